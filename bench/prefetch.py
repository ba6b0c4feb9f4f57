"""`python -m bench.prefetch TRACE [--requests N] [--dram 10%] ...`: what prefetching is worth on a trace.

The production planner on virtual tiers (appliance/replay): dram of a share of the trace's distinct blocks
over an NVMe that holds everything, Llama-3-8B's 128 KiB a token, copies that queue on edges of stated speed.
Every request waits --queue seconds for its turn before its prefill begins. Compared:

    arrival     promotion begins when the request arrives (SessionUpdated QUEUED; a request of a session that
                that is new names its prompt, PrefetchRequested), for all below too
    announced   sessions say when they will be back after a tool call (gaps up to --tool seconds), and err by
                a lognormal factor of --error
    oracle      has read the trace (oracle.py): what knowing would be worth under the same bounds

"there" is the share of tokens on NVMe only (but for prefetching) that were in dram when prefill began. "wait"
is what a request that found something on NVMe waited for it: time to first token without queue, reading from
dram, and prefill, which no cache can shorten by prefetching.
"""

import argparse
import math
import multiprocessing
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from bench.machine import print_machine
from bench.oracle import OraclePrefetch
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.results import AcquireResult, Result
from kvtier.appliance.replay.readers import read_trace
from kvtier.appliance.replay.setups import ModelShape, Setup, capacity_of, choice_of
from kvtier.appliance.replay.shell import CLIENT
from kvtier.appliance.replay.timed import TimedShell
from kvtier.appliance.replay.traces import Trace
from kvtier.tiers.block import Tier, Urgency


@dataclass(frozen=True, slots=True)
class Case:
    """One row: policies, and what the runtime tells."""

    name: str
    prefetch: str = ""
    has_arrivals: bool = True
    has_hints: bool = False
    eviction: str = ""  # empty: what --eviction says
    is_oracle: bool = False

    def policy(self, eviction: str) -> str:
        """Return the policies in the words of the command line."""
        eviction = self.eviction or eviction
        return f"{eviction}@{self.prefetch}" if self.prefetch else eviction


CASES = [
    Case("lru, nothing ahead", has_arrivals=False, eviction="lru"),
    Case("nothing ahead", has_arrivals=False),
    Case("arrival"),
    Case("announced", "announced", has_hints=True),
    Case("oracle", is_oracle=True),
]


