"""`python -m tests.chaos.soak --minutes 60`: mixed load for a long time, and the size of the daemon
meanwhile.

Workers open ever new sessions, put, get, lease and pin; every ten seconds a client that holds leases is
killed with SIGKILL, and the time until the daemon holds none of its leases is taken. Every sample of
memory, descriptors and threads goes to `--out`, a line of JSON each. At the end all clients leave, and no
lease and no client may be left.

The slope is that of a straight line through the samples of the second half (least squares).
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import numpy as np

from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import Daemon

from ..waiting import until
from .load import Load, Role

SETTINGS = (
    *("tiers.dram.capacity=128MiB", "tiers.dram.extent=8MiB"),
    *("tiers.nvme.capacity=512MiB", "tiers.nvme.segment=8MiB"),
)
WAIT_S = 60.0
CHURN_S = 10.0  # between two deaths of a client


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process and its daemon said of themselves, once."""

    at_s: float
    anonymous_mib: float
    num_descriptors: int
    num_threads: int
    num_leases: int
    num_clients: int
    num_sessions: int
    num_blocks: int
    num_namespaces: int


class Watched:
    """A daemon, and what it is like from outside."""

    def __init__(self, folder: Path) -> None:
        settings = (*SETTINGS, f"tiers.nvme.path={folder / 'nvme'}")
        self.daemon = Daemon(folder, settings=settings)
        self.daemon.start()
        self._began_at = time.monotonic()
        self._channel = grpc.insecure_channel(self.daemon.target)
        self._stub = AdminServiceStub(self._channel)

    def num_leases(self) -> int:
        """Return how many leases there are."""
        return int(self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S).num_leases)

    def problems(self) -> list[str]:
        """Audit the daemon."""
        return list(self._stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=WAIT_S).problems)

    def sample(self) -> Sample:
        """Return what there is now."""
        status = self._stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=WAIT_S)
        process = Path(f"/proc/{self.daemon.pid}")
        lines = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        return Sample(
            at_s=round(time.monotonic() - self._began_at, 1),
            anonymous_mib=round(int(lines["RssAnon"].split()[0]) / 1024, 2),
            num_descriptors=len(os.listdir(process / "fd")),
            num_threads=int(lines["Threads"]),
            num_leases=status.num_leases,
            num_clients=status.num_clients,
            num_sessions=status.num_sessions,
            num_blocks=status.num_blocks,
            num_namespaces=status.num_namespaces,
        )

    def close(self) -> None:
        """End the daemon."""
        self._channel.close()
        self.daemon.close()


def slope_per_hour(samples: list[Sample], name: str) -> float:
    """Return how fast a figure grew in these samples."""
    at_h = [sample.at_s / 3600 for sample in samples]
    values = [float(getattr(sample, name)) for sample in samples]
    return float(np.polyfit(at_h, values, 1)[0]) if len(samples) > 1 else 0.0


def killed_holder_s(watched: Watched, load: Load) -> float:
    """Kill a client that holds leases; return the seconds until the daemon holds none of them."""
    holder = load.start(Role(), is_holder=True)

    def num_granted() -> int:
        holder.assert_alive()
        return holder.counts()["held"]

    num_held = until(num_granted, "no lease was granted", pause_s=0.05)
    began_at = time.monotonic()
    load.end(holder, signal.SIGKILL)
    # The workers hold a few, for a moment each.
    until(lambda: watched.num_leases() < num_held, "leases outlive their client")
    return time.monotonic() - began_at


def soak(folder: Path, minutes: float, every_s: float, pause_s: float, out: Path | None) -> dict[str, object]:
    """Run; return the figures. Raises AssertionError when something was wrong or stayed."""
    watched = Watched(folder)
    load = Load(folder, watched.daemon.target, pause_s=pause_s)
    samples, reclaim_s = [], []
    try:
        before = watched.sample()
        for role in (Role(), Role(), Role(is_grpc=True)):
            load.start(role)
        ends_at = time.monotonic() + minutes * 60
        next_kill_at = time.monotonic() + CHURN_S
        pause = threading.Event()
        while time.monotonic() < ends_at:
            pause.wait(every_s)
            load.assert_alive()
            samples.append(watched.sample())
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(samples[-1])) + "\n")
            if time.monotonic() >= next_kill_at:
                reclaim_s.append(killed_holder_s(watched, load))
                next_kill_at = time.monotonic() + CHURN_S
        load.end_all()
        counts = load.counts()
        after = until_left(watched)
        problems = watched.problems()
        assert problems == [], problems
    finally:
        load.kill_all()
        watched.close()
    return report(before, samples, after, reclaim_s, dict(counts))


def until_left(watched: Watched) -> Sample:
    """Wait until no client and no lease is left, and return what there is then."""
    deadline_at, pause = time.monotonic() + WAIT_S, threading.Event()
    while (sample := watched.sample()).num_leases or sample.num_clients:
        assert time.monotonic() < deadline_at, f"clients have left and their things stay: {sample}"
        pause.wait(0.1)
    return sample


def report(
    before: Sample, samples: list[Sample], after: Sample, reclaim_s: list[float], counts: dict[str, int]
) -> dict[str, object]:
    """Return the figures of a run."""
    judged = samples[len(samples) // 2 :]
    names = ("anonymous_mib", "num_descriptors", "num_threads", "num_leases")
    return {
        "minutes": round(samples[-1].at_s / 60, 1),
        "slope_per_hour": {name: round(slope_per_hour(judged, name), 3) for name in names},
        "before": asdict(before),
        "half": asdict(judged[0]),
        "end": asdict(samples[-1]),
        "after": asdict(after),
        "highest_anonymous_mib": max(sample.anonymous_mib for sample in samples),
        "num_clients_killed": len(reclaim_s),
        "reclaim_s": {
            "p50": round(float(np.percentile(reclaim_s, 50)), 4) if reclaim_s else None,
            "p99": round(float(np.percentile(reclaim_s, 99)), 4) if reclaim_s else None,
        },
        "counts": counts,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two samples")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds between two calls of a worker")
    parser.add_argument("--out", type=Path, help="append every sample to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtier-soak-") as name:
        figures = soak(Path(name), arguments.minutes, arguments.every, arguments.pause, arguments.out)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
