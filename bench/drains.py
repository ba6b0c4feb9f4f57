"""Draining under load: the daemon leaves and comes back; the runtimes it serves see misses, never an error.

    python -m bench.drains --drains 100

A real daemon with dram and nvme. Runtimes ask the way plug-ins do (ChainStore: a guard and a breaker), two
over the local channel and one over gRPC; a fourth holds a lease over the drain and reads its memory when the
daemon is gone. Each drain comes by SIGTERM or by the admin call while all of them work, and a witness chain
is acknowledged right before it.

Failed: a call of a plug-in that raised, or ended for another reason than that the daemon leaves or is away;
wrong bytes; an exit status other than 0; a drain beyond its grace period; a witness that is not found after
the restart; an audit with problems.
"""

import argparse
import logging
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvtier.appliance.host.daemon import CLOSE_GRACE_S
from kvtier.appliance.host.process import DRAIN_GRACE_S
from kvtier.clients import Client, Geometry, KvtierError, NamespaceIdentity
from kvtier.clients.connector.breaker import Breaker
from kvtier.clients.connector.chain_store import ChainStore
from kvtier.clients.connector.guard import Guard
from kvtier.clients.options import Limits, Timeout
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import Daemon

from .machine import finish, print_machine

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2
)  # 64 KiB a block
IDENTITY = NamespaceIdentity(b"a model of drains", GEOMETRY)
CHAIN_BLOCKS = 8
NUM_CHAINS = 60  # 30 MiB: twice dram, half of nvme, so that nothing acknowledged has to go
SETTINGS = (
    *("tiers.dram.capacity=16MiB", "tiers.dram.extent=2MiB", "observe.http=off"),
    *("tiers.nvme.capacity=128MiB", "tiers.nvme.segment=2MiB"),
)
DEADLINE_S = 30.0  # on a busy machine, too: what is late is a defect, what is slow is not
PATIENT: Any = {"timeout": Timeout(DEADLINE_S, DEADLINE_S), "limits": Limits(staging_bytes=1 << 20)}
#: Why a plug-in may get nothing: the daemon leaves, is away, was away a moment ago, or has no room just now.
AWAY = {"DRAINING", "CONNECTION_LOST", "NOT_RUNNING", "BREAKER_OPEN"}
NO_ROOM = {"PUT_NO_ROOM", "PUT_DECLINED", "PUT_PARENT_MISSING", "GONE_BEFORE_LOAD"}


@dataclass
class DrainOutcome:
    """What a run was like. `failures` is empty when nothing went wrong."""

    num_drains: int = 0
    num_requests: int = 0
    num_blocks_read: int = 0
    num_lease_reads: int = 0  # leases read after the daemon was gone
    causes: Counter[str] = field(default_factory=Counter)
    drain_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def chain(number: int) -> tuple[list[bytes], Any]:
    """Return names and blocks of a chain; every word says which chain, and where in it."""
    names = [b"%16d/%15d" % (number, block) for block in range(CHAIN_BLOCKS)]
    num_words = CHAIN_BLOCKS * GEOMETRY.block_bytes // 8
    data = np.arange(num_words, dtype=np.uint64) + np.uint64(number << 32)
    return names, data.view(np.uint8).reshape(CHAIN_BLOCKS, -1)


class DrainRuntime:
    """Loads chains, and stores what it did not find, until `ended`; never notices more than misses."""

    def __init__(self, target: str, seed: int, ended: threading.Event, *, shared_memory: bool) -> None:
        self.num_requests = self.num_blocks_read = 0
        self.failures: list[str] = []
        self.guard = Guard("kvtier.bench.drains", Breaker(pause_s=0.05, max_pause_s=0.2))
        self._client = Client(target, shared_memory=shared_memory, **PATIENT)
        self._store = ChainStore(self._client, self.guard, DEADLINE_S)
        self._dice, self._ended = random.Random(seed), ended
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        memory = np.empty((CHAIN_BLOCKS, GEOMETRY.block_bytes), np.uint8)
        try:
            while not self._ended.is_set():
                self._step(self._dice.randrange(NUM_CHAINS), memory)
                if self.guard.breaker.turns_away():
                    self._ended.wait(0.01)  # a runtime would compute meanwhile
        except Exception as failure:
            self.failures.append(f"a plug-in's call raised {type(failure).__name__}: {failure}")
        finally:
            self._store.close()

    def _step(self, number: int, memory: Any) -> None:
        names, data = chain(number)
        num_blocks = self._store.load(IDENTITY, names, list(memory))
        if not np.array_equal(memory[:num_blocks], data[:num_blocks]):
            self.failures.append(f"chain {number}: wrong bytes")
        self.num_blocks_read += num_blocks
        self.num_requests += 1
        if num_blocks < CHAIN_BLOCKS:
            self._store.store(IDENTITY, names, list(data))
            self.num_requests += 1


