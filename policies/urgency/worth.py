"""Gittins index: what keeping a block is worth, by age.

Keeping a block from now until age H earns a hit with some chance and occupies its bytes for some expected
time, until the hit or until H. The best ratio of the two over all H,

    index(age) = max over H of  P(used before H | unused at age) / E[time kept | unused at age]

is the rent per second at which keeping it just pays. It is high shortly before returns are likely, where the
hazard of the moment is still low, and it falls when they are overdue. Ranking by it is optimal for a single
resource that is handed to one of many (Gittins, J. R. Stat. Soc. B 41, 1979); for caches the same ratio with
a fixed horizon is hit density (Beckmann, Chen, Cidon, "LHD", NSDI 2018). The hazard of the moment alone does
worse than LRU on real traces, and a fixed horizon loses wherever it does not fit the gaps.

Horizons are ends of age bins: half of the steps for the same hits (within 0.01 points on two public traces).
What was before the youngest asked age makes no difference, so hazards may begin there. Arrays
are worked on bin by bin, all stretches of a bin side by side: running sums along an axis that is not
contiguous are as quick as any, and the best of all horizons is found four times as quickly.
"""

import numpy as np
import numpy.typing as npt

from .ages import F64, STEP_WIDTHS_S, STEPS_PER_BIN

I64 = npt.NDArray[np.int64]

assert STEPS_PER_BIN == 2, "index_at cuts bins into halves"
#: No time kept is shorter. It keeps horizons before the asked step, which have a negative gain, from being
#: best.
LEAST_KEPT_S = 1e-9

#: Half the widths of steps, those in the first half of a bin and those in the second.
_FIRST_HALVES_S: F64 = STEP_WIDTHS_S[0::2, None] / 2
_SECOND_HALVES_S: F64 = STEP_WIDTHS_S[1::2, None] / 2


def index_at(hazards: F64, steps: I64, first_bin: int = 0) -> F64:
    """Return the index at the beginnings of some steps of age, float64, in uses per second of keeping.

    `hazards`: (num_stretches, NUM_BINS - first_bin), chance of a use within a bin for what reached it, below
    1. `steps`: (num_stretches, num_asked) steps of age, none before `first_bin`. Returns their shape.
    """
    return _best_ratios(*_curves(hazards.T, first_bin), steps.T - STEPS_PER_BIN * first_bin).T


def _curves(hazards: F64, first_bin: int) -> tuple[F64, F64]:
    """Return, as (num_steps + 1, num_stretches), the share that is unused and the mean time kept until the
    beginning of each step and (last row) until the end of all."""
    num_bins, num_stretches = hazards.shape
    survival = np.empty((STEPS_PER_BIN * num_bins + 1, num_stretches))
    kept_s = np.empty_like(survival)
    survival[0], kept_s[0] = 1.0, 0.0
    passes = 1.0 - hazards
    np.cumprod(passes, axis=0, out=survival[2::2])
    np.sqrt(passes, out=passes)  # half a bin
    begins, middles = survival[:-1:2], survival[1::2]
    np.multiply(begins, passes, out=middles)
    first_half_s = (begins + middles) * _FIRST_HALVES_S[first_bin:]
    spent_s = (middles + survival[2::2]) * _SECOND_HALVES_S[first_bin:]
    spent_s += first_half_s
    np.cumsum(spent_s, axis=0, out=kept_s[2::2])
    np.add(kept_s[:-1:2], first_half_s, out=kept_s[1::2])
    return survival, kept_s


def _best_ratios(survival: F64, kept_s: F64, steps: I64) -> F64:
    """Return, per asked step, the best ratio of uses to time kept over all horizons. Steps first."""
    stretches = np.arange(steps.shape[1])
    ratios = survival[steps, stretches][:, None] - survival[2::2]
    kept = kept_s[2::2] - kept_s[steps, stretches][:, None]
    np.maximum(kept, LEAST_KEPT_S, out=kept)
    np.divide(ratios, kept, out=ratios)
    best: F64 = ratios.max(axis=1)
    return best
