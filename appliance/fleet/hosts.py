"""Hosts: the other hosts, what each says it holds, and how fetching from each goes.

One stream to each, which is also its sign of life: a host that is silent for SILENCE_S, or has another epoch
than before, holds nothing any more. So a host that was restarted is never asked for what it held before.

A stream tells of the namespaces that this host had when it began. For others a new one begins, with a whole
snapshot, once that of the last one was complete, and every RENEW_S at most: clients may register namespaces
at any pace. Its channel stays, as fetches use it.
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import grpc

from ...sources.directories.records import refusal_of
from ...sources.peers.inventory import NAME_BYTES, HostInventory, short_names
from ...v1 import peer_pb2 as pb
from ...v1.peer_pb2_grpc import PeerServiceStub
from ...v1.types_pb2 import HostLoad
from ..security.callers import RateLimit
from ..tasks import end
from .finding import ChainPart, Held
from .fleet_host import FleetHost, open_channel
from .fleet_tls import FleetTls

if TYPE_CHECKING:
    from ...v1.peer_pb2_grpc import PeerServiceAsyncStub

log = logging.getLogger(__name__)

SILENCE_S: Final = 3.0
RETRY_S, MAX_RETRY_S = 0.5, 10.0
RENEW_S: Final = 5.0
MAX_HOST_NAME: Final = 64
#: In one message; what an honest host sends is shorter (holdings.py). Half a million took 170 ms of the loop.
MAX_NAMES_AT_ONCE: Final = 20_480
#: For which nothing more is read from a host, of each message and each name in it: five times what it costs.
MESSAGE_PAUSE_S, NAME_PAUSE_S = 5e-4, 1e-6


class Hosts:
    """All other hosts, and a stream from each.

    `digests` returns the namespaces that this host has; `changed` is called when there is a host to ask, or
    none any more."""

    def __init__(
        self,
        epoch: int,
        tls: FleetTls | None,
        digests: Callable[[], frozenset[bytes]],
        changed: Callable[[], None],
        stores_in_plain: bool = False,
    ) -> None:
        self._epoch = epoch
        self._stores_in_plain = stores_in_plain
        self._tls = tls
        self._digests = digests
        self._changed = changed
        self._watching: dict[str, asyncio.Task[None]] = {}
        self.by_address: dict[str, FleetHost] = {}

    def set_members(self, addresses: Iterable[str]) -> None:
        """Watch exactly the hosts at these addresses."""
        wanted = set(addresses)
        for address in self.by_address.keys() - wanted:
            if (watching := self._watching.pop(address, None)) is not None:
                watching.cancel()
            self.by_address.pop(address).forget("it is no member any more")
        for address in sorted(wanted - self.by_address.keys()):
            host = self.by_address[address] = FleetHost(address)
            self._watching[address] = asyncio.create_task(self._watch(host))
        self._changed()

    async def stop(self) -> None:
        """Watch nothing any more. Idempotent."""
        tasks, self._watching = self._watching, {}
        await end(tasks.values())
        for host in self.by_address.values():
            host.forget("this host stops")

    def all(self) -> list[FleetHost]:
        """See KnownHosts."""
        return list(self.by_address.values())

    def live(self) -> list[FleetHost]:
        """See KnownHosts."""
        return [host for host in self.by_address.values() if host.is_live]

    def at(self, address: str) -> FleetHost | None:
        """See KnownHosts."""
        return self.by_address.get(address)

    def told(self, host: FleetHost, digest: bytes, names: Sequence[bytes], tenant: str) -> None:
        """See KnownHosts. Its stream tells of the same blocks later, and of their end."""
        host.inventory.change(digest, short_names(names), b"")

    def find(self, part: ChainPart, answer: Callable[[Held], None]) -> None:
        """See KnownHosts. The answer comes at once."""
        held = ((host, host.inventory.prefix(part.digest, part.names)) for host in self.live())
        answer({host: number for host, number in held if number})

    def num_held(self, digest: bytes, names: Sequence[bytes]) -> int:
        """Return how many of `names` any live host says it holds."""
        packed = short_names(names)
        return sum(map(any, zip(*(host.inventory.has(digest, packed) for host in self.live()), strict=True)))

    # ------------------------------------------------------------------------------------- streams

    async def _watch(self, host: FleetHost) -> None:
        """Follow one host until cancelled."""
        retry_s, renewals = RETRY_S, RateLimit(1 / RENEW_S)
        while True:
            try:
                async with open_channel(host.address, self._tls) as channel:
                    host.stub = PeerServiceStub(channel)
                    while True:
                        await self._follow(host, host.stub, renewals)
                        retry_s = RETRY_S
            except (grpc.aio.AioRpcError, OSError, TimeoutError) as failure:
                problem = _words_of(failure)
            was_live, said = host.is_live, host.problem
            host.forget(problem)
            if was_live:
                retry_s = RETRY_S
                self._changed()
            if said != problem:  # said once, not with every try
                log.warning("host %s is not asked: %s", host.address, problem)
            await asyncio.sleep(retry_s * (0.5 + random.random() / 2))
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _follow(self, host: FleetHost, stub: "PeerServiceAsyncStub", renewals: RateLimit) -> None:
        """Take in what a host says; returns when this host has namespaces that it was not asked for."""
        digests, clock, is_complete = self._digests(), asyncio.get_running_loop().time, False
        request = pb.WatchInventoryRequest(
            namespace_digests=sorted(digests), stores_in_plain=self._stores_in_plain
        )
        call = stub.WatchInventory(request)
        coming = HostInventory()
        try:
            while self._digests() <= digests or not is_complete or renewals.take(clock()):
                async with asyncio.timeout(SILENCE_S):
                    message = await call.read()
                if not isinstance(message, pb.WatchInventoryResponse):
                    raise OSError("it ended the stream")
                if message.epoch == self._epoch:
                    call.cancel()
                    await _wait_as_self(host)
                if message.epoch != host.epoch:
                    host.forget("it has started anew")
                    host.epoch = message.epoch
                host.name = "".join(filter(str.isprintable, message.host[:MAX_HOST_NAME]))
                message.load.DiscardUnknownFields()  # of any length
                host.load, host.tells_tiers = HostLoad(), message.tells_tiers
                host.load.CopyFrom(message.load)
                if message.is_reset:
                    if refusal := refusal_of(message.protocol or 1, message.oldest or 1):
                        raise OSError(refusal)
                    coming = HostInventory()
                num_names = await _take(coming, message, digests)
                if message.is_complete:
                    host.inventory, is_complete = coming, True
                    if not host.is_live:
                        log.info("host %s (%s) is asked from now on", host.address, host.name)
                        host.is_live, host.problem = True, ""
                        self._changed()
                await asyncio.sleep(MESSAGE_PAUSE_S + num_names * NAME_PAUSE_S)
        finally:
            call.cancel()


async def _wait_as_self(host: FleetHost) -> None:
    """Wait for ever: this host is one of the members, and asks itself nothing."""
    host.is_self, host.name, host.problem = True, socket.gethostname(), "this host"
    await asyncio.Event().wait()


async def _take(
    inventory: HostInventory, message: pb.WatchInventoryResponse, digests: frozenset[bytes]
) -> int:
    """Take in changes of namespaces that were asked for; sorting many happens in a thread. Returns how many
    names there were. Raises OSError for more than a host sends at once."""
    num_bytes = sum(max(len(one.added) + len(one.removed), len(one.added_on_disk)) for one in message.changes)
    num_names = num_bytes // NAME_BYTES + len(message.changes)
    if num_names > MAX_NAMES_AT_ONCE:
        raise OSError(f"it names {num_names} blocks in one message, which no host does")
    for change in message.changes:
        if change.namespace_digest not in digests:
            continue
        to_merge = inventory.change(
            change.namespace_digest, change.added, change.removed, change.added_on_disk
        )
        for names in to_merge:
            names.adopt(*await asyncio.to_thread(names.merged))
    return num_names


def _words_of(failure: Exception) -> str:
    if isinstance(failure, grpc.aio.AioRpcError):
        return f"{failure.code().name}: {failure.details()}"
    return str(failure) or f"silent for {SILENCE_S:g} s"