class Loop:
    """One directory, drained again and again."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.outcome = DrainOutcome()
        settings = (*SETTINGS, f"tiers.nvme.path={folder / 'nvme'}")
        self._daemon = Daemon(folder, settings=settings)
        self._dice, self._seed = random.Random(seed), seed
        self._ended = threading.Event()

    def run(self, num_drains: int) -> DrainOutcome:
        """Return what was seen in so many drains."""
        target, outcome = self._daemon.target, self.outcome
        self._daemon.start()
        runtimes = [
            DrainRuntime(target, self._seed + number, self._ended, shared_memory=number > 0)
            for number in range(3)
        ]
        for runtime in runtimes:
            runtime.thread.start()
        try:
            for number in range(num_drains):
                self._drain(number)
                outcome.num_drains += 1
        finally:
            self._ended.set()
            for runtime in runtimes:
                runtime.thread.join()
            self._daemon.close()
        for runtime in runtimes:
            outcome.num_requests += runtime.num_requests
            outcome.num_blocks_read += runtime.num_blocks_read
            outcome.failures += runtime.failures
            outcome.causes += Counter(runtime.guard.causes)
        outcome.failures += [
            f"{times} x {cause}" for cause, times in outcome.causes.items() if cause not in AWAY | NO_ROOM
        ]
        return outcome

    def _drain(self, number: int) -> None:
        """Run a drain: put a block, hold a lease, drain, read the lease, restart, find the block."""
        target, failures = self._daemon.target, self.outcome.failures
        threading.Event().wait(self._dice.random() * 0.2)  # somewhere in the middle of the load
        names, data = chain(NUM_CHAINS + number % 20)  # twenty witnesses in turn
        with Client(target, **PATIENT) as client:
            namespace = client.register(IDENTITY)
            report = client.put(namespace, names, data)
            if not all(outcome.name in ("STORED", "DEDUPLICATED") for outcome in report.outcomes):
                failures.append(f"drain {number}: the witness was not stored: {report}")
            with client.acquire(namespace, names, ttl_s=300.0) as lease:
                fragments = list(lease)
                self._leave(number)
                self._read_lease(number, fragments, data)
        self._daemon.start()
        with Client(target, **PATIENT) as client:
            namespace = client.register(IDENTITY)
            back = client.get(namespace, names, deadline_s=30.0)
            if back.num_blocks != CHAIN_BLOCKS or not np.array_equal(
                np.asarray(back.data).reshape(data.shape), data
            ):
                failures.append(f"drain {number}: {back.num_blocks} blocks of the witness came back")
        failures += self._daemon.audit()

    def _leave(self, number: int) -> None:
        began_at = time.monotonic()
        if number % 2:
            with grpc.insecure_channel(self._daemon.target) as channel:
                request = admin_pb2.DrainRequest(exit=True, grace_ms=round(DRAIN_GRACE_S * 1000))
                AdminServiceStub(channel).Drain(request, timeout=60)
            status = self._daemon.wait()
        else:
            status = self._daemon.stop(signal.SIGTERM)
        self.outcome.drain_s.append(time.monotonic() - began_at)
        if status != 0:
            self.outcome.failures.append(f"drain {number}: exit status {status}")

    def _read_lease(self, number: int, fragments: list[Any], data: Any) -> None:
        """Read mapped memory after the daemon's end: it lives as long as its readers."""
        offsets = Counter[int]()
        try:
            for fragment in sorted(fragments, key=lambda one: (one.block, one.group)):
                begin, length = offsets[fragment.block], len(fragment.view)
                if bytes(fragment.view) != data[fragment.block][begin : begin + length].tobytes():
                    self.outcome.failures.append(f"drain {number}: wrong bytes under a lease")
                offsets[fragment.block] += length
            self.outcome.num_lease_reads += len(offsets) == CHAIN_BLOCKS
        except KvtierError as problem:
            self.outcome.failures.append(f"drain {number}: a lease was not readable: {problem}")


def main() -> int:
    """Run, print, and return 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.drains", description=__doc__)
    parser.add_argument("--drains", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json:
        print_machine()
    # Else a line for every drain and every return.
    logging.getLogger("kvtier.bench.drains").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        outcome = Loop(Path(folder), arguments.seed).run(arguments.drains)
    drains = sorted(outcome.drain_s)
    if drains[-1] > DRAIN_GRACE_S + 2 * CLOSE_GRACE_S:
        outcome.failures.append(f"a drain took {drains[-1]:.1f} s")
    report = {
        "seed": arguments.seed,
        "num_drains": outcome.num_drains,
        "num_requests": outcome.num_requests,
        "num_blocks_read": outcome.num_blocks_read,
        "num_leases_read_after_exit": outcome.num_lease_reads,
        "misses_by_cause": dict(outcome.causes),
        "drain_p50_s": round(drains[len(drains) // 2], 3),
        "drain_max_s": round(drains[-1], 3),
        "num_failures": len(outcome.failures),
    }
    return finish(report, outcome.failures, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
