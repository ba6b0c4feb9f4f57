"""From nvme straight into hbm: a real cold store on disk, the fake device with its kernels on the host.
Whatever goes wrong on the way, what is readable in the end is what was put."""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity, Tier
from kvtier.tiers.codecs.base import shape_of
from kvtier.tiers.codecs.lossy.profile import Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.tiers.gpu.decode.cold_edge import ColdCopier
from kvtier.tiers.gpu.decode.cold_trial import quicker_codecs
from kvtier.tiers.gpu.decode.decoding import load_decoding
from kvtier.tiers.gpu.decode.gds import Records
from kvtier.tiers.gpu.device.contract import CopyPieces, DeviceError, DeviceFault, DeviceMemory
from kvtier.tiers.gpu.device.flights import NOTHING, Flight, TouchedPlaces
from kvtier.tiers.gpu.hbm import HbmEngine
from kvtier.tiers.memory.slots import SlotPool
from kvtier.v1.shm import PAGE_BYTES
from tests.contracts.kv_values import values_like_kv
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.cold.store import Cold, cold, flip, in_slot

from .host_kernels import on_host

GEOMETRY = Geometry(4, 2, 64, 16, "bfloat16")
PROFILE = Profile(b"m" * 32, 4, 2, 64, 2, "bfloat16", uniform_rules(4, 2, 2, "int", 4))
PLAIN = NamespaceIdentity(b"e" * 32, GEOMETRY)
PROFILED = NamespaceIdentity(b"m" * 32, GEOMETRY, profile_digest=PROFILE.digest)
SHAPE = shape_of(GEOMETRY, 0)
CHUNK_BYTES = 256 << 10
WAIT_S = 30.0
KINDS = ["exponents", "profiled", "identity", "planes"]


