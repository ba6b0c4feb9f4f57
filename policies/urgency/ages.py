"""Age since the last use, cut into bins that grow by sqrt(2): half a second to nine hours.

Gaps between uses span five orders of magnitude, and what one learns about them scales with the gap: a
second matters after ten seconds, not after an hour. With geometric bins nothing here has a time scale of its
own. Prices are kept on a grid twice as fine (`steps`), because they fall quickly where returns are likely,
and are read between its points: a block that is a second older is a bit cheaper.
Rejected: bins fitted to observed quantiles (they move, and everything counted per bin with them).
"""

import math

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

FIRST_EDGE_S = 0.5
NUM_BINS = 33
STEPS_PER_BIN = 2
NUM_STEPS = NUM_BINS * STEPS_PER_BIN

#: Ages at which bins begin, and where the last one ends. The first bin begins at 0.
EDGES_S: F64 = np.concatenate(([0.0], FIRST_EDGE_S * 2.0 ** (np.arange(NUM_BINS) / 2)))
#: Ages at which steps begin, and where the last one ends; the first bin is cut in the middle.
STEP_EDGES_S: F64 = np.concatenate(
    ([0.0, FIRST_EDGE_S / 2], FIRST_EDGE_S * 2.0 ** (np.arange(NUM_STEPS - 1) / (2 * STEPS_PER_BIN)))
)
STEP_WIDTHS_S: F64 = np.diff(STEP_EDGES_S)

#: Seconds from one request to the next, at least.
MIN_GAP_S = 0.05


class Clock:
    """Time that ages are measured by: seconds, but every request takes MIN_GAP_S at least.

    A recording without times, or one played a thousand times too fast, would have no ages that can be told
    apart; by this clock it has those that its order gives. Requests of one instant are told apart, too, and
    once it is later than the clock the clock is right again: rejected is one that stays ahead, by which a
    service with bursts of requests has longer gaps than it has.
    """

    def __init__(self) -> None:
        self._request_at = -math.inf

    def at(self, now: float) -> float:
        """Return this clock's time, in seconds: `now`, or that of the last request if it is later."""
        return max(now, self._request_at)

    def begin_request(self, now: float) -> float:
        """Begin a request. Returns this clock's time, later than `now` if the request follows too closely."""
        self._request_at = max(now, self._request_at + MIN_GAP_S)
        return self._request_at


def bin_of(age_s: float) -> int:
    """Return the bin of an age; the last one is open-ended."""
    if age_s < FIRST_EDGE_S:
        return 0
    return min(NUM_BINS - 1, 1 + int(2.0 * math.log2(age_s / FIRST_EDGE_S)))


def step_of(age_s: float) -> float:
    """Return the step of an age, and how far into it the age is; the last step is open-ended."""
    if age_s < FIRST_EDGE_S:
        return STEPS_PER_BIN * max(0.0, age_s) / FIRST_EDGE_S
    return min(NUM_STEPS - 1.0, STEPS_PER_BIN + 2.0 * STEPS_PER_BIN * math.log2(age_s / FIRST_EDGE_S))


def steps_of(ages_s: F64) -> F64:
    """Return the steps (n,) of ages (n,) in seconds, float64, as `step_of` does for one."""
    later = np.log2(np.maximum(ages_s, FIRST_EDGE_S) / FIRST_EDGE_S)
    early = np.minimum(np.maximum(ages_s / FIRST_EDGE_S, 0.0), 1.0)
    steps: F64 = STEPS_PER_BIN * (early + 2.0 * later)
    return np.minimum(steps, NUM_STEPS - 1.0, out=steps)
