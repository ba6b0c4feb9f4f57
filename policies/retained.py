"""Retention: stated priorities, compared before a policy's price.

A client may say that some tokens are worth more or less than the rest for a while (TensorRT-LLM's
KvCacheRetentionConfig: a priority of 0 to 100 per token range, with a duration), and a prefetch states one
for what it promoted. `RetainedEviction` wraps the policy that an administrator chose: blocks with another
priority than DEFAULT_PRIORITY are its own, lowest priority first and least recently used first among equals;
all others are the policy's. So every policy honours retention, those of users too, and none has to.
`RetainedAdmission` does the same for admission: a block of higher priority than the victim is admitted, one
of lower priority is not, and only among equals the policy decides.

Rejected: a factor on the policy's price. Prices have units of their own (seconds, chances, counts), and a
block with priority 0 must be evicted before any block without a stated priority.
"""

import heapq
import math
from collections.abc import Sequence

from .base import DEFAULT_PRIORITY, AdmissionPolicy, BlockFacts, EvictionPolicy, Newcomer, Victim

#: Price between two priorities: more than any policy's price, and still exact to milliseconds in a float.
BAND = 1e12
SLACK = 1024


class RetainedEviction(EvictionPolicy):
    """Evicts by priority, then by another policy.

    The price of a block of another priority is (priority - DEFAULT_PRIORITY) * BAND + the time of its last
    use.
    """

    def __init__(self, inner: EvictionPolicy, facts: BlockFacts) -> None:
        self.inner = inner
        self._facts = facts
        self._prices: dict[int, float] = {}  # living entries of the heap
        self._heap: list[tuple[float, int]] = []

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows; the inner policy gets the event by itself."""
        if self._prices:
            for row in rows:
                self._prices.pop(row, None)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates: to the band of their priority, or to the inner policy."""
        if not self._facts.has_retention and not self._prices:
            self.inner.offer(rows, now)
            return
        plain = []
        for row in rows:
            if self._facts.retention(row, now) == DEFAULT_PRIORITY:
                self._prices.pop(row, None)
                plain.append(row)
            else:
                self._add(row, now)
        if plain:
            self.inner.offer(plain, now)

    def price(self, row: int, now: float) -> float:
        """Return what evicting this block costs, comparable across priorities."""
        priority = self._facts.retention(row, now) if self._facts.has_retention else DEFAULT_PRIORITY
        if priority == DEFAULT_PRIORITY:
            return self.inner.price(row, now)
        return (priority - DEFAULT_PRIORITY) * BAND + self._facts.last_used[row]

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return the inner policy's count, or count by `price` while any block has a stated priority."""
        if self._facts.has_retention:
            return super().num_no_dearer(rows, price, now)
        return self.inner.num_no_dearer(rows, price, now)

    def choose(self, now: float) -> Victim | None:
        """Remove and return a candidate of the lowest priority there is."""
        lowest = self._lowest(now)
        if lowest is not None and lowest[0] < -BAND / 2:
            return self._take(lowest)
        while (victim := self.inner.choose(now)) is not None:
            if self._facts.has_retention and self._facts.retention(victim.row, now) != DEFAULT_PRIORITY:
                self._add(victim.row, now)  # it was given a priority after it was offered
                continue
            return victim
        lowest = self._lowest(now)
        return self._take(lowest) if lowest is not None else None

    def left(self, rows: Sequence[int]) -> None:
        """Drop candidates that left this tier."""
        self.forgotten(rows)
        self.inner.left(rows)

    def __len__(self) -> int:
        return len(self.inner) + len(self._prices)

    # ------------------------------------------------------------------------------------ internals

    def _add(self, row: int, now: float) -> None:
        price = self.price(row, now)
        if self._prices.get(row) == price:
            return
        self._prices[row] = price
        heapq.heappush(self._heap, (price, row))
        if len(self._heap) > 2 * len(self._prices) + SLACK:
            self._heap = [(price, row) for row, price in self._prices.items()]
            heapq.heapify(self._heap)

    def _lowest(self, now: float) -> tuple[float, int] | None:
        """Return the first valid entry; move blocks that lost their priority to the inner policy."""
        while self._heap:
            price, row = self._heap[0]
            if self._prices.get(row) == price:
                if self._facts.retention(row, now) == DEFAULT_PRIORITY:
                    del self._prices[row]
                    self.inner.offer((row,), now)
                elif self.price(row, now) == price:
                    return price, row
                else:  # used meanwhile, or given another priority
                    heapq.heappop(self._heap)
                    self._add(row, now)
                    continue
            heapq.heappop(self._heap)
        return None

    def _take(self, entry: tuple[float, int]) -> Victim:
        price, row = entry
        heapq.heappop(self._heap)
        del self._prices[row]
        following = [(p, r) for p, r in self._heap[:1] if self._prices.get(r) == p]
        return Victim(row, price, *(following[0] if following else (math.nan, -1)))


class RetainedAdmission(AdmissionPolicy):
    """Admits by priority, then by another policy."""

    def __init__(self, inner: AdmissionPolicy, facts: BlockFacts) -> None:
        self.inner = inner
        self._facts = facts

    def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
        """Return whether the newcomer's priority is higher; of equals, what the inner policy answers."""
        priority, facts = newcomer.priority, self._facts
        if victim is None:
            return priority > DEFAULT_PRIORITY or self.inner.admits(newcomer, None)
        if priority == DEFAULT_PRIORITY and not facts.has_retention:
            return self.inner.admits(newcomer, victim)
        victims = facts.retention(victim.row, newcomer.now)
        if priority != victims:
            return priority > victims
        return priority != DEFAULT_PRIORITY or self.inner.admits(newcomer, victim)
