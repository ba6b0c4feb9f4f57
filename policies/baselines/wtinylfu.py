"""W-TinyLFU: a small window for new blocks, and a comparison of frequencies at its end.

Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS 2017, as in
Caffeine. New blocks enter an LRU window of 1 % of the tier. The block at its end meets the victim of the
main part, a segmented LRU (probation, and protected for what was used there); the one that was seen less
often, by a sketch that also remembers blocks that left, leaves. When the newcomer wins it moves to
probation.

That is admission done by eviction: no put is declined, so the policy works with any AdmissionPolicy. On a
prefix tree only leaves meet. A winner takes its ancestors along into probation, or inner blocks, which never
come to the exit, would fill the window. Parents leave with a victim when they stand in its part or a worse
one and were used no later.

Deviations: room is made before the new blocks arrive, so a put of many blocks is met by as many contests,
until the window is within its share, and none while the tier has free room; the window has a fixed share
(Caffeine climbs hills to find one); equal counts are decided for the block that is there already, without
Caffeine's dice.
"""

import math
from array import array
from collections.abc import Sequence

from ..base import EvictionPolicy, Surroundings, Use, Victim
from ..candidates import Candidates, Entry
from ..options import Number, read_numbers
from .arrivals import GROWTH, Arrivals
from .priced import MAX_REFRESHES
from .sketch import FrequencySketch

OPTIONS = {
    "window_share": Number(0.01, 0.0, 0.99),  # of the blocks
    "protected_share": Number(0.8, 0.0, 0.99),  # of the main part
}
WINDOW, PROBATION, PROTECTED, GONE = 0, 1, 2, 3
#: Blocks moved from protected to probation in one call.
MAX_MOVES = 16
#: Seconds by which a part is priced above a worse one: 3,000 years. The last is for blocks that are gone.
BANDS_S = (0.0, 1e11, 2e11, 0.0)


class WTinyLfuEviction(EvictionPolicy):
    """Price: when the block was used last, in seconds; far later in a better part."""

    def __init__(self, surroundings: Surroundings) -> None:
        options = read_numbers("wtinylfu", surroundings.options, OPTIONS)
        self._window_share, self._protected_share = options["window_share"], options["protected_share"]
        self._facts = surroundings.facts
        self._arrivals = Arrivals(surroundings)
        self._candidates = (Candidates(), Candidates(), Candidates())
        self._part_of = array("B")  # by row
        self._sizes = [0, 0, 0]  # blocks of each part, candidates or not
        self._sketch = FrequencySketch()
        self._is_room_free = True  # nothing was evicted for the blocks that come next

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Count uses; move used blocks from probation to protected."""
        names = self._facts.prefix_hash
        for row in rows:
            self._sketch.add(names[row])
            if row < len(self._part_of) and self._part_of[row] == PROBATION:
                self._move(row, PROTECTED)
        self._shrink_protected()

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Count names; put new blocks into the window."""
        names = self._facts.prefix_hash
        for row in rows:
            self._sketch.add(names[row])
        self._join(self._arrivals.stored(rows))

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows; the sketch counts names, not rows."""
        self.left(rows)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates."""
        self._join(self._arrivals.enter(rows))
        for row in rows:
            candidates = self._candidates[self._part_of[row]]
            if row not in candidates:
                candidates.add(row, self._facts.last_used[row])

    def price(self, row: int, now: float) -> float:
        """Return when the block was used last, later by BANDS_S in a better part."""
        part = self._part_of[row] if row < len(self._part_of) else GONE
        return self._facts.last_used[row] + BANDS_S[part]

    def choose(self, now: float) -> Victim | None:
        """Remove and return the less frequent of the oldest of the window and of the main part."""
        self._is_room_free = False
        self._shrink_protected()
        newcomer = self._oldest(WINDOW)
        resident = self._oldest(PROBATION) or self._oldest(PROTECTED)
        if newcomer is None or resident is None or not self._is_window_full(num_coming=1):
            loser = resident or newcomer
            return None if loser is None else self._victim_of(loser, now)
        names = self._facts.prefix_hash
        if self._sketch.count(names[newcomer[1]]) <= self._sketch.count(names[resident[1]]):
            return self._victim_of(newcomer, now)
        self._move_into_main(newcomer[1])
        return self._victim_of(resident, now)

    def left(self, rows: Sequence[int]) -> None:
        """Drop blocks that left this tier; the sketch keeps their counts."""
        for row in self._arrivals.leave(rows):
            part = self._part_of[row]
            self._candidates[part].discard(row)
            self._sizes[part] -= 1
            self._part_of[row] = GONE

    def __len__(self) -> int:
        return sum(map(len, self._candidates))

    # ------------------------------------------------------------------------------------ internals

    def _oldest(self, part: int) -> Entry | None:
        """Return the least recently used candidate of a part; it stays."""
        candidates, last_used = self._candidates[part], self._facts.last_used
        for _ in range(MAX_REFRESHES):
            entry = candidates.lowest()
            if entry is None or last_used[entry[1]] <= entry[0]:
                return entry
            candidates.add(entry[1], last_used[entry[1]])
        return candidates.lowest()

    def _victim_of(self, entry: Entry, now: float) -> Victim:
        row = entry[1]
        part = self._part_of[row]
        self._candidates[part].discard(row)
        following = self._candidates[part].lowest()
        runner_up = self.price(following[1], now) if following else math.nan
        return Victim(row, self.price(row, now), runner_up, following[1] if following else -1)

    def _join(self, rows: Sequence[int]) -> None:
        for row in rows:
            if row >= len(self._part_of):
                self._part_of.extend([GONE] * (row + GROWTH - len(self._part_of)))
            self._part_of[row] = WINDOW
            self._sizes[WINDOW] += 1
            if self._is_room_free and self._is_window_full() and (oldest := self._oldest(WINDOW)):
                self._move_into_main(oldest[1])
        if rows:
            self._is_room_free = True
        self._sketch.fit(self._arrivals.num_blocks)

    def _move(self, row: int, part: int) -> None:
        before = self._part_of[row]
        self._part_of[row] = part
        self._sizes[before] -= 1
        self._sizes[part] += 1
        if row in self._candidates[before]:
            self._candidates[before].discard(row)
            self._candidates[part].add(row, self._facts.last_used[row])

    def _is_window_full(self, num_coming: int = 0) -> bool:
        return self._sizes[WINDOW] + num_coming > self._window_share * self._arrivals.num_blocks

    def _move_into_main(self, row: int) -> None:
        """Move a block and all its ancestors that are in the window. Each moves once in its life."""
        parents = self._facts.parent
        while row >= 0 and self._part_of[row] == WINDOW:
            self._move(row, PROBATION)
            row = parents[row]

    def _shrink_protected(self) -> None:
        """Send the oldest of protected back to probation while they are too many."""
        for _ in range(MAX_MOVES):
            num_main = self._sizes[PROBATION] + self._sizes[PROTECTED]
            oldest = (
                self._oldest(PROTECTED) if self._sizes[PROTECTED] > self._protected_share * num_main else None
            )
            if oldest is None:
                return
            self._move(oldest[1], PROBATION)
