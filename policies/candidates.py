"""Candidates with prices: the order that policies take their victims from.

Most prices are times or numbers of arrival, so most candidates come in the order in which they leave:
those join a queue. Candidates out of order (a parent after its last child has left, a price that changed)
go into a heap; the victim is the lower of the two firsts. With a
million candidates a heap alone spends most of a decision on its way through memory that no cache holds.

Neither can look inside itself, so a candidate that left or changed its price leaves a dead entry behind,
which is skipped when it comes up. When dead entries outnumber the living, both are swept, a few entries
at each call: the heap is emptied from its end (the last entry of a heap can always be removed) into a new
one, the queue from its beginning. Memory stays proportional to the candidates, and no call has to sort
a million entries again. Rejected: a heap that knows the position of each row, because heapq is
C and a heap of our own would not be; linked lists, because a parent that becomes a candidate belongs into
the middle of the order, not to its end.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Any, TypeAlias

#: (price, row). Which one it is counts, not what it says: a tuple by its right name would be taken apart and
#: put together again by the compiler (see docs/decisions/0018-compiled-planner.md), and be another one.
Entry: TypeAlias = Any

#: Entries moved per call while dead ones are swept out. More than one, or sweeping would never end.
MOVES_PER_CALL = 8
#: Dead entries that are not worth a sweep.
SLACK = 1024
GROWTH = 1024


class Candidates:
    """Rows by price, lowest first; equal prices by row.

    Every method is amortised O(log n), and O(1) for candidates that come in order.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._old: list[Entry] = []  # a heap that is being emptied
        # The queue, in three parts: what this sweep found living, what the last one did, what came since.
        self._swept: deque[Entry] = deque()
        self._rest: deque[Entry] = deque()
        self._queue: deque[Entry] = deque()
        self._num_to_sweep = 0  # entries behind the swept ones
        self._entries: list[Entry | None] = []  # the living entry of each row
        self._num_candidates = 0

    def add(self, row: int, price: float) -> None:
        """Make a row a candidate, or change its price."""
        entries, queue = self._entries, self._queue
        if row >= len(entries):
            entries.extend([None] * (row + GROWTH - len(entries)))
        if entries[row] is None:
            self._num_candidates += 1
        entry: Entry = (price, row)
        entries[row] = entry
        if (queue and queue[-1] <= entry) or (not queue and self._is_behind(entry)):
            queue.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        self._tidy()

    def discard(self, row: int) -> None:
        """Remove a candidate; nothing happens when the row is none."""
        if row < len(self._entries) and self._entries[row] is not None:
            self._entries[row] = None
            self._num_candidates -= 1
            self._tidy()

    def discard_many(self, rows: Iterable[int]) -> None:
        """Remove candidates; nothing happens to rows that are none, as nearly all rows that leave a tier."""
        entries = self._entries
        num_rows = len(entries)
        for row in rows:
            if row < num_rows and entries[row] is not None:
                self.discard(row)

    def price_of(self, row: int) -> float | None:
        """Return the price a candidate was added with; None when the row is none."""
        entry = self._entries[row] if row < len(self._entries) else None
        return None if entry is None else entry[0]

    def pop(self) -> Entry | None:
        """Remove and return (price, row) of the cheapest candidate; None when there is none."""
        entry = self.lowest()
        if entry is None:
            return None
        self._entries[entry[1]] = None
        self._num_candidates -= 1
        return entry

    def lowest(self) -> Entry | None:
        """Return what `pop` would; the candidate stays."""
        entries, lowest = self._entries, None
        for heap in (self._heap, self._old):
            while heap and entries[heap[0][1]] is not heap[0]:
                heapq.heappop(heap)
            if heap and (lowest is None or heap[0] < lowest):
                lowest = heap[0]
        first = self._first_in_queue()
        return first if first is not None and (lowest is None or first < lowest) else lowest

    def __contains__(self, row: int) -> bool:
        return row < len(self._entries) and self._entries[row] is not None

    def __len__(self) -> int:
        return self._num_candidates

    @property
    def num_entries(self) -> int:
        """Entries kept, dead ones included."""
        in_order = len(self._swept) + len(self._rest) + len(self._queue)
        return len(self._heap) + len(self._old) + in_order

    def _is_behind(self, entry: Entry) -> bool:
        """Whether an entry continues the parts before an empty queue."""
        return all(not part or part[-1] <= entry for part in (self._swept, self._rest))

    def _first_in_queue(self) -> Entry | None:
        """Drop dead entries from the beginning of the queue; return the first living one."""
        entries = self._entries
        for part in (self._swept, self._rest, self._queue):
            while part:
                entry = part[0]
                if entries[entry[1]] is entry:
                    return entry
                part.popleft()
                self._num_to_sweep -= part is not self._swept
        return None

    def _tidy(self) -> None:
        if not self._old and self._num_to_sweep <= 0:
            if self.num_entries <= 2 * self._num_candidates + SLACK:
                return
            self._old, self._heap = self._heap, []
            assert not self._rest, "the last sweep went through it"
            self._rest, self._swept = self._swept, self._rest
            self._num_to_sweep = len(self._rest) + len(self._queue)
        entries = self._entries
        for _ in range(min(MOVES_PER_CALL, len(self._old))):
            entry = self._old.pop()
            if entries[entry[1]] is entry:
                heapq.heappush(self._heap, entry)
        if self._num_to_sweep > 0:
            self._sweep(min(MOVES_PER_CALL, self._num_to_sweep))

    def _sweep(self, count: int) -> None:
        entries, swept = self._entries, self._swept
        for _ in range(count):
            entry = (self._rest or self._queue).popleft()
            if entries[entry[1]] is entry:
                swept.append(entry)
        self._num_to_sweep -= count
