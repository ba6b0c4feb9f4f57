"""Life tables of returns: the chance that a conversation comes back, by age, learned while serving.

One `ReturnTimes` is a life table: age since the last touch is cut into bins that grow by sqrt(2) from one
second to four hours; per bin it counts how many conversations reached it (at risk) and how many of those came
back in it. The ratio is the hazard, and everything else follows from it: conversations that never return are
counted by the bins they outlived, which a histogram of gaps would leave out and so promise returns that never
come. (Life tables are Kaplan and Meier's estimator with fixed bins: J. Am. Stat. Assoc. 53, 1958.)

A class of conversations with few observations leans on a broader one (`parent`), with the weight of
PRIOR_WEIGHT observations. Counts halve at MAX_AT_RISK per bin: habits change, and the table follows. Nothing
is trained beforehand.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

FIRST_EDGE_S = 1.0
GROWTH = math.sqrt(2.0)
#: Beginnings of the bins, in seconds; the last edge ends the last bin.
EDGES_S = tuple(FIRST_EDGE_S * GROWTH**number for number in range(29))
NUM_BINS = len(EDGES_S) - 1
ROUNDING = 1e-6  # of a bin: an age is a difference of two clock readings
PRIOR_WEIGHT = 4.0
#: Hazard of a bin without observations: a return in one of fifteen.
PRIOR_HAZARD = 1 / 15
MAX_AT_RISK = 2000.0


class Outlook(NamedTuple):
    """A window in which a return is likely enough."""

    until_s: float  # age at which it ends
    chance: float  # of a return before that
    occupied_s: float  # expected seconds until the return or the end


def bin_of(age_s: float) -> int:
    """Return the bin of an age; -1 before the first one, NUM_BINS after the last."""
    steps = math.log(max(age_s, 1e-9) / FIRST_EDGE_S) / math.log(GROWTH)
    return max(-1, min(NUM_BINS, math.floor(steps + ROUNDING)))


class ReturnTimes:
    """The life table of one class of conversations."""

    def __init__(self, parent: "ReturnTimes | None" = None) -> None:
        self._parent = parent
        self._at_risk = [0.0] * NUM_BINS
        self._returned = [0.0] * NUM_BINS

    def outlived(self, number: int) -> None:
        """Count a conversation that did not come back in bin `number`."""
        self._count(number, 0.0)

    def returned(self, number: int) -> None:
        """Count a conversation that came back in bin `number`."""
        self._count(number, 1.0)

    def counts(self) -> tuple[list[float], list[float]]:
        """Return, per bin, how many reached it and how many of those came back in it."""
        return list(self._at_risk), list(self._returned)

    def take(self, at_risk: Sequence[float], returned: Sequence[float]) -> None:
        """Replace the counts per bin, not those of the parent. Raises ValueError."""
        if any(back > reached for back, reached in zip(returned, at_risk, strict=True)):
            raise ValueError("more came back than were away; start without what was learned")
        self._at_risk, self._returned = list(at_risk), list(returned)

    def hazard(self, number: int) -> float:
        """Return the chance of a return in bin `number`, for conversations that reached it."""
        prior = self._parent.hazard(number) if self._parent is not None else PRIOR_HAZARD
        return (self._returned[number] + PRIOR_WEIGHT * prior) / (self._at_risk[number] + PRIOR_WEIGHT)

    def outlook(self, number: int, min_chance: float, max_window_s: float) -> Outlook | None:
        """Return the shortest window from the beginning of a bin with at least this chance of a return.

        None when there is none of at most `max_window_s`, or when it is better to wait: when returns come
        more often later in the window than in its first bin, nothing is lost by beginning later.
        """
        survival, occupied_s = 1.0, 0.0
        first_rate = 0.0
        for bin_number in range(max(0, number), NUM_BINS):
            begin_s, end_s = EDGES_S[bin_number], EDGES_S[bin_number + 1]
            if end_s - EDGES_S[max(0, number)] > max_window_s:
                return None
            hazard = self.hazard(bin_number)
            occupied_s += survival * (1 - hazard / 2) * (end_s - begin_s)
            survival *= 1 - hazard
            if bin_number == max(0, number):
                first_rate = hazard / (end_s - begin_s)
            chance = 1 - survival
            if chance >= min_chance:
                is_early = first_rate < 0.5 * chance / occupied_s
                return None if is_early else Outlook(end_s, chance, occupied_s)
        return None

    def _count(self, number: int, returned: float) -> None:
        if not 0 <= number < NUM_BINS:
            return
        self._at_risk[number] += 1.0
        self._returned[number] += returned
        if self._at_risk[number] > MAX_AT_RISK:
            self._at_risk[number] /= 2
            self._returned[number] /= 2
        if self._parent is not None:
            self._parent._count(number, returned)


class KeptPromises:
    """Histogram of the ratio of gap to announcement ("back in 30 s"), learned per appliance.

    Starts with most announcements right within a third; quantiles follow what happened.
    """

    STEP = 2**0.25
    NUM_STEPS = 16  # to either side of a ratio of 1: a factor of 16

    def __init__(self) -> None:
        middle = self.NUM_STEPS
        self._counts = [0.05] * (2 * middle + 1)
        for distance, weight in ((0, 6.0), (1, 2.0), (2, 1.0)):
            self._counts[middle + distance] = self._counts[middle - distance] = weight

    def counts(self) -> list[float]:
        """Return the weight of each ratio."""
        return list(self._counts)

    def take(self, counts: Sequence[float]) -> None:
        """Replace the weight of each ratio."""
        self._counts = list(counts)

    def kept(self, announced_s: float, really_s: float) -> None:
        """Count a return after `really_s` that was announced for `announced_s`, both in seconds."""
        if announced_s <= 0 or really_s <= 0:
            return
        steps = round(math.log(really_s / announced_s, self.STEP))
        self._counts = [count * 0.995 for count in self._counts]
        self._counts[min(max(steps, -self.NUM_STEPS), self.NUM_STEPS) + self.NUM_STEPS] += 1.0

    def ratio_at(self, share: float) -> float:
        """Return the ratio below which this share of returns comes."""
        wanted = share * sum(self._counts)
        for number, count in enumerate(self._counts):
            wanted -= count
            if wanted <= 0:
                return float(self.STEP ** (number - self.NUM_STEPS))
        return float(self.STEP**self.NUM_STEPS)
