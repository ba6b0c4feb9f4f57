"""A daemon on memory that another one left, while its background verification gets no processor."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.core.requests.erasing import Erasing
from kvtier.appliance.host import adoption
from kvtier.appliance.supervisor import Supervisor
from kvtier.clients import Client, Geometry, NamespaceIdentity, prefix_hashes
from kvtier.tiers.block import Tier
from kvtier.tiers.memory.keeper import Keeper
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub

from ...daemon import PATIENT
from ..loops import DaemonThread

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(bytes(range(32)), GEOMETRY)
NUM_BLOCKS = 12
TOKENS = list(range(NUM_BLOCKS * 16))
DATA = np.random.default_rng(5).integers(0, 256, (NUM_BLOCKS, GEOMETRY.block_bytes), np.uint8)


class Holder(Supervisor):
    """What a supervisor holds and answers, on a thread: it forks nothing here."""

    def __init__(self) -> None:
        self.kept = {}
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while self._answer(self._ours):
            pass

    def keeper(self) -> Keeper:
        """Return what the next daemon gets."""
        inherited, self.kept = self.kept, {}
        return Keeper(self._theirs, inherited)

    def close(self) -> None:
        self._theirs.close()
        self._thread.join()
        self._ours.close()
        for name in list(self.kept):
            self._drop(name)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Threads for the background that do other work until the event is set."""
    is_free = threading.Event()

    def make_busy_pool(num_threads: int, *arguments: Any, **named: Any) -> ThreadPoolExecutor:
        pool = ThreadPoolExecutor(num_threads)
        for _ in range(num_threads):
            pool.submit(is_free.wait)
        return pool

    monkeypatch.setattr(adoption, "make_pool", make_busy_pool)
    yield is_free
    is_free.set()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon with memory only."""
    return Settings.model_validate(
        {
            "listen": [f"unix://{tmp_path}/k.sock"],
            "tiers": {"dram": {"capacity": "16MiB", "extent": "2MiB"}},
            "observe": {"http": "off"},
        }
    )


def put_all(address: str) -> None:
    """Put NUM_BLOCKS blocks."""
    with Client(address, timeout=PATIENT) as kv:
        ns = kv.register(IDENTITY)
        assert kv.put(ns, prefix_hashes(ns, TOKENS), DATA).num_stored == NUM_BLOCKS


@pytest.fixture
def left(settings: Settings) -> Iterator[tuple[Settings, Holder]]:
    """Settings of a daemon, and the memory that one with them has left: NUM_BLOCKS blocks."""
    holder = Holder()
    keeper = holder.keeper()
    with DaemonThread(settings, keeper=keeper) as served:
        put_all(settings.listen[0])
        keeper.is_handing_over = True
    assert served.daemon.assembly.dram.inherited == []
    yield settings, holder
    holder.close()


def test_a_get_verifies_what_it_asks_for(left: tuple[Settings, Holder], busy: threading.Event) -> None:
    settings, holder = left
    with (
        DaemonThread(settings, keeper=holder.keeper()) as served,
        Client(settings.listen[0], timeout=PATIENT) as kv,
    ):
        found = served.daemon.planner.found_memory
        ns = kv.register(IDENTITY)
        hashes = prefix_hashes(ns, TOKENS)
        report = kv.get(ns, hashes[:5])
        assert report.num_blocks == 5
        assert report.data.tobytes() == DATA[:5].tobytes()
        assert served.call(lambda: len(found.unverified(ns.id, hashes))) == 2 * (NUM_BLOCKS - 5)
        assert kv.lookup(ns, hashes).num_blocks == NUM_BLOCKS
        assert served.call(lambda: found.unverified(ns.id, hashes)) == []


def test_a_damaged_block_is_a_miss_at_once_and_later(
    left: tuple[Settings, Holder], busy: threading.Event
) -> None:
    settings, holder = left
    for name, (_, mapping) in holder.kept.items():
        if Tier.DRAM.label in name and (at := mapping.find(DATA[3].tobytes()[:4096])) >= 0:
            mapping[at] ^= 1
            break
    else:
        pytest.fail("block 3 is nowhere")
    with (
        DaemonThread(settings, keeper=holder.keeper()) as served,
        Client(settings.listen[0], timeout=PATIENT) as kv,
    ):
        ns = kv.register(IDENTITY)
        hashes = prefix_hashes(ns, TOKENS)
        assert kv.get(ns, hashes).num_blocks == 3
        busy.set()
        served.wait(asyncio.wait_for(served.daemon.adoption.is_verified.wait(), PATIENT.call_s))
        report = kv.get(ns, hashes)
        assert report.data.tobytes() == DATA[:3].tobytes()
        assert kv.put(ns, hashes, DATA).num_stored == 1
        assert kv.get(ns, hashes).data.tobytes() == DATA.tobytes()


@pytest.mark.parametrize("is_erased", [False, True], ids=["control", "erased"])
def test_an_erasure_that_a_crash_cut_off_is_completed_by_the_next_daemon(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, *, is_erased: bool
) -> None:
    """Before: the next daemon served all that the former one had not come to."""
    holder = Holder()
    keeper = holder.keeper()
    address = settings.listen[0]
    with monkeypatch.context() as patch:
        patch.setattr(Erasing, "run", lambda self: None)  # as if the daemon died before the first block went
        with DaemonThread(settings, keeper=keeper) as served, grpc.insecure_channel(address) as channel:
            put_all(address)
            erasure = served.daemon.planner.erasing
            stub: Any = AdminServiceStub(channel)
            deadline_at = time.monotonic() + 60
            answer = stub.EraseTenant.future(pb.EraseTenantRequest(name="common:")) if is_erased else None
            while answer is not None and not served.call(erasure.namespaces):
                assert not answer.done(), answer
                assert time.monotonic() < deadline_at
                time.sleep(0.01)
            served.call(cancel_erasing)
            keeper.is_handing_over = True
    with DaemonThread(settings, keeper=holder.keeper()) as served, Client(address, timeout=PATIENT) as kv:
        book = served.daemon.assembly.book
        assert book is not None
        assert len(book.identities) == 1
        ns = kv.register(IDENTITY)
        hashes = prefix_hashes(ns, TOKENS)
        assert kv.lookup(ns, hashes).num_blocks == (0 if is_erased else NUM_BLOCKS)
        served.wait(served.daemon.adoption.is_verified.wait())
        assert kv.lookup(ns, hashes).num_blocks == (0 if is_erased else NUM_BLOCKS)
    holder.close()


def cancel_erasing() -> None:
    """End what waits for the answer of an erasure."""
    for task in asyncio.all_tasks():
        if "_erase" in repr(task.get_coro()):
            task.cancel()
