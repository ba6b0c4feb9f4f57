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
from collections.abc import Sequence

from ..tiers.block import Urgency
from .base import EvictionPolicy, Surroundings, Victim

#: Blocks of finished sessions are priced as if they had last been used this long ago: 30 years.
ENDED_DISCOUNT_S = 1e9
MAX_REFRESHES = 256


class LruEviction(EvictionPolicy):
    """Price: when the block was used last, in seconds."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts
        self._heap: list[tuple[float, int]] = []  # (price, block), older offers of a block included
        self._offered = array("d")  # latest price per block; NaN: not a candidate
        self._num_candidates = 0

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates. O(log n) each."""
        for row in rows:
            if row >= len(self._offered):
                self._offered.extend([math.nan] * (row + 1024 - len(self._offered)))
            price = self.price(row, now)
            known = self._offered[row]
            if known == price:
                continue
            if math.isnan(known):
                self._num_candidates += 1
            self._offered[row] = price
            heapq.heappush(self._heap, (price, row))

    def price(self, row: int, now: float) -> float:
        """Return when the block was used last."""
        last_used = self._facts.last_used[row]
        return last_used - ENDED_DISCOUNT_S if self._facts.urgency[row] == Urgency.ENDED else last_used

    def choose(self, now: float) -> Victim | None:
        """Remove and return the coldest candidate. Amortised O(log n) per use of a block.

        After MAX_REFRESHES candidates that were used meanwhile it settles for the next one: nearly the
        coldest now is better than the coldest after a pause.
        """
        num_refreshed = 0
        while self._heap:
            price, row = heapq.heappop(self._heap)
            if self._offered[row] != price:
                continue  # an older offer of the same block
            current = self.price(row, now)
            if current > price and num_refreshed < MAX_REFRESHES:
                num_refreshed += 1
                self._offered[row] = current
                heapq.heappush(self._heap, (current, row))
                continue
            self._offered[row] = math.nan
            self._num_candidates -= 1
            return Victim(row, price, self._heap[0][0] if self._heap else math.nan)
        return None

    def left(self, rows: Sequence[int]) -> None:
        """Forget the offers of these."""
        for row in rows:
            if row < len(self._offered) and not math.isnan(self._offered[row]):
                self._offered[row] = math.nan
                self._num_candidates -= 1

    def __len__(self) -> int:
        return self._num_candidates
