"""Fleet: the parts of this host's side of a fleet, started and stopped together."""

import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Final

from ... import __version__
from ...sources.directories.addresses import DirectoryError, parse_address
from ...sources.directories.opening import open_directory, open_index
from ...sources.directories.records import HostRecord
from ...sources.directories.redis_index import HolderIndex
from ...tiers.block import Tier
from ...tiers.memory.engine import ExtentEngine
from ...v1.addresses import socket_path
from ..appliance import Appliance
from ..config import Settings
from ..errors import StartError
from ..tasks import Tasks
from .awaits import Awaits
from .data_listener import DataListener
from .fleet_tls import FleetTls
from .hosts import Hosts
from .index import IndexedHosts
from .index_writer import HoldingsWriter
from .meeting import Meeting, own_address
from .members import FleetMembers
from .peer_edge import PeerEdge
from .pushing import Pushing
from .tickets import PeerService

NUM_LOOKED_AT: Final = 256  # blocks, in 64 inventories 2 ms


@contextmanager
def started() -> Iterator[None]:
    """Turn what a directory raises inside into a StartError."""
    try:
        yield
    except DirectoryError as problem:
        raise StartError(f"peers.directory.url: {problem}") from problem


class Fleet:
    """Asks other hosts, and answers them. Owned by the event loop."""

    def __init__(
        self,
        settings: Settings,
        appliance: Appliance,
        engines: Mapping[Tier, ExtentEngine],
        epoch: int,
    ) -> None:
        self._settings = settings
        self._appliance = appliance
        peers, tls = settings.peers, settings.access.tls
        self._tls = FleetTls(tls, peers.certificate_name) if tls is not None else None
        self._namespaces = appliance.planner.catalog.namespaces
        self._tier_of = appliance.planner.catalog.tier_of
        self._epoch = epoch
        self.meeting = self._open_meeting() if peers.directory.url else None
        self.index = self._open_index() if peers.directory.index else None
        is_plain = settings.stores_in_plain
        self.hosts: Hosts | IndexedHosts
        if self.index is not None:
            self.hosts = self._indexed_hosts(self.index)
        else:
            self.hosts = Hosts(epoch, self._tls, self._digests, lambda: self.edge.hosts_changed(), is_plain)
            self._members = FleetMembers(peers.hosts, self.hosts.set_members)
        self.edge = PeerEdge(self.hosts, engines, appliance.step, appliance.clock, self._tls, is_plain)
        self.awaits = Awaits(self.hosts, appliance.step, appliance.clock)
        self.writer: HoldingsWriter | None = None
        self._running: Tasks[None] = Tasks()
        self._listener: DataListener | None = None
        self._service: PeerService | None = None
        self._pushing: Pushing | None = None

    def _digests(self) -> frozenset[bytes]:
        return frozenset(one.identity.digest for one in self._namespaces.values())

    def _open_meeting(self) -> Meeting:
        """Return what enters this host into the directory. Raises StartError."""
        peers, address = self._settings.peers, parse_address(self._settings.peers.directory.url)
        with started():
            directory = open_directory(address, peers.directory.access)
        own = HostRecord(self._epoch, "", socket.gethostname()[:64], __version__)
        where = partial(own_address, self._tcp, address.nodes)
        return Meeting(directory, own, where, self._met)

    def _open_index(self) -> HolderIndex:
        """Return where hosts say what they hold. Raises StartError."""
        directory = self._settings.peers.directory
        with started():
            return open_index(parse_address(directory.url), directory.access)

    def _indexed_hosts(self, index: HolderIndex) -> IndexedHosts:
        """Return the hosts of the directory, and what the index says of them."""
        assert self.meeting is not None
        meeting, clock = self.meeting, self._appliance.clock
        hosts = IndexedHosts(index, self._tls, lambda: self.edge.hosts_changed(), meeting.hurry, clock)

        def met(is_new: bool) -> None:
            if is_new and self.writer is not None:
                self.writer.begin_again()
            hosts.show_own(meeting.own)
            hosts.directory_answers()

        meeting.met = met
        return hosts

    def _met(self, lives: Mapping[int, HostRecord]) -> None:
        if isinstance(self.hosts, IndexedHosts):
            self.hosts.set_lives(lives)
        else:
            self._members.set_met(record.address for record in lives.values())

    @property
    def _tcp(self) -> str:
        """Return the address on which other hosts call this one, as it is set."""
        return next(one for one in self._settings.listen if socket_path(one) is None)

    def start(self, service: PeerService) -> None:
        """Accept data connections for tickets of `service`, and find the other hosts. Raises StartError."""
        host, port = self._tcp.rpartition(":")[0].strip("[]"), self._settings.peers.data_port
        self._service = service
        if self._settings.peers.transport == "nixl":
            self._pushing = self.edge.pushing = service.pushing = Pushing(self._appliance.clock)
        self._listener = DataListener(host, port, service, self._tls, self._appliance.clock)
        if self.index is not None:
            holdings = service.holdings
            self.writer = HoldingsWriter(
                self.index, self._epoch, lambda: holdings.watch(None, in_bundles=True)
            )
            self._running.start(self.writer.run())
        else:
            self._running.start(self._members.run())
        if self.meeting is not None:
            self._running.start(self.meeting.run())

    async def stop(self) -> None:
        """End every connection; nothing is read from or written to memory afterwards. Idempotent."""
        await self._running.stop()
        if self.meeting is not None:
            await self.meeting.stop()
        await self.hosts.stop()
        await self.awaits.stop()
        await self.edge.stop()
        if self._pushing is not None:
            await self._pushing.stop()
        if self.index is not None:
            await self.index.close()
        if self._listener is not None:
            await self._listener.stop()

    def locate(self, name: str, epoch: int) -> str | None:
        """Return the address of a live host that has this address, name or epoch.

        Empty for this host, None where there is none."""
        if epoch == self._epoch or not (name or epoch):
            return ""
        for host in self.hosts.all():
            if name and name not in (host.address, host.name):
                continue
            if host.is_self and epoch in (0, self._epoch):
                return ""
            if host.is_live and epoch in (0, host.epoch):
                return host.address
        return None

    @property
    def counters(self) -> Counter[str]:
        """Return what was counted on both sides, by name."""
        counters = Counter(self.edge.counters)
        for part in (self._service, self.meeting, self.writer, self._pushing):
            counters += part.counters if part is not None else Counter()
        return counters + (self.hosts.counters if isinstance(self.hosts, IndexedHosts) else Counter())

    @property
    def _is_index_up(self) -> bool:
        is_asked = isinstance(self.hosts, IndexedHosts) and self.hosts.is_open
        return is_asked and self.writer is not None and not self.writer.is_failing

    def directory_status(self) -> dict[str, Any] | None:
        """Return the fields of DirectoryStatus; None without a directory."""
        if self.meeting is None:
            return None
        return {
            "address": str(parse_address(self._settings.peers.directory.url)),
            "problem": self.meeting.problem,
            "num_hosts": len(self.meeting.lives.records),
            "has_index": self.index is not None,
            "is_index_up": self._is_index_up,
            "num_indexed": self.writer.num_told if self.writer is not None else 0,
        }

    def summary(self) -> dict[str, Any]:
        """Return the hosts, what flowed, and what is held twice: `fleet` of docs/web-api.md."""
        hosts = []
        for row in self.rows():
            counters = row.pop("counters")
            failed = sum(counters.get(word, 0) for word in ("refused", "broken", "wrong_bytes", "lost"))
            hosts.append({**row, "received_bytes": counters.get("bytes", 0), "num_failed": failed})
        counted = self.counters
        return {
            "hosts": hosts,
            "received_bytes": counted["bytes_received"],
            "sent_bytes": counted["bytes_sent"],
            "held_twice": self._held_twice(),
        }

    def _held_twice(self) -> float | None:
        """Return the share of the blocks here that another host says it holds; None without any.

        Of NUM_LOOKED_AT that stand anywhere: comparing all takes a second for a million blocks."""
        if isinstance(self.hosts, IndexedHosts):
            return None  # it is not known here
        num_held = num_twice = 0
        for namespace in self._namespaces.values():
            rows = islice(namespace.rows.items(), NUM_LOOKED_AT - num_held)
            names = [name for name, row in rows if self._tier_of(row) is not None]
            if names:
                num_held += len(names)
                num_twice += self.hosts.num_held(namespace.identity.digest, names)
        return num_twice / num_held if num_held else None

    def rows(self) -> list[dict[str, Any]]:
        """Return the fields of HostStatus for each host, by address."""
        now = self._appliance.clock()
        return [
            {
                "address": host.address,
                "name": host.name,
                "state": "self" if host.is_self else "live" if host.is_live else "down",
                "problem": "" if host.is_live or host.is_self else host.problem or "it has not answered yet",
                "num_blocks": len(host.inventory),
                "num_fetches": host.num_fetches,
                "bytes_per_s": host.bytes_per_s,
                "is_paused": host.pause_until > now,
                "num_tickets": host.load.num_tickets,
                "max_tickets": host.load.max_tickets,
                "counters": dict(host.counters),
            }
            for host in sorted(self.hosts.all(), key=lambda host: host.address)
        ]
