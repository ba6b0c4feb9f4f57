"""Reloading under load: the policy changes again and again while clients put and get; nothing fails or leaks.

    python -m bench.reload --reloads 200

A real daemon with hbm (host memory), dram and nvme; writers and readers over the local channel and one over
gRPC, every block bearing its own number. Each reload draws sizes of all tiers, eviction, admission, prefetch,
leases and limits from a seed, and comes in by the admin call, by SIGHUP, or by the
file alone, which is exchanged the way Kubernetes does it: a symbolic link two folders up. A tenth of the
policies is wrong and must be refused.

Failed: a request that raised, a block with wrong bytes. (A block that is not there any more is a miss.)
Leaked: at the end, when all clients have left and the last policy is small, what is left of extents, segment
files, reserved, condemned and pinned bytes beyond what that policy says.
"""

import argparse
import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import yaml

from kvtier.clients import Client, Geometry, NamespaceIdentity
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import Daemon

from .machine import finish, print_machine

MIB = 1 << 20
GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=128, block_tokens=16, dtype="bfloat16", layers_per_group=2
)
CHAIN_BLOCKS = 12
NUM_CHAINS = 400  # 400 * 12 * 64 KiB: three times the largest dram
EXTENT_BYTES = 2 * MIB
SEGMENT_BYTES = 4 * MIB
SMALLEST = {"hbm": 8, "dram": 16, "nvme": 24}  # MiB
LARGEST = {"hbm": 32, "dram": 96, "nvme": 128}
SETTLE_S = 60.0


@dataclass
class Tally:
    """What the clients saw."""

    num_requests: int = 0
    num_blocks_read: int = 0
    num_missed: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class PolicyFolder:
    """A policy file as a ConfigMap volume has it: policy.yaml -> ..data/policy.yaml, ..data -> a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "policy.yaml"
        self._number = 0

    def write(self, text: str) -> None:
        """Write the content by an atomic exchange of a symbolic link."""
        self._number += 1
        version = self.folder / f"..{self._number}"
        version.mkdir()
        (version / "policy.yaml").write_text(text)
        link = self.folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self.folder / "..data")
        if not self.path.is_symlink():
            self.path.symlink_to("..data/policy.yaml")


def draw(rng: random.Random, folder: Path, target: str) -> dict[str, Any]:
    """Return a policy that the running daemon can change to."""
    sizes = {tier: rng.randrange(SMALLEST[tier] // 4, LARGEST[tier] // 4 + 1) * 4 for tier in SMALLEST}
    return policy(folder, target, sizes) | {
        "policy": {
            "eviction": rng.choice(("urgency", "lru", "s3fifo", "arc")),
            "admission": rng.choice(("all", "urgency")),
            "prefetch": rng.choice(("", "announced")),
        },
        "leases": {"ttl": f"{rng.choice((10, 30))}s"},
        "limits": {"max_clients": rng.choice((64, 256)), "max_pinned": f"{rng.choice((25, 50))}%"},
    }


def policy(folder: Path, target: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return a policy with these sizes, in MiB, and all else by default."""
    segment, nvme = f"{SEGMENT_BYTES // MIB}MiB", str(folder / "nvme")
    extent = f"{EXTENT_BYTES // MIB}MiB"
    return {
        "listen": target,
        "tiers": {
            "hbm": {"capacity": f"{sizes['hbm']}MiB"},
            "dram": {"capacity": f"{sizes['dram']}MiB", "extent": extent},
            "nvme": {
                "path": nvme,
                "capacity": f"{sizes['nvme']}MiB",
                "segment": segment,
                "durability": "none",
            },
        },
        "observe": {"http": "off"},
    }


WRONG = (
    {"leases": {"ttl": "0s"}},
    {"tiers": {"dram": {"capacty": "1GiB"}}},
    {"reflection": False},  # right, but not while it runs
    {"policy": {"eviction": "lur"}},
)


