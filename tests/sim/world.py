"""World: virtual time, the order of events, randomness, and the log of what happened.

The trace has one line per event, tab separated:

    number   time_s   what   detail...

`what` is an event given to the planner (`CommitRequested`), an instruction it gave (`>Copy`) or something
done to it (`!crash`). Its hash is the fingerprint of a run: the same seed must give the same one.
"""

import heapq
import zlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any


class Violation(AssertionError):
    """The system did what it must not. `check` names the invariant that saw it."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"{check}: {message}")
        self.check = check


class World:
    """One simulated world. Everything random is drawn from `rng`, everything timed goes through `after`."""

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.random = self.rng.random
        self.now = 0.0
        self.num_events = 0
        self.counts: Counter[str] = Counter()  # faults injected, reads verified, ...
        self.fingerprint = 0
        self._trace = trace
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def after(self, delay_s: float, do: Callable[..., None], *arguments: Any) -> None:
        """Do something `delay_s` from now."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, do, arguments))

    def advance(self) -> bool:
        """Do what is due next; False when nothing is."""
        if not self._heap:
            return False
        at, _, do, arguments = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        do(*arguments)
        return True

    def note(self, what: str, *detail: object) -> None:
        """Add one line to the log."""
        self.num_events += 1
        line = f"{self.num_events}\t{self.now:.6f}\t{what}\t{detail}"
        self.fingerprint = zlib.crc32(line.encode(), self.fingerprint)
        if self._trace is not None:
            self._trace.append(line)

    def spread(self, mean_s: float) -> float:
        """Draw a duration: mostly short, sometimes long."""
        return mean_s * 2 * self.random() ** 2 * 1.5

    def chance(self, probability: float) -> bool:
        """Draw yes with `probability`."""
        return probability > 0 and self.random() < probability
