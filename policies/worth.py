"""What keeping a block is worth at each age: a Gittins index.

Keeping a block from now until age H earns a hit with some chance and occupies its bytes for some expected
time, until the hit or until H. The best ratio of the two over all H,

    index(age) = max over H of  P(used before H | unused at age) / E[time kept | unused at age]

is the rent per second at which keeping it just pays. It is high shortly before returns are likely, where the
hazard of the moment is still low, and it falls when they are overdue. Ranking by it is optimal for a single
resource that is handed to one of many (Gittins, J. R. Stat. Soc. B 41, 1979); for caches the same ratio with
a fixed horizon is hit density (Beckmann, Chen, Cidon, "LHD", NSDI 2018). The hazard of the moment alone does
worse than LRU on real traces, and a fixed horizon loses wherever it does not fit the gaps.
"""

import numpy as np
import numpy.typing as npt

from .ages import F64, NUM_STEPS, STEP_WIDTHS_S, STEPS_PER_BIN

I64 = npt.NDArray[np.int64]
_STEPS = np.arange(NUM_STEPS)


def index_at(hazards: F64, steps: I64) -> F64:
    """Return the index at the beginnings of some steps of age, in uses per second of keeping.

    `hazards`: (num_stretches, NUM_BINS), chance of a use within a bin for what reached it, below 1.
    `steps`: (num_stretches, num_asked) steps of age. Returns the shape of `steps`.
    """
    per_step = np.repeat(1.0 - (1.0 - hazards) ** (1.0 / STEPS_PER_BIN), STEPS_PER_BIN, axis=1)
    num_stretches = len(hazards)
    # Column i: until the beginning of step i; the last one: until the end of all.
    survival = np.ones((num_stretches, NUM_STEPS + 1))
    np.cumprod(1.0 - per_step, axis=1, out=survival[:, 1:])
    kept_s = np.zeros((num_stretches, NUM_STEPS + 1))
    reached = survival[:, :-1]
    np.cumsum((reached + survival[:, 1:]) * (STEP_WIDTHS_S / 2), axis=1, out=kept_s[:, 1:])
    used = 1.0 - survival
    gains = used[:, None, 1:] - np.take_along_axis(used, steps, axis=1)[:, :, None]
    costs = kept_s[:, None, 1:] - np.take_along_axis(kept_s, steps, axis=1)[:, :, None]
    is_later = steps[:, :, None] <= _STEPS
    ratios = np.zeros_like(gains)
    np.divide(gains, costs, out=ratios, where=is_later & (costs > 0))
    best: F64 = ratios.max(axis=2)
    return best
