"""Use rates: a factor of prices by uses per time known, which fades with what is learned.

Where only the number of uses of a block is known, and for how long it is known, the best estimate is the
same again:

    rate = (uses + PRIOR_USES) / (time known + scale)

This is the mean of a Poisson rate under a gamma prior (Gelman et al., "Bayesian Data Analysis", 3rd ed.,
2.6). A block that is new has the rate of the prior; that of a block which is used no more falls with its age,
so between new blocks this is LRU. The scale is twice the usual gap between two uses of a conversation's
blocks, which is learned, so nothing here has a time scale of its own.

A price is multiplied by (rate / rate of a new block) ** exponent. The exponent is small, because the rest of
the price looks at the same counts as soon as it has seen what they mean, and it fades as observations come
in: hazards need some hundred uses of each kind to learn that used blocks are used again, and these are the
requests at which a small tier keeps the wrong blocks.

Rejected: slopes of hazards that begin at this rate (features that say the same by other words share the
surprise, so none of them unlearns it where only age matters, and they drift where habits do not change); an
exponent that stays (half a point less on agents); one scale for all (300 s suit people and cost a point
where steps take seconds); breaking ties by age in the same way (what pays for LRU's own traffic costs twice
as much where popularity is all there is).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .ages import F64, MIN_GAP_S

EXPONENT = 0.4
#: Observations after which half of the exponent is left.
HALF_LIFE = 51_200.0
#: So small an exponent changes nothing but the work.
LEAST_EXPONENT = 0.01
PRIOR_USES = 0.2
GAPS_PER_SCALE = 2.0
FIRST_GAP_S = 60.0
#: Weight of the newest gap in the running mean of their logarithms, once many are known.
GAP_WEIGHT = 0.01
MAX_LOADED = 1e18


class UseRates:
    """Learns the usual gap between uses, and returns factors of prices by counts of uses."""

    def __init__(self) -> None:
        self._log_gap = math.log(FIRST_GAP_S)
        self._num_gaps = 1.0
        self._num_learned = 0.0

    def add_gap(self, gap_s: float) -> None:
        """Add the gap, in seconds, between two uses of a block that belongs to one conversation."""
        self._num_gaps += 1.0
        weight = max(GAP_WEIGHT, 1.0 / self._num_gaps)
        self._log_gap += weight * (math.log(max(gap_s, MIN_GAP_S)) - self._log_gap)

    def fade(self, num_observations: int) -> None:
        """Add observations that hazards learned from: the exponent falls."""
        self._num_learned += num_observations

    @property
    def exponent(self) -> float:
        """Exponent of the rate in a price; 0 once enough was learned."""
        exponent = EXPONENT * HALF_LIFE / (HALF_LIFE + self._num_learned)
        return exponent if exponent >= LEAST_EXPONENT else 0.0

    def factor(self, num_uses: int, life_s: float) -> float:
        """Return the factor of a block's price: 1 for a new one.

        `num_uses`: uses after the first; `life_s`: seconds since the first use.
        """
        return float(((num_uses / PRIOR_USES + 1.0) / (life_s / self._scale_s() + 1.0)) ** self.exponent)

    def factors(self, num_uses: npt.ArrayLike, lives_s: F64) -> F64 | float:
        """Return the factors of many prices; one number when all are 1.

        Shape of `lives_s`, which is overwritten, float64; `num_uses` has a shape that broadcasts to it.
        """
        exponent = self.exponent
        if not exponent:
            return 1.0
        lives_s /= self._scale_s()
        lives_s += 1.0
        uses = np.asarray(num_uses) * (1.0 / PRIOR_USES) + 1.0
        np.divide(uses, lives_s, out=lives_s)
        return np.power(lives_s, exponent, out=lives_s)

    def _scale_s(self) -> float:
        return GAPS_PER_SCALE * math.exp(self._log_gap)

    def dump(self) -> dict[str, float]:
        """Return what is known, for `load`."""
        return {"log_gap": self._log_gap, "num_gaps": self._num_gaps, "num_learned": self._num_learned}

    def load(self, saved: Mapping[str, Any] | None) -> None:
        """Replace the state by a `dump`; None, of a version without rates, changes nothing.

        Raises ValueError, and changes nothing, where it cannot."""
        if saved is None:
            return
        try:
            log_gap, num_gaps, num_learned = (
                float(saved[name]) for name in ("log_gap", "num_gaps", "num_learned")
            )
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"what was learned of rates lacks a number: {error!r}") from error
        is_possible = abs(log_gap) <= math.log(MAX_LOADED) and 1 <= num_gaps <= MAX_LOADED
        if not (is_possible and 0 <= num_learned <= MAX_LOADED):
            raise ValueError("what was learned holds impossible rates; start without it")
        self._log_gap, self._num_gaps, self._num_learned = log_gap, num_gaps, num_learned
