"""The timed shell: several tiers, copies that queue, prefill that takes time. What a runtime would have felt.

    arrive -> one-sided: what is in memory -> acquire: the rest comes up -> read -> prefill what is missing
           -> first token -> put what was computed -> decode -> the session waits

The planner gets the events a daemon gets, in the order a client sends them: Touched for what was read from
memory without asking, AcquireRequested from the first block on that was not, ReleaseRequested when it is
read, and the put after the prefill. Prefill seconds are the planner's own price for them
(policies/costs.py). There is as much compute as there are requests: time to first token here is what the
cache makes of it, without a queue for the GPU.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np

from ...tiers.block import Urgency
from ..core import events as ev
from ..core import instructions as ins
from ..core.results import AcquireResult, Refusal, Result
from ..core.worth import day_bill
from .future import TraceFuture
from .outcomes import Outcome, percentiles
from .setups import Setup
from .shell import CLIENT, PROGRESS_STEP, PolicyFailedListener, Progress, Shell, cpu_seconds
from .traces import NO_BLOCK, Trace
from .virtual import EdgeSpeed, VirtualClock, VirtualMover, default_speeds
from .virtual_store import LIST_PRICES, VirtualStore

#: A Tick that continues work comes this much later: what a step of the daemon takes.
BUSY_TICK_S = 1e-3
FREE_SEGMENT_S = 1e-3
DECODE_S_PER_TOKEN = 0.02  # 50 tokens a second, as people are served
SETTLE_S = 60.0  # after the last request, for what is under way
INFINITY = float("inf")


class TimedShell(Shell):
    """Runs one trace through several tiers on a virtual clock."""

    def __init__(
        self,
        trace: Trace,
        setup: Setup,
        progress: Progress | None = None,
        speeds: Mapping[str, EdgeSpeed] | None = None,
        on_policy_failed: PolicyFailedListener | None = None,
        clock: VirtualClock | None = None,
        future: TraceFuture | None = None,
    ) -> None:
        """`clock`, `future`: shared with other shells; own ones by default."""
        self.clock = clock or VirtualClock()
        self.speeds = default_speeds(setup.ladder) | dict(speeds or {})
        self._waiting: dict[int, _Acquire] = {}  # by call
        self._puts: set[int] = set()  # calls
        super().__init__(trace, setup, progress, on_policy_failed, future)
        self.mover = VirtualMover(self.clock, self.speeds, self._step)
        self.execute |= {
            ins.Copy: self.mover.start,
            ins.CancelCopy: self.mover.cancel,
            ins.HastenCopy: self.mover.hasten,
            ins.FreeSegment: self._free_segment,
        }
        self._tick_at = INFINITY
        self.num_hits = np.zeros(trace.num_requests, np.int32)
        self._tiers: dict[int, bytes] = {}  # of the hits, for requests that hit below dram or above it
        self._ttft_s = np.full(trace.num_requests, np.nan)
        self._prefill_s = self._saved_s = 0.0
        for edge, speed in self.speeds.items():
            self._announce(edge, speed)
        self._store = VirtualStore(self.clock, setup.store, self._step) if setup.store is not None else None
        self._fetched_s = 0.0  # of prefill, of what was fetched
        if self._store is not None:
            self.execute |= {
                ins.SearchBundles: self._store.search,
                ins.FetchBundle: self._fetch,
                ins.ExportBundle: self._store.export,
            }
            self.state_prefill()
            self.step(ev.SourceChanged(True), 0.0)

    def state_prefill(self) -> None:
        """Let prefill speeds be known, as of an engine that measures them."""
        costs = self.planner.costs
        for namespace_id in self.namespace_ids:
            costs.state_speed(namespace_id, costs.prefill_speed(namespace_id)[0])

    def computed_at(self, begin_at: float, prefill_s: float) -> float:
        """Return when a prefill ends that can begin at `begin_at`: there is no queue."""
        return begin_at + prefill_s

    def run(self) -> Outcome:
        """Replay the whole trace. Returns the outcome, audited."""
        cpu_s = cpu_seconds(self._serve_all)
        self.progress(self.trace.num_requests)
        return self._outcome(cpu_s)

    def _serve_all(self) -> None:
        self._arrive_from(0)
        end_at = self.trace.duration_s + SETTLE_S
        while (when := self.clock.next_at()) is not None and (when <= end_at or self._waiting):
            self.clock.run_next()

    # ------------------------------------------------------------------------------------ requests

    def _arrive_from(self, request: int) -> None:
        """Schedule the arrival of a request, which schedules the next: the agenda holds one arrival at a
        time."""
        if request < self.trace.num_requests:
            self.clock.at(float(self.trace.at[request]), lambda: self._arrive(request))

    def _arrive(self, request: int) -> None:
        if request % PROGRESS_STEP == 0:
            self.progress(request)
        self._arrive_from(request + 1)
        self.serve(request)

    def serve(self, request: int) -> None:
        """Begin a request that has arrived."""
        trace = self.trace
        num_asked = int(trace.num_asked[request])
        if not num_asked:
            if trace.num_filled[request]:
                self._put(request, 0)
            return self._over(request)
        chain = self.chain_of(request)[:num_asked]
        namespace_id = self.namespace_ids[trace.namespace[request]]
        session = trace.sessions[request]
        found = self.planner.lookup(namespace_id, chain)
        assert not isinstance(found, Refusal)
        log_tier = self.setup.ladder.log_tier
        num_one_sided = next((n for n, tier in enumerate(found.tiers) if tier == log_tier), found.num_blocks)
        if num_one_sided:
            self._step(ev.Touched(CLIENT, namespace_id, chain[:num_one_sided], session))
        if num_one_sided == num_asked:
            return self._read(request, found.tiers, 0)
        acquire = ev.AcquireRequested(
            self.call(),
            CLIENT,
            "",
            namespace_id,
            chain,
            session,
            Urgency.PREFILL if session else None,
            first_block=num_one_sided,
        )
        self._waiting[acquire.call] = _Acquire(request, found.tiers[:num_one_sided])
        return self._step(acquire)

    def _answered(self, call: int, result: Result) -> None:
        """Take in an answer of an acquire; the last one counts."""
        waiting = self._waiting[call]
        if isinstance(result, AcquireResult):
            waiting.tiers = result.tiers or waiting.tiers
            if not result.last:
                return
            num_hits, lease_id = result.num_blocks, result.lease_id
        else:  # refused: what was read one-sidedly counts all the same
            num_hits, lease_id = 0, 0
        del self._waiting[call]
        tiers = waiting.one_sided + waiting.tiers[len(waiting.one_sided) : num_hits]
        self._read(waiting.request, tiers, lease_id)

    def _read(self, request: int, tiers: bytes, lease_id: int) -> None:
        """Read what was loaded, then compute the rest of the prompt."""
        trace = self.trace
        num_hits, num_missing = len(tiers), int(trace.num_asked[request]) - len(tiers)
        self.num_hits[request] = num_hits
        ladder = self.setup.ladder
        if tiers.count(ladder.put_tier) != num_hits:
            self._tiers[request] = tiers
        namespace = int(trace.namespace[request])
        namespace_id, block_bytes = self.namespace_ids[namespace], self.block_bytes[namespace]
        read_s = 0.0
        for tier in ladder.memory_tiers:
            count = tiers.count(tier)
            if tier == ladder.put_tier:
                count += tiers.count(ladder.log_tier)  # loaded into it
            if count:
                edge = f"{tier.label}>runtime"
                speed = self.speeds[edge]
                read_s += speed.latency_s + count * block_bytes / speed.bandwidth_bytes_per_s
                self.mover.num_bytes[edge] += count * block_bytes
        recompute_s = self.planner.costs.recompute_s
        prefill_s = recompute_s(namespace_id, num_hits, num_missing) if num_missing else 0.0
        self._prefill_s += prefill_s
        self._saved_s += recompute_s(namespace_id, 0, num_hits) if num_hits else 0.0
        read_at = self.clock.now + read_s
        first_token_at = self.computed_at(read_at, prefill_s)
        self._ttft_s[request] = first_token_at - float(trace.at[request])
        if lease_id:
            self.clock.at(read_at, lambda: self._step(ev.ReleaseRequested(None, CLIENT, [lease_id])))
        if num_hits < int(trace.num_filled[request]):
            self.clock.at(first_token_at, lambda: self._put(request, num_hits))
        hint = trace.hints.get(request)
        if hint is not None:
            over_at = first_token_at + hint.num_decoded_tokens * DECODE_S_PER_TOKEN
            self.clock.at(over_at, lambda: self._over(request))

    def _over(self, request: int) -> None:
        """End a request: its last token was decoded, or the session changed in between."""
        said = self.session_over(request, self.clock.now)
        if said is not None:
            self._step(said)

    def _put(self, request: int, num_hits: int) -> None:
        """Put what was computed."""
        chain = self.chain_of(request)[: int(self.trace.num_filled[request])]
        if num_hits:
            parent = chain[num_hits - 1]
        else:
            number = int(self.trace.parent[request])
            parent = b"" if number == NO_BLOCK else self.names[number]
        put = self.put_event(request, parent, chain[num_hits:], INFINITY)
        self._puts.add(put.call)
        self._step(put)

    # ------------------------------------------------------------------------------------ planner

    def _step(self, event: ev.Event) -> None:
        self.step(event, self.clock.now)
        self._arm()

    def _reply(self, reply: ins.Reply) -> None:
        if reply.call in self._waiting:
            # Not now: the planner is in the middle of a step.
            self.clock.at(self.clock.now, lambda: self._answered(reply.call, reply.result))
        elif reply.call in self._puts:
            self._puts.discard(reply.call)
            self.count_refused(reply.result)
        else:
            super()._reply(reply)

    def _fetch(self, fetch: ins.FetchBundle) -> None:
        assert self._store is not None
        items = fetch.batches[0][1]
        first = fetch.bundle.position + items[0].source
        namespace_id = items[0].label.namespace_id
        self._fetched_s += self.planner.costs.recompute_s(namespace_id, first, len(items))
        self._store.fetch(fetch)

    def _store_figures(self) -> dict[str, float]:
        """Return what the store was used for; nothing without one."""
        if self._store is None:
            return {}
        usage, prices = self._store.usage, self.setup.options.prices
        bill = day_bill(prices if any(astuple(prices)) else LIST_PRICES, usage)
        return {
            "num_bundles_stored": usage["stored"],
            "num_bundles_read": usage["read"],
            "stored_bytes": usage["sent_bytes"],
            "fetched_bytes": usage["received_bytes"],
            "num_requests": usage["put"] + usage["get"] + usage["head"],
            "prefill_saved_s": self._fetched_s,
            "dollars": sum(bill.values()),
        }

    def _free_segment(self, instruction: ins.FreeSegment) -> None:
        freed = ev.SegmentFreed(instruction.segment)
        self.clock.at(self.clock.now + FREE_SEGMENT_S, lambda: self._step(freed))

    def _arm(self) -> None:
        """Schedule a Tick for the planner's next deadline."""
        deadline = self.planner.next_deadline()
        if deadline is None:
            return
        due_at = max(deadline, self.clock.now + BUSY_TICK_S)
        if due_at < self._tick_at:
            self._tick_at = due_at
            self.clock.at(due_at, lambda: self._tick(due_at))

    def _tick(self, due_at: float) -> None:
        if due_at == self._tick_at:
            self._tick_at = INFINITY
            self._step(ev.Tick())

    def _announce(self, edge: str, speed: EdgeSpeed) -> None:
        """Report an edge's speed to the planner, as the mover's meter does."""
        source, target = edge.split(">")
        tiers = {tier.label: tier for tier in self.planner.rooms}
        if source in tiers and target in tiers:
            measured = ev.EdgeMeasured(
                tiers[source], tiers[target], speed.bandwidth_bytes_per_s, speed.latency_s
            )
            self.step(measured, 0.0)

    def _outcome(self, cpu_s: float) -> Outcome:
        return self.outcome(
            self.num_hits,
            self._tiers,
            prefill_s=self._prefill_s,
            prefill_saved_s=self._saved_s,
            edge_bytes=dict(sorted(self.mover.num_bytes.items())),
            ttft_s=percentiles(self._ttft_s[~np.isnan(self._ttft_s)]),
            store=self._store_figures(),
            cpu_s=cpu_s,
        )


@dataclass(slots=True)
class _Acquire:
    """A request that waits for its blocks to be loaded."""

    request: int
    one_sided: bytes  # tiers of the blocks that were read without asking
    tiers: bytes = b""  # of all that were found
