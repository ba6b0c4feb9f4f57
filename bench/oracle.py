"""The oracle: a prefetcher that has read the trace. The bound that every other one is held against.

It knows when each request will arrive and which blocks it will name, and asks for them a while ahead,
earliest first. Everything else is the planner's own: the same bytes in flight, the same share of the
bandwidth and of dram, never ahead of demand. So what it gains over `arrival` is what knowing is worth under
these bounds, and what it cannot gain is theirs. It is not the best that could be done with the future known:
it does not weigh what it displaces against what it brings, and a request is named once, when it comes into
sight.
"""

from collections.abc import Callable, Sequence

from kvtier.appliance.core.planner import Planner
from kvtier.appliance.replay.traces import Trace
from kvtier.policies.base import Expected, Prefetcher
from kvtier.tiers.block import Tier

#: How long after its arrival a request may still come for its blocks (it waits for its turn, and for others).
WINDOW_S = 30.0


class OraclePrefetch(Prefetcher):
    """Names the cold blocks of every request `horizon_s` before it arrives."""

    name = "oracle"

    def __init__(
        self,
        trace: Trace,
        planner: Planner,
        chain_of: Callable[[int], list[bytes]],
        namespace_ids: Sequence[int],
        horizon_s: float,
    ) -> None:
        self._trace, self._planner = trace, planner
        self._chain_of, self._namespace_ids = chain_of, namespace_ids
        self._horizon_s = horizon_s
        self._next = 0  # request to come into sight

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        """Return the cold blocks of the requests in sight, earliest arrival first."""
        trace, expected = self._trace, []
        while num_bytes > 0 and (seen_at := self.next_at()) is not None and seen_at <= now:
            request, self._next = self._next, self._next + 1
            arrives_at = float(trace.at[request])
            rows = self._cold_rows(request) if arrives_at > now else []
            if rows:
                expected.append(Expected(rows, arrives_at + WINDOW_S, "the trace says so", True))
                num_bytes -= len(rows) * self._planner.catalog.block_bytes(rows[0])
        return expected

    def next_at(self) -> float | None:
        """Return when the next request comes into sight."""
        if self._next >= self._trace.num_requests:
            return None
        return float(self._trace.at[self._next]) - self._horizon_s

    def _cold_rows(self, request: int) -> list[int]:
        """Return the blocks of the longest stored prefix that are in nvme only."""
        catalog, trace = self._planner.catalog, self._trace
        stored = catalog.namespaces[self._namespace_ids[int(trace.namespace[request])]].rows
        rows = []
        for name in self._chain_of(request)[: int(trace.num_asked[request])]:
            row = stored.get(name, -1)
            tier = catalog.tier_of(row) if row >= 0 else None
            if tier is None:
                break
            if tier is Tier.NVME:
                rows.append(row)
        return rows
