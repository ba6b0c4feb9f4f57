"""SIEVE: a queue, a bit per block, and a hand that only ever moves forward.

Zhang et al., "SIEVE is Simpler than LRU", NSDI'24. Blocks stand in the order of their arrival. The hand
walks from the oldest to the newest: a block that was used since the hand last came by loses its bit and
stays where it stands; one that was not leaves. At the newest the hand starts again at the oldest.

Here a walk over the whole queue is a *lap*, and the place at which the hand will look at a block is its lap
and its number: a heap over that is the queue, and sparing a block moves it to the next lap. On a prefix
tree the hand sees leaves only. When the last child of a block leaves, the hand looks at it at once if it
has passed its place in this lap, else when it gets there. Blocks that came in one put stand at one place
and are evicted together, tail first, as far as they were not used.

The hand follows newcomers: while most of them are never used, as in chat, it evicts one for every one that
comes and does not get back to what was used once, long ago. That is SIEVE, not an accident of this version.

Deviation: after MAX_REFRESHES spared blocks in one call the next one leaves, used or not.
"""

import math
from array import array
from collections.abc import Sequence

from ..base import EvictionPolicy, Surroundings, Use, Victim
from ..candidates import Candidates
from ..options import read_numbers
from .arrivals import GROWTH, Arrivals
from .priced import MAX_REFRESHES

#: Numbers of arrival in a place; the lap stands above them.
NUMBER_BITS = 36


class SieveEviction(EvictionPolicy):
    """Price: distance of the hand until it takes the block, if that is not used meanwhile."""

    def __init__(self, surroundings: Surroundings) -> None:
        read_numbers("sieve", surroundings.options, {})
        self._facts = surroundings.facts
        self._arrivals = Arrivals(surroundings)
        self._candidates = Candidates()  # by place, an integer
        self._is_visited = array("B")  # by row
        self._laps = array("q")  # in which the hand looks at the block
        self._lap = 0  # the hand's

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Set the bits of used blocks."""
        for row in rows:
            if row < len(self._is_visited):
                self._is_visited[row] = 1  # of a block that is not here, too: it loses it when it joins

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Put new blocks at the end of the lap the hand is in."""
        self._join(self._arrivals.stored(rows))

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows: they may name other blocks from now on."""
        self.left(rows)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates where the hand will look at them; what it sees then, decides."""
        self._join(self._arrivals.enter(rows))
        for row in rows:
            if row not in self._candidates:
                self._laps[row] = max(self._laps[row], self._lap)
                self._candidates.add(row, self._place(row))

    def price(self, row: int, now: float) -> float:
        """Return the block's number, one lap on for each time that the hand will come by before it leaves."""
        number = self._arrivals.number_of(row)
        if row >= len(self._laps):
            return float(number)
        num_laps = max(self._laps[row] - self._lap, 0) + self._is_visited[row]
        return float((num_laps << NUMBER_BITS) + number)

    def choose(self, now: float) -> Victim | None:
        """Move the hand to the next block without a bit; remove and return it."""
        row = -1
        for num_spared in range(MAX_REFRESHES + 1):
            entry = self._candidates.pop()
            if entry is None:
                return None
            row = entry[1]
            self._lap = max(self._lap, self._laps[row])
            if not self._is_visited[row] or num_spared == MAX_REFRESHES:
                break
            self._is_visited[row] = 0
            self._laps[row] = self._lap + 1
            self._candidates.add(row, self._place(row))
        following = self._candidates.lowest()
        next_price = self.price(following[1], now) if following else math.nan
        return Victim(row, self.price(row, now), next_price, following[1] if following else -1)

    def left(self, rows: Sequence[int]) -> None:
        """Drop blocks that left this tier."""
        self._arrivals.leave(rows)
        for row in rows:
            self._candidates.discard(row)

    def __len__(self) -> int:
        return len(self._candidates)

    # ------------------------------------------------------------------------------------ internals

    def _place(self, row: int) -> int:
        return (self._laps[row] << NUMBER_BITS) + self._arrivals.number_of(row)

    def _join(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row >= len(self._laps):
                self._laps.extend([0] * (row + GROWTH - len(self._laps)))
                self._is_visited.extend([0] * (row + GROWTH - len(self._is_visited)))
            self._laps[row] = self._lap
            self._is_visited[row] = 0