class Rig:
    """A cold store, hbm, and the edge between them."""

    def __init__(self, opened: Cold, device: FakeDevice, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.cold, self.device = opened, device
        self.room = SlotPool(2, 2 << 20)
        self.engine = HbmEngine(device, self.room)
        self.enqueuer, self.readers = ThreadPoolExecutor(1), ThreadPoolExecutor(2)
        decoding = load_decoding(device)
        assert decoding is not None
        threads = self.enqueuer, self.readers
        self.copier = ColdCopier(self.engine, opened.store, *threads, decoding, chunk_bytes, 2)
        for identity in (PLAIN, PROFILED):
            opened.store.store_namespace(identity)
        opened.store.codecs.adopt({PROFILE.digest: PROFILE})
        self.wanted: dict[int, bytes] = {}  # by place in the cold store

    def put(self, number: int, kind: str) -> CopyItem:
        """Store fragment `number`; return the item that brings it into hbm."""
        identity = PROFILED if kind == "profiled" else PLAIN
        codec = Profiled(PROFILE) if kind == "profiled" else codec_named(kind)
        payload = values_like_kv(SHAPE, seed=number).tobytes()
        label = FragmentLabel(
            namespace_digest=identity.digest,
            namespace_id=1,
            prefix_hash=hashlib.sha256(b"cold %d" % number).digest(),
            parent_hash=b"",
            position=number,
            group=0,
            raw_length=len(payload),
            checksum=xxhash.xxh3_128_digest(payload),
            codec_id=codec.codec_id,
            stored_length=codec.stored_bound(SHAPE) if codec.codec_id else 0,
        )
        place = self.cold.room.reserve(0, label.stored_length or label.raw_length)
        target = self.room.reserve(0, label.raw_length)
        assert place is not None
        assert target is not None
        outcome = self.cold.store.write_batch([(place, label, in_slot(payload))])[0]
        assert outcome.cause is None
        self.cold.room.settle(place)
        found = self.cold.get(place, label)
        assert isinstance(found, bytes)
        self.wanted[place] = found
        return CopyItem(place, target, label)

    def load(self, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        """Bring items into hbm; compare every byte of what is said to be there."""
        outcomes = self.copier.start(items).result(WAIT_S)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome.cause is None:
                there = self.device.peek(
                    int(self.engine.addresses_of([item.target])[0]), item.label.raw_length
                )
                assert there == self.wanted[item.source]
                assert outcome.checksum == xxhash.xxh3_128_digest(there)
        assert self.engine.flights.num_open == 0
        return outcomes

    def peek(self, item: CopyItem) -> bytes:
        """Return what is in the slot of an item now."""
        start = int(self.engine.addresses_of([item.target])[0])
        return self.device.peek(start, item.label.raw_length)

    def damage(self, item: CopyItem) -> None:
        """Invert a byte in the middle of a record's payload."""
        path = segment_path(self.cold.store.directory, item.source >> 32)
        flip(path, (item.source & 0xFFFFFFFF) * PAGE_BYTES + PAGE_BYTES + 1000)

    def count(self) -> dict[str, int]:
        return dict(self.copier.counters)

    def close(self) -> None:
        self.engine.close()
        self.enqueuer.shutdown()
        self.readers.shutdown()
        assert self.device.check_integrity() == self.device.left_behind == []


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with cold(tmp_path, num_segments=8) as opened:
        made = Rig(opened, FakeDevice(is_live=True, compiler=on_host, seed=3))
        yield made
        made.close()


def causes(outcomes: Sequence[CopyOutcome]) -> list[Cause | None]:
    return [outcome.cause for outcome in outcomes]


def test_every_kind_of_record_comes_up(rig: Rig) -> None:
    """The device decodes two of the codecs, the host the other; what is stored as it is needs neither."""
    items = [rig.put(number, KINDS[number % 4]) for number in range(12)]
    assert causes(rig.load(items)) == [None] * 12
    assert rig.count() == {"on_device": 6, "as_they_are": 3, "on_host": 3}


def test_many_batches_side_by_side(rig: Rig) -> None:
    items = [rig.put(number, KINDS[number % 3]) for number in range(24)]
    futures = [rig.copier.start(items[first : first + 3]) for first in range(0, 24, 3)]
    assert [outcome.cause for future in futures for outcome in future.result(WAIT_S)] == [None] * 24
    for item in items:
        there = rig.peek(item)
        assert there == rig.wanted[item.source]


@pytest.mark.parametrize("kind", ["exponents", "profiled", "identity"])
def test_a_damaged_record_is_a_miss_and_its_neighbours_are_not(rig: Rig, kind: str) -> None:
    items = [rig.put(number, kind) for number in range(3)]
    rig.damage(items[1])
    assert causes(rig.load(items)) == [None, Cause.WRONG_CHECKSUM, None]
    assert "device_faults" not in rig.count()


# Which argument of a kernel says where what it decodes goes.
RAW_OF = {"kvtier_exponents_decode": 7, "kvtier_quantised_decode": 9, "kvtier_float8_decode": 10}


class Faulty:
    """A compiler whose kernels make a mistake: one value of what they decode is another one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_broken = True

    def __call__(self, source: str, names: Sequence[str]) -> Any:
        kernels = on_host(source, names)

        def launch(stream: Any, name: str, num_threads: int, arguments: Sequence[Any]) -> None:
            kernels(stream, name, num_threads, arguments)
            if self.is_broken and name == self.name:
                stream.call(lambda: self._spoil(stream.device, arguments))

        return launch

    def _spoil(self, device: FakeDevice, arguments: Sequence[Any]) -> None:
        raw = int(arguments[RAW_OF[self.name]])
        first = int.from_bytes(device.peek(raw, 8), "little")
        device.poke(first, bytes([device.peek(first, 1)[0] ^ 1]))


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("exponents", "kvtier_exponents_decode"), ("profiled", "kvtier_quantised_decode")],
)
def test_a_kernel_that_errs_costs_time_and_no_record(tmp_path: Path, kind: str, kernel: str) -> None:
    with cold(tmp_path, num_segments=8) as opened:
        rig = Rig(opened, FakeDevice(is_live=True, compiler=Faulty(kernel)))
        items = [rig.put(number, kind) for number in range(3)]
        assert causes(rig.load(items)) == [None] * 3
        assert rig.count() == {"on_device": 2, "on_host": 1, "device_faults": 1}
        assert causes(rig.load(items)) == [None] * 3
        assert rig.count() == {"on_device": 2, "on_host": 4, "device_faults": 1}, (
            "nothing more is decoded there"
        )
        rig.close()


def test_what_is_larger_than_a_chunk_and_what_finds_none(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        rig = Rig(opened, FakeDevice(is_live=True, compiler=on_host), chunk_bytes=8 * PAGE_BYTES)
        items = [rig.put(0, "identity"), rig.put(1, "profiled")]  # nine pages and three
        assert causes(rig.load(items)) == [None, None]
        assert rig.count() == {"on_host": 1, "on_device": 1}
        taken = [rig.copier.chunks.take() for _ in range(2)]
        assert causes(rig.load(items)) == [None, None]
        assert rig.count() == {"on_host": 3, "on_device": 1}
        for chunk in taken:
            assert chunk is not None
            rig.copier.chunks.give(chunk)
        rig.close()


def test_a_lost_device_is_a_miss_and_the_record_stays(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        device = FakeDevice(compiler=on_host)  # stands still: the copy is under way when it is lost
        rig = Rig(opened, device)
        items = [rig.put(number, "exponents") for number in range(2)]
        future = rig.copier.start(items)
        while rig.engine.flights.num_open == 0:
            pass
        device.lose("fell off the bus")
        device.run()
        assert causes(future.result(WAIT_S)) == [Cause.TIER_OFFLINE] * 2
        assert causes(rig.copier.start(items).result(WAIT_S)) == [Cause.TIER_OFFLINE] * 2
        assert all(opened.get(item.source, item.label) == rig.wanted[item.source] for item in items)
        rig.engine.close()
        rig.enqueuer.shutdown()
        rig.readers.shutdown()


def test_a_slot_that_is_still_read_is_not_written(tmp_path: Path) -> None:
    """Its reader is on another stream: the device is told to wait, under every schedule."""
    with cold(tmp_path) as opened:
        device = FakeDevice(compiler=on_host, seed=5)
        rig = Rig(opened, device)
        item = rig.put(0, "identity")
        slot, elsewhere = (
            int(rig.engine.addresses_of([item.target])[0]),
            device.allocate(item.label.raw_length),
        )
        stream = device.take_stream()
        event = stream.record()
        reader = Flight(stream, event, TouchedPlaces(Tier.HBM, [item.target]), NOTHING)
        rig.engine.flights.begin(reader)
        columns = ([slot], [elsewhere.address], [item.label.raw_length])
        stream.copy(
            CopyPieces(*(np.array(column, kind) for column, kind in zip(columns, "QQq", strict=True)))
        )
        stream.record(event)
        device.when_done(event, lambda _: rig.engine.flights.end(reader))
        future = rig.copier.start([item])
        while not future.done():
            device.run()
        assert causes(future.result()) == [None]
        assert device.check_integrity() == []
        device.give_stream(stream)
        device.free(elsewhere)
        device.recycle(event)
        rig.close()


# -------------------------------------------------------------------------------------- GPUDirect Storage


class FakeDisk:
    """A disk that writes into a fake device's memory; `reader` opens a file of it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.num_opened = 0
        self.is_broken = False

    def reader(self, path: Path) -> "FakeFile":
        self.num_opened += 1
        return FakeFile(self, path)


class FakeFile:
    """Implements FileReader."""

    def __init__(self, disk: FakeDisk, path: Path) -> None:
        self.disk, self.path = disk, path

    def read(self, offset: int, memory: DeviceMemory) -> None:
        if self.disk.is_broken:
            raise DeviceError(DeviceFault.REFUSED, "cuFile: not today")
        with self.path.open("rb") as file:
            file.seek(offset)
            self.disk.device.poke(memory.address, file.read(memory.num_bytes))

    def close(self) -> None:
        pass


@pytest.fixture
def disk(rig: Rig) -> FakeDisk:
    made = FakeDisk(rig.device)
    rig.copier.direct = Records(rig.cold.store.whereabouts, made.reader)
    return made


def test_records_by_gpudirect_storage(rig: Rig, disk: FakeDisk) -> None:
    items = [rig.put(number, KINDS[number % 3]) for number in range(9)]
    assert causes(rig.load(items)) == [None] * 9
    assert rig.count() == {"direct_reads": 9, "on_device": 6, "as_they_are": 3}
    assert disk.num_opened == len({item.source >> 32 for item in items}), "a file is opened once"


@pytest.mark.parametrize("kind", ["exponents", "profiled", "identity"])
def test_what_no_host_has_seen_is_not_believed(rig: Rig, disk: FakeDisk, kind: str) -> None:
    """A damaged payload, and a record that is another one by now."""
    items = [rig.put(number, kind) for number in range(4)]
    rig.damage(items[1])
    other = CopyItem(items[3].source, items[2].target, items[2].label)
    assert causes(rig.load([items[0], items[1], other])) == [
        None,
        Cause.WRONG_CHECKSUM,
        Cause.WRONG_IDENTITY,
    ]
    assert "device_faults" not in rig.count()


def test_a_disk_that_refuses_is_asked_once(rig: Rig, disk: FakeDisk) -> None:
    disk.is_broken = True
    items = [rig.put(number, "exponents") for number in range(2)]
    assert causes(rig.load(items)) == causes(rig.load(items)) == [None, None]
    assert rig.count() == {"direct_reads_failed": 1, "on_device": 4}


def test_a_segment_that_was_freed_is_another_file(rig: Rig, disk: FakeDisk) -> None:
    item = rig.put(0, "identity")
    assert causes(rig.load([item])) == [None]
    rig.cold.accepted[item.source] = (item.label, rig.wanted[item.source])
    rig.cold.seal()
    rig.cold.free(item.source >> 32)
    assert causes(rig.load([item])) == [Cause.WRONG_IDENTITY]
    assert disk.num_opened == 2


# ------------------------------------------------------------------------------------------------ the trial


def test_the_trial_leaves_nothing_and_knows_only_what_it_tried(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        rig = Rig(opened, FakeDevice(is_live=True, compiler=on_host), chunk_bytes=2 << 20)
        disk = FakeDisk(rig.device)
        assert quicker_codecs(rig.copier, rig.readers, (tmp_path, disk.reader)) <= {0, 1, 5, 6}
        assert disk.num_opened == 1
        assert not [path for path in tmp_path.iterdir() if "trial" in path.name]
        assert causes(rig.load([rig.put(0, "exponents")])) == [None], "chunks and scratch were given back"
        rig.close()


@pytest.mark.parametrize(
    ("kernel", "codec_id"),
    [("kvtier_exponents_decode", 1), ("kvtier_quantised_decode", 5), ("kvtier_float8_decode", 6)],
)
def test_a_device_that_decodes_otherwise_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kernel: str, codec_id: int
) -> None:
    with cold(tmp_path) as opened:
        rig = Rig(opened, FakeDevice(is_live=True, compiler=Faulty(kernel)), chunk_bytes=2 << 20)
        assert codec_id not in quicker_codecs(rig.copier, rig.readers)
        assert f"codec {codec_id}: refused" in caplog.text
        rig.close()
