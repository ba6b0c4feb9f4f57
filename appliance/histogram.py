"""Histogram: how long something takes, counted in buckets.

prometheus_client's own Histogram was rejected for what happens thousands of times a second: its labels, its
lock and its search cost five times what this does. Its exposition is
used.
"""

from bisect import bisect_left

#: Upper bounds in seconds, from what a local call takes to what a client still waits for.
BOUNDS_S = (
    *(1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)


class Histogram:
    """Counts durations. Not thread-safe: owned by the event loop."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # the last one: longer than every bound
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def num(self) -> int:
        """How many were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """Return (upper bound, how many took at most that), as Prometheus wants them; the last is +Inf."""
        names = [*map(repr, BOUNDS_S), "+Inf"]
        total, pairs = 0, []
        for name, count in zip(names, self.counts, strict=True):
            total += count
            pairs.append((name, total))
        return pairs

    def quantile(self, fraction: float) -> float | None:
        """Return the bound below which `fraction` of the durations lie; None when there are none."""
        num = self.num
        if num == 0:
            return None
        reached = 0
        for bound, count in zip(BOUNDS_S, self.counts, strict=False):
            reached += count
            if reached >= fraction * num:
                return bound
        return BOUNDS_S[-1]
