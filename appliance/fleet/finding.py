"""The port for finding what other hosts hold: inventories that they stream (hosts.py), or an index
(index.py).

Answers come by callback: from an inventory at once, in the step of the acquire; from an index after a
round trip, while the acquire waits as it does for a store.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from .fleet_host import FleetHost

#: Of hosts that hold some: how many blocks, from the first one asked for on.
Held: TypeAlias = Mapping[FleetHost, int]


class ChainPart(NamedTuple):
    """Consecutive blocks of a chain that are asked for."""

    digest: bytes  # of the namespace
    names: Sequence[bytes]
    offset: int  # of the first one in its bundle
    size: int  # blocks of a bundle
    tenant: str = ""  # that asks

    def bundle_names(self) -> Sequence[bytes]:
        """Return the names of the bundles that end among the blocks."""
        return self.names[self.size - 1 - self.offset :: self.size]


class KnownHosts(Protocol):
    """The other hosts, and what each holds."""

    def all(self) -> list[FleetHost]:
        """Return all hosts, this one among them where it is known."""
        ...

    def live(self) -> list[FleetHost]:
        """Return the hosts that can be asked."""
        ...

    def at(self, address: str) -> FleetHost | None:
        """Return the host at an address that can be called; None where there is none."""
        ...

    def told(self, host: FleetHost, digest: bytes, names: Sequence[bytes], tenant: str) -> None:
        """Take in that a host has blocks of a chain that a tenant awaits: found from now on."""
        ...

    def find(self, part: ChainPart, answer: Callable[[Held], None]) -> None:
        """Call `answer` once, now or later, with what hosts say they hold. Nothing after a failure."""
        ...

    async def stop(self) -> None:
        """Ask nothing any more; every answer has been given. Idempotent."""
        ...
