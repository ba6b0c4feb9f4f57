"""`python -m tests.crash.daemon_loop --iterations 200`: kill -9 the daemon under load, look at what is left.

Small tiers, so that spills, seals and reclaims go on all the time. A writer and a reader work through the
real client until the daemon is killed at a random moment. It starts again on the same directory, and an
oracle in this process, which knows every byte it ever put, reads everything back:

- every block that comes has the bytes that were put, none has others;
- every block that stood in a sealed segment when the daemon was asked for the last time is still there,
  unless its segment has been reclaimed since, which the manifest or the block's story must say;
- the daemon is ready in time and audits clean.

What a kill may take: blocks in memory only, and records that were being written. The kernel keeps what the
process had written; the loss of power is simulated in tests/tiers.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from kvtier.clients import Client, Geometry, KvtierError, Namespace, NamespaceIdentity
from kvtier.tiers.cold.manifest import Kind, frame, segment_event
from kvtier.tiers.cold.manifest_file import load_manifest
from kvtier.v1 import admin_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub
from tests.daemon import PATIENT, Daemon

from ..waiting import until

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=4, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2
)  # 64 KiB a block, two fragments of 32 KiB
IDENTITY = NamespaceIdentity(b"crash loop model", GEOMETRY)
CHAIN_BLOCKS = 8
SEGMENT_BYTES = 1 << 20
NVME_BYTES = 64 << 20
NUM_CHAINS_ASKED = 12  # of them at each look; a question costs half a millisecond
MAX_CHAINS = NVME_BYTES // (CHAIN_BLOCKS * GEOMETRY.block_bytes) * 3 // 2  # half as much again as fits
SETTINGS = (
    *("tiers.dram.capacity=16MiB", "tiers.dram.extent=2MiB"),
    *(f"tiers.nvme.capacity={NVME_BYTES >> 20}MiB", f"tiers.nvme.segment={SEGMENT_BYTES >> 20}MiB"),
)


def names_of(number: int) -> list[bytes]:
    """Prefix hashes of chain `number`. Those of a chain share their first 16 bytes, which no hashes do."""
    return [b"%16d/%15d" % (number, block) for block in range(CHAIN_BLOCKS)]


def payload_of(number: int) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Bytes of chain `number`: every word says which chain, and where in it."""
    num_words = CHAIN_BLOCKS * GEOMETRY.block_bytes // 8
    return np.arange(num_words, dtype=np.uint64) + np.uint64(number << 32)


@dataclass
class Tally:
    """What the loop has seen."""

    num_kills: int = 0
    num_put: int = 0  # blocks acknowledged
    num_read: int = 0  # blocks read back after a restart
    num_read_alive: int = 0  # blocks read by the reader before a kill
    num_sealed: int = 0  # blocks known to stand in sealed segments at a kill
    num_reclaimed: int = 0  # of them, found by the next life and dropped for room before we could ask
    num_sealed_lost: int = 0
    ready_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        ready = sorted(self.ready_s)
        return (
            f"{self.num_kills} kills; put {self.num_put} blocks, read {self.num_read_alive} alive and "
            f"{self.num_read} after a restart, all right; sealed {self.num_sealed}, reclaimed "
            f"{self.num_reclaimed}, lost {self.num_sealed_lost}; ready in "
            f"{ready[len(ready) // 2]:.2f} s, at worst {ready[-1]:.2f} s"
        )


class Load:
    """A writer and a reader that work until the daemon dies. Leaves their problems in `problems`."""

    def __init__(self, target: str, seed: int, tally: Tally) -> None:
        self.problems: list[BaseException] = []
        self._target, self._seed, self._tally = target, seed, tally
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=[work]) for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Wait for both, after the daemon was killed."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[Client, Namespace, random.Random], None]) -> None:
        try:
            with Client(self._target) as client:
                namespace = client.register(IDENTITY)
                dice = random.Random(f"{self._seed}/{work.__name__}")
                while not self._ended.is_set():
                    work(client, namespace, dice)
        except KvtierError:
            pass  # killed
        except BaseException as problem:
            self.problems.append(problem)

    def _write(self, client: Client, namespace: Namespace, dice: random.Random) -> None:
        number = dice.randrange(MAX_CHAINS)
        self._tally.num_put += client.put(namespace, names_of(number), payload_of(number)).num_stored

    def _read(self, client: Client, namespace: Namespace, dice: random.Random) -> None:
        self._tally.num_read_alive += read(client, namespace, dice.randrange(MAX_CHAINS))


