"""Memory outlives the daemon: real processes, killed; what was acknowledged is there again, byte for byte."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvtier.clients import Client, Geometry, NamespaceIdentity, prefix_hashes
from kvtier.clients.errors import KvtierError
from kvtier.tiers.memory import memfd
from kvtier.v1.shm import HUGE_PAGE_BYTES

from ..daemon import PATIENT, START_S, Daemon, child_of, is_alive
from ..waiting import until

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2
)
LARGE = Geometry(num_layers=32, num_kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")  # 2 MiB
IDENTITY = NamespaceIdentity(bytes(range(32)), GEOMETRY)
NUM_BLOCKS = 48
NUM_HUGE_PAGES = 64  # of 32 MiB in extents of 8 MiB, with their headers and the indexes, and some for others
TOKENS = list(range(NUM_BLOCKS * 16))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, settings=("tiers.dram.capacity=64MiB", "observe.http=off")) as daemon:
        yield daemon


def blocks(block_bytes: int, seed: int = 1) -> "np.ndarray[tuple[int, int], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, (NUM_BLOCKS, block_bytes), np.uint8)


def store(daemon: Daemon, identity: NamespaceIdentity = IDENTITY, seed: int = 1) -> None:
    """Put the whole chain."""
    with Client(daemon.target, timeout=PATIENT) as kv:
        ns = kv.register(identity)
        assert kv.put(ns, prefix_hashes(ns, TOKENS), blocks(ns.block_bytes, seed)).num_stored == NUM_BLOCKS


def kill(daemon: Daemon) -> None:
    """Kill the process that serves; return when another one has taken its place."""
    before = daemon.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: daemon.pid not in (0, before) and not is_alive(before))


def found(daemon: Daemon, identity: NamespaceIdentity = IDENTITY, seed: int = 1) -> int:
    """Return how many blocks of the chain the first get that is answered finds; their bytes are compared."""
    deadline_at, pause = time.monotonic() + START_S, threading.Event()
    while True:
        assert time.monotonic() < deadline_at
        try:
            with Client(daemon.target, timeout=PATIENT) as kv:
                ns = kv.register(identity)
                into = np.zeros((NUM_BLOCKS, ns.block_bytes), np.uint8)
                num_found = kv.get(ns, prefix_hashes(ns, TOKENS), into=into).num_blocks
        except KvtierError:  # nothing listens yet
            pause.wait(0.005)
            continue
        assert np.array_equal(into[:num_found], blocks(ns.block_bytes, seed)[:num_found])
        return num_found


def test_what_was_acknowledged_survives_kills(running: Daemon) -> None:
    store(running)
    for _ in range(3):
        kill(running)
        assert found(running) == NUM_BLOCKS
    running.wait_for_log("96 fragments")
    assert running.stop() == 0


def num_huge(pid: int) -> int:
    """Return how many mappings of extents a process has that are made of huge pages."""
    maps = Path(f"/proc/{pid}/smaps").read_text()
    sizes = re.findall(r"memfd:kvtier[^\n]*\n(?:[^\n]*\n)*?KernelPageSize: +(\d+) kB", maps)
    return sizes.count(str(HUGE_PAGE_BYTES >> 10))


def test_memory_of_huge_pages_survives_a_kill_and_is_given_back(tmp_path: Path) -> None:
    num_free = memfd.free_huge_pages()
    if num_free < NUM_HUGE_PAGES:
        pytest.skip(f"{num_free} huge pages are free, {NUM_HUGE_PAGES} wanted: sysctl -w vm.nr_hugepages=...")
    tier = ("tiers.dram.capacity=32MiB", "tiers.dram.extent=8MiB", "tiers.dram.hugepages=on")
    with Daemon(tmp_path, settings=(*tier, "observe.http=off")) as daemon:
        store(daemon)
        before = num_huge(daemon.pid)
        assert before > 0
        for _ in range(2):
            kill(daemon)
            assert found(daemon) == NUM_BLOCKS
            assert num_huge(daemon.pid) == before
        daemon.wait_for_log("96 fragments")
        store(daemon, NamespaceIdentity(bytes(32), GEOMETRY), seed=2)  # what was taken over is written again
        assert found(daemon) == NUM_BLOCKS
        assert daemon.stop() == 0


def test_two_namespaces_of_the_same_tokens_are_told_apart_after_a_kill(running: Daemon) -> None:
    """Slots name namespaces by number: after the kill the second one is registered first."""
    other = NamespaceIdentity(bytes(32), GEOMETRY)
    store(running)
    store(running, other, seed=2)
    kill(running)
    assert found(running, other, seed=2) == NUM_BLOCKS
    assert found(running) == NUM_BLOCKS


def test_a_client_of_before_goes_on(running: Daemon) -> None:
    with Client(running.target, timeout=PATIENT) as kv:
        ns = kv.register(IDENTITY)
        hashes, data = prefix_hashes(ns, TOKENS), blocks(ns.block_bytes)
        kv.put(ns, hashes, data)
        kill(running)
        assert found(running) == NUM_BLOCKS
        into = np.zeros_like(data)
        deadline_at, num_found = time.monotonic() + START_S, 0
        while num_found < NUM_BLOCKS and time.monotonic() < deadline_at:
            num_found = kv.get(ns, hashes, into=into).num_blocks
        assert num_found == NUM_BLOCKS
        assert np.array_equal(into, data)


def test_what_a_client_views_is_not_overwritten_by_the_next_daemon(running: Daemon) -> None:
    """The lease died with its daemon; the view did not. Blocks that would need its room have to wait."""
    other = NamespaceIdentity(bytes(32), LARGE)
    with Client(running.target, timeout=PATIENT) as kv, Client(running.target, timeout=PATIENT) as rival:
        ns = kv.register(IDENTITY)
        hashes, data = prefix_hashes(ns, TOKENS), blocks(ns.block_bytes)
        kv.put(ns, hashes, data)
        lease = kv.acquire(ns, hashes)
        lease.wait()
        views = [lease.view(block, group) for block in range(NUM_BLOCKS) for group in range(2)]
        kill(running)
        assert found(running) == NUM_BLOCKS
        flood(rival, other)
        assert b"".join(views) == data.tobytes()
        assert found(running) == NUM_BLOCKS, "held, as under a lease"
        views.clear()
        lease.release()
        running.wait_for_log("views of memory")
        flood(rival, other)
        rest = kv.lookup(kv.register(IDENTITY), hashes).num_blocks
        assert rest < NUM_BLOCKS, "its room is used again"


def test_a_lease_that_is_never_released_stops_no_other_put_after_a_kill(tmp_path: Path) -> None:
    """Only the extents that it shows are not written to; the others are used again, full as they are."""
    other = NamespaceIdentity(bytes(32), LARGE)
    settings = ("tiers.dram.capacity=64MiB", "tiers.dram.extent=16MiB", "observe.http=off")
    with (
        Daemon(tmp_path, settings=settings) as running,
        Client(running.target, timeout=PATIENT) as kv,
        Client(running.target, timeout=PATIENT) as rival,
    ):
        store(running)
        ns = kv.register(IDENTITY)
        lease = kv.acquire(ns, prefix_hashes(ns, TOKENS))
        lease.wait()
        flood(rival, other)
        kill(running)
        assert found(running) == NUM_BLOCKS
        last = rival.register(NamespaceIdentity(b"new" + bytes(29), LARGE))
        assert rival.put(last, prefix_hashes(last, TOKENS[: 16 * 4]), bytes(4 * last.block_bytes)).complete
        assert found(running) == NUM_BLOCKS
        lease.release()


def flood(kv: Client, identity: NamespaceIdentity) -> None:
    """Put more than memory holds; what finds no room is refused."""
    ns = kv.register(identity)
    hashes = prefix_hashes(ns, list(range(16 * 40)))
    with suppress(KvtierError):
        kv.put(ns, hashes, np.ones((40, ns.block_bytes), np.uint8))


def restart(daemon: Daemon) -> "subprocess.CompletedProcess[str]":
    return command("restart", "--target", daemon.target)


def command(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "kvtier.appliance.cli", *words], capture_output=True, text=True
    )


def test_a_restart_keeps_memory(running: Daemon) -> None:
    store(running)
    before = running.pid
    asked = restart(running)
    assert asked.returncode == 0, asked.stderr
    assert "has taken over" in asked.stdout
    assert running.pid not in (0, before)
    assert found(running) == NUM_BLOCKS


@pytest.mark.parametrize(
    ("wrong", "words", "needs_restart"),
    [
        ("tiers: {dram: {capasity: 64MiB}}", "tiers.dram.capasity: unknown key", False),
        (
            "tiers: {dram: {capacity: 64MiB}}\n"
            "access: {tls: {certificate: /no/c, key: /no/k, client_ca: /no/a}}",
            "access.tls.certificate: ",
            True,
        ),
        (
            "tiers: {dram: {capacity: 64MiB}, nvme: {capacity: 1GiB, segment: 64MiB, path: /dev/null}}",
            "tiers.nvme.path: /dev/null is no directory",
            True,
        ),
    ],
    ids=["key", "file", "host"],
)
def test_settings_that_are_refused_cost_no_memory(
    wrong: str, words: str, needs_restart: bool, tmp_path: Path
) -> None:
    """Before: a restart, or a crash, with a mistake in the file ended the supervisor, and memory with it."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(right := "tiers: {dram: {capacity: 64MiB}}")
    with Daemon(tmp_path, policy, settings=("observe.http=off",)) as daemon:
        store(daemon)
        policy.write_text(wrong)
        if needs_restart:
            tried = command("policy", "apply", "--dry-run", "--target", daemon.target)
            assert "these need a restart" in tried.stderr
            assert words in tried.stderr
        before, asked = daemon.pid, restart(daemon)
        assert (asked.returncode, daemon.pid) == (2, before)
        assert "BAD_POLICY: " in asked.stderr
        assert words in asked.stderr
        assert found(daemon) == NUM_BLOCKS
        os.kill(before, signal.SIGKILL)
        daemon.wait_for_log("(exit code 2); what memory holds is kept")
        policy.write_text(right)
        os.kill(daemon.session, signal.SIGHUP)  # or in a few seconds
        assert found(daemon) == NUM_BLOCKS
        assert daemon.stop() == 0


