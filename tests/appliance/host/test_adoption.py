"""A daemon on memory that another one left, while its background verification gets no processor."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvtier.appliance.config import Settings
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.planner import Planner
from kvtier.appliance.core.requests.erasing import Erasing
from kvtier.appliance.host import adoption
from kvtier.appliance.supervisor import Supervisor
from kvtier.clients import Client, Geometry, Namespace, NamespaceIdentity, prefix_hashes
from kvtier.clients.errors import KvtierError
from kvtier.tiers.block import Tier
from kvtier.tiers.memory import extent, memfd
from kvtier.tiers.memory import keeper as keeper_module
from kvtier.tiers.memory.keeper import Keeper
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1.admin_pb2_grpc import AdminServiceStub

from ...daemon import PATIENT
from ..loops import DaemonThread

GEOMETRY = Geometry(
    num_layers=4, num_kv_heads=2, head_dim=64, block_tokens=16, dtype="float16", layers_per_group=2
)
IDENTITY = NamespaceIdentity(bytes(range(32)), GEOMETRY)
SMALL = Geometry(1, 1, 64, 16, "float16")
NUM_EXTENTS, EXTENT_BYTES = 8, 2 << 20
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


def settings_in(folder: Path, **sections: Any) -> Settings:
    return Settings.model_validate(
        {
            "listen": [f"unix://{folder}/k.sock"],
            "tiers": {"dram": {"capacity": NUM_EXTENTS * EXTENT_BYTES, "extent": EXTENT_BYTES}},
            "observe": {"http": "off"},
            **sections,
        }
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a daemon with memory only."""
    return settings_in(tmp_path)


def put_all(address: str, identity: NamespaceIdentity = IDENTITY) -> None:
    """Put NUM_BLOCKS blocks."""
    with Client(address, timeout=PATIENT) as kv:
        ns = kv.register(identity)
        assert kv.put(ns, prefix_hashes(ns, TOKENS), DATA).num_stored == NUM_BLOCKS


@contextmanager
def memory_left(
    settings: Settings, *identities: NamespaceIdentity, before: Callable[[], None] = lambda: None
) -> Iterator[Holder]:
    """The memory that a daemon has left: NUM_BLOCKS blocks of each of these namespaces."""
    before()
    holder = Holder()
    keeper = holder.keeper()
    with DaemonThread(settings, keeper=keeper) as served:
        for identity in identities:
            put_all(settings.listen[0], identity)
        keeper.is_handing_over = True
    assert served.daemon.assembly.dram.inherited == []
    try:
        yield holder
    finally:
        holder.close()


@pytest.fixture
def left(settings: Settings) -> Iterator[tuple[Settings, Holder]]:
    """Settings of a daemon, and the memory that one with them has left: NUM_BLOCKS blocks."""
    with memory_left(settings, IDENTITY) as holder:
        yield settings, holder


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


def forgetting(monkeypatch: pytest.MonkeyPatch, identity: NamespaceIdentity) -> None:
    """Let the planner not know a namespace when headers that name it were read."""
    read = adoption.Adoption._read_headers

    async def without(self: adoption.Adoption, viewed: Set[tuple[Tier, int]]) -> Any:
        planner = self._appliance.planner
        assert isinstance(planner, Planner)
        self._found.awaited.clear()
        numbers = [number for number, one in planner.identities().items() if one == identity]
        for number in numbers:
            planner.requests.forget(planner.catalog.namespaces[number])
        return await read(self, viewed)

    monkeypatch.setattr(adoption.Adoption, "_read_headers", without)


def all_verified(served: DaemonThread) -> None:
    """Wait until nothing is left to be verified."""
    served.wait(asyncio.wait_for(served.daemon.adoption.is_verified.wait(), PATIENT.call_s))


def put_zeros(kv: Client, ns: Namespace, token: int = 0) -> None:
    """Put one block of zeros: the rest of its extent stays as it was given."""
    data = np.zeros((1, ns.block_bytes), np.uint8)
    assert kv.put(ns, prefix_hashes(ns, [token] * 16), data).num_stored == 1


def register_until_refused(kv: Client) -> list[Namespace]:
    """Register namespaces with a block in each until three more were refused."""
    spaces: list[Namespace] = []
    num_refused = 0
    for number in range(2 * PlannerOptions().max_namespaces):
        try:
            spaces.append(ns := kv.register(NamespaceIdentity(number.to_bytes(32), SMALL)))
        except KvtierError as refusal:
            if refusal.reason != "TOO_MANY_NAMESPACES":
                raise
            num_refused += 1
            if num_refused == 3:
                return spaces
            continue
        block = np.zeros((1, ns.block_bytes), np.uint8)
        assert kv.put(ns, prefix_hashes(ns, TOKENS[:16]), block).num_stored == 1
    raise AssertionError("never refused")