class QueuedShell(TimedShell):
    """Requests wait for their turn, and sessions may say when they are back."""

    def __init__(self, trace: Trace, setup: Setup, case: Case, arguments: argparse.Namespace) -> None:
        self.case, self.arguments = case, arguments
        self.num_there = self.num_cold = 0  # tokens, when prefill began
        self._touched_nvme: set[int] = set()  # requests with such tokens
        self._next_of = _next_turns(trace)
        self.wait_s = np.full(trace.num_requests, np.nan)  # of those that found something on nvme
        self._group_at: dict[int, dict[int, float]] = {}  # request -> layer group -> when all of it was there
        super().__init__(trace, setup)
        if case.is_oracle:
            self.planner.core.policies.prefetcher = OraclePrefetch(
                trace, self.planner, self.chain_of, self.namespace_ids, arguments.horizon
            )

    def _arrive_from(self, request: int) -> None:
        if request < self.trace.num_requests:
            self.clock.at(float(self.trace.at[request]), lambda: self._queue(request))

    def _queue(self, request: int) -> None:
        self._arrive_from(request + 1)
        if self.case.has_arrivals:
            self._announce_arrival(request)
        self.clock.at(self.clock.now + self.arguments.queue, lambda: self._begin(request))

    def _announce_arrival(self, request: int) -> None:
        session = self.trace.sessions[request]
        if session and self.planner.sessions.get(session) is not None:
            self._step(ev.SessionUpdated(CLIENT, session, Urgency.QUEUED))
            return
        namespace_id = self.namespace_ids[int(self.trace.namespace[request])]
        chain = self.chain_of(request)[: int(self.trace.num_asked[request])]
        deadline_at = self.clock.now + self.arguments.queue
        call = self.call()
        self._step(ev.PrefetchRequested(call, CLIENT, namespace_id, chain, deadline_at=deadline_at))
        del self.results[call]

    def _begin(self, request: int) -> None:
        """Count what is there, then do what the timed shell does on arrival (without the next one)."""
        catalog = self.planner.catalog
        namespace = int(self.trace.namespace[request])
        rows = catalog.namespaces[self.namespace_ids[namespace]].rows
        tokens = self.trace.namespaces[namespace].block_tokens
        num_before = self.num_cold + self.num_there
        for name in self.chain_of(request)[: int(self.trace.num_asked[request])]:
            row = rows.get(name, -1)
            if row < 0 or (tier := catalog.tier_of(row)) is None:
                break
            self.num_cold += tokens * (tier is Tier.NVME)
            self.num_there += tokens * (tier is not Tier.NVME and row in catalog.awaited)
        if self.num_cold + self.num_there > num_before:
            self._touched_nvme.add(request)
        saved, self._arrive_from = self._arrive_from, lambda request: None  # type: ignore[method-assign]
        self._arrive(request)
        self._arrive_from = saved  # type: ignore[method-assign]

    def _answered(self, call: int, result: Result) -> None:
        if isinstance(result, AcquireResult):
            group_at = self._group_at.setdefault(self._waiting[call].request, {})
            for ready in result.ready:
                group_at[ready.group] = self.clock.now
        super()._answered(call, result)

    def _read(self, request: int, tiers: bytes, lease_id: int) -> None:
        """Let prefill begin with the layers that are there: a share of it is left when each group comes."""
        super()._read(request, tiers, lease_id)
        begun_at = float(self.trace.at[request]) + self.arguments.queue
        busy_s = float(self._ttft_s[request] + self.trace.at[request]) - self.clock.now  # reads and computes
        group_at, num_groups = self._group_at.pop(request, {}), self.arguments.groups
        here_at = [group_at.get(group, self.clock.now) for group in range(num_groups)]
        ends_at = [at + busy_s * (1 - group / num_groups) for group, at in enumerate(here_at)]
        self._ttft_s[request] = max(ends_at) - float(self.trace.at[request])
        if request in self._touched_nvme:
            self.wait_s[request] = max(ends_at) - begun_at - busy_s

    def session_over(self, request: int, now: float) -> ev.Event | None:
        session, following = self.trace.sessions[request], self._next_of.get(request)
        if not session:
            return None
        if following is None:
            return ev.SessionUpdated(CLIENT, session, Urgency.IDLE)
        gap_s = float(self.trace.at[following]) - now
        if gap_s > self.arguments.tool:
            return ev.SessionUpdated(CLIENT, session, Urgency.IDLE)
        back_at = math.inf
        if self.case.has_hints and gap_s > 0:
            error = math.exp(Random(request).gauss(0, math.log(self.arguments.error)))
            back_at = now + gap_s * error
        return ev.SessionUpdated(CLIENT, session, Urgency.WAITING, back_at=back_at)


def _next_turns(trace: Trace) -> dict[int, int]:
    """Return the next request of the same session, by request."""
    last: dict[str, int] = {}
    following = {}
    for request, session in enumerate(trace.sessions):
        if session in last:
            following[last[session]] = request
        last[session] = request
    return following


def sample_of(trace: Trace, num_requests: int, every: int) -> Trace:
    """Return the first requests (0: all) of every so-manieth session, in order of their first request."""
    numbers: dict[str, int] = {}
    requests = [
        request
        for request, session in enumerate(trace.sessions)
        if numbers.setdefault(session, len(numbers)) % every == 0
    ]
    if every == 1 and not 0 < num_requests < len(requests):
        return trace
    return trace.only(requests[: num_requests or None], f"{trace.name}, 1/{every}")


def runs_of(trace: Trace) -> list[str]:
    """Return the agent run of every request: the run of its session with the last chain that it continues (at
    least half of it). Subagents share their session's name in traces, and are runs of their own."""
    last: dict[str, list[list[int]]] = {}  # session -> last chain of each run
    names = []
    for request, session in enumerate(trace.sessions):
        chain = trace.blocks[trace.first[request] : trace.first[request + 1]].tolist()
        runs = last.setdefault(session, [])
        shared = [sum(a == b for a, b in zip(chain, former, strict=False)) for former in runs]
        best = max(range(len(runs)), key=shared.__getitem__, default=-1)
        if best < 0 or shared[best] * 2 < len(runs[best]):
            best = len(runs)
            runs.append(chain)
        runs[best] = chain
        names.append(f"{session}/{best}")
    return names


