"""ARC: two LRU lists, blocks used once and blocks used again, and ghosts that move the border between them.

Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST'03. T1 holds blocks seen once,
T2 those seen again; B1 and B2 are the ghosts of either. A block that comes back out of B1 says that T1
should have been larger, one out of B2 that T2 should have been: `target` is the size that T1 is to have. Both
join T2.

On a prefix tree the lists are lazy heaps over the time of the last use, so only leaves come up; a use of a
block is one of all its ancestors, so T2 is closed upwards but for ghosts that come back. Parents leave with
a victim when they were used no later and are not in the better list.

Deviations: room for new blocks is made before they are named, so `target` moves after the victims of the
same put have gone, and the paper's rule for a block of B2 when T1 has exactly its target is not needed. The
paper's c, the number of places, is the number of blocks in the tier: a policy is asked only when the tier
is full, and blocks of several namespaces differ in size.
"""

import math
from array import array
from collections.abc import Iterable, Sequence

from ..base import EvictionPolicy, Surroundings, Use, Victim
from ..candidates import Candidates
from ..options import read_numbers
from .arrivals import GROWTH, Arrivals
from .ghosts import Ghosts
from .priced import MAX_REFRESHES

ONCE, AGAIN, GONE = 0, 1, 2  # T1, T2, neither
#: Seconds by which a block of T2 is priced above one of T1: 3,000 years.
BAND_S = 1e11


class ArcEviction(EvictionPolicy):
    """Price: when the block was used last, in seconds; far later for blocks that were used again."""

    def __init__(self, surroundings: Surroundings) -> None:
        read_numbers("arc", surroundings.options, {})
        self._facts = surroundings.facts
        self._arrivals = Arrivals(surroundings)
        self._candidates = (Candidates(), Candidates())  # of T1, T2
        self._list_of = array("B")  # by row
        self._sizes = [0, 0]  # blocks of T1, T2, candidates or not
        self._ghosts = (Ghosts(), Ghosts())  # B1, B2
        self._target = 0.0  # of T1, in blocks

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Move used blocks of T1 to T2."""
        lists = self._list_of
        for row in rows:
            if row < len(lists) and lists[row] == ONCE:
                self._move_up(row)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Put new blocks into T1; put ghosts into T2 and move the target."""
        self._join(self._arrivals.stored(rows))

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows, without ghosts: they may name other blocks from now on."""
        self._leave(rows)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates."""
        self._join(self._arrivals.enter(rows))
        for row in rows:
            candidates = self._candidates[self._list_of[row]]
            if row not in candidates:
                candidates.add(row, self._facts.last_used[row])

    def price(self, row: int, now: float) -> float:
        """Return when the block was used last, BAND_S later if it was used again."""
        is_again = row < len(self._list_of) and self._list_of[row] == AGAIN
        return self._facts.last_used[row] + (BAND_S if is_again else 0.0)

    def choose(self, now: float) -> Victim | None:
        """Remove and return the least recently used candidate of the list that is too long."""
        once, again = self._candidates
        is_once = len(once) > 0 and (self._sizes[ONCE] > self._target or not len(again))
        candidates = once if is_once else again
        last_used = self._facts.last_used
        for num_looked_at in range(MAX_REFRESHES + 1):
            entry = candidates.pop()
            if entry is None:
                return None
            row = entry[1]
            if last_used[row] <= entry[0] or num_looked_at == MAX_REFRESHES:
                break
            candidates.add(row, last_used[row])
        following = candidates.lowest()
        runner_up = self.price(following[1], now) if following else math.nan
        return Victim(row, self.price(row, now), runner_up, following[1] if following else -1)

    def left(self, rows: Sequence[int]) -> None:
        """Drop blocks that left this tier, and make them ghosts of their list."""
        names = self._facts.prefix_hash
        for row, was_in in self._leave(rows):
            num_places = self._arrivals.num_blocks + 1
            if was_in == ONCE:
                self._ghosts[ONCE].add(names[row], num_places - self._sizes[ONCE])
            else:
                self._ghosts[AGAIN].add(names[row], num_places - len(self._ghosts[ONCE]))

    def __len__(self) -> int:
        return sum(map(len, self._candidates))

    # ------------------------------------------------------------------------------------ internals

    def _join(self, rows: Iterable[int]) -> None:
        names = self._facts.prefix_hash
        for row in rows:
            if row >= len(self._list_of):
                self._list_of.extend([GONE] * (row + GROWTH - len(self._list_of)))
            self._list_of[row] = AGAIN if self._is_ghost(names[row]) else ONCE
            self._sizes[self._list_of[row]] += 1

    def _is_ghost(self, prefix_hash: bytes) -> bool:
        """Return whether a new block is a ghost; move the target if it is."""
        sizes = [len(ghosts) for ghosts in self._ghosts]
        if self._ghosts[ONCE].take(prefix_hash):
            self._target += max(1.0, sizes[AGAIN] / sizes[ONCE])
        elif self._ghosts[AGAIN].take(prefix_hash):
            self._target -= max(1.0, sizes[ONCE] / sizes[AGAIN])
        else:
            return False
        self._target = min(max(0.0, self._target), float(self._arrivals.num_blocks))
        return True

    def _move_up(self, row: int) -> None:
        self._list_of[row] = AGAIN
        self._sizes[ONCE] -= 1
        self._sizes[AGAIN] += 1
        if row in self._candidates[ONCE]:
            self._candidates[ONCE].discard(row)
            self._candidates[AGAIN].add(row, self._facts.last_used[row])

    def _leave(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """Drop blocks; return those that were here, with the list that each was in."""
        left = []
        for row in self._arrivals.leave(rows):
            was_in = self._list_of[row]
            self._candidates[was_in].discard(row)
            self._sizes[was_in] -= 1
            self._list_of[row] = GONE
            left.append((row, was_in))
        return left
