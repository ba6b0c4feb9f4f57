"""First in, first out: evicts the oldest arrival, used or not.

What quick-demotion policies start from, and the cheapest there is: a use costs nothing at all.

On a prefix tree the oldest block is the head of a chain and cannot go first, because its continuations
would be unreachable. So the candidates are the leaves, and the oldest *leaf* goes. Its parents arrived with
it or before it, are therefore worth no more, and go in the same step, tail first, up to where another chain
branches off: a chain leaves as a whole, when its latest continuation is the oldest there is.
"""

from collections.abc import Sequence

from ..base import Surroundings, Use
from ..options import read_numbers
from .arrivals import Arrivals
from .priced import PricedEviction


class FifoEviction(PricedEviction):
    """Price: the number of the block's arrival."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        read_numbers("fifo", surroundings.options, {})
        self._arrivals = Arrivals(surroundings)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Number new blocks."""
        self._arrivals.stored(rows)

    def forgotten(self, rows: Sequence[int]) -> None:
        """Drop state of these rows: they may name other blocks from now on."""
        self.left(rows)

    def offer(self, rows: Sequence[int], now: float) -> None:
        """Add candidates, and number those that did not come by `stored`."""
        self._arrivals.enter(rows)
        super().offer(rows, now)

    def price(self, row: int, now: float) -> float:
        """Return the number of the block's arrival."""
        return float(self._arrivals.number_of(row))

    def left(self, rows: Sequence[int]) -> None:
        """Drop blocks that left this tier; if they come back, they arrive anew."""
        self._arrivals.leave(rows)
        super().left(rows)
