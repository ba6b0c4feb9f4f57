"""LRU by the chance that a conversation goes on, learned while it runs: after Learned Prefix Caching.

Yang et al., "Learned Prefix Caching for Efficient LLM Inference" (NeurIPS 2025), read the text of a prompt to
foretell whether there will be another turn, and evict first what has no future. A daemon sees no text, so
this foretells from what it does see: how many turns there were, how long the conversation is, how much the
last prompt added, and whether its session is named. Logistic regression, one AdaGrad step for each
conversation that went on or was evicted before it did.

If a conversation goes on with chance p, and when it does after a time of mean g, then the chance that it
still will at age a is about p exp(-a / g). The order of that does not change with time: it is the order of
(last use) + g log p, so this is LRU with its clock put back by g log p, and a price is a number that is
written once.

It is a baseline of that idea, not of that system: it has another model, other features and no text.
"""

import math
from array import array
from collections.abc import Sequence

from ..base import Surroundings, Use
from ..options import Number, read_numbers
from .arrivals import GROWTH
from .lru import ENDED, ENDED_DISCOUNT_S
from .priced import PricedEviction

OPTIONS = {"learning_rate": Number(0.2, 0.001, 10)}
MAX_LOG = 12  # buckets of powers of two
NUM_BUCKETS = MAX_LOG + 1
NUM_FEATURES = 3 + 3 * NUM_BUCKETS
LEAST = 1e-3  # chance, so that its logarithm is bounded
FIRST_GAP_S = 60.0
GAP_SHARE = 0.01  # of the mean gap that a new one replaces


class LearnedPrefixEviction(PricedEviction):
    """Price: when the block was used last, put back by how unlikely it is that its conversation goes on."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._rate = read_numbers("learned_prefix", surroundings.options, OPTIONS)["learning_rate"]
        self._weights = array("d", [0.0] * NUM_FEATURES)
        self._squares = array("d", [1e-6] * NUM_FEATURES)
        self._log_chance = array("d")  # by row: of the conversation that used it last
        self._ends: dict[
            int, tuple[tuple[int, ...], float, int]
        ] = {}  # last row of one: features, time, turns
        self._gap_s = FIRST_GAP_S

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Learn that a conversation went on, and price its blocks anew."""
        self._ask(rows, use, num_new=max(0, use.num_asked - len(rows)))

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Price the new end of a conversation."""
        parent = self._facts.parent[rows[0]]
        known = self._ends.pop(parent, None) if parent >= 0 else None
        self._end(rows, use, len(rows), known[2] if known else 0)

    def forgotten(self, rows: Sequence[int]) -> None:
        """Learn that conversations did not go on while their ends were stored."""
        for row in rows:
            if (end := self._ends.pop(row, None)) is not None:
                self._learn(end[0], 0.0)
        super().forgotten(rows)

    def price(self, row: int, now: float) -> float:
        """Return when the block was used last, plus the mean gap times the logarithm of the chance."""
        last_used = self._facts.last_used[row]
        if self._facts.urgency[row] == ENDED:
            return last_used - ENDED_DISCOUNT_S
        log_chance = self._log_chance[row] if row < len(self._log_chance) else 0.0
        return last_used + self._gap_s * log_chance

    def _ask(self, rows: Sequence[int], use: Use, num_new: int) -> None:
        if not rows:
            return
        num_turns = 0
        for row in rows:
            if (end := self._ends.pop(row, None)) is not None:
                self._learn(end[0], 1.0)
                self._gap_s += GAP_SHARE * (max(use.now - end[1], 0.0) - self._gap_s)
                num_turns = max(num_turns, end[2])
        self._end(rows, use, num_new, num_turns)

    def _end(self, rows: Sequence[int], use: Use, num_new: int, num_turns: int) -> None:
        length = max(use.num_asked, self._facts.position[rows[-1]] + 1)
        features = (
            0,
            1 if use.session else 2,
            3 + _bucket(num_turns),
            3 + NUM_BUCKETS + _bucket(length),
            3 + 2 * NUM_BUCKETS + _bucket(num_new),
        )
        self._ends[rows[-1]] = features, use.now, num_turns + 1
        log_chance = math.log(max(self._chance(features), LEAST))
        known = self._log_chance
        for row in rows:
            if row >= len(known):
                known.extend([0.0] * (row + GROWTH - len(known)))
            known[row] = log_chance

    def _chance(self, features: Sequence[int]) -> float:
        total = sum(self._weights[one] for one in features)
        return 1.0 / (1.0 + math.exp(-max(min(total, 30.0), -30.0)))

    def _learn(self, features: Sequence[int], truth: float) -> None:
        slope = self._chance(features) - truth
        for one in features:
            self._squares[one] += slope * slope
            self._weights[one] -= self._rate * slope / math.sqrt(self._squares[one])


def _bucket(count: int) -> int:
    return min(count.bit_length(), MAX_LOG)