def memory_of(served: DaemonThread, domain: str) -> list["np.ndarray[Any, np.dtype[np.uint8]]"]:
    """Return the extents of dram that clients of an isolation domain may map."""
    engine, number = served.daemon.assembly.dram, served.daemon.planner.domain_number(domain)
    mine = [one for one in range(engine.num_extents) if engine.domain_of(engine.first_extent + one) == number]
    return [np.frombuffer(engine.data_of(one), np.uint8) for one in mine]


def test_an_extent_of_which_nothing_is_taken_is_given_back(
    left: tuple[Settings, Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: with its bytes to the next isolation domain that needed one."""
    settings, holder = left
    forgetting(monkeypatch, IDENTITY)
    with DaemonThread(settings, keeper=holder.keeper()) as served:
        all_verified(served)
        with Client(settings.listen[0], timeout=PATIENT, domain="other") as kv:
            for number in range(1, NUM_EXTENTS + 1):  # with slots of a size of its own, so in one of its own
                shape = Geometry(1, 1, 256 * number, 16, "float16")
                put_zeros(kv, kv.register(NamespaceIdentity(bytes(32), shape, domain="other")))
        extents = served.call(lambda: memory_of(served, "other"))
        assert len(extents) == NUM_EXTENTS
        assert not any(one.any() for one in extents)
        del extents


def test_fragments_that_are_not_taken_are_emptied(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: every later daemon found them again. The audit at the end sees one that is readable."""
    other = NamespaceIdentity(bytes(32), GEOMETRY)
    with memory_left(settings, IDENTITY, other) as holder:
        forgetting(monkeypatch, other)
        with (
            DaemonThread(settings, keeper=holder.keeper()) as served,
            Client(settings.listen[0], timeout=PATIENT) as kv,
        ):
            all_verified(served)
            for identity, num_blocks in ((IDENTITY, NUM_BLOCKS), (other, 0)):
                ns = kv.register(identity)
                assert kv.get(ns, prefix_hashes(ns, TOKENS)).num_blocks == num_blocks


def tenants(mine: str, other: str) -> dict[str, Any]:
    """Return two tenants, of which this user is one."""
    return {mine: {"members": [f"uid:{os.getuid()}"]}, other: {"members": ["uid:4242"]}}


def test_a_tenant_beyond_its_share_after_a_restart_takes_nothing_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: its registrations, refused, had the other's namespaces forgotten before memory was read.
    What it put next stood in the other's memory, which it could map."""
    # Memory that was not kept has room for all that the attacker puts before the headers are read.
    tiers = {"dram": {"capacity": 8 * NUM_EXTENTS * EXTENT_BYTES, "extent": EXTENT_BYTES}}
    attacked = settings_in(tmp_path, tenants=tenants("bolt", "acme"))
    attacker = settings_in(tmp_path, tenants=tenants("acme", "bolt"), tiers=tiers)
    is_open = threading.Event()
    read = adoption.Adoption._read_headers

    async def later(self: adoption.Adoption, viewed: Set[tuple[Tier, int]]) -> Any:
        await asyncio.to_thread(is_open.wait, PATIENT.call_s)
        return await read(self, viewed)

    monkeypatch.setattr(adoption.Adoption, "_read_headers", later)
    with memory_left(attacked, IDENTITY, before=is_open.set) as holder:
        is_open.clear()
        with (
            DaemonThread(attacker, keeper=holder.keeper()) as served,
            Client(attacker.listen[0], timeout=PATIENT) as kv,
        ):
            try:
                spaces = register_until_refused(kv)
            finally:
                is_open.set()
            all_verified(served)
            planner = served.daemon.planner
            (number,) = (n for n, one in planner.identities().items() if one.domain == "tenant:bolt")
            assert served.call(lambda: len(planner.catalog.namespaces[number].rows)) == NUM_BLOCKS
            put_zeros(kv, spaces[0], 99)
            extents = served.call(lambda: memory_of(served, "tenant:acme"))
            assert extents
            assert not any(one.any() for one in extents)
            del extents


def others_of_sizes(first_heads: int) -> list[NamespaceIdentity]:
    """Return five namespaces that each take extents of their own: their slots differ in size."""
    sizes = [Geometry(1, first_heads << power, 64, 16, "float16") for power in range(5)]
    return [NamespaceIdentity(bytes([number]) * 32, one) for number, one in enumerate(sizes)]


def extents_of(served: DaemonThread) -> list[int]:
    """The numbers of the extents of dram."""
    room = served.daemon.assembly.rooms[Tier.DRAM]
    assert isinstance(room, SlotPool)
    return room.extents()


@pytest.mark.parametrize("sizes", [(4,), (4, 8)])
def test_what_a_shrunk_tier_holds_is_found_by_the_next_daemon(
    settings: Settings, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Before: the next daemon looked for extents 0 to N-1 only, and gave the others back."""
    new = NamespaceIdentity(b"new" + bytes(29), Geometry(1, 256, 64, 16, "float16"))
    holder = Holder()
    keeper, address = holder.keeper(), settings.listen[0]
    sized = [settings_in(tmp_path, tiers=extents(num_extents)) for num_extents in sizes]
    with DaemonThread(settings, keeper=keeper) as served, Client(address, timeout=PATIENT) as kv:
        for identity in others_of_sizes(8):  # extents 0 to 4, one slot taken in each
            ns = kv.register(identity)
            kv.put(ns, prefix_hashes(ns, TOKENS[:16]), np.ones((1, ns.block_bytes), np.uint8))
        put_all(address)
        for one in sized:
            served.wait(served.daemon.reload.apply(one.to_yaml(), "sent.yaml"))
            served.wait(served.daemon.appliance.settled())
        numbers = extents_of(served)
        assert len(numbers) == sizes[-1]
        assert 5 in numbers
        ns = kv.register(new)
        kv.put(ns, prefix_hashes(ns, TOKENS[:16]), np.ones((1, ns.block_bytes), np.uint8))
        keeper.is_handing_over = True
    try:
        with DaemonThread(sized[-1], keeper=holder.keeper()) as served:
            with Client(address, timeout=PATIENT) as kv:
                ns = kv.register(IDENTITY)
                assert kv.get(ns, prefix_hashes(ns, TOKENS)).data.tobytes() == DATA.tobytes()
                ns = kv.register(new)
                assert kv.lookup(ns, prefix_hashes(ns, TOKENS[:16])).num_blocks == 1
            assert len(extents_of(served)) == sizes[-1]
    finally:
        holder.close()


def test_memory_that_is_kept_already_costs_no_descriptor() -> None:
    holder = Holder()
    keeper, memory = holder.keeper(), os.memfd_create("kept")
    try:
        os.ftruncate(memory, 4096)
        keeper.keep("dram 0", memory)
        num_open = len(os.listdir("/proc/self/fd"))
        keeper.keep("dram 0", memory)
        assert len(os.listdir("/proc/self/fd")) == num_open
    finally:
        os.close(memory)
        holder.close()


def extents(num_extents: int, **more: object) -> dict[str, object]:
    """Return the tiers of a daemon with so many extents."""
    return {"dram": {"capacity": num_extents * EXTENT_BYTES, "extent": EXTENT_BYTES, **more}}


@pytest.mark.parametrize(
    ("more", "num_found"), [({}, NUM_BLOCKS), ({"hugepages": "off"}, 0), ({"numa_nodes": [0]}, 0)]
)
def test_memory_of_other_pages_or_nodes_is_given_back(
    left: tuple[Settings, Holder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, object],
    num_found: int,
) -> None:
    """Before: it was taken over unbound, and the new nodes were reported; `on` refused to start."""
    settings, holder = left
    has_huge_pages = keeper_module.is_huge
    kept = {os.fstat(descriptor).st_ino for descriptor, _ in holder.kept.values()}

    def is_huge(descriptor: int) -> bool:
        return os.fstat(descriptor).st_ino in kept or has_huge_pages(descriptor)

    monkeypatch.setattr(extent, "is_huge", is_huge)
    monkeypatch.setattr(memfd, "bind", lambda mapping, nodes: None)
    sized = settings_in(tmp_path, tiers=extents(NUM_EXTENTS, **more))
    with (
        DaemonThread(sized, keeper=holder.keeper()) as served,
        Client(settings.listen[0], timeout=PATIENT) as kv,
    ):
        ns = kv.register(IDENTITY)
        assert kv.lookup(ns, prefix_hashes(ns, TOKENS)).num_blocks == num_found
        put_all(settings.listen[0], NamespaceIdentity(b"new" + bytes(29), GEOMETRY))
        assert ("MiB of kept memory are given back" in caplog.text) == (not num_found)
        assert bool(served.daemon.assembly.dram.inherited) == bool(num_found)
