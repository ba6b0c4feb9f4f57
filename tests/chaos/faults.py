"""What chaos does to a daemon and its clients, one thing at a time. None of it needs privileges.

Disk faults are made from outside: a limit on the daemon's files makes its writes fail, as a full or failing
device does; bits of its segments are flipped, and segments are cut. Faults that need a mount are in
tests/e2e/test_bad_disk.py.
"""

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvtier.clients import Client, KvtierError
from tests.daemon import PATIENT, START_S, Daemon

from .content import CHAIN_BLOCKS, IDENTITY, names_of, payload_of
from .load import Load

FILE_LIMIT_BYTES = 64 << 10  # what is written behind it fails with EFBIG
NUM_ROTTEN = 8  # segments, and bits in each of them
NUM_FLIPPED = 64
WITNESS_S = 20.0  # until what memory held is served again
HOLD_S = 20.0  # until a client has the leases that it is killed with
WITNESSES = 1 << 34  # numbers of chains that only faults put

BAD_POLICIES = ("tiers: [", "nonsense: 1\n", "[" * 5000, "tiers: {dram: {capacity: -1MiB}}\n", "\0\xff")


class Faults:
    """Everything that can be done. `restore` undoes what is left of it."""

    def __init__(self, daemon: Daemon, load: Load, policy: Path, store: Path, token: Path, seed: int) -> None:
        self.num_witnesses = self.num_witnesses_found = 0
        self._daemon, self._load, self._policy, self._store = daemon, load, policy, store
        self._token, self._dice = token, random.Random(seed)
        self._good_policy = policy.read_text()
        self._is_refusing = False
        self._pause = threading.Event()
        self.kinds: dict[str, Callable[[], str]] = {
            "kill the daemon": self._kill_daemon,
            "kill the daemon and its successor": self._kill_twice,
            "kill the supervisor": self._kill_supervisor,
            "end the daemon": self._end_daemon,
            "stop the daemon": self._stop_daemon,
            "refuse writes": self._refuse_writes,
            "flip bits on disk": self._flip_bits,
            "cut a segment": self._cut_segment,
            "take another policy": self._take_policy,
            "take a bad policy": self._take_bad_policy,
            "kill a client": self._kill_client,
            "kill a client that holds leases": self._kill_holder,
            "stop a client": self._stop_client,
        }
        #: One round of faults.
        self.round = [
            *self.kinds,
            *["kill the daemon"] * 2,
            "kill the daemon and its successor",
            "flip bits on disk",
        ]

    def restore(self) -> None:
        """Give the daemon its disk and its policy back."""
        self._write_policy(self._good_policy)
        self._daemon.signal(signal.SIGHUP)
        self._admit_writes()

    # ---------------------------------------------------------------------------------- processes

    def _kill_daemon(self) -> str:
        number = self._put_witness()
        self._kill_child()
        return self._ask_for_witness(number)

    def _kill_twice(self) -> str:
        """Kill the next daemon, too, while it starts or takes memory over."""
        number = self._put_witness()
        self._kill_child()
        self._pause.wait(self._dice.random())
        self._kill_child()
        return self._ask_for_witness(number)

    def _kill_child(self) -> None:
        self._is_refusing = False  # the next one has no limit
        if pid := self._daemon.pid:
            os.kill(pid, signal.SIGKILL)
        self._wait_until_served(pid)

    def _kill_supervisor(self) -> str:
        self._is_refusing = False
        self._daemon.stop(signal.SIGKILL)
        self._daemon.start()
        return ""

    def _end_daemon(self) -> str:
        self._is_refusing = False
        status = self._daemon.stop(signal.SIGTERM)
        assert status == 0, f"SIGTERM ended the daemon with {status}"
        self._daemon.start()
        return ""

    def _stop_daemon(self) -> str:
        seconds, pid = 0.1 + 2 * self._dice.random(), self._daemon.pid
        os.kill(pid, signal.SIGSTOP)
        self._pause.wait(seconds)
        os.kill(pid, signal.SIGCONT)
        return f"{seconds:.1f} s"

    def _wait_until_served(self, former: int) -> None:
        """Wait until a process other than `former` answers."""
        deadline_at = time.monotonic() + START_S
        problem: KvtierError | None = None
        while True:
            assert time.monotonic() < deadline_at, f"no daemon serves after a kill: {problem}"
            if self._daemon.pid not in (0, former):
                try:
                    with self._client() as client:
                        client.register(IDENTITY)
                    return
                except KvtierError as refused:
                    problem = refused
            self._pause.wait(0.02)

    def _client(self) -> Client:
        os.environ["KVTIER_TOKEN_FILE"] = str(self._token)
        return Client(self._daemon.target, timeout=PATIENT)

    # ---------------------------------------------------------------------------------- witnesses

    def _put_witness(self) -> int:
        """Put a chain and return its number, 0 if it is not taken just now."""
        number = WITNESSES + self._dice.randrange(1 << 20)
        try:
            with self._client() as client:
                report = client.put(client.register(IDENTITY), names_of(number), payload_of(0, number))
        except KvtierError:
            return 0
        return number if report.complete else 0

    def _ask_for_witness(self, number: int) -> str:
        """Ask for it until it is found: it was put last, and memory outlives the daemon."""
        if not number:
            return "no witness"
        self.num_witnesses += 1
        deadline_at = time.monotonic() + WITNESS_S
        while time.monotonic() < deadline_at:
            try:
                with self._client() as client:
                    report = client.get(client.register(IDENTITY), names_of(number))
            except KvtierError:
                continue
            expected = payload_of(0, number).tobytes()[: report.num_bytes]
            assert report.data.tobytes() == expected, f"witness {number}: other bytes"
            if report.num_blocks == CHAIN_BLOCKS:
                self.num_witnesses_found += 1
                return "witness found"
            self._pause.wait(0.05)
        return "witness lost"

    # ---------------------------------------------------------------------------------- disk

    def _refuse_writes(self) -> str:
        """Let every write to the store fail until the next fault of this kind, or the next daemon."""
        if self._is_refusing:
            self._admit_writes()
            return "writes succeed again"
        self._limit_files(FILE_LIMIT_BYTES)
        self._is_refusing = True
        return ""

    def _admit_writes(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)
        self._is_refusing = False

    def _limit_files(self, num_bytes: int) -> None:
        if pid := self._daemon.pid:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))

    def _segments(self) -> list[Path]:
        """Return the files of segments that hold something, in the order of their names."""
        return [path for path in sorted(self._store.glob("segment-*")) if _is_filled(path)]

    def _flip_bits(self) -> str:
        segments = self._segments()
        chosen = self._dice.sample(segments, min(NUM_ROTTEN, len(segments)))
        for path in chosen:
            with path.open("r+b", buffering=0) as file:
                for _ in range(NUM_FLIPPED):
                    offset = self._dice.randrange(os.fstat(file.fileno()).st_size)
                    [byte] = os.pread(file.fileno(), 1, offset)
                    os.pwrite(file.fileno(), bytes([byte ^ 1 << self._dice.randrange(8)]), offset)
                os.fsync(file.fileno())
        return f"{len(chosen)} segments"

    def _cut_segment(self) -> str:
        segments = self._segments()
        if not segments:
            return "nothing is stored yet"
        path = self._dice.choice(segments)
        os.truncate(path, self._dice.randrange(path.stat().st_size))
        return path.name

    # ---------------------------------------------------------------------------------- policy

    def _write_policy(self, text: str) -> None:
        """Exchange the file, whatever it is now."""
        new = self._policy.with_suffix(".new")
        new.write_text(text)
        new.rename(self._policy)

    def _take_policy(self) -> str:
        capacity = f"{self._dice.choice([32, 48, 64])}MiB"
        self._write_policy(self._good_policy.replace("capacity: 64MiB", f"capacity: {capacity}"))
        self._daemon.signal(signal.SIGHUP)
        return f"dram {capacity}"

    def _take_bad_policy(self) -> str:
        if self._dice.random() < 0.3:
            self._policy.unlink()
            os.mkfifo(self._policy)
        else:
            self._write_policy(self._dice.choice(BAD_POLICIES))
        self._daemon.signal(signal.SIGHUP)
        self._pause.wait(0.5)
        self._write_policy(self._good_policy)
        return ""

    # ---------------------------------------------------------------------------------- clients

    def _kill_client(self) -> str:
        worker = self._dice.choice(self._load.running)
        self._load.end(worker, signal.SIGKILL)
        self._load.start(worker.role)
        return ""

    def _kill_holder(self) -> str:
        """Kill a client that holds leases; they must be gone in the end."""
        holder = self._load.start(self._load.running[0].role, is_holder=True)
        deadline_at = time.monotonic() + HOLD_S
        while not (has_leases := holder.counts()["held"]) and time.monotonic() < deadline_at:
            if holder.process.poll() is not None:
                break  # the daemon did not take its put
            self._pause.wait(0.05)
        self._load.drop(holder)
        return "" if has_leases else "no leases"

    def _stop_client(self) -> str:
        seconds = 0.1 + 4 * self._dice.random()
        worker = self._dice.choice(self._load.running)
        worker.process.send_signal(signal.SIGSTOP)
        self._pause.wait(seconds)
        worker.process.send_signal(signal.SIGCONT)
        return f"{seconds:.1f} s"


def _is_filled(segment: Path) -> bool:
    """Whether a segment has a first record."""
    with segment.open("rb") as file:
        return any(file.read(64))
