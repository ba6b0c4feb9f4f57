"""The untimed shell: one memory tier in which every copy takes no time. Hit ratios, fast.

For each request, at its arrival: the longest resident prefix is a hit and is touched (one event, as a
client reports what it read one-sidedly), then everything missing is put, then its session waits. Room is
made at once or not at all. This is the semantics of the tables in the literature, and of the policies'
bars.
"""

from typing import Any

import numpy as np

from ..core import events as ev
from ..core.instructions import Copy
from .outcomes import Outcome, percentiles
from .setups import Setup
from .shell import CLIENT, PROGRESS_STEP, PolicyFailedListener, Progress, Shell, cpu_seconds
from .traces import NO_BLOCK, Trace
from .virtual import LANDED

INFINITY = float("inf")
MAX_TICKS = 10_000  # of one put; more is a planner that turns in circles


class UntimedShell(Shell):
    """Runs one trace through one memory tier."""

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        progress: Progress | None = None,
        on_policy_failed: PolicyFailedListener | None = None,
    ) -> None:
        super().__init__(trace, setup, progress, on_policy_failed)
        self._copies: list[Copy] = []
        self.execute[Copy] = self._copies.append
        self._num_hits = np.zeros(trace.num_requests, np.int32)

    def run(self) -> Outcome:
        """Replay the whole trace. Returns the outcome, audited."""
        cpu_s = cpu_seconds(self._serve)
        self.progress(self.trace.num_requests)
        return self._outcome(self._num_hits, cpu_s)

    def _serve(self) -> None:
        for request in range(self.trace.num_requests):
            self._num_hits[request] = self._request(request)
            if request % PROGRESS_STEP == 0:
                self.progress(request)

    def _request(self, request: int) -> int:
        """Serve one request; return how many of its blocks were there."""
        trace = self.trace
        now = float(trace.at[request])
        chain = self.chain_of(request)
        num_asked, num_filled = int(trace.num_asked[request]), int(trace.num_filled[request])
        namespace_id = self.namespace_ids[trace.namespace[request]]
        num_hits = 0
        if num_asked:
            found: Any = self.planner.lookup(namespace_id, chain[:num_asked])
            num_hits = found.num_blocks
            if num_hits:
                touched = ev.Touched(CLIENT, namespace_id, chain[:num_hits], trace.sessions[request])
                self.step(touched, now)
            elif trace.sessions[request]:
                self._ask_in_vain(request, chain[:num_asked], now)
        if num_hits < num_filled:
            parent = chain[num_hits - 1] if num_hits else self._parent_of(request)
            self._put(request, parent, chain[num_hits:num_filled], now)
        said = self.session_over(request, now)
        if said is not None:
            self.step(said, now)
        return num_hits

    def _ask_in_vain(self, request: int, chain: list[bytes], now: float) -> None:
        """Send the lookup of a client that found nothing one-sidedly: the answer is known, but it opens the
        session."""
        call, namespace_id = self.call(), self.namespace_ids[self.trace.namespace[request]]
        session = self.trace.sessions[request]
        self.step(ev.AcquireRequested(call, CLIENT, "", namespace_id, chain, session), now)
        del self.results[call]

    def _parent_of(self, request: int) -> bytes:
        parent = int(self.trace.parent[request])
        return b"" if parent == NO_BLOCK else self.names[parent]

    def _put(self, request: int, parent: bytes, chain: list[bytes], now: float) -> None:
        put = self.put_event(request, parent, chain, INFINITY)
        self.step(put, now)
        copies, results = self._copies, self.results
        for _ in range(MAX_TICKS):
            while copies:
                copy = copies.pop()
                self.step(ev.CopyFinished(copy.copy, [LANDED] * len(copy.items)), now)
            if put.call in results:
                return self.count_refused(results.pop(put.call))
            # Nothing can be done and nothing is on its way: there is no room, which its deadline will say.
            self.step(ev.Tick(), now if self.planner.is_busy else now + self.setup.options.put_wait_s)
        raise RuntimeError(
            f"{self.setup.label}: the put of request {request} does not end; a defect, report it"
        )

    def _outcome(self, num_hits: Any, cpu_s: float) -> Outcome:
        trace = self.trace
        recompute_s = self.planner.costs.recompute_s
        missing_s = np.zeros(trace.num_requests)
        saved_s = 0.0
        for request, (hits, asked) in enumerate(
            zip(num_hits.tolist(), trace.num_asked.tolist(), strict=True)
        ):
            namespace_id = self.namespace_ids[trace.namespace[request]]
            saved_s += recompute_s(namespace_id, 0, hits) if hits else 0.0
            missing_s[request] = recompute_s(namespace_id, hits, asked - hits) if asked > hits else 0.0
        return self.outcome(
            num_hits,
            {},
            prefill_s=float(missing_s.sum()),
            prefill_saved_s=saved_s,
            edge_bytes={},
            missing_prefill_s=percentiles(missing_s[trace.num_asked > 0]),
            cpu_s=cpu_s,
        )
