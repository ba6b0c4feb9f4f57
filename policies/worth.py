"""What keeping a block is worth at each age: a Gittins index.

Keeping a block from now until age H earns a hit with some chance and occupies its bytes for some expected
time, until the hit or until H. The best ratio of the two over all H,

    index(age) = max over H of  P(used before H | unused at age) / E[time kept | unused at age]

is the rent per second at which keeping it just pays. It is high shortly before returns are likely, where the
hazard of the moment is still low, and it falls when they are overdue. Ranking by it is optimal for a single
resource that is handed to one of many (Gittins, J. R. Stat. Soc. B 41, 1979); for caches the same ratio with
a fixed horizon is hit density (Beckmann, Chen, Cidon, "LHD", NSDI 2018). The hazard of the moment alone does
worse than LRU on real traces, and a fixed horizon loses wherever it does not fit the gaps.

Horizons are ends of age bins: half of the steps for the same hits (within 0.01 points on two public traces).
"""

import numpy as np
import numpy.typing as npt

from .ages import F64, NUM_STEPS, STEP_WIDTHS_S, STEPS_PER_BIN

I64 = npt.NDArray[np.int64]

assert STEPS_PER_BIN == 2, "index_at cuts bins into halves"
#: Rows worked on at a time: what they need fits a core's cache, which is twice as fast as memory.
NUM_TOGETHER = 256
#: No time kept is shorter. It keeps horizons before the asked step, whose gain is negative, from being best.
LEAST_KEPT_S = 1e-9

_HALF_WIDTHS_S: F64 = STEP_WIDTHS_S / 2


def index_at(hazards: F64, steps: I64) -> F64:
    """Return the index at the beginnings of some steps of age, in uses per second of keeping.

    `hazards`: (num_stretches, NUM_BINS), chance of a use within a bin for what reached it, below 1.
    `steps`: (num_stretches, num_asked) steps of age. Returns the shape of `steps`.
    """
    best = np.empty(steps.shape)
    for first in range(0, len(hazards), NUM_TOGETHER):
        part = slice(first, first + NUM_TOGETHER)
        _best_ratios(*_curves(hazards[part]), steps[part], best[part])
    return best


def _curves(hazards: F64) -> tuple[F64, F64]:
    """Return the share that is unused, and the mean time kept, until the beginning of each step and (last
    column) until the end of all."""
    survival = np.empty((len(hazards), NUM_STEPS + 1))
    kept_s = np.empty_like(survival)
    survival[:, 0], kept_s[:, 0] = 1.0, 0.0
    passes = 1.0 - hazards
    np.cumprod(passes, axis=1, out=survival[:, 2::2])
    np.sqrt(passes, out=passes)  # half a bin
    np.multiply(survival[:, :-1:2], passes, out=survival[:, 1::2])
    spent_s = survival[:, :-1] + survival[:, 1:]
    spent_s *= _HALF_WIDTHS_S
    np.cumsum(spent_s, axis=1, out=kept_s[:, 1:])
    return survival, kept_s


def _best_ratios(survival: F64, kept_s: F64, steps: I64, best: F64) -> None:
    """Write into `best`, per asked step, the best ratio of uses to time kept over all horizons."""
    rows = np.arange(len(steps))[:, None]
    ratios = survival[rows, steps][:, :, None] - survival[:, None, 2::2]
    kept = kept_s[:, None, 2::2] - kept_s[rows, steps][:, :, None]
    np.maximum(kept, LEAST_KEPT_S, out=kept)
    np.divide(ratios, kept, out=ratios)
    ratios.max(axis=2, out=best)
