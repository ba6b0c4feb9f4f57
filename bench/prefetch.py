"""`python -m bench.prefetch TRACE [--requests N] [--dram 10%] ...`: what prefetching is worth on a trace.

The production planner on virtual tiers (appliance/replay): dram of a share of the trace's distinct blocks
over an NVMe that holds everything, Llama-3-8B's 128 KiB a token, copies that queue on edges of stated speed.
Every request waits --queue seconds for its turn before its prefill begins. Compared:

    arrival     promotion begins when the request arrives (SessionUpdated QUEUED; a request of a session that
                nobody has heard of names its prompt, PrefetchRequested), for all below too
    announced   sessions say when they will be back after a tool call (gaps up to --tool seconds), and err by
                a lognormal factor of --error
    turns       the same hints, and what the prefetcher learns of those who say nothing
    turns, no hints

"there" is the share of tokens on NVMe only (but for prefetching) that were in dram when prefill began.
"""

import argparse
import math
import multiprocessing
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np

from bench.machine import describe
from kvtier.appliance.core import events as ev
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.replay.readers import read_trace
from kvtier.appliance.replay.setups import Setup, Shape, capacity_of, choice_of
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

    def policy(self, eviction: str) -> str:
        """Return the policies in the words of the command line."""
        eviction = self.eviction or eviction
        return f"{eviction}@{self.prefetch}" if self.prefetch else eviction


CASES = [
    Case("lru, nothing ahead", has_arrivals=False, eviction="lru"),
    Case("nothing ahead", has_arrivals=False),
    Case("arrival"),
    Case("announced", "announced", has_hints=True),
    Case("turns", "turns", has_hints=True),
    Case("turns, no hints", "turns"),
]


class QueuedShell(TimedShell):
    """Requests wait for their turn, and sessions may say when they are back."""

    def __init__(self, trace: Trace, setup: Setup, case: Case, arguments: argparse.Namespace) -> None:
        self.case, self.arguments = case, arguments
        self.num_there = self.num_cold = 0  # tokens, when prefill began
        self._next_of = _next_turns(trace)
        super().__init__(trace, setup)

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
        for name in self.chain_of(request)[: int(self.trace.num_asked[request])]:
            row = rows.get(name, -1)
            if row < 0 or (tier := catalog.tier_of(row)) is None:
                break
            self.num_cold += tokens * (tier is Tier.NVME)
            self.num_there += tokens * (tier is not Tier.NVME and row in catalog.awaited)
        saved, self._arrive_from = self._arrive_from, lambda request: None  # type: ignore[method-assign]
        self._arrive(request)
        self._arrive_from = saved  # type: ignore[method-assign]

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


def first_of(trace: Trace, num_requests: int) -> Trace:
    """Return the beginning of a trace."""
    if not 0 < num_requests < trace.num_requests:
        return trace
    cut = int(trace.first[num_requests])
    columns = ("at", "parent", "num_asked", "num_filled", "num_tokens", "namespace", "sessions")
    return replace(
        trace,
        first=trace.first[: num_requests + 1],
        blocks=trace.blocks[:cut],
        num_blocks=int(trace.blocks[:cut].max()) + 1,
        hints={request: hint for request, hint in trace.hints.items() if request < num_requests},
        **{name: getattr(trace, name)[:num_requests] for name in columns},
    )


def runs_of(trace: Trace) -> list[str]:
    """Name the agent run of every request: of the runs of its session the one whose last chain it continues
    (at least half of it). Subagents share their session's name in traces, and are runs of their own."""
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
    trace = first_of(read_trace(arguments.trace), arguments.requests)
    trace = replace(trace, sessions=runs_of(trace))
    shape = Shape(layers_per_group=32 // arguments.groups)
    options = PlannerOptions(max_story_lines=1, max_pinned_fraction=1.0)
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
    used, late, wasted = (counters.get(f"prefetch_{n}_bytes", 0) for n in ("used", "late", "wasted"))
    return case.name, {
        "there": shell.num_there / max(1, shell.num_there + shell.num_cold),
        "p50": float(np.percentile(ttft_s, 50)),
        "p95": float(np.percentile(ttft_s, 95)),
        "mean": float(ttft_s.mean()),
        "begun": float(counters.get("prefetch_begun", 0)),
        "used": used / max(1, used + late + wasted),
        "wasted": wasted / max(1, used + late + wasted),
        "cpu_s": outcome.cpu_s,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefetch", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--dram", default="10%", help="of the distinct blocks, or bytes")
    parser.add_argument("--queue", type=float, default=0.1, help="seconds between arrival and prefill")
    parser.add_argument("--tool", type=float, default=60.0, help="longest gap that is a tool call, seconds")
    parser.add_argument("--error", type=float, default=1.3, help="typical factor by which hints are off")
    parser.add_argument("--eviction", default="urgency+all", help="who leaves dram, but in the first row")
    parser.add_argument("--groups", type=int, default=1, help="layer groups a block moves in")
    parser.add_argument("--only", default="", help="cases by their first word, comma-separated")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",") if arguments.only else None
    cases = [case for case in CASES if wanted is None or case.name.split()[0].strip(",") in wanted]
    command = shlex.join(["python", "-m", "bench.prefetch", *sys.argv[1:]])
    print("\n".join(f"{label:9s}{value}" for label, value in {**describe({}), "command": command}.items()))
    print(
        f"{'':20} {'there':>6} {'p50':>8} {'p95':>8} {'mean':>8} {'begun':>7} {'used':>6} {'wasted':>6} cpu"
    )
    with multiprocessing.Pool(arguments.jobs) as pool:
        for name, row in pool.imap(partial(run, arguments=arguments), cases):
            print(
                f"{name:20} {row['there']:6.1%} {row['p50']:7.3f}s {row['p95']:7.3f}s {row['mean']:7.3f}s "
                f"{row['begun']:7.0f} {row['used']:6.1%} {row['wasted']:6.1%} {row['cpu_s']:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
