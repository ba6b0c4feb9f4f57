"""Overload of the gRPC port: what callers get when they ask for more than the daemon can answer.

    python -m bench.overload [--seconds 8] [--json FILE] [--pin] [LOAD ...]

A real daemon; callers in processes of their own, each with one call in progress all the time. A refused
caller waits as long as the refusal says, at least 10 ms.

    1x       20 callers, lookups of 16 blocks
    10x      200 callers
    wide     3,000 callers, lookups of 4,096 blocks, deadline 5 s
    calm     8 callers of one principal
    flood    the same 8, beside 200 callers of another principal

Callers of `wide` are clients of gRPC (overload_callers.py), the others plain sockets, which cost a tenth
(overload_raw.py). Of `wide` the first process gives the times, and the others run at a lower priority (nice
10): a process of a thousand gRPC clients mostly measures itself.

After 1x and 10x the same callers call a bare gRPC server (overload_floor.py), which refuses as large a share
of the calls with the same time to retry, and does nothing else: `floor-10x` is what gRPC and the machine
take of 10x. With --pin servers run on the first core and callers on the others.

Columns: accepted calls a second, their p50 and p99; refusals a second with a retry hint, p50 and p99 of the
time to a refusal; p99 of the calls that began in the first second, which the other times leave out: all
callers begin at once, and a burst of 0.2 s is not refused; calls that ended in CANCELLED without a reason, in
DEADLINE_EXCEEDED, in any other way; anonymous memory of the daemon in the end and at most; time from the end
of the load until a call is accepted. Compare ratios of one run: callers and daemon share the machine's cores.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import kvcache_pb2_grpc, types_pb2
from tests.daemon import Daemon

from .machine import ROOT, print_machine, write_report
from .table import percentile, render

BLOCK_GEOMETRY = types_pb2.Geometry(
    num_layers=1,
    num_kv_heads=1,
    head_dim=1024,
    block_tokens=16,
    dtype="int8",
    num_planes=1,
    layers_per_group=1,
)
PRINCIPALS = ("calm", "flood")
SAMPLE_S = 0.1
KINDS = ("accepted", "refused")
ONSET_S = 1.0  # calls that began earlier have a column of their own


@dataclass(frozen=True)
class Callers:
    """One process of callers."""

    principal: str
    num_callers: int
    num_channels: int
    num_hashes: int = 16
    deadline_s: float = 30.0
    niceness: int = 10


LOADS = {
    "1x": [Callers("calm", 20, 20, niceness=0)],
    "10x": [Callers("calm", 200, 44, niceness=0)],
    "wide": [Callers("calm", 4, 4, 4096, 5.0, 0), *[Callers("calm", 1000, 20, 4096, 5.0)] * 3],
    "calm": [Callers("calm", 8, 8, niceness=0)],
    "flood": [Callers("calm", 8, 8, niceness=0), Callers("flood", 200, 44, niceness=0)],
}
WITH_FLOOR = ("1x", "10x")
MAX_RAW_HASHES = 256  # a message of one frame


@dataclass
class Outcome:
    """What the callers of one principal got. Durations in milliseconds."""

    load: str
    principal: str
    accepted_per_s: float
    p50_ms: float
    p99_ms: float
    refused_per_s: float
    refused_p50_ms: float
    refused_p99_ms: float
    first_p99_ms: float
    num_cancelled: int
    num_late: int
    num_other: int
    rss_mib: float = 0.0
    most_rss_mib: float = 0.0
    recovery_ms: float = 0.0


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"of {', '.join(LOADS)}; default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--pin", action="store_true", help="servers on the first core, callers on the others")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows to FILE")
    args = parser.parse_args()
    if unknown := set(args.loads) - set(LOADS):
        parser.error(f"unknown load {', '.join(sorted(unknown))}; known: {', '.join(LOADS)}")
    machine = print_machine()
    found = []
    with tempfile.TemporaryDirectory() as name:
        scene = Scene(Path(name), is_pinned=args.pin)
        try:
            for load in args.loads or LOADS:
                found += scene.run(load, args.seconds)
        finally:
            scene.close()
    print(report(found))
    write_report(args.json, machine=machine, rows=[asdict(row) for row in found])


class Scene:
    """A daemon with one namespace, and a token for each principal."""

    def __init__(self, folder: Path, *, is_pinned: bool) -> None:
        tokens = "".join(
            f"{name} {hashlib.sha256(token_of(name).encode()).hexdigest()}\n" for name in PRINCIPALS
        )
        self._folder = folder
        first, *others = sorted(os.sched_getaffinity(0)) if is_pinned else (None,)
        self._server_core, self._caller_cores = first, set(others)
        (folder / "tokens").write_text(tokens)
        settings = {"access.tokens": f"{folder / 'tokens'}", "observe.http": "off"}
        self.daemon = Daemon(folder, settings=settings)
        self.daemon.start()
        self._pin_server(self.daemon.pid)
        self._channel = grpc.insecure_channel(self.daemon.target)
        self._stub = kvcache_pb2_grpc.KVCacheServiceStub(self._channel)
        identity = types_pb2.NamespaceIdentity(model_digest=b"o" * 32, geometry=BLOCK_GEOMETRY)
        request = pb.RegisterNamespaceRequest(identity=identity)
        self._namespace_id = self._stub.RegisterNamespace(
            request, timeout=60, wait_for_ready=True
        ).namespace_id

    def run(self, load: str, seconds: float) -> list[Outcome]:
        """Run one load; return an outcome for each principal, and for a bare server."""
        processes = self._start_all(load, seconds, self.daemon.target)
        rss_mib = []
        while any(process.poll() is None for process in processes):
            rss_mib.append(rss_anon_mib(self.daemon.pid))
            time.sleep(SAMPLE_S)
        recovery_ms = self._recovery_ms()
        outcomes, share, told_ms = self._read(load, processes)
        for row in outcomes:
            row.rss_mib, row.most_rss_mib, row.recovery_ms = rss_mib[-1], max(rss_mib), recovery_ms
        return outcomes + (self._run_floor(load, seconds, share, told_ms) if load in WITH_FLOOR else [])

    def close(self) -> None:
        """Stop the daemon."""
        self._channel.close()
        self.daemon.close()

    def _run_floor(self, load: str, seconds: float, refused_share: float, told_ms: float) -> list[Outcome]:
        """Run a load against a bare gRPC server that refuses the same share of it."""
        path = self._folder / "floor.sock"
        task = {"path": str(path), "refused_share": refused_share, "told_ms": told_ms}
        command = [sys.executable, "-m", "bench.overload_floor", json.dumps(task)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()  # it serves
            self._pin_server(server.pid)
            processes = self._start_all(load, seconds, f"unix://{path}")
            for process in processes:
                process.wait()
            server.kill()
        outcomes, _, _ = self._read(f"floor-{load}", processes)
        return outcomes

    def _pin_server(self, pid: int) -> None:
        if self._server_core is not None:
            for thread in os.listdir(f"/proc/{pid}/task"):
                os.sched_setaffinity(int(thread), {self._server_core})

    def _answer_file(self, number: int) -> Path:
        return self._folder / f"callers-{number}.json"

    def _start_all(self, load: str, seconds: float, target: str) -> "list[subprocess.Popen[bytes]]":
        """Start the callers of a load."""
        found = []
        for number, callers in enumerate(LOADS[load]):
            task = asdict(callers) | {
                "target": target,
                "token": token_of(callers.principal),
                "namespace_id": self._namespace_id,
                "seconds": seconds,
            }
            is_raw = callers.num_hashes <= MAX_RAW_HASHES
            command = [
                sys.executable,
                "-m",
                f"bench.overload_{'raw' if is_raw else 'callers'}",
                json.dumps(task),
            ]
            with self._answer_file(number).open("wb") as answers:  # too much for a pipe
                found.append(subprocess.Popen(command, cwd=ROOT, stdout=answers))
            if self._caller_cores:
                os.sched_setaffinity(found[-1].pid, self._caller_cores)
        return found

    def _read(
        self, load: str, processes: "list[subprocess.Popen[bytes]]"
    ) -> tuple[list[Outcome], float, float]:
        """Return an outcome for each principal, the share of calls refused, the mean time to retry."""
        answers: dict[str, list[dict[str, Any]]] = {}
        for number, (callers, process) in enumerate(
            zip(LOADS[load.removeprefix("floor-")], processes, strict=True)
        ):
            assert process.returncode == 0, "callers failed; what they said stands above"
            found = json.loads(self._answer_file(number).read_text()) | {"niceness": callers.niceness}
            answers.setdefault(callers.principal, []).append(found)
        every = [answer for some in answers.values() for answer in some]
        num_accepted, num_refused = (sum(len(one[name]) for one in every) for name in ("accepted", "refused"))
        share = num_refused / max(1, num_accepted + num_refused)
        told_ms = 1000 * sum(one["told_s"] for one in every) / max(1, num_refused)
        return [outcome(load, name, some) for name, some in answers.items()], share, told_ms

    def _recovery_ms(self) -> float:
        """Return how long it takes from now until a call is accepted."""
        began_at = time.monotonic()
        request = pb.LookupRequest(namespace_id=self._namespace_id, prefix_hashes=b"h" * 32)
        while True:
            try:
                self._stub.Lookup(request, timeout=60)
                return (time.monotonic() - began_at) * 1e3
            except grpc.RpcError:
                time.sleep(0.005)


def token_of(principal: str) -> str:
    """Return the bearer token of a principal."""
    return f"kvt_{principal}"


def rss_anon_mib(pid: int) -> float:
    """Return the anonymous memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def outcome(load: str, principal: str, answers: list[dict[str, Any]]) -> Outcome:
    """Return what the callers of one principal got, over all their processes."""
    seconds = max(answer["seconds"] for answer in answers) - ONSET_S
    measured = [answer for answer in answers if not answer["niceness"]]
    first = [ms for one in measured for name in KINDS for began_s, ms in one[name] if began_s < ONSET_S]
    times = {
        name: [ms for one in measured for began_s, ms in one[name] if began_s >= ONSET_S] for name in KINDS
    }
    numbers = {name: sum(began_s >= ONSET_S for one in answers for began_s, _ in one[name]) for name in KINDS}
    return Outcome(
        load,
        principal,
        numbers["accepted"] / seconds,
        *percentiles(times["accepted"]),
        numbers["refused"] / seconds,
        *percentiles(times["refused"]),
        percentiles(first)[1],
        *(sum(answer[name] for answer in answers) for name in ("num_cancelled", "num_late", "num_other")),
    )


