"""Candidates with prices: the lazy heap that every policy here takes its victims from.

A heap cannot look inside itself, so a candidate that left or changed its price leaves a dead entry behind,
which is skipped when it comes up. When dead entries outnumber the living, the heap is emptied from its end
(the last entry of a heap can always be removed) into a new one, a few entries at each call: memory stays
proportional to the candidates, and nobody waits for a million entries to be sorted again. Rejected: a heap
that knows the position of each row, because heapq is C and a heap of our own would not be; linked lists,
because a parent that becomes a candidate belongs into the middle of the order, not to its end.
"""

import heapq
from typing import TypeAlias

Entry: TypeAlias = tuple[float, int]

#: Entries moved per call while a heap is emptied. More than one, or emptying would never end.
MOVES_PER_CALL = 8
#: Dead entries that are not worth a new heap.
SLACK = 1024
GROWTH = 1024


class Candidates:
    """Rows by price, lowest first; equal prices by row. Every method is amortised O(log n)."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._old: list[Entry] = []  # a heap that is being emptied
        self._entries: list[Entry | None] = []  # the living entry of each row
        self._num_candidates = 0

    def add(self, row: int, price: float) -> None:
        """Make a row a candidate, or change its price."""
        entries = self._entries
        if row >= len(entries):
            entries.extend([None] * (row + GROWTH - len(entries)))
        if entries[row] is None:
            self._num_candidates += 1
        entry = (price, row)
        entries[row] = entry
        heapq.heappush(self._heap, entry)
        self._tidy()

    def discard(self, row: int) -> None:
        """Forget a candidate; nothing happens when the row is none."""
        if row < len(self._entries) and self._entries[row] is not None:
            self._entries[row] = None
            self._num_candidates -= 1
            self._tidy()

    def price_of(self, row: int) -> float | None:
        """Return the price a candidate was added with; None when the row is none."""
        entry = self._entries[row] if row < len(self._entries) else None
        return None if entry is None else entry[0]

    def pop(self) -> Entry | None:
        """Remove and return (price, row) of the cheapest candidate; None when there is none."""
        heap = self._heap_with_lowest()
        if not heap:
            return None
        entry = heapq.heappop(heap)
        self._entries[entry[1]] = None
        self._num_candidates -= 1
        return entry

    def lowest(self) -> Entry | None:
        """Return what `pop` would; the candidate stays."""
        heap = self._heap_with_lowest()
        return heap[0] if heap else None

    def __contains__(self, row: int) -> bool:
        return row < len(self._entries) and self._entries[row] is not None

    def __len__(self) -> int:
        return self._num_candidates

    @property
    def num_entries(self) -> int:
        """Entries kept, dead ones included."""
        return len(self._heap) + len(self._old)

    def _heap_with_lowest(self) -> list[Entry]:
        """Drop dead entries from both tops; return the heap whose top is lower."""
        entries = self._entries
        for heap in (self._heap, self._old):
            while heap and entries[heap[0][1]] is not heap[0]:
                heapq.heappop(heap)
        if self._old and (not self._heap or self._old[0] < self._heap[0]):
            return self._old
        return self._heap

    def _tidy(self) -> None:
        if not self._old:
            if len(self._heap) <= 2 * self._num_candidates + SLACK:
                return
            self._old, self._heap = self._heap, []
        for _ in range(min(MOVES_PER_CALL, len(self._old))):
            entry = self._old.pop()
            if self._entries[entry[1]] is entry:
                heapq.heappush(self._heap, entry)