class ClientLoad:
    """One client that puts and gets chains until it is told to stop. A block's bytes are its number."""

    def __init__(self, target: str, seed: int, ended: threading.Event, shared_memory: bool) -> None:
        self.tally = Tally()
        self._target, self._shared_memory = target, shared_memory
        self._rng = random.Random(seed)
        self._ended = ended
        self.thread = threading.Thread(target=self._run, name=f"load-{seed}")

    def _run(self) -> None:
        try:
            with Client(self._target, shared_memory=self._shared_memory) as client:
                identity = NamespaceIdentity(hashlib.sha256(b"reload").digest(), GEOMETRY)
                namespace = client.register(identity)
                while not self._ended.is_set():
                    began_at = time.monotonic()
                    self._step(client, namespace)
                    self.tally.slowest_s = max(self.tally.slowest_s, time.monotonic() - began_at)
        except Exception as failure:
            self.tally.failures.append(f"{type(failure).__name__}: {failure}")

    def _step(self, client: Client, namespace: Any) -> None:
        number = int(self._rng.random() ** 2 * NUM_CHAINS)
        names, data = chain(number)
        tally = self.tally
        report = client.get(namespace, names)
        tally.num_requests += 1
        num_bytes = report.num_blocks * GEOMETRY.block_bytes
        if not np.array_equal(np.asarray(report.data)[:num_bytes], data[:num_bytes]):
            tally.failures.append(f"chain {number}: wrong bytes")
        tally.num_blocks_read += report.num_blocks
        tally.num_missed += CHAIN_BLOCKS - report.num_blocks
        if report.num_blocks < CHAIN_BLOCKS:
            client.put(namespace, names, data)
            tally.num_requests += 1


def chain(number: int) -> tuple[list[bytes], Any]:
    """Return names and bytes of a chain; half of them share their first blocks with others."""
    shared = number % 10 if number % 2 else number
    seeds = [(shared if block < 4 else number) * 1000 + block for block in range(CHAIN_BLOCKS)]
    names, parent = [], b""
    for seed in seeds:
        parent = hashlib.sha256(parent + seed.to_bytes(8, "big")).digest()
        names.append(parent)
    data = np.repeat(np.array([s + 1 for s in seeds], np.uint64), GEOMETRY.block_bytes // 8)
    return names, data.view(np.uint8)


@dataclass
class ReloadOutcome:
    """What a run was like. `leaks` is empty when nothing was left over."""

    num_applied: int = 0
    num_refused: int = 0
    apply_s: list[float] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """Return everything that went wrong."""
        return [*self.unexpected, *self.leaks, *(f for tally in self.tallies for f in tally.failures)]


def play(folder: Path, num_reloads: int, seed: int, num_clients: int = 3) -> ReloadOutcome:
    """Run the daemon in `folder`, reload it, look at what is left."""
    rng, outcome = random.Random(seed), ReloadOutcome()
    (folder / "policy").mkdir()
    file = PolicyFolder(folder / "policy")
    target = f"unix://{folder}/kvtier.sock"
    file.write(yaml.safe_dump(policy(folder, target, LARGEST)))
    daemon = Daemon(folder, file.path)
    daemon.start()
    ended = threading.Event()
    loads = [ClientLoad(target, seed + n, ended, shared_memory=n > 0) for n in range(num_clients)]
    try:
        with grpc.insecure_channel(target) as channel:
            stub = AdminServiceStub(channel)
            for load in loads:
                load.thread.start()
            for number in range(num_reloads):
                _reload(number, rng, folder, target, file, stub, daemon, outcome)
            ended.set()
            for load in loads:
                load.thread.join()
            outcome.tallies = [load.tally for load in loads]
            outcome.leaks = leaks(stub, folder, target, daemon)
        if daemon.stop() != 0:
            outcome.unexpected.append("the daemon did not end well")
    finally:
        ended.set()
        daemon.close()
    return outcome


def _reload(
    number: int,
    rng: random.Random,
    folder: Path,
    target: str,
    file: PolicyFolder,
    stub: AdminServiceStub,
    daemon: Daemon,
    outcome: ReloadOutcome,
) -> None:
    """Change the policy once, in one of three ways, or try to with a wrong one."""
    chosen = draw(rng, folder, target)
    is_wrong = rng.random() < 0.1
    if is_wrong:
        _overlay(chosen, rng.choice(WRONG))
    text = yaml.safe_dump(chosen)
    before = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30).policy
    way = "file" if number % 20 == 10 else rng.choice(("call", "hangup"))
    began_at = time.monotonic()
    if way == "call":
        try:
            stub.ApplyPolicy(admin_pb2.ApplyPolicyRequest(yaml=text, name="drawn.yaml"), timeout=60)
        except grpc.RpcError as refusal:
            if not is_wrong:
                outcome.unexpected.append(f"reload {number}: {refusal.details()}")
    else:
        file.write(text)
        if way == "hangup":
            daemon.signal(signal.SIGHUP)
    while True:
        now = stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30).policy
        if now.num_applied + now.num_refused > before.num_applied + before.num_refused:
            break
        if time.monotonic() - began_at > SETTLE_S:
            outcome.unexpected.append(f"reload {number} by {way} was not noticed")
            return
        time.sleep(0.01)
    outcome.apply_s.append(time.monotonic() - began_at)
    is_refused = now.num_refused > before.num_refused
    outcome.num_refused += is_refused
    outcome.num_applied += not is_refused
    if is_refused != is_wrong:
        outcome.unexpected.append(f"reload {number} by {way}: {now.last_error or 'should have been refused'}")
    time.sleep(rng.random() * 0.1)