def percentiles(durations: list[float]) -> tuple[float, float]:
    """Return p50 and p99; nan of nothing."""
    if not durations:
        return float("nan"), float("nan")
    return percentile(durations, 0.5), percentile(durations, 0.99)


def report(found: list[Outcome]) -> str:
    """Return the table."""
    header = "load,principal,accepted/s,p50 ms,p99 ms,refused/s,p50 ms,p99 ms,1st s p99,CANCELLED,late,other"
    header += ",RssAnon MiB,most,recovery ms"
    rows = [
        [
            row.load,
            row.principal,
            *(f"{x:.0f}" if i in (0, 3) else f"{x:.1f}" for i, x in enumerate(_figures(row))),
            str(row.num_cancelled),
            str(row.num_late),
            str(row.num_other),
            f"{row.rss_mib:.0f}",
            f"{row.most_rss_mib:.0f}",
            f"{row.recovery_ms:.0f}",
        ]
        for row in found
    ]
    return render(header.split(","), rows)


def _figures(row: Outcome) -> list[float]:
    names = ("accepted_per_s", "p50_ms", "p99_ms", "refused_per_s", "refused_p50_ms", "refused_p99_ms")
    return [getattr(row, name) for name in (*names, "first_p99_ms")]


if __name__ == "__main__":
    main()
