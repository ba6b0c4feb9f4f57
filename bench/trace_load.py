"""`python -m bench.trace_load [TRACE]`: a trace played against a real daemon, beside its own replay.

    daemon   kvtier serve in a process of its own, one client, real bytes, compared block by block
    replay   the same requests at the times at which they were sent, through `kvtier replay`'s shell

Blocks are small (16 KiB), so that a share of a production trace's blocks fits any machine; hit ratios do
not depend on the size of a block. The two must agree within a point: replay is worth nothing if the daemon
does otherwise. Without TRACE a generator of chat sessions takes its place.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

from bench.machine import print_machine
from kvtier import Client
from kvtier.appliance.replay.outcomes import Outcome
from kvtier.appliance.replay.readers import read_trace
from kvtier.appliance.replay.setups import ModelShape, choice_of, single_tier
from kvtier.appliance.replay.traces import SessionHint, Trace, TraceBuilder, TraceNamespace
from kvtier.appliance.replay.untimed import UntimedShell
from kvtier.clients import Session, Urgency
from kvtier.clients.values.namespace import Namespace
from kvtier.v1.types import Geometry, NamespaceIdentity
from tests.daemon import Daemon

BLOCK_BYTES = 16 << 10  # the smallest slot
EXTENT_BYTES = 2 << 20
BLOCKS_PER_EXTENT = EXTENT_BYTES // BLOCK_BYTES
AGREEMENT_POINTS = 1.0
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Played:
    """What the daemon did."""

    num_hits: list[int]  # per request
    sent_at: list[float]  # seconds from the first request
    num_wrong: int  # blocks with other bytes than were put
    num_refused: int
    wall_s: float


def main() -> int:
    args = parse()
    print_machine()
    print()
    trace = read_trace(args.trace) if args.trace else generate(args.seed, args.requests)
    trace = small(trace.stretch(args.skip, min(args.skip + args.requests, trace.num_requests)))
    print(
        f"{trace.name}: {trace.num_requests:,} requests, {trace.num_accesses:,} block accesses, "
        f"{trace.num_blocks:,} distinct blocks"
    )
    print(
        f"{'policy':14}{'capacity':>16}{'daemon':>10}{'replay':>10}{'apart':>9}{'requests/s':>12}{'wrong':>7}"
    )
    failed = False
    for policy in args.policy.split(","):
        for share in (float(text.strip("% ")) / 100 for text in args.capacity.split(",")):
            num_extents = max(1, round(share * trace.num_blocks / BLOCKS_PER_EXTENT))
            num_blocks = num_extents * BLOCKS_PER_EXTENT
            played = play(trace, policy, num_extents, args.seconds)
            outcome = replayed(trace, played, policy, num_blocks)
            daemon = sum(played.num_hits) / outcome.num_blocks
            apart = abs(daemon - outcome.block_hit_ratio) * 100
            size = f"{num_blocks:,} ({num_blocks / trace.num_blocks:.1%})"
            print(
                f"{policy:14}{size:>16}{daemon:>10.2%}{outcome.block_hit_ratio:>10.2%}{apart:>8.2f}p"
                f"{trace.num_requests / played.wall_s:>12,.0f}{played.num_wrong:>7}",
                flush=True,
            )
            failed |= apart > AGREEMENT_POINTS or played.num_wrong > 0 or bool(outcome.problems)
    print(f"\n{'FAILED: more than' if failed else 'agreed within'} {AGREEMENT_POINTS:g} point")
    return int(failed)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.trace_load", description="a daemon and its replay")
    parser.add_argument("trace", nargs="?", type=Path, help="trace file; default: generated chat sessions")
    parser.add_argument("--policy", default="lru", help="comma-separated names, as for kvtier replay")
    parser.add_argument("--capacity", default="2%,10%", help="shares of the distinct blocks, comma-separated")
    parser.add_argument("--requests", type=int, default=1000, help="how many to play")
    parser.add_argument("--skip", type=int, default=0, help="requests to leave out before")
    parser.add_argument("--seconds", type=float, default=30.0, help="squeeze the stretch into this time")
    parser.add_argument("--seed", type=int, default=1, help="of the generator")
    return parser.parse_args(arguments)


def generate(seed: int, num_requests: int) -> Trace:
    """Return chat sessions: a few system prompts, turns that grow, sessions that end."""
    rng = Random(seed)
    builder = TraceBuilder(f"generated, seed {seed}")
    builder.add_namespace(TraceNamespace(512))
    prompts = [[("system", n, k) for k in range(rng.randint(1, 8))] for n in range(6)]
    agenda: list[tuple[float, int, list[tuple[str, int, int]]]] = []
    at = 0.0
    for session in range(num_requests):
        at += rng.expovariate(2.0)
        chain = list(rng.choices(prompts, weights=[1 / (n + 1) for n in range(6)])[0])
        when = at
        while True:
            chain = chain + [("turn", session, len(chain) + k) for k in range(rng.randint(1, 12))]
            agenda.append((when, session, chain))
            if rng.random() < 0.45:
                break
            when += rng.lognormvariate(4.0, 1.0)
    for when, session, chain in sorted(agenda)[:num_requests]:
        count = len(chain)
        builder.add(
            when,
            chain,
            num_tokens=count * 512,
            num_asked=count,
            num_filled=count,
            session=f"s{session}",
            hint=SessionHint(num_decoded_tokens=rng.randint(1, 800)),
        )
    return builder.build()


def small(trace: Trace) -> Trace:
    """Return the same requests for blocks of BLOCK_BYTES."""
    tokens = trace.namespaces[0].block_tokens
    return replace(trace, namespaces=[TraceNamespace(tokens, BLOCK_BYTES)])


def play(trace: Trace, policy: str, num_extents: int, seconds: float) -> Played:
    """Run a trace against a daemon of its own, spread over at least `seconds`."""
    choice = choice_of(policy)
    overrides = {
        "tiers.dram.capacity": f"{num_extents * EXTENT_BYTES}B",
        "tiers.dram.extent": f"{EXTENT_BYTES}B",
        "policy.eviction": choice.eviction,
        "policy.admission": choice.admission,
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-trace-load-"))
        daemon = stack.enter_context(Daemon(Path(folder), settings=overrides))
        client = stack.enter_context(Client(daemon.target, name="trace-load"))
        return _Player(client, trace).play(seconds)


class _Player:
    """One runtime: gets what is there, puts what is not, says how long the answer was."""

    def __init__(self, client: Client, trace: Trace) -> None:
        tokens = trace.namespaces[0].block_tokens
        geometry = Geometry(1, 1, BLOCK_BYTES // tokens, tokens, "int8", num_planes=1)
        self._client = client
        self._trace = trace
        self._namespace: Namespace = client.register(NamespaceIdentity(b"trace load".ljust(32), geometry))
        self._names = trace.names()
        longest = int(np.diff(trace.first).max())
        self._buffer: Bytes = np.zeros((longest, BLOCK_BYTES), np.uint8)

    def play(self, seconds: float) -> Played:
        """Run all requests; every block that was found is compared with what was put."""
        trace, client = self._trace, self._client
        played = Played([], [], 0, 0, 0.0)
        speedup = max(1.0, trace.duration_s / seconds) if seconds else float("inf")
        began_at = time.perf_counter()
        for request in range(trace.num_requests):
            due_s = float(trace.at[request]) / speedup
            time.sleep(max(0.0, began_at + due_s - time.perf_counter()))
            played.sent_at.append(time.perf_counter() - began_at)
            blocks = trace.blocks[trace.first[request] : trace.first[request + 1]]
            chain = [self._names[block] for block in blocks.tolist()]
            session = trace.sessions[request]
            buffer = self._buffer[: len(chain)]
            num_hits = client.get(self._namespace, chain, buffer, session=session).num_loaded
            expected = self._bytes_of(chain)
            played.num_wrong += int((buffer[:num_hits] != expected[:num_hits]).any(axis=1).sum())
            played.num_hits.append(num_hits)
            if num_hits < len(chain):
                parent = chain[num_hits - 1] if num_hits else b""
                report = client.put(
                    self._namespace, chain[num_hits:], expected[num_hits:], parent=parent, session=session
                )
                played.num_refused += report.num_refused
            if request in trace.hints:
                num_decoded = trace.hints[request].num_decoded_tokens
                Session(client, session).update(Urgency.WAITING, num_decoded_tokens=num_decoded)
        played.wall_s = time.perf_counter() - began_at
        return played

    def _bytes_of(self, chain: list[bytes]) -> Bytes:
        """Return blocks that repeat their own name."""
        names = np.frombuffer(b"".join(chain), np.uint8).reshape(len(chain), 32)
        return np.tile(names, (1, BLOCK_BYTES // 32))


def replayed(trace: Trace, played: Played, policy: str, num_blocks: int) -> Outcome:
    """Replay the requests at the times at which they were sent, on a tier of the same size."""
    as_sent = replace(trace, at=np.array(played.sent_at))
    return UntimedShell(
        as_sent, single_tier(policy, f"{num_blocks * BLOCK_BYTES}B", as_sent, ModelShape())
    ).run()


if __name__ == "__main__":
    sys.exit(main())
