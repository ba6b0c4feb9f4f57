"""Tail-optimised LRU: blocks that no slow first token can depend on are evicted first, by recency.

Zhang et al., "Tail-Optimized Caching for LLM Inference" (arXiv:2510.15152), as SGLang ships it. A
conversation of L tokens with a next prompt of about Q more needs only L + Q - threshold of them stored for
its next prefill to stay within `threshold` tokens; what stands behind that may go at no cost to the tail.
Those blocks are evicted first, least recently used first, and then everything else is LRU.

L is the most that a request asked for of this branch, not what is left of it: otherwise a conversation that
was cut once would be cut down to nothing. With threshold 0 this is LRU.
"""

from array import array
from collections.abc import Sequence

from ..base import Surroundings, Use
from ..options import Number, read_numbers
from .arrivals import GROWTH
from .lru import LruEviction

#: Blocks that may go are priced as if they had last been used this long ago: three years.
SAFE_DISCOUNT_S = 1e8
OPTIONS = {
    "threshold_tokens": Number(4096, 0, 1e9),  # of prefill that is no slow first token
    "next_prompt_tokens": Number(1024, 0, 1e9),  # that a conversation's next prompt is expected to add
}


class TailLruEviction(LruEviction):
    """Price: when the block was used last, in seconds; less where the tail can do without it."""

    def __init__(self, surroundings: Surroundings) -> None:
        options = read_numbers("tail_lru", surroundings.options, OPTIONS)
        surroundings.options.clear()
        super().__init__(surroundings)
        self._spare_tokens = options["threshold_tokens"] - options["next_prompt_tokens"]
        self._num_asked = array("l")  # by row: blocks of its branch, at most

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Note how long the branch of used blocks is."""
        self._note(rows, use.num_asked)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Note how long the branch of new blocks is."""
        self._note(rows, max(use.num_asked, self._facts.position[rows[-1]] + 1))

    def price(self, row: int, now: float) -> float:
        """Return when the block was used last, three years earlier if the tail can do without it."""
        num_behind = (self._num_asked[row] if row < len(self._num_asked) else 0) - self._facts.position[row]
        is_spare = num_behind * self._facts.block_tokens(row) <= self._spare_tokens
        return super().price(row, now) - (SAFE_DISCOUNT_S if is_spare and self._spare_tokens > 0 else 0.0)

    def num_no_dearer(self, rows: Sequence[int], price: float, now: float) -> int:
        """Return how many of these blocks, from the first one on, cost at most `price`."""
        for number, row in enumerate(rows):
            if self.price(row, now) > price:
                return number
        return len(rows)

    def _note(self, rows: Sequence[int], num_asked: int) -> None:
        known = self._num_asked
        for row in rows:
            if row >= len(known):
                known.extend([0] * (row + GROWTH - len(known)))
            known[row] = num_asked