def serves(target: str) -> bool:
    """Whether a daemon answers there."""
    with suppress(KvtierError), Client(target, timeout=PATIENT) as kv:
        kv.register(IDENTITY)
        return True
    return False


FAILING_PLANNER = """
from pathlib import Path

from kvtier.appliance.core.planner import Planner

handle, flag = Planner.handle, Path(__file__).parent / "fails"

def fails_once(planner, event, now):
    if flag.exists():
        flag.unlink()
        raise AssertionError("the books do not balance")
    return handle(planner, event, now)

Planner.handle = fails_once
"""


def test_a_planner_that_fails_costs_no_memory(tmp_path: Path) -> None:
    """Before: it ended in order, which retracts all that memory holds."""
    (tmp_path / "sitecustomize.py").write_text(FAILING_PLANNER)
    sizes = ("tiers.dram.capacity=64MiB", "observe.http=off")
    with Daemon(tmp_path, settings=sizes, prefix=("env", f"PYTHONPATH={tmp_path}")) as daemon:
        store(daemon)
        before = daemon.pid
        (tmp_path / "fails").touch()
        with suppress(KvtierError):
            serves(daemon.target)
        until(lambda: daemon.pid not in (0, before))
        daemon.wait_for_log("exit code 70")
        assert found(daemon) == NUM_BLOCKS
        assert daemon.stop() == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_daemon_that_dies_is_replaced_without_a_reader_of_what_it_says(tmp_path: Path, stream: str) -> None:
    """Before: the supervisor ended in BrokenPipeError, or its next daemon did, and all memory with it."""
    reading, writing = os.pipe()
    target = f"unix://{tmp_path}/k.sock"
    sizes = ["--set", "tiers.dram.capacity=64MiB", "--set", "observe.http=off"]
    command = [sys.executable, "-m", "kvtier.appliance.cli", "serve", "--listen", target, *sizes]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: writing}
    supervisor = subprocess.Popen(command, stdout=streams["stdout"], stderr=streams["stderr"])
    os.close(writing)
    try:
        deadline_at, pause = time.monotonic() + START_S, threading.Event()
        while not (tmp_path / "k.sock.local").exists():
            assert supervisor.poll() is None
            assert time.monotonic() < deadline_at
            pause.wait(0.02)
        before = child_of(supervisor.pid)
        assert before
        os.close(reading)
        os.kill(before, signal.SIGKILL)
        deadline_at = time.monotonic() + START_S
        while child_of(supervisor.pid) in (0, before) or not serves(target):
            assert supervisor.poll() is None, "the supervisor ended"
            assert time.monotonic() < deadline_at
            pause.wait(0.005)
        supervisor.terminate()
        assert supervisor.wait(START_S) == 0
    finally:
        supervisor.kill()
        supervisor.wait()


