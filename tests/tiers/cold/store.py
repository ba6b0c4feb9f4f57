"""What the tests of the cold store share: fragments with a real namespace, a store with its room, and system
calls that fail, fall short, or lose what was not flushed."""

import errno
import hashlib
import mmap
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash

from kvtier.tiers.base import Buffer, Cause, CopyOutcome
from kvtier.tiers.block import FragmentLabel, Geometry, NamespaceIdentity
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.cold.opening import Durability
from kvtier.tiers.cold.recovery import RecoveredStore
from kvtier.tiers.encryption.master_keys import MasterKeys
from kvtier.v1.shm import PAGE_BYTES
from tests.records import rows_of

SEGMENT_BYTES = 256 << 10
NUM_SEGMENTS = 4
NAMESPACES = [
    NamespaceIdentity(bytes([i]) * 32, Geometry(4, 2, 64, 16, "float16"), shard=f"rank {i}") for i in range(3)
]


def aligned(num_bytes: int) -> memoryview:
    """Return fresh page-aligned memory of whole pages, at least `num_bytes`."""
    return memoryview(mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES))


def payload_of(number: int, length: int) -> bytes:
    """Return the bytes of fragment `number`."""
    return random.Random(number).randbytes(length)


def label_of(number: int, length: int, *, namespace: int = 0, group: int = 0) -> FragmentLabel:
    """Return the label of fragment `number`, hashed; every third one starts a chain."""
    parent = hashlib.sha256(b"parent %d" % number).digest() if number % 3 else b""
    return FragmentLabel(
        namespace_digest=NAMESPACES[namespace].digest,
        namespace_id=namespace + 1,
        prefix_hash=hashlib.sha256(b"block %d" % number).digest(),
        parent_hash=parent,
        position=number,
        group=group,
        raw_length=length,
        checksum=xxhash.xxh3_128_digest(payload_of(number, length)),
    )


def in_slot(data: bytes, *, shift: int = 0) -> memoryview:
    """Return `data` in page-aligned memory, or `shift` bytes off."""
    view = aligned(len(data) + shift)[shift : shift + len(data)]
    view[:] = data
    return view


