"""What a pool's failures are for its caller: misses and StoreErrors in time, and it comes back by itself."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.mooncake_pool import WAIT_S
from kvtier.sources.objects.opening import open_store
from kvtier.sources.objects.pool import PART_BYTES, MooncakePool
from kvtier.sources.objects.problems import StoreError, StoreProblem
from kvtier.sources.objects.store import ObjectStore, StoreLimits

from ..waiting import until
from .running import Pool

#: One hung call takes a second; a start may take long on a busy machine.
LIMITS = StoreLimits(connect_s=1.0, idle_s=1.0, request_s=60.0, num_retries=0, retry_s=0.0)
DATA = os.urandom(2 * PART_BYTES + 12345)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """A pool of one host."""
    with Pool(tmp_path) as running:
        yield running


@pytest.fixture
def store(pool: Pool) -> ObjectStore:
    """That pool with one object of three parts."""
    opened = open_store(f"mooncake://{pool.address}/p", limits=LIMITS)
    opened.check_bucket()
    assert opened.create("v1/b/x", memoryview(DATA))
    return opened


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returns, or the problem that it raises."""
    try:
        return call()
    except StoreError as error:
        return error.problem


def is_back(store: ObjectStore, name: str) -> bool:
    """Return whether a store takes and returns an object."""
    data = memoryview(name.encode() * 1000)
    if outcome(store.check_bucket) is not None or outcome(lambda: store.create(name, data)) is not True:
        return False
    return b"".join(map(bytes, store.stream(name, 0, 1 << 20))) == data


def whole(store: ObjectStore, key: str = "v1/b/x") -> bytes:
    """Return what comes of an object."""
    return b"".join(bytes(chunk) for chunk in store.stream(key, 0, 1 << 30))


def client_of(store: ObjectStore) -> int:
    """Return the process that holds Mooncake's client."""
    assert isinstance(store, MooncakePool)
    assert store._process is not None
    return store._process._process.pid


def test_a_stopped_master_is_unreachable_in_time_and_comes_back(pool: Pool, store: ObjectStore) -> None:
    pool.master.send_signal(signal.SIGSTOP)
    try:
        until(lambda: outcome(store.check_bucket) is StoreProblem.UNREACHABLE)
        for call in (lambda: whole(store), lambda: store.create("v1/b/y", memoryview(b"y"))):
            assert outcome(call) is StoreProblem.UNREACHABLE
    finally:
        pool.master.send_signal(signal.SIGCONT)
    until(lambda: is_back(store, f"v1/b/{time.monotonic_ns()}"))
    assert whole(store) == DATA


def test_a_killed_master_is_unreachable_and_another_one_knows_nothing(pool: Pool, store: ObjectStore) -> None:
    pool.master.kill()
    until(lambda: outcome(store.check_bucket) is StoreProblem.UNREACHABLE)
    pool.restart_master()
    until(lambda: is_back(store, f"v1/b/{time.monotonic_ns()}"))
    assert whole(store) == b""


def test_what_a_killed_host_held_is_missing(pool: Pool, store: ObjectStore) -> None:
    pool.lenders[0].kill()
    pool.lenders[0].wait(60)
    assert whole(store) == b""
    assert store.read("v1/b/x", [(0, memoryview(bytearray(100)))]) is False
    pool.lend()
    until(lambda: is_back(store, f"v1/b/{time.monotonic_ns()}"))


def test_a_stopped_host_costs_the_call_and_not_the_others(pool: Pool, store: ObjectStore) -> None:
    """The native call hangs for 30 s: its lane is given up, and the client goes on."""
    client = client_of(store)
    pool.lenders[0].send_signal(signal.SIGSTOP)
    try:
        assert outcome(lambda: whole(store)) in (StoreProblem.UNREACHABLE, b"")
        pool.lend()
        until(lambda: is_back(store, f"v1/b/{time.monotonic_ns()}"))
    finally:
        pool.lenders[0].send_signal(signal.SIGCONT)
    assert client_of(store) == client
    assert whole(store) in (DATA, b"")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_client_that_crashes_is_started_again_by_the_next_look(store: ObjectStore, number: int) -> None:
    client = client_of(store)
    os.kill(client, number)
    assert outcome(lambda: whole(store)) is StoreProblem.UNREACHABLE
    until(lambda: outcome(store.check_bucket) is None)
    assert client_of(store) != client
    assert whole(store) == DATA


def test_a_client_that_hangs_is_given_up_and_started_again(store: ObjectStore) -> None:
    client = client_of(store)
    os.kill(client, signal.SIGSTOP)
    until(lambda: outcome(store.check_bucket) is None)
    assert client_of(store) != client
    assert whole(store) == DATA


def test_a_full_pool_evicts_what_is_then_missing(pool: Pool, store: ObjectStore) -> None:
    num_stored = 0
    outcomes = []
    for number in range(200):
        outcomes.append(outcome(lambda: store.create(f"v1/b/{number}", memoryview(DATA))))  # noqa: B023
        num_stored += outcomes[-1] is True
    assert set(outcomes) == {True, StoreProblem.FULL}
    found = [whole(store, f"v1/b/{number}") for number in range(200)]
    assert set(found) <= {DATA, b""}
    assert found.count(DATA) <= num_stored < 200


def test_the_client_ends_with_its_store(pool: Pool) -> None:
    opened = open_store(f"mooncake://{pool.address}", limits=LIMITS)
    opened.check_bucket()
    client = client_of(opened)
    del opened
    with pytest.raises(ProcessLookupError):
        os.kill(client, 0)


def test_no_master_is_unreachable(tmp_path: Path) -> None:
    with Pool(tmp_path, num_lenders=0) as pool:
        address = pool.address
    closed = open_store(f"mooncake://{address}", limits=LIMITS)
    assert outcome(closed.check_bucket) is StoreProblem.UNREACHABLE


def test_nothing_secret_reaches_the_client(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "private")
    store = open_store(f"mooncake://{pool.address}", limits=LIMITS)
    store.check_bucket()
    environment = Path(f"/proc/{client_of(store)}/environ").read_bytes().split(b"\0")
    names = {one.partition(b"=")[0] for one in environment}
    assert b"PATH" in names
    assert not {name for name in names if name.startswith((b"AWS_", b"KVTIER_", b"AZURE_", b"GOOGLE_"))}


def test_what_is_abandoned_ends_at_once(pool: Pool, store: ObjectStore) -> None:
    pool.master.send_signal(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as threads:
            late = threads.submit(outcome, lambda: store.create("v1/b/y", memoryview(DATA)))
            store.abandon()
            assert late.result(WAIT_S) in (StoreProblem.UNREACHABLE, StoreProblem.FAILED)
        assert outcome(lambda: store.create("v1/b/z", memoryview(DATA))) is StoreProblem.FAILED
    finally:
        pool.master.send_signal(signal.SIGCONT)