def test_the_daemon_ends_with_its_supervisor_and_memory_with_both(running: Daemon) -> None:
    store(running)
    serving = running.pid
    running.stop(signal.SIGKILL)
    assert not is_alive(serving)
    running.start()
    with Client(running.target, timeout=PATIENT) as kv:
        ns = kv.register(IDENTITY)
        assert kv.lookup(ns, prefix_hashes(ns, TOKENS)).num_blocks == 0


def test_a_signal_to_end_drains_the_daemon_and_ends_both(running: Daemon) -> None:
    serving = running.pid
    assert running.stop(signal.SIGTERM) == 0
    assert not is_alive(serving)


def test_memory_stays_while_no_process_can_be_had() -> None:
    """Before: a fork that failed ended the supervisor, and all memory with it."""
    program = """
import errno, mmap, os, sys
from kvtier.appliance import supervisor

fork, failures = os.fork, [OSError(errno.EAGAIN, "no process left")] * 3

def failing():
    if failures:
        raise failures.pop()
    return fork()

os.fork, supervisor.FORK_RETRY_S = failing, 0.01
one = supervisor.Supervisor([])
memory = os.memfd_create("kept")
os.ftruncate(memory, 4096)
one.kept["dram 0"] = memory, mmap.mmap(memory, 4096)
one._become_daemon = lambda channel, parent: 40 + len(one.kept)
sys.exit(one.run())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 41, ended.stderr
    assert ended.stderr.count("cannot start a daemon (no process left)") == 3


@pytest.mark.parametrize(
    ("codes", "num_serving", "num_kept"),
    [
        ([75, 78, 2, 78, 78, 0], 1, 0),
        ([75, 78, 78, 78, 78, -9, 0], 1, 0),
        ([70, 70, 1, 70, 70, 0], 6, 1),
        ([70, 70, 70, 0], 4, 0),
    ],
)
def test_memory_is_given_up_when_no_daemon_can_go_on_with_it(
    tmp_path: Path, codes: list[int], num_serving: int, num_kept: int
) -> None:
    """It may be the reason: a machine is too small for what is kept and what a start takes beside it, or the
    planner fails of it. What had served is tried on and on: memory, or a disk that is full, may come back."""
    program = f"""
import mmap, os, sys
from pathlib import Path
from kvtier.appliance import supervisor

codes, number = {codes}, Path({str(tmp_path / "number")!r})

def daemon(channel, parent):
    at = int(number.read_text()) if number.exists() else 0
    number.write_text(str(at + 1))
    if at < {num_serving}:
        channel.send(b"ready")
        channel.recv(8)
    if not codes[at]:
        print(len(one.kept))
    if codes[at] < 0:
        os.kill(os.getpid(), -codes[at])
    return codes[at]

supervisor.REFUSED_RETRY_S = 0.01
one = supervisor.Supervisor([])
memory = os.memfd_create("kept")
os.ftruncate(memory, 4096)
one.kept["dram 0"] = memory, mmap.mmap(memory, 4096)
one._become_daemon = daemon
sys.exit(one.run())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, f"{num_kept}\n"), ended.stderr
