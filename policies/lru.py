"""Least recently used, finished sessions first, tail of a chain before its head.

A lazy heap: the price of a candidate is taken when it is offered and checked again when it comes up; a
block used meanwhile goes back with its new price. A use therefore costs nothing here, where a linked
list would pay on every touch of every block of a long prompt. Exact LRU all the same, because prices
only rise between offers.
"""

import heapq
from typing import TypeAlias

from ..tiers.block import Urgency
from .base import BlockFacts

Price: TypeAlias = tuple[bool, float, int]


class LruEviction:
    """Implements EvictionPolicy."""

    def __init__(self, facts: BlockFacts) -> None:
        self._facts = facts
        self._heap: list[tuple[Price, int]] = []
        self._offered: dict[int, Price] = {}

    def offer(self, block: int) -> None:
        """Add a candidate. O(log n)."""
        price = self._price(block)
        if self._offered.get(block) != price:
            self._offered[block] = price
            heapq.heappush(self._heap, (price, block))

    def choose(self) -> int | None:
        """Remove and return the coldest candidate. Amortised O(log n) per use of a block."""
        while self._heap:
            price, block = heapq.heappop(self._heap)
            if self._offered.get(block) != price:
                continue  # an older offer of the same block
            current = self._price(block)
            if current > price:
                self._offered[block] = current
                heapq.heappush(self._heap, (current, block))
                continue
            del self._offered[block]
            return block
        return None

    def __len__(self) -> int:
        return len(self._offered)

    def _price(self, block: int) -> Price:
        facts = self._facts
        ended = facts.urgency[block] == Urgency.ENDED
        return (not ended, facts.last_used[block], -facts.position[block])
