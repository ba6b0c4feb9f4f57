"""Base of policies that are a price: evicts the candidate with the lowest.

LRU, LFU, first in first out, GDSF and Belady's rule differ in `price` and in little else. Prices that rise
(a block was used) cost nothing when they do: they are looked at again when the candidate comes up, and the
candidate goes back with its new price. A price that falls has to be offered again.

Only leaves of the prefix tree are candidates; the planner offers a block when its last child has left. The
planner then takes a run of parents in the same step, as long as `price` says that they are worth no more
than the victim. With prices, that is what choosing one by one would have done.
"""

import math
from collections.abc import Sequence

from ..base import EvictionPolicy, Surroundings, Victim
from ..candidates import Candidates

#: Candidates looked at again in one `choose`. After these it settles for the next one: nearly the right
#: victim now is better than the right one after a pause.
MAX_REFRESHES = 256


class PricedEviction(EvictionPolicy):
    """A lazy heap over `price`, which subclasses define."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts
        self._candidates = Candidates()

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows: they may name other blocks from now on."""
        self._candidates.discard_many(rows)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates. A known one with a higher price now stays where it is until it comes up."""
        candidates = self._candidates
        for row in rows:
            price = self.price(row, now)
            known = candidates.price_of(row)
            if known is None or price < known:
                candidates.add(row, price)

    def choose(self, now: float) -> Victim | None:
        """Remove and return the candidate with the lowest price."""
        candidates = self._candidates
        for _ in range(MAX_REFRESHES):
            entry = candidates.pop()
            if entry is None:
                return None
            price, row = entry
            current = self.price(row, now)
            if current <= price:
                break
            candidates.add(row, current)
        else:
            entry = candidates.pop()
            assert entry is not None, "the last one that was looked at went back"
            price, row = entry
        following = candidates.lowest()
        return Victim(row, price, *(following or (math.nan, -1)))

    def left(self, rows: Sequence[int]) -> None:
        """Drop candidates that left this tier."""
        self._candidates.discard_many(rows)

    def __len__(self) -> int:
        return len(self._candidates)
