"""Least recently used, finished sessions first.

Exact, though a use costs nothing here: the time of the last use is in the catalog, and a candidate that was
used after it was offered goes back when it comes up (see priced.py). A linked list would pay on every touch
of every block of a long prompt. The tail of a chain goes before its head without our help: a block is a
candidate only when none of its children is left.
"""

from collections.abc import Sequence

from ...tiers.block import Urgency
from ..base import Surroundings
from ..options import read_numbers
from .priced import PricedEviction

#: Blocks of finished sessions are priced as if they had last been used this long ago: 30 years.
ENDED_DISCOUNT_S = 1e9
ENDED = int(Urgency.ENDED)


class LruEviction(PricedEviction):
    """Price: when the block was used last, in seconds."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        read_numbers("lru", surroundings.options, {})

    def price(self, row: int, now: float) -> float:
        """Return when the block was used last."""
        last_used = self._facts.last_used[row]
        return last_used - ENDED_DISCOUNT_S if self._facts.urgency[row] == ENDED else last_used

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return how many of these blocks, from the first one on, cost at most `price`."""
        last_used = self._facts.last_used
        for number, row in enumerate(rows):
            if last_used[row] > price and self.price(row, now) > price:
                return number
        return len(rows)
