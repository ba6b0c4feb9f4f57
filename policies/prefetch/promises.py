"""How far off announced returns are, learned for each appliance and kept over a restart."""

import math
from collections.abc import Mapping
from typing import Any

from ..base import Surroundings

NAME = "promises"
FORMAT = 1


class KeptPromises:
    """Histogram of the ratio of gap to announcement ("back in 30 s").

    Starts with most announcements right within a third; quantiles follow what happened. Implements
    learned.Learner.
    """

    STEP = 2**0.25
    NUM_STEPS = 16  # to either side of a ratio of 1: a factor of 16

    def __init__(self) -> None:
        middle = self.NUM_STEPS
        self._counts = [0.05] * (2 * middle + 1)
        for distance, weight in ((0, 6.0), (1, 2.0), (2, 1.0)):
            self._counts[middle + distance] = self._counts[middle - distance] = weight

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

    def dump(self) -> dict[str, Any]:
        """Return everything learned, in JSON's types, to be loaded after a restart."""
        return {"format": FORMAT, "counts": self._counts}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace what was learned by a `dump`. Raises ValueError, and changes nothing, if it is damaged."""
        if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
            raise ValueError("what was learned is of another version of the prefetcher; start without it")
        counts = saved.get("counts")
        if not isinstance(counts, list) or len(counts) != len(self._counts):
            raise ValueError(f"what was learned should hold {len(self._counts)} numbers; start without it")
        if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in counts) or not any(counts):
            raise ValueError("what was learned holds impossible numbers; start without it")
        self._counts = [float(one) for one in counts]


def promises_of(surroundings: Surroundings) -> KeptPromises:
    """Return the promises that all prefetchers of one planner share."""
    promises: KeptPromises = surroundings.shared.setdefault(NAME, KeptPromises())
    return promises
