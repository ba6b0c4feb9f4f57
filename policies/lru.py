"""Least recently used, finished sessions first.

A lazy heap: the price of a candidate is taken when it is offered and checked again when it comes up; a
block used meanwhile goes back with its new price. A use therefore costs nothing here, where a linked
list would pay on every touch of every block of a long prompt. Exact LRU all the same, because prices
only rise between offers. (The tail of a chain goes before its head without our help: a block is a candidate
only when none of its children is left.)
"""

import heapq
import math
from array import array

from ..tiers.block import Urgency
from .base import BlockFacts

#: Blocks of finished sessions are priced as if they had last been used this long ago: 30 years.
ENDED_DISCOUNT_S = 1e9
MAX_REFRESHES = 256


class LruEviction:
    """Implements EvictionPolicy."""

    def __init__(self, facts: BlockFacts) -> None:
        self._facts = facts
        self._heap: list[tuple[float, int]] = []  # (price, block), older offers of a block included
        self._offered = array("d")  # latest price per block; NaN: not a candidate
        self._num_candidates = 0

    def offer(self, block: int) -> None:
        """Add a candidate. O(log n)."""
        if block >= len(self._offered):
            self._offered.extend([math.nan] * (block + 1024 - len(self._offered)))
        price = self._price(block)
        known = self._offered[block]
        if known == price:
            return
        if math.isnan(known):
            self._num_candidates += 1
        self._offered[block] = price
        heapq.heappush(self._heap, (price, block))

    def choose(self) -> int | None:
        """Remove and return the coldest candidate. Amortised O(log n) per use of a block.

        After MAX_REFRESHES candidates that were used meanwhile it settles for the next one: nearly the
        coldest now is better than the coldest after a pause.
        """
        num_refreshed = 0
        while self._heap:
            price, block = heapq.heappop(self._heap)
            if self._offered[block] != price:
                continue  # an older offer of the same block
            current = self._price(block)
            if current > price and num_refreshed < MAX_REFRESHES:
                num_refreshed += 1
                self._offered[block] = current
                heapq.heappush(self._heap, (current, block))
                continue
            self._offered[block] = math.nan
            self._num_candidates -= 1
            return block
        return None

    def __len__(self) -> int:
        return self._num_candidates

    def _price(self, block: int) -> float:
        last_used = self._facts.last_used[block]
        return last_used - ENDED_DISCOUNT_S if self._facts.urgency[block] == Urgency.ENDED else last_used
