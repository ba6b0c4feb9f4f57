"""Stretches: blocks with the same past, learned from and priced together.

One request uses a whole chain; what it used again in one go has one past from then on. A chain of 500
blocks is a handful of stretches: the shared beginning, the private rest, what was new. Blocks leave a stretch
at its end, by eviction, or at its beginning, when the next request takes them into stretches of its own.

A block that left every tier stays in its stretch as a *ghost*, under its name, as long as there is room for
names. Without ghosts the forecast would only learn from blocks that were kept, as if those evicted early were
never used again.

Columns, not objects: a million blocks have tens of thousands of stretches, and the garbage collector would
look at every object again and again.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..baselines.ghosts import Names
from .visits import NUM_FEATURES, NUM_GAPS, Visit

I32 = npt.NDArray[np.int32]
#: The stretch of blocks without a known past (they were restored after a restart).
UNKNOWN = 0
GROWTH = 1024
#: Stretches that are made together, at least; one in so many when there are many.
MIN_GROWTH = 32
#: Ghosts that are remembered for each block that is stored, and for how many blocks at least.
GHOSTS_PER_BLOCK = 32
MIN_BLOCKS = 16
#: Whether prices were made since it was described, and are of the age bin it is in.
UNPRICED, OUTDATED, PRICED = 0, 1, 2
#: What hazards see of a stretch, side by side: its kind, its features, the bins of its gaps.
DESCRIPTION = 1 + NUM_FEATURES + NUM_GAPS
#: Steps of age that a stretch is priced at: the beginning, the middle and the end of its bin.
NUM_PRICES = 3


class Stretches:
    """Columns of stretches by number, the stretch of every row, and the ghosts."""

    def __init__(self, max_ghosts: int) -> None:
        self.max_ghosts = max_ghosts
        self.of_row = array("i")  # UNKNOWN where nothing is known
        self.ghosts = Names()  # stretch by prefix hash, oldest first
        self.used_at = array("d")
        self.serial = array("q")  # another one for each stretch of a number, and each time it is used
        self.kind = array("b")
        self.num_forks = array("q")  # before its visit
        self.num_uses = array("q")
        self.age_s = array("d")  # at its last use; -1: it was new then
        self.known_s = array("d")  # from the first use to its last one
        self.num_rows = array("i")
        self.num_ghosts = array("i")
        self.bin = array("b")  # the first one that is not counted as outlived
        self.visit: list[Visit | None] = []
        self.descriptions = array("h")  # DESCRIPTION each: kind, features, gap bins
        self.described_as = array("q")  # the state of the visit that these are of; 0: nothing yet
        self.share = array("d")  # of the price that its hints leave
        self.said_at = array("d")
        self.back_at = array("d")  # announced; inf: not, or not believed
        self.freshness = array("b")  # of the prices below
        self.priced_from = array("b")  # step of age of the first price
        self.prices = array("f")  # NUM_PRICES each: from there on, a step each
        self.num_blocks = 0  # rows that are in a stretch
        self._free: list[int] = []
        self._next_serial = 0
        unknown = self.open(None, 0.0, 0, 0, 0, -1.0, 0.0)
        assert unknown == UNKNOWN
        self.freshness[unknown] = PRICED  # never read

    def open(
        self,
        visit: Visit | None,
        used_at: float,
        kind: int,
        num_forks: int,
        num_uses: int,
        age_s: float,
        known_s: float,
    ) -> int:
        """Return the number of a new, empty stretch, without features and prices."""
        number = self._free.pop() if self._free else self._grow()
        self.visit[number], self.described_as[number] = visit, 0
        self.used_at[number] = used_at
        self.kind[number], self.num_forks[number], self.num_uses[number] = kind, num_forks, num_uses
        self.age_s[number], self.known_s[number] = age_s, known_s
        self.num_rows[number] = self.num_ghosts[number] = self.bin[number] = 0
        self.freshness[number] = UNPRICED
        self.share[number], self.said_at[number], self.back_at[number] = 1.0, 0.0, math.inf
        self.renew(number)
        return number

    def _grow(self) -> int:
        """Make numbers for new stretches, many at once. Returns the lowest; the others are free."""
        first = len(self.used_at)
        count = max(MIN_GROWTH, first // MIN_GROWTH)
        for column in self._columns():
            column.frombytes(bytes(count * column.itemsize))
        self.visit += [None] * count
        self.descriptions.frombytes(bytes(count * DESCRIPTION * self.descriptions.itemsize))
        self.prices.frombytes(bytes(count * NUM_PRICES * self.prices.itemsize))
        self._free.extend(range(first + count - 1, first, -1))  # the lowest is taken first
        return first

    def description_of(self, stretch: int) -> "array[int]":
        """Return a copy of a stretch's kind, features and gap bins, DESCRIPTION numbers."""
        return self.descriptions[stretch * DESCRIPTION : (stretch + 1) * DESCRIPTION]

    def describe(self, stretch: int, features: Sequence[int], gap_bins: Sequence[int]) -> None:
        """Set the features and gap bins of a stretch; its prices become invalid."""
        self.descriptions[stretch * DESCRIPTION : (stretch + 1) * DESCRIPTION] = array(
            "h", (self.kind[stretch], *features, *gap_bins)
        )
        self.freshness[stretch] = UNPRICED

    def renew(self, stretch: int) -> None:
        """Give a stretch a new serial number: entries of the agenda for the old one are void."""
        self._next_serial += 1
        self.serial[stretch] = self._next_serial

    def weigh(self, stretch: int) -> int:
        """Return the number of blocks of a stretch, ghosts included."""
        return self.num_rows[stretch] + self.num_ghosts[stretch]

    def put(self, rows: Sequence[int], stretch: int) -> None:
        """Move rows, of other stretches or of none, into this one."""
        of_row, num_rows = self.of_row, self.num_rows
        num_rows[stretch] += len(rows)  # first, as in `_name_ghosts`
        for row in rows:
            if row >= len(of_row):
                of_row.extend([UNKNOWN] * (row + GROWTH - len(of_row)))
            before = of_row[row]
            if before:
                num_rows[before] -= 1
                self.close_if_empty(before)
            else:
                self.num_blocks += 1
            of_row[row] = stretch

    def runs(self, rows: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return (first, last + 1, stretch) of the parts of a chain that lie in one stretch each."""
        of_row, num_known = self.of_row, len(self.of_row)
        found = [of_row[row] if row < num_known else UNKNOWN for row in rows]
        ends = [number for number in range(1, len(found)) if found[number] != found[number - 1]]
        ends.append(len(found))
        return [(first, end, found[first]) for first, end in pairwise((0, *ends))]

    def of(self, rows: I32) -> I32:
        """Return the stretches (n,) int32 of `rows` (n,) int32."""
        of_row = self.of_row
        try:
            found: I32 = np.frombuffer(of_row, np.int32)[rows]
        except (IndexError, ValueError):
            of_row.extend([UNKNOWN] * (int(rows.max()) + GROWTH - len(of_row)))
            found = np.frombuffer(of_row, np.int32)[rows]
        return found

    def make_ghosts(self, rows: Sequence[int], names: Sequence[bytes]) -> None:
        """Make ghosts of rows, under their `names` (by row). Blocks without a known past are dropped."""
        of_row, num_known = self.of_row, len(self.of_row)
        group: list[bytes] = []  # names of those met last, all of one stretch
        stretch_of_group = UNKNOWN
        for row in rows:
            stretch = of_row[row] if row < num_known else UNKNOWN
            if stretch != stretch_of_group:
                if group:
                    self._name_ghosts(group, stretch_of_group)
                group, stretch_of_group = [], stretch
            if stretch:
                of_row[row] = UNKNOWN
                self.num_rows[stretch] -= 1
                self.num_blocks -= 1
                group.append(names[row])
        if group:
            self._name_ghosts(group, stretch_of_group)
        self._make_room(2 * len(rows))

    def add_ghosts(self, names: Sequence[bytes], stretch: int) -> None:
        """Add names of blocks that are not stored as ghosts of a stretch. The oldest ghosts make room."""
        self._name_ghosts(names, stretch)
        self._make_room(2 * len(names))

    def _name_ghosts(self, names: Sequence[bytes], stretch: int) -> None:
        self.num_ghosts[stretch] += len(names)  # first, or one that loses and gains a ghost would close
        for before in self.ghosts.set(names, stretch):
            self.num_ghosts[before] -= 1
            self.close_if_empty(before)

    def _make_room(self, max_forgotten: int) -> None:
        """Remove the oldest ghosts beyond the limit: two for each that came, because the limit may fall."""
        limit = min(self.max_ghosts, GHOSTS_PER_BLOCK * max(self.num_blocks, MIN_BLOCKS))
        while max_forgotten > 0:
            oldest, num_forgotten = self.ghosts.pop_oldest(limit)
            if not oldest:
                return
            if num_forgotten:
                self.num_ghosts[oldest] -= num_forgotten
                self.close_if_empty(oldest)
            max_forgotten -= num_forgotten

    def remove_ghost(self, name: bytes) -> None:
        """Remove a ghost: its block is back, or in another stretch."""
        stretch = self.ghosts.pop(name)
        self.num_ghosts[stretch] -= 1
        self.close_if_empty(stretch)

    def ghost_runs(self, names: Sequence[bytes]) -> Iterator[tuple[int, int, int]]:
        """Yield (first, last + 1, stretch) of the parts of a chain with ghosts in one stretch each.

        Also of those without (UNKNOWN). Ghosts may change between two of them.
        """
        end = 0
        while end < len(names):
            first, stretch = end, self.ghosts.get(names[end])
            while end < len(names) and self.ghosts.get(names[end]) == stretch:
                end += 1
            yield first, end, stretch

    def __len__(self) -> int:
        return len(self.used_at) - len(self._free)

    def check_integrity(self) -> list[str]:
        """Return inconsistencies of the counts, in words; empty when there are none."""
        problems = []
        rows = np.bincount(np.array(self.of_row, np.int64), minlength=len(self.used_at))
        ghosts = np.bincount(np.array(self.ghosts.numbers(), np.int64), minlength=len(self.used_at))
        free = set(self._free)
        for stretch in range(1, len(self.used_at)):
            if self.num_rows[stretch] != rows[stretch] or self.num_ghosts[stretch] != ghosts[stretch]:
                problems.append(f"stretch {stretch}: counts of rows or ghosts are off")
            if (stretch in free) != (self.visit[stretch] is None):
                problems.append(f"stretch {stretch}: free and in use")
            if (stretch in free) == bool(rows[stretch] + ghosts[stretch]):
                problems.append(f"stretch {stretch}: free with blocks, or kept without")
        if self.num_blocks != int(rows[1:].sum()):
            problems.append("the count of rows in stretches is off")
        if len(free) != len(self._free):
            problems.append("a stretch is free twice")
        return problems

    def close_if_empty(self, stretch: int) -> None:
        """Free the number of a stretch without blocks and ghosts."""
        visit = self.visit[stretch]
        if visit is not None and stretch and not self.num_rows[stretch] and not self.num_ghosts[stretch]:
            visit.stretches.remove(stretch)
            self.visit[stretch] = None
            self.serial[stretch] = 0
            self._free.append(stretch)

    def _columns(self) -> "list[array[int] | array[float]]":
        return [
            self.used_at,
            self.serial,
            self.kind,
            self.num_forks,
            self.num_uses,
            self.age_s,
            self.known_s,
            self.num_rows,
            self.num_ghosts,
            self.bin,
            self.described_as,
            self.share,
            self.said_at,
            self.back_at,
            self.freshness,
            self.priced_from,
        ]
