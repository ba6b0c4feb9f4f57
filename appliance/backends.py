"""What `Appliance` drives: a planner, and the tiers as engines, routes and a store, by protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..tiers.base import Engine
from ..tiers.block import NamespaceIdentity, Tier
from ..tiers.ladder import STANDARD, Ladder
from .core.events import Event
from .core.instructions import Instruction
from .transfer.lanes import Edge, Route


class PlannerPort(Protocol):
    """What the shell needs of the planner to run it.

    (The services also ask it; asking changes nothing.)
    """

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Return the instructions that follow from an event, in order."""
        ...

    def answer(self, event: Event, now: float) -> list[Instruction]:
        """Do the first half of `handle`, what callers wait for; return its instructions."""
        ...

    def follow_up(self) -> list[Instruction]:
        """Do the second half; return its instructions."""
        ...

    @property
    def may_put_off(self) -> bool:
        """Whether `follow_up` may wait until other puts were answered."""
        ...

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether a Tick is due at once, because work was left over."""
        ...


class StorePort(Protocol):
    """What the shell needs of the cold store beside copying. All of it blocks."""

    def seal(self, segment: int) -> bool:
        """Write the footer of a full segment and make it durable; False when the device refused."""
        ...

    def free(self, segment: int) -> None:
        """Forget a segment durably."""
        ...

    def resize(self, num_segments: int) -> None:
        """Create the files of so many segments; files beyond stay until they are given back."""
        ...

    def give_back(self, number: int) -> None:
        """Remove the file of a free segment, unless it is wanted again meanwhile."""
        ...

    def store_namespace(self, identity: NamespaceIdentity) -> None:
        """Remember a namespace durably."""
        ...

    def forget_namespace(self, identity: NamespaceIdentity) -> None:
        """Forget a namespace, at some time."""
        ...


@dataclass(frozen=True, slots=True)
class TierBackends:
    """The tiers as the shell drives them: engines, routes of copies, and the cold store's housekeeping.

    `max_in_flight` bounds the batches of copies per edge; `store` is None without nvme.
    """

    engines: Mapping[Tier, Engine]
    routes: Mapping[Edge, Route]
    max_in_flight: Mapping[Edge, int]
    store: StorePort | None
    ladder: Ladder = STANDARD
