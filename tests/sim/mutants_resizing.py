"""Mutants of tiers that change their size while they are used."""

from typing import Any

from kvtier.appliance.core.catalog import residency
from kvtier.appliance.core.instructions import Retract
from kvtier.tiers.cold.log import SegmentLog, SegmentState
from kvtier.tiers.memory.slots import SlotPool

Patch = tuple[Any, str, Any]


def moved_and_left_behind() -> list[Patch]:
    """The old place of what was moved stays readable."""
    move = residency.Residency.move

    def forgetful(self: Any, fragment: int, tier: Any, place: int) -> None:
        out = self.core.outbox._instructions
        before = len(out)
        move(self, fragment, tier, place)
        out[before:] = [i for i in out[before:] if not isinstance(i, Retract)]

    return [(residency.Residency, "move", forgetful)]


def given_back_in_use() -> list[Patch]:
    """Leaving extents go back to the host with what is in them."""

    def hasty(self: Any) -> list[int]:
        gone = sorted(self.leaving)
        self.leaving.clear()
        self._gone.update(gone)
        return gone

    return [(SlotPool, "take_gone", hasty)]


def segments_given_back_in_use() -> list[Patch]:
    """Files of leaving segments are removed before they are empty."""

    def hasty(self: Any) -> list[int]:
        gone = [
            n
            for n, segment in enumerate(self.segments)
            if n >= self.num_segments and segment.state is SegmentState.SEALED
        ]
        for number in gone:
            self.segments[number].state = SegmentState.GONE
        return gone

    return [(SegmentLog, "take_gone", hasty)]


#: Name, what is broken, how.
PLANTED = [
    ("moved, left behind", "the old place of what moved stays readable", moved_and_left_behind),
    ("extent back early", "an extent goes with what is in it", given_back_in_use),
    ("segment back early", "so does a segment", segments_given_back_in_use),
]