@dataclass
class Cold:
    """A cold store, its room, and everything accepted so far: place -> (label, payload)."""

    store: ColdStore
    room: SegmentLog
    recovered: RecoveredStore
    accepted: dict[int, tuple[FragmentLabel, bytes]] = field(default_factory=dict)

    def put(self, numbers: Sequence[int], length: int = 9000, *, namespace: int = 0) -> list[CopyOutcome]:
        """Write fragments `numbers` in one batch; remember those that were accepted."""
        self.store.store_namespace(NAMESPACES[namespace])
        items = []
        for number in numbers:
            place = self.room.reserve(0, length)
            assert place is not None
            label = label_of(number, length, namespace=namespace)
            items.append((place, label, in_slot(payload_of(number, length))))
        outcomes = self.store.write_batch(items)
        for (place, label, payload), outcome in zip(items, outcomes, strict=True):
            self.room.settle(place)
            if outcome.cause is None:
                self.accepted[place] = (label, bytes(payload))
            else:
                self.room.release(place, length)
        return outcomes

    def seal(self) -> list[bool]:
        """Close the open segment and seal what can be."""
        self.room.close_open_segments()
        return [self.store.seal(number) for number in self.room.take_segments_to_seal()]

    def free(self, number: int) -> None:
        """Reclaim a sealed segment whole."""
        for place in [place for place in self.accepted if place >> 32 == number]:
            self.room.release(place, self.accepted.pop(place)[0].raw_length)
        self.room.begin_reclaim(number)
        self.store.free(number)
        self.room.finish_reclaim(number)

    def get(self, place: int, label: FragmentLabel) -> bytes | Cause:
        """Read one fragment into a slot: its bytes, or why not."""
        into = aligned(label.raw_length)
        outcome = self.store.read_batch([(place, label, into)])[0]
        return outcome.cause or bytes(into[: label.raw_length])

    def assert_readable(self, *, except_for: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Everything accepted reads back right, but for the places named, which read right or not at all."""
        for place, (label, payload) in self.accepted.items():
            found = self.get(place, label)
            assert found == payload or (place in except_for and isinstance(found, Cause)), f"place {place:#x}"


@contextmanager
def cold(
    directory: Path,
    durability: Durability = "none",
    *,
    num_segments: int = NUM_SEGMENTS,
    segment_bytes: int = SEGMENT_BYTES,
    master_key: bytes | tuple[bytes, ...] | None = None,
    io: DirectIo | None = None,
) -> Iterator[Cold]:
    """Open and recover a store, its room adopting what was found; audit both at the end. Of several master
    keys the first is in force."""
    keys = (master_key,) if isinstance(master_key, bytes) else master_key
    masters = MasterKeys(*keys) if keys else None
    store = ColdStore.open(directory, segment_bytes, num_segments, durability, master_keys=masters, io=io)
    try:
        opened = adopt(store, num_segments)
        yield opened
        assert store.check_integrity() == []
        assert opened.room.check_integrity() == []
    finally:
        store.close()


def adopt(store: ColdStore, num_segments: int = NUM_SEGMENTS) -> Cold:
    """Recover `store` and make its room agree."""
    recovered = store.recover()
    room = SegmentLog(num_segments, store.segment_bytes, store.footer_bytes)
    for segment in recovered.segments:
        room.adopt(segment.number, segment.next_page, segment.num_live, segment.live_bytes)
    for number in recovered.unreadable:
        room.keep_out(number)
    assert room.check_integrity() == []
    return Cold(store, room, recovered)


def labels_of(
    recovered: RecoveredStore, namespaces: Sequence[NamespaceIdentity] = NAMESPACES
) -> dict[int, FragmentLabel]:
    """Return what was recovered as place -> label, namespace_id as this module numbers them."""
    ids = {identity.digest: index + 1 for index, identity in enumerate(namespaces)}
    labels = {}
    for record in rows_of(recovered):
        digest = recovered.namespaces[record["namespace_index"]].digest
        labels[int(record["place"])] = FragmentLabel(
            digest,
            ids[digest],
            record["prefix_hash"].tobytes(),
            record["parent_hash"].tobytes() if record["has_parent"] else b"",
            int(record["position"]),
            int(record["group"]),
            int(record["raw_length"]),
            record["checksum"].tobytes(),
            int(record["codec"]),
            int(record["stored_length"]) if record["codec"] else 0,
        )
    return labels


def flip(path: Path, offset: int) -> None:
    """Invert one byte of a file, if it is that long."""
    if path.stat().st_size <= offset:
        return
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0xFF]))
        file.flush()
        os.fsync(file.fileno())


class FaultyIo(DirectIo):
    """System calls of which chosen ones fail. `calls` lists what was asked for, in order.

    `fault(kind, number)` is asked before every call with its kind (open, read-only open, allocate, read,
    write, sync) and its number among all calls; it may raise OSError, or return a number of bytes to fall
    short at.
    """

    def __init__(self, fault: Callable[[str, int], int | None] = lambda kind, number: None) -> None:
        self.fault = fault
        self.calls: list[str] = []

    def open(self, path: Path, *, direct: bool = True) -> int:
        self._ask("open")
        return super().open(path, direct=direct)

    def open_to_read(self, path: Path) -> int:
        self._ask("read-only open")
        return super().open_to_read(path)

    def allocate(self, fd: int, num_bytes: int) -> None:
        self._ask("allocate")
        super().allocate(fd, num_bytes)

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        limit = self._ask("read")
        num_read = super().read(fd, buffers, offset)
        return num_read if limit is None else min(limit, num_read)

    def write(self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False) -> int:
        limit = self._ask("durable write" if durable else "write")
        if limit is None:
            return super().write(fd, buffers, offset, durable=durable)
        return super().write(fd, [_cut(buffers, limit)], offset) if limit else 0

    def sync(self, fd: int) -> None:
        self._ask("sync")
        super().sync(fd)

    def _ask(self, kind: str) -> int | None:
        self.calls.append(kind)
        return self.fault(kind, len(self.calls) - 1)


def _cut(buffers: Sequence[Buffer | bytes], limit: int) -> memoryview:
    """Return the first `limit` bytes of `buffers`, in aligned memory when they are whole pages."""
    data = b"".join(bytes(buffer) for buffer in buffers)[:limit]
    view = aligned(len(data))[: len(data)]
    view[:] = data
    return view


def failing(kind: str, code: int = errno.EIO, *, after: int = 0) -> Callable[[str, int], int | None]:
    """Return a fault: calls of `kind` fail, from the `after`-th on."""
    seen = iter(range(1 << 30))

    def fault(asked: str, number: int) -> int | None:
        if asked.endswith(kind) and next(seen) >= after:
            raise OSError(code, os.strerror(code))
        return None

    return fault


class VolatileIo(DirectIo):
    """A device with a cache that loses power: `cut_power` undoes, sector by sector and by the dice, what was
    written since the last flush."""

    SECTOR_BYTES = 512

    def __init__(self) -> None:
        self._unflushed: dict[int, list[tuple[int, bytes]]] = {}  # by file: offset, what was there before

    def write(self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False) -> int:
        if not durable:
            length = sum(len(buffer) for buffer in buffers)
            before = _read_plain(fd, offset, length)
            self._unflushed.setdefault(fd, []).append((offset, before))
        return super().write(fd, buffers, offset, durable=durable)

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self._unflushed.pop(fd, None)

    def cut_power(self, dice: random.Random, kept: float) -> None:
        """Lose each unflushed sector unless a die says `kept`. The files must still be open."""
        for fd, writes in self._unflushed.items():
            with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
                for offset, before in reversed(writes):
                    for start in range(0, len(before), self.SECTOR_BYTES):
                        if dice.random() >= kept:
                            os.pwrite(
                                file.fileno(), before[start : start + self.SECTOR_BYTES], offset + start
                            )
                os.fsync(file.fileno())
        self._unflushed.clear()


def _read_plain(fd: int, offset: int, length: int) -> bytes:
    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as file:
        return os.pread(file.fileno(), length, offset).ljust(length, b"\0")


def without_checksum(label: FragmentLabel) -> FragmentLabel:
    """Return the label as it is before the put hashed the payload."""
    return replace(label, checksum=b"")


def address_of(view: Buffer) -> int:
    """Return where `view` lies."""
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
