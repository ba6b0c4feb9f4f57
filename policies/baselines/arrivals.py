"""Order of arrival of the blocks of a tier, for the queues (FIFO, SIEVE, S3-FIFO, ARC).

Blocks that arrive in one call have one number: they are one piece of one prompt, and a policy that ranks
them against each other would only tear the piece apart. Because leaves of the tree are
evicted first, a piece leaves tail first anyway.

Puts land in one tier, so there `stored` is an arrival. Everything else (a block that came up from a slower
tier, any block of another tier) is noticed when it, or a descendant, is offered for the first time: a block
in a tier has its whole past in that tier, so its unknown ancestors came with it.
"""

from array import array
from collections.abc import Sequence

from ..base import Surroundings

GROWTH = 1024


class Arrivals:
    """Numbers of arrival of the blocks of a tier, counted from 1."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._facts = surroundings.facts
        self._is_entrance = surroundings.tier == surroundings.ladder.put_tier
        self._numbers = array("q")  # by row; 0: not in this tier
        self._num_arrivals = 0
        self.num_blocks = 0

    def stored(self, rows: Sequence[int]) -> Sequence[int]:
        """Number new blocks of a put. Returns those that are in this tier now and were not, parents first."""
        return self.enter(rows) if self._is_entrance else ()

    def enter(self, rows: Sequence[int]) -> Sequence[int]:
        """Number blocks that are in the tier, and their ancestors. Returns the new ones, parents first."""
        numbers, parents = self._numbers, self._facts.parent
        entered: list[int] = []
        for row in rows:
            if row < len(numbers) and numbers[row]:
                continue
            path = []
            while row >= 0 and (row >= len(numbers) or not numbers[row]):
                if row >= len(numbers):
                    numbers.extend([0] * (row + GROWTH - len(numbers)))
                numbers[row] = self._num_arrivals + 1
                path.append(row)
                row = parents[row]
            entered += reversed(path)
        if entered:
            self._num_arrivals += 1
            self.num_blocks += len(entered)
        return entered

    def leave(self, rows: Sequence[int]) -> list[int]:
        """Drop the numbers of blocks. Returns those that were known to be here."""
        numbers = self._numbers
        here = [row for row in rows if row < len(numbers) and numbers[row]]
        for row in here:
            numbers[row] = 0
        self.num_blocks -= len(here)
        return here

    def take_number(self) -> int:
        """Return a number after all arrivals so far, for a block that queues up again."""
        self._num_arrivals += 1
        return self._num_arrivals

    def number_of(self, row: int) -> int:
        """Return the number of a block's arrival. Blocks that are not here count as the next to come."""
        number = self._numbers[row] if row < len(self._numbers) else 0
        return number or self._num_arrivals + 1

    def __contains__(self, row: int) -> bool:
        return row < len(self._numbers) and self._numbers[row] > 0
