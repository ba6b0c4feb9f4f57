"""Verifies the published slots of this daemon's extents against their headers, beside other work."""

import threading
from collections.abc import Container, Iterator, Mapping

from ...v1.shm import extent_of, place_of, slot_of
from ..base import Cause, Damaged, Verified
from ..payload import checksum
from .extent import SlotExtent

#: What one step is of at most: slots looked at, filled ones, bytes. It holds the interpreter for less than a
#: millisecond.
STEP_SLOTS, STEP_FRAGMENTS, STEP_BYTES = 4096, 128, 4 << 20


class ExtentVerifier:
    """Implements `Verifier` for the extents of one engine; `unmapping` is held while an extent is closed."""

    def __init__(
        self, extents: Mapping[int, SlotExtent], published: Container[int], unmapping: threading.Lock
    ) -> None:
        self._extents, self._published, self._unmapping = extents, published, unmapping

    def units(self) -> list[int]:
        """Return the numbers of the extents made so far."""
        return sorted(list(self._extents))  # noqa: C414 (`list` of a dict is one step of the interpreter)

    def verify_unit(self, number: int) -> Iterator[Verified]:
        """Verify the published fragments of an extent; see Verifier."""
        slot = 0
        while True:
            with self._unmapping:
                extent = self._extents.get(number)
                if extent is None or slot >= extent.num_slots:
                    return
                step, slot = self._verify_slots(extent, number, slot)
            yield step

    def is_alive(self, damaged: Damaged) -> bool:
        """Whether the place is published, and has been since it was found damaged."""
        extent = self._extents.get(extent_of(damaged.place))
        if extent is None or damaged.place not in self._published:
            return False
        return extent.headers.generation(slot_of(damaged.place)) == damaged.life

    def _verify_slots(self, extent: SlotExtent, number: int, first: int) -> tuple[Verified, int]:
        """Verify slots from `first` on; return what was found, and the slot to go on with.

        A slot that is emptied or filled meanwhile is not judged; one that is published, and says of itself
        that it is empty, is damaged.
        """
        num_fragments = num_bytes = 0
        damaged: list[Damaged] = []
        for slot in range(first, min(first + STEP_SLOTS, extent.num_slots)):
            place = place_of(number, slot)
            if place not in self._published:
                continue
            generation = extent.headers.generation(slot)
            length, cause = _examine(extent, slot)
            num_fragments, num_bytes = num_fragments + 1, num_bytes + length
            is_same = place in self._published and extent.headers.generation(slot) == generation
            if cause is not None and is_same:
                damaged.append(Damaged(place, generation, cause))
            if num_bytes >= STEP_BYTES or num_fragments == STEP_FRAGMENTS:
                return Verified(num_fragments, num_bytes, damaged), slot + 1
        return Verified(num_fragments, num_bytes, damaged), first + STEP_SLOTS


def _examine(extent: SlotExtent, slot: int) -> tuple[int, Cause | None]:
    """Return the bytes read of a filled slot, and what is wrong with it."""
    found = extent.headers.payload_of(slot)
    if found is None or found[0] + found[1] > extent.extent_bytes:
        return 0, Cause.WRONG_IDENTITY
    offset, length, stored = found
    return length, None if checksum(extent.data[offset : offset + length]) == stored else Cause.WRONG_CHECKSUM
