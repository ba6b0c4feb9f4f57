"""What is in a directory beside the hosts: a host with a valid certificate that lies, doubles, nonsense."""

import asyncio
import itertools
import threading
from contextlib import suppress
from pathlib import Path

from kvtier.appliance.config.tenants import Tls
from kvtier.sources.directories.addresses import DirectoryAccess, DirectoryError, parse_address
from kvtier.sources.directories.opening import open_directory, open_index
from kvtier.sources.directories.records import HostRecord
from kvtier.sources.directories.redis_index import bundle_key
from kvtier.sources.peers.inventory import short_names
from tests.appliance.fleet.hostile_host import TRICKS, HostileHost

from .content import CHAIN_BLOCKS, IDENTITY, names_of

FIRST_LIE, NUM_LIES = 1 << 41, 64  # chains that only the lying host says it has
BEAT_S = 0.5
BUNDLE_BLOCKS = 4
TWIN, NOWHERE = 11, "127.0.0.1:9"  # a life; an address where nothing listens


class Strangers:
    """Enters them again and again, until `close`. `doubled`: the life of a host that another one has, too."""

    def __init__(self, url: str, folder: Path, tls: Tls, twin_of: str, *, has_index: bool) -> None:
        self._url, self._tls, self._twin_of, self._has_index = url, tls, twin_of, has_index
        self._names = [name for lie in range(NUM_LIES) for name in names_of(FIRST_LIE + lie)]
        self._epochs = itertools.count(1000)
        self._ended = threading.Event()
        self._host: HostileHost | None = None
        self.doubled = 0
        self.trick = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._enter()), daemon=True)
        self._thread.start()

    def lie(self, number: int) -> str:
        """Let another lying host take the place of the one before; return its trick."""
        former, self.trick = self._host, TRICKS[number % len(TRICKS)]
        self._host = HostileHost(self.trick, IDENTITY, self._names, next(self._epochs), self._tls)
        if former is not None:
            former.close()
        return self.trick

    def close(self) -> None:
        """End all of it."""
        self._ended.set()
        self._thread.join()
        if self._host is not None:
            self._host.close()

    async def _enter(self) -> None:
        address = parse_address(self._url)
        directories = [open_directory(address, DirectoryAccess()) for _ in range(3)]
        index = open_index(address, DirectoryAccess()) if self._has_index else None
        ends = [self._names[at] for at in range(BUNDLE_BLOCKS - 1, len(self._names), BUNDLE_BLOCKS)]
        keys = [bundle_key(IDENTITY.digest, short_names([name])) for name in ends]
        assert len(keys) * BUNDLE_BLOCKS == NUM_LIES * CHAIN_BLOCKS
        known, told = 0, 0
        while not self._ended.is_set():
            host = self._host
            records = [HostRecord(TWIN, self._twin_of, "twin")]
            records += [HostRecord(self.doubled, NOWHERE, "double")] if self.doubled else []
            records += [HostRecord(host.epoch, f"127.0.0.1:{host.port}", "liar")] if host else []
            for directory, record in zip(directories, records, strict=False):
                with suppress(DirectoryError, TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await directory.meet(record)
            told = (told + 1) % 8 if host and host.epoch == known else 0
            if index is not None and host is not None and not told:
                known = host.epoch
                with suppress(DirectoryError, TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await index.add(host.epoch, keys)
            await asyncio.sleep(BEAT_S)
        for directory in directories:
            await directory.close()
        if index is not None:
            await index.close()