def _overlay(chosen: dict[str, Any], wrong: dict[str, Any]) -> None:
    for key, value in wrong.items():
        if isinstance(value, dict):
            _overlay(chosen.setdefault(key, {}), value)
        else:
            chosen[key] = value


def leaks(stub: AdminServiceStub, folder: Path, target: str, daemon: Daemon) -> list[str]:
    """Return leaks: what is left after the smallest policy came into force and is done."""
    text = yaml.safe_dump(policy(folder, target, SMALLEST))
    stub.ApplyPolicy(admin_pb2.ApplyPolicyRequest(yaml=text, name="smallest.yaml"), timeout=60)
    deadline_at = time.monotonic() + SETTLE_S
    while True:
        found = _left_over(stub, folder, daemon)
        if not found or time.monotonic() > deadline_at:
            problems = stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=60).problems
            return [*found, *problems]
        time.sleep(0.2)


def _left_over(stub: AdminServiceStub, folder: Path, daemon: Daemon) -> list[str]:
    found = []
    for tier in stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=30).tiers:
        if tier.reserved_bytes or tier.condemned_bytes or tier.pinned_bytes:
            found.append(
                f"tier {tier.tier}: {tier.reserved_bytes} reserved, {tier.condemned_bytes} condemned, "
                f"{tier.pinned_bytes} pinned"
            )
        if tier.used_bytes > tier.capacity_bytes:
            found.append(f"tier {tier.tier}: {tier.used_bytes} bytes in {tier.capacity_bytes}")
    names = {name for name in daemon.open_files() if "kvtier-hbm" in name or "kvtier-dram" in name}
    wanted = (SMALLEST["hbm"] + SMALLEST["dram"]) * MIB // EXTENT_BYTES
    if len(names) > wanted:
        found.append(f"{len(names)} extents, {wanted} wanted")
    num_segments = len(list((folder / "nvme").glob("segment-*")))
    if num_segments != SMALLEST["nvme"] * MIB // SEGMENT_BYTES:
        found.append(f"{num_segments} segment files")
    return found


def main() -> int:
    """Run, print, and return 1 when anything failed or leaked."""
    parser = argparse.ArgumentParser(prog="python -m bench.reload", description=__doc__)
    parser.add_argument("--reloads", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        print_machine()
    with tempfile.TemporaryDirectory() as folder:
        outcome = play(Path(folder), arguments.reloads, arguments.seed)
    applied = sorted(outcome.apply_s)
    report = {
        "seed": arguments.seed,
        "num_applied": outcome.num_applied,
        "num_refused": outcome.num_refused,
        "num_requests": sum(t.num_requests for t in outcome.tallies),
        "num_blocks_read": sum(t.num_blocks_read for t in outcome.tallies),
        "num_blocks_missed": sum(t.num_missed for t in outcome.tallies),
        "slowest_get_and_put_s": round(max(t.slowest_s for t in outcome.tallies), 3),
        "reload_p50_s": round(applied[len(applied) // 2], 4),
        "reload_max_s": round(applied[-1], 4),
        "num_failures": len(outcome.failures),
    }
    return finish(report, outcome.failures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