class Writer:
    """Puts chains, one after the other, until the daemon is killed; `chains` gets what is acknowledged."""

    def __init__(self, target: str, chains: list[int], numbers: Iterable[int], pause_s: float = 0.0) -> None:
        self._chains, self._num_before = chains, len(chains)
        self._problems: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=[target, numbers, pause_s])
        self._thread.start()

    def wait_for(self, number: int) -> None:
        """Wait until so many chains are acknowledged, or it has ended."""
        until(lambda: len(self._chains) >= self._num_before + number or not self._thread.is_alive())

    def end(self) -> None:
        """Wait for it, after the daemon was killed."""
        self._thread.join()
        assert not self._problems, self._problems

    def _run(self, target: str, numbers: Iterable[int], pause_s: float) -> None:
        pause = threading.Event()
        try:
            with Client(target, timeout=PATIENT) as client:
                namespace = client.register(IDENTITY)
                for number in numbers:
                    if client.put(namespace, names_of(number), payload_of(number)).complete:
                        self._chains.append(number)
                    pause.wait(pause_s)
        except KvtierError:
            pass  # killed
        except BaseException as problem:
            self._problems.append(problem)


def read(client: Client, namespace: Namespace, number: int) -> int:
    """Read what is stored of a chain; return the number of blocks. Raises WrongBytes."""
    target = np.zeros(CHAIN_BLOCKS * GEOMETRY.block_bytes // 8, np.uint64)
    report = client.get(namespace, names_of(number), target)
    num_words = report.num_blocks * GEOMETRY.block_bytes // 8
    wrong = np.flatnonzero(target[:num_words] != payload_of(number)[:num_words])
    if len(wrong):
        raise WrongBytes(f"chain {number}: {len(wrong)} wrong words of {num_words}, first {wrong[0]}")
    return report.num_blocks


class WrongBytes(AssertionError):
    """The one thing that must never happen."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One block that must survive: every segment life (number, epoch) in which its records stand sealed."""

    name: bytes
    lives: frozenset[tuple[int, int]]


class Admin:
    """What the daemon says about itself."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._stub = AdminServiceStub(self._channel)

    def segments_of(self, namespace_id: int, name: bytes) -> set[int] | None:
        """Return the segments in which a block is resident whole, None when it is not."""
        block = admin_pb2.BlockName(namespace_id=namespace_id, prefix_hash=name)
        try:
            answer = self._stub.Inspect(admin_pb2.InspectRequest(block=block))
        except grpc.RpcError as refused:
            if not isinstance(refused, grpc.Call) or refused.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return None
        places = [part["places"].get("nvme") for part in json.loads(answer.json)["fragments"]]
        if not all(place is not None and place["state"] == "resident" for place in places):
            return None
        return {place["container"] for place in places}

    def was_reclaimed(self, namespace_id: int, name: bytes) -> bool:
        """Whether the daemon, in its present life, dropped this block from the cold store to make room."""
        block = admin_pb2.BlockName(namespace_id=namespace_id, prefix_hash=name)
        try:
            lines = self._stub.GetStory(admin_pb2.GetStoryRequest(block=block)).lines
        except grpc.RpcError:
            return False  # nothing is remembered: it was never found
        return any(line.what == "evicted_nvme" for line in lines)

    def problems(self) -> list[str]:
        """Audit the daemon."""
        return list(self._stub.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).problems)

    def close(self) -> None:
        """Leave."""
        self._channel.close()


def sealed_lives(store: Path) -> dict[int, int]:
    """Return the epoch of every segment that the manifest on the disk calls sealed."""
    state, _ = load_manifest(store)
    return {n: life.epoch for n, life in state.lives.items() if life.sealed} if state else {}


def was_freed(store: Path, life: tuple[int, int]) -> bool:
    """Whether the manifest says that this life of a segment was ended by its owner."""
    event = frame(segment_event(Kind.FREED, *life))
    return any(event in path.read_bytes() for path in store.glob("manifest.[01]"))


def kept_blocks(store: Path, admin: Admin, namespace_id: int, dice: random.Random) -> list[Kept]:
    """Return those of some chains' blocks which stand in sealed segments now, while the load goes on."""
    lives = sealed_lives(store)
    found = []
    for number in dice.sample(range(MAX_CHAINS), NUM_CHAINS_ASKED):
        for name in names_of(number):
            segments = admin.segments_of(namespace_id, name)
            if segments and segments <= lives.keys():
                found.append(Kept(name, frozenset((n, lives[n]) for n in segments)))
    return found


class Loop:
    """One directory, killed again and again."""

    def __init__(self, workdir: Path, seed: int, max_life_s: float) -> None:
        self.tally = Tally()
        self._store, self._seed, self._max_life_s = workdir / "nvme", seed, max_life_s
        settings = (*SETTINGS, f"tiers.nvme.path={self._store}")
        self._daemon = Daemon(workdir, settings=settings)
        self._kept: list[Kept] = []

    def run(self, iterations: int) -> Tally:
        """Kill and verify. Raises AssertionError, naming the seed, when something was lost or wrong."""
        try:
            for iteration in range(iterations):
                try:
                    self._live_and_die(random.Random(f"{self._seed}/{iteration}"))
                except AssertionError as error:
                    raise AssertionError(f"seed {self._seed}, iteration {iteration}: {error}") from error
            self._start()
            with Client(self._daemon.target, timeout=PATIENT) as client:
                self._verify(client)
            assert self._daemon.stop() == 0, "the last one may leave properly"
        finally:
            self._daemon.close()
        return self.tally

    def _start(self) -> None:
        began_at = time.monotonic()
        self._daemon.start()
        self.tally.ready_s.append(time.monotonic() - began_at)

    def _live_and_die(self, dice: random.Random) -> None:
        self._start()
        with Client(self._daemon.target, timeout=PATIENT) as client:
            namespace = self._verify(client)
            load = Load(self._daemon.target, dice.randrange(1 << 30), self.tally)
            pause = threading.Event()
            if not self.tally.num_kills:  # the first life is long enough to fill half of the store, if slowly
                num_half = NVME_BYTES // SEGMENT_BYTES // 2
                until(lambda: load.problems or len(sealed_lives(self._store)) >= num_half, pause_s=0.01)
            pause.wait(dice.random() * self._max_life_s)
            admin = Admin(self._daemon.target)
            self._kept = kept_blocks(self._store, admin, namespace.id, dice)
            admin.close()
            pause.wait(dice.random() * self._max_life_s)
            self._daemon.stop(signal.SIGKILL)
        load.end()
        self.tally.num_kills += 1
        self.tally.num_sealed += len(self._kept)
        if load.problems:
            raise AssertionError(f"under load: {load.problems[0]!r}") from load.problems[0]

    def _verify(self, client: Client) -> Namespace:
        """Compare what is there with what was put."""
        namespace = client.register(IDENTITY)
        admin = Admin(self._daemon.target)
        try:
            lost = [kept for kept in self._kept if not admin.segments_of(namespace.id, kept.name)]
            lost = [kept for kept in lost if not any(was_freed(self._store, life) for life in kept.lives)]
            dropped = [kept for kept in lost if admin.was_reclaimed(namespace.id, kept.name)]
            self.tally.num_reclaimed += len(dropped)
            lost = [kept for kept in lost if kept not in dropped]
            self.tally.num_sealed_lost += len(lost)
            assert not lost, f"{len(lost)} of {len(self._kept)} sealed blocks are gone, first {lost[0]}"
            for number in range(MAX_CHAINS):
                self.tally.num_read += read(client, namespace, number)
            problems = admin.problems()
            assert problems == [], problems
        finally:
            admin.close()
        return namespace


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.daemon_loop", description=__doc__)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--max-life", type=float, default=0.4, help="seconds, twice: before and after looking"
    )
    args = parser.parse_args()
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvtier-crash-") as name:
        tally = Loop(Path(name), args.seed, args.max_life).run(args.iterations)
    print(f"seed {args.seed}, {time.monotonic() - began_at:.0f} s: {tally}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