def run(case: Case, arguments: argparse.Namespace) -> tuple[str, dict[str, float]]:
    """Replay the trace once."""
    trace = sample_of(read_trace(arguments.trace), arguments.requests, arguments.every)
    trace = replace(trace, sessions=runs_of(trace))
    shape = ModelShape(layers_per_group=32 // arguments.groups)
    options = PlannerOptions(max_story_lines=1, max_pinned_fraction=1.0, write="spill")
    capacity = {
        Tier.DRAM: capacity_of(arguments.dram, trace, shape),
        Tier.NVME: 2 * capacity_of("100%", trace, shape),
    }
    choice = choice_of(case.policy(arguments.eviction))
    setup = Setup(case.name, arguments.dram, choice, capacity, options, shape, is_timed=True)
    shell = QueuedShell(trace, setup, case, arguments)
    outcome = shell.run()
    assert not outcome.problems, outcome.problems
    counters = outcome.counters
    ttft_s = shell._ttft_s[~np.isnan(shell._ttft_s)] - arguments.queue
    wait_s = shell.wait_s[~np.isnan(shell.wait_s)]
    wait_s = wait_s if len(wait_s) else np.zeros(1)  # no request found anything on nvme
    used, late, wasted = (counters.get(f"prefetch_{n}_bytes", 0) for n in ("used", "late", "wasted"))
    return case.name, {
        "there": shell.num_there / max(1, shell.num_there + shell.num_cold),
        "p50": float(np.percentile(ttft_s, 50)),
        "p95": float(np.percentile(ttft_s, 95)),
        "mean": float(ttft_s.mean()),
        "wait p50": float(np.percentile(wait_s, 50)),
        "wait p95": float(np.percentile(wait_s, 95)),
        "begun": float(counters.get("prefetch_begun", 0)),
        "used": used / max(1, used + late + wasted),
        "wasted": wasted / max(1, used + late + wasted),
        "read_TB": outcome.edge_bytes.get("nvme>dram", 0) / 1e12,
        "cpu_s": outcome.cpu_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefetch", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--every", type=int, default=1, help="only every so-manieth session")
    parser.add_argument("--dram", default="10%", help="of the distinct blocks, or bytes")
    parser.add_argument("--queue", type=float, default=0.1, help="seconds between arrival and prefill")
    parser.add_argument("--tool", type=float, default=60.0, help="longest gap that is a tool call, seconds")
    parser.add_argument("--error", type=float, default=1.3, help="typical factor by which hints are off")
    parser.add_argument(
        "--eviction", default="urgency+all", help="policies of dram in all rows but the first"
    )
    parser.add_argument("--groups", type=int, default=1, help="layer groups a block moves in")
    parser.add_argument("--horizon", type=float, default=30.0, help="how far the oracle sees, seconds")
    parser.add_argument("--only", default="", help="cases by their first word, comma-separated")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else None
    cases = [case for case in CASES if wanted is None or case.name.split()[0].strip(",") in wanted]
    print_machine()
    print(
        f"{'':20} {'there':>6} {'p50':>8} {'p95':>8} {'mean':>8} {'wait p50':>9} {'p95':>8} {'begun':>7} "
        f"{'used':>6} {'wasted':>6} {'read':>7} cpu"
    )
    with multiprocessing.Pool(arguments.jobs) as pool:
        for name, row in pool.imap(partial(run, arguments=arguments), cases):
            print(
                f"{name:20} {row['there']:6.1%} {row['p50']:7.3f}s {row['p95']:7.3f}s {row['mean']:7.3f}s "
                f"{row['wait p50']:8.3f}s {row['wait p95']:7.3f}s {row['begun']:7.0f} {row['used']:6.1%} "
                f"{row['wasted']:6.1%} {row['read_TB']:4.1f} TB {row['cpu_s']:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
