"""S3-FIFO: three queues; most blocks are never used again, so find out quickly and cheaply which.

Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP'23. New blocks join a small queue that
may hold a tenth of the tier. At its end, those used more than once move to the main queue, the others leave
and become ghosts; a ghost that comes back joins the main queue at once. At the end of the main queue a
block that was used joins it anew, one count poorer; counts stop at 3.

On a prefix tree only leaves come up at an end. The queues are heaps over the numbers of arrival, so a
parent stands where it always stood when its last child has left, and comes up next. Two rules keep the small
queue small although inner blocks never come up: a block that moves to the main queue takes its ancestors
along (every use of it was one of theirs), and a victim's parent that was used enough moves when the victim
leaves, because the end of the queue has passed it by then.

Deviations: room is made before the new blocks arrive, not after, so the queues are judged by what is there,
and "a tenth of the tier" is a tenth of the blocks in it, whatever their sizes; after MAX_REFRESHES spared
blocks in one call the next one leaves.
"""

import math
from array import array
from collections.abc import Iterable, Sequence

from ..base import EvictionPolicy, Surroundings, Use, Victim
from ..candidates import Candidates
from ..options import Number, read_numbers
from .arrivals import GROWTH, Arrivals
from .ghosts import Ghosts
from .priced import MAX_REFRESHES

OPTIONS = {
    "small_share": Number(0.1, 0.001, 0.999),  # of the blocks, for the small queue
    "ghost_share": Number(0.9, 0.0, 10.0),  # of the blocks, for the ghosts
    "uses_to_stay": Number(2, 1, 3),  # in the small queue, to move to the main one
}
MAX_COUNT = 3
SMALL, MAIN = 0, 1
#: Distance of two bands of the price: more arrivals than there will be.
BAND = 2.0**36


class S3FifoEviction(EvictionPolicy):
    """Price: 1 band for the main queue, 1 for every time the block would be spared, and its number there."""

    def __init__(self, surroundings: Surroundings) -> None:
        options = read_numbers("s3fifo", surroundings.options, OPTIONS)
        self._small_share, self._ghost_share = options["small_share"], options["ghost_share"]
        self._uses_to_stay = int(options["uses_to_stay"])
        self._facts = surroundings.facts
        self._arrivals = Arrivals(surroundings)
        self._queues = (Candidates(), Candidates())
        self._queue_of = array("B")  # by row
        self._numbers = array("q")  # place in its queue
        self._counts = array("B")  # uses since it joined, MAX_COUNT at most
        self._num_small = 0
        self._ghosts = Ghosts()

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Count uses, up to MAX_COUNT."""
        counts = self._counts
        for row in rows:
            if row < len(counts) and counts[row] < MAX_COUNT:
                counts[row] += 1  # of a block that is not here, too: it starts anew when it joins

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Put new blocks into the small queue, ghosts into the main one."""
        self._join(self._arrivals.stored(rows))

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows, without ghosts: they may name other blocks from now on."""
        self._leave(rows)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates."""
        self._join(self._arrivals.enter(rows))
        for row in rows:
            queue = self._queues[self._queue_of[row]]
            if row not in queue:
                queue.add(row, self._numbers[row])

    def price(self, row: int, now: float) -> float:
        """Return the place of the block in the order of eviction."""
        if row >= len(self._counts):
            return float(self._arrivals.number_of(row))
        count = self._counts[row]
        if self._queue_of[row] == MAIN:
            return (1 + count) * BAND + self._numbers[row]
        return (count >= self._uses_to_stay) * BAND + self._numbers[row]

    def choose(self, now: float) -> Victim | None:
        """Remove and return the first block that is not spared, of the queue that is too long."""
        queue = row = -1
        for num_spared in range(MAX_REFRESHES + 1):
            queue = SMALL if self._num_small > self._small_share * self._arrivals.num_blocks else MAIN
            entry = self._queues[queue].pop()
            if entry is None:
                queue = MAIN - queue
                entry = self._queues[queue].pop()
                if entry is None:
                    return None
            row = entry[1]
            if num_spared == MAX_REFRESHES or not self._is_spared(row):
                break
            self._queues[MAIN].add(row, self._numbers[row])
        self._move_used_parent(row)
        following = self._queues[queue].lowest() or self._queues[MAIN - queue].lowest()
        runner_up = self.price(following[1], now) if following else math.nan
        return Victim(row, self.price(row, now), runner_up, following[1] if following else -1)

    def left(self, rows: Sequence[int]) -> None:
        """Drop blocks that left this tier; make those of the small queue ghosts."""
        names = self._facts.prefix_hash
        for row in self._leave(rows):
            if self._queue_of[row] == SMALL:
                self._ghosts.add(names[row], int(self._ghost_share * (self._arrivals.num_blocks + 1)))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    # ------------------------------------------------------------------------------------ internals

    def _join(self, rows: Iterable[int]) -> None:
        """Put new blocks, parents first, into the small queue; ghosts into the main one."""
        names = self._facts.prefix_hash
        for row in rows:
            if row >= len(self._counts):
                missing = row + GROWTH - len(self._counts)
                for column in (self._queue_of, self._numbers, self._counts):
                    column.extend([0] * missing)
            self._counts[row] = 0
            self._numbers[row] = self._arrivals.number_of(row)
            self._queue_of[row] = SMALL
            self._num_small += 1
            if self._ghosts.take(names[row]):
                self._move_to_main(row)

    def _is_spared(self, row: int) -> bool:
        """Move a block at the end of its queue to the end of the main one, if it was used; return whether."""
        if self._queue_of[row] == SMALL and self._counts[row] >= self._uses_to_stay:
            self._move_to_main(row)
            return True
        if self._queue_of[row] == MAIN and self._counts[row] > 0:
            self._counts[row] -= 1
            self._numbers[row] = self._arrivals.take_number()
            return True
        return False

    def _move_to_main(self, row: int) -> None:
        """Move a block and all its ancestors that are in the small queue. Each moves once in its life."""
        number = self._arrivals.take_number()
        parents = self._facts.parent
        while row >= 0 and row in self._arrivals and self._queue_of[row] == SMALL:
            if row in self._queues[SMALL]:
                self._queues[SMALL].discard(row)
                self._queues[MAIN].add(row, number)
            self._queue_of[row], self._numbers[row], self._counts[row] = MAIN, number, 0
            self._num_small -= 1
            row = parents[row]

    def _move_used_parent(self, row: int) -> None:
        parent = self._facts.parent[row]
        is_small = parent >= 0 and parent in self._arrivals and self._queue_of[parent] == SMALL
        if is_small and self._counts[parent] >= self._uses_to_stay:
            self._move_to_main(parent)

    def _leave(self, rows: Sequence[int]) -> list[int]:
        here = self._arrivals.leave(rows)
        for row in here:
            queue = self._queue_of[row]
            self._queues[queue].discard(row)
            self._num_small -= queue == SMALL
        return here
