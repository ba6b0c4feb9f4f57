"""Least frequently used; among equals, least recently used.

Counts are those of the catalog: uses since the block was stored, in whatever tier. They never age, which is
what is wrong with LFU: yesterday's favourites stay. Kept for comparison.

On a prefix tree every use of a block is a use of all blocks before it, so a parent is never used less
often, or longer ago, than its children: leaves first is what LFU wants anyway, and a chain used as a whole
leaves as a whole, tail first.
"""

from ..base import Surroundings
from ..options import read_numbers
from .priced import PricedEviction

#: Makes seconds (since boot or since 1970) a fraction that breaks ties between equal counts.
TIE_PER_S = 1e-10


class LfuEviction(PricedEviction):
    """Price: number of uses."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        read_numbers("lfu", surroundings.options, {})

    def price(self, row: int, now: float) -> float:
        """Return how often the block was used, plus a fraction that grows with its last use."""
        return self._facts.num_uses[row] + self._facts.last_used[row] * TIE_PER_S
