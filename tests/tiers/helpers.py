"""Fragments and engines that several tests need. Everything follows from small integers."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from kvtier.tiers.block import FragmentLabel, Tier
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool

EXTENT_BYTES = 2 << 20


def make_label(number: int, length: int, *, group: int = 0, namespace_id: int = 1) -> FragmentLabel:
    """Return the label, not hashed yet, of fragment `number`."""
    return FragmentLabel(
        namespace_digest=hashlib.sha256(b"namespace %d" % namespace_id).digest(),
        namespace_id=namespace_id,
        prefix_hash=hashlib.sha256(b"block %d" % number).digest(),
        parent_hash=b"",
        position=0,
        group=group,
        raw_length=length,
    )


def make_payload(number: int, length: int) -> memoryview:
    """Return the bytes of fragment `number`; different numbers differ almost everywhere."""
    return memoryview(random.Random(number).randbytes(length))


@contextmanager
def open_engine(
    num_extents: int = 1, extent_bytes: int = EXTENT_BYTES, *, first_extent: int = 0, tier: Tier = Tier.DRAM
) -> Iterator[tuple[ExtentEngine, SlotPool, Indexes]]:
    """Give an engine, its room and its indexes; audit all three at the end."""
    room = SlotPool(num_extents, extent_bytes)
    indexes = Indexes(num_extents * extent_bytes // (16 << 10), epoch=7)
    engine = ExtentEngine(room, indexes, tier=tier, first_extent=first_extent)
    try:
        yield engine, room, indexes
        assert engine.check_integrity() == []
        assert room.check_integrity() == []
        assert indexes.check_integrity() == []
    finally:
        engine.close()
        indexes.close()


def store(engine: ExtentEngine, room: SlotPool, label: FragmentLabel, number: int, domain: int = 0) -> int:
    """Reserve, write and publish fragment `number` under `label`; return its place."""
    place = room.reserve(domain, label.raw_length)
    assert place is not None
    checksum = engine.write(place, label, make_payload(number, label.raw_length))
    engine.publish_run([place], [replace(label, checksum=checksum)])
    return place


def drop(engine: ExtentEngine, room: SlotPool, place: int, length: int) -> None:
    """Retract and release."""
    engine.retract(place)
    room.release(place, length)
