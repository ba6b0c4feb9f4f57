"""Overload of the gRPC port: what callers get when they ask for more than the daemon can answer.

    python -m bench.overload [--seconds 8] [--json FILE] [--impatient] [LOAD ...]

A real daemon; callers in processes of their own (overload_callers.py), each with one call in progress all
the time. A refused caller waits as long as the refusal says, at least 10 ms; with --impatient not at all.

    1x       20 callers, lookups of 16 blocks
    10x      200 callers
    wide     3,000 callers, lookups of 4,096 blocks, deadline 5 s
    calm     8 callers of one principal
    flood    the same 8, beside 200 callers of another principal

Four callers of each principal (of `calm` all 8) are alone in a process and give the times; the others run at
a lower priority (nice 10), because a process that runs a hundred callers mostly measures itself.

Columns: accepted calls a second, their p50 and p99; refusals a second with a retry hint, p50 and p99 of the
time to a refusal; calls that ended in CANCELLED without a reason, in DEADLINE_EXCEEDED, in any other way;
anonymous memory of the daemon in the end and at most; time from the end of the load until a call is accepted.
Compare ratios of one run: callers and daemon share the machine's cores.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvtier.v1 import kvcache_pb2 as pb
from kvtier.v1 import kvcache_pb2_grpc, types_pb2
from tests.daemon import Daemon

from .machine import ROOT, describe
from .table import render

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
    "1x": [Callers("calm", 4, 4, niceness=0), Callers("calm", 16, 16)],
    "10x": [Callers("calm", 4, 4, niceness=0), *[Callers("calm", 98, 20)] * 2],
    "wide": [Callers("calm", 4, 4, 4096, 5.0, 0), *[Callers("calm", 1000, 20, 4096, 5.0)] * 3],
    "calm": [Callers("calm", 8, 8, niceness=0)],
    "flood": [
        Callers("calm", 8, 8, niceness=0),
        Callers("flood", 4, 4, niceness=0),
        *[Callers("flood", 98, 20)] * 2,
    ],
}


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
    parser.add_argument("--impatient", action="store_true", help="callers overlook retry hints")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write machine and rows to FILE")
    args = parser.parse_args()
    if unknown := set(args.loads) - set(LOADS):
        parser.error(f"unknown load {', '.join(sorted(unknown))}; known: {', '.join(LOADS)}")
    machine = describe({}) | {"command": f"python -m bench.overload {' '.join(sys.argv[1:])}"}
    print("\n".join(f"{label:9}{value}" for label, value in machine.items()), flush=True)
    found = []
    with tempfile.TemporaryDirectory() as name:
        scene = Scene(Path(name))
        try:
            for load in args.loads or LOADS:
                found += scene.run(load, args.seconds, is_patient=not args.impatient)
        finally:
            scene.close()
    print(report(found))
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine, "rows": [asdict(row) for row in found]}, indent=1)
        )


class Scene:
    """A daemon with one namespace, and a token for each principal."""

    def __init__(self, folder: Path) -> None:
        tokens = "".join(
            f"{name} {hashlib.sha256(token_of(name).encode()).hexdigest()}\n" for name in PRINCIPALS
        )
        self._folder = folder
        (folder / "tokens").write_text(tokens)
        settings = ["--set", f"access.tokens={folder / 'tokens'}", "--set", "observe.http=off"]
        self.daemon = Daemon(folder, arguments=tuple(settings))
        self.daemon.start()
        self._channel = grpc.insecure_channel(self.daemon.target)
        self._stub = kvcache_pb2_grpc.KVCacheServiceStub(self._channel)
        identity = types_pb2.NamespaceIdentity(model_digest=b"o" * 32, geometry=BLOCK_GEOMETRY)
        request = pb.RegisterNamespaceRequest(identity=identity)
        self._namespace_id = self._stub.RegisterNamespace(
            request, timeout=60, wait_for_ready=True
        ).namespace_id

    def run(self, load: str, seconds: float, *, is_patient: bool) -> list[Outcome]:
        """Run one load; return an outcome for each principal."""
        processes = [
            self._start(number, callers, seconds, is_patient) for number, callers in enumerate(LOADS[load])
        ]
        rss_mib = []
        while any(process.poll() is None for process in processes):
            rss_mib.append(rss_anon_mib(self.daemon.pid))
            time.sleep(SAMPLE_S)
        recovery_ms = self._recovery_ms()
        answers: dict[str, list[dict[str, Any]]] = {}
        for number, (callers, process) in enumerate(zip(LOADS[load], processes, strict=True)):
            assert process.returncode == 0, "callers failed; what they said stands above"
            found = json.loads(self._answer_file(number).read_text()) | {"niceness": callers.niceness}
            answers.setdefault(callers.principal, []).append(found)
        outcomes = [outcome(load, name, some) for name, some in answers.items()]
        for row in outcomes:
            row.rss_mib, row.most_rss_mib, row.recovery_ms = rss_mib[-1], max(rss_mib), recovery_ms
        return outcomes

    def close(self) -> None:
        """Stop the daemon."""
        self._channel.close()
        self.daemon.close()

    def _answer_file(self, number: int) -> Path:
        return self._folder / f"callers-{number}.json"

    def _start(
        self, number: int, callers: Callers, seconds: float, is_patient: bool
    ) -> "subprocess.Popen[bytes]":
        task = asdict(callers) | {
            "target": self.daemon.target,
            "token": token_of(callers.principal),
            "namespace_id": self._namespace_id,
            "seconds": seconds,
            "is_patient": is_patient,
        }
        command = [sys.executable, "-m", "bench.overload_callers", json.dumps(task)]
        with self._answer_file(number).open("wb") as answers:  # too much for a pipe
            return subprocess.Popen(command, cwd=ROOT, stdout=answers)

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
    seconds = max(answer["seconds"] for answer in answers)
    accepted, refused = (
        [one for answer in answers if not answer["niceness"] for one in answer[name]]
        for name in ("accepted_ms", "refused_ms")
    )
    num_accepted, num_refused = (
        sum(len(answer[name]) for answer in answers) for name in ("accepted_ms", "refused_ms")
    )
    return Outcome(
        load,
        principal,
        num_accepted / seconds,
        *percentiles(accepted),
        num_refused / seconds,
        *percentiles(refused),
        *(sum(answer[name] for answer in answers) for name in ("num_cancelled", "num_late", "num_other")),
    )


def percentiles(durations: list[float]) -> tuple[float, float]:
    """Return p50 and p99; nan of nothing."""
    if not durations:
        return float("nan"), float("nan")
    return float(np.percentile(durations, 50)), float(np.percentile(durations, 99))


def report(found: list[Outcome]) -> str:
    """Return the table."""
    header = "load,principal,accepted/s,p50 ms,p99 ms,refused/s,p50 ms,p99 ms,CANCELLED,late,other"
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
    return [getattr(row, name) for name in names]


if __name__ == "__main__":
    main()
