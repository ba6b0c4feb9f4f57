"""What will happen, for the bounds that no real policy reaches: the trace itself, read ahead."""

from bisect import bisect_right

import numpy as np

from .traces import Trace

NEVER = float("inf")


class TraceFuture:
    """When each block is asked for: implements policies.base.Future.

    Times are those of the shells' clocks.
    """

    def __init__(self, trace: Trace) -> None:
        self.names = trace.names()
        lengths = np.diff(trace.first)
        position = np.arange(trace.num_accesses) - np.repeat(trace.first[:-1], lengths)
        is_asked = position < np.repeat(trace.num_asked, lengths)
        at = np.repeat(trace.at, lengths)[is_asked]
        blocks = trace.blocks[is_asked]
        by_block = np.argsort(blocks, kind="stable")  # accesses are in order of time already
        self._times: list[float] = at[by_block].tolist()
        ends = np.cumsum(np.bincount(blocks, minlength=trace.num_blocks))
        starts = np.concatenate(([0], ends[:-1]))
        self._spans = dict(zip(self.names, zip(starts.tolist(), ends.tolist(), strict=True), strict=True))

    def next_use(self, prefix_hash: bytes, now: float) -> float:
        """Return when a block is asked for next after `now`; inf: never again."""
        start, end = self._spans.get(prefix_hash, (0, 0))
        index = bisect_right(self._times, now, start, end)
        return self._times[index] if index < end else NEVER
