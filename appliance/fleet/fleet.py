"""Fleet: the parts of this host's side of a fleet, started and stopped together."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from ...tiers.block import Tier
from ...tiers.memory.engine import ExtentEngine
from ...v1.addresses import socket_path
from ..appliance import Appliance
from ..config import Settings
from ..core.planner import Planner
from .awaits import Awaits
from .data_listener import DataListener
from .fleet_tls import FleetTls
from .hosts import Hosts
from .members import FleetMembers
from .peer_edge import PeerEdge
from .tickets import PeerService

NUM_LOOKED_AT: Final = 256  # blocks, in 64 inventories 2 ms


class Fleet:
    """Asks other hosts, and answers them. Owned by the event loop."""

    def __init__(
        self,
        settings: Settings,
        appliance: Appliance,
        planner: Planner,
        engines: Mapping[Tier, ExtentEngine],
        epoch: int,
    ) -> None:
        self._settings = settings
        self._appliance = appliance
        peers, tls = settings.peers, settings.access.tls
        self._tls = FleetTls(tls, peers.certificate_name) if tls is not None else None
        self._namespaces = planner.catalog.namespaces
        self._tier_of = planner.catalog.tier_of
        self.hosts = Hosts(epoch, self._tls, self._digests, lambda: self.edge.hosts_changed())
        self.edge = PeerEdge(self.hosts, engines, appliance.step, appliance.clock, self._tls)
        self.awaits = Awaits(self.hosts, appliance.step, appliance.clock)
        self._epoch = epoch
        self._members = FleetMembers(peers.hosts, self.hosts.set_members)
        self._running: asyncio.Task[None] | None = None
        self._listener: DataListener | None = None
        self._service: PeerService | None = None

    def _digests(self) -> frozenset[bytes]:
        return frozenset(one.identity.digest for one in self._namespaces.values())

    def start(self, service: PeerService) -> None:
        """Accept data connections for tickets of `service`, and find the other hosts. Raises StartError."""
        tcp = next(one for one in self._settings.listen if socket_path(one) is None)
        host, port = tcp.rpartition(":")[0].strip("[]"), self._settings.peers.data_port
        self._service = service
        self._listener = DataListener(host, port, service, self._tls, self._appliance.clock)
        self._running = asyncio.get_running_loop().create_task(self._members.run())

    async def stop(self) -> None:
        """End every connection; nothing is read from or written to memory afterwards. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.hosts.stop()
        await self.awaits.stop()
        await self.edge.stop()
        if self._listener is not None:
            await self._listener.stop()

    def locate(self, name: str, epoch: int) -> str | None:
        """Return the address of a live host that has this address, name or epoch.

        Empty for this host, None where there is none."""
        if epoch == self._epoch or not (name or epoch):
            return ""
        for host in self.hosts.by_address.values():
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
        return self.edge.counters + (self._service.counters if self._service is not None else Counter())

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
            for _, host in sorted(self.hosts.by_address.items())
        ]
