"""What the cold store has after a restart or a power cut, and what it flushes for that, in which order."""

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtier.tiers.base import Buffer, Cause
from kvtier.tiers.cold import recovery
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.tiers.cold.inspection import inspect_segment
from kvtier.tiers.cold.log import record_bytes
from kvtier.tiers.cold.opening import Durability
from tests.tiers.cold.store import (
    NAMESPACES,
    NUM_SEGMENTS,
    FaultyIo,
    VolatileIo,
    cold,
    failing,
    in_slot,
    label_of,
    labels_of,
    payload_of,
)

# ---------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("durability", ["none", "segment", "record"])
@pytest.mark.parametrize("sealed", [True, False])
def test_everything_is_there_after_a_restart(tmp_path: Path, durability: Durability, sealed: bool) -> None:
    with cold(tmp_path, durability) as opened:
        opened.put(range(8))
        opened.put(range(20, 30), length=100, namespace=2)
        opened.put([40], length=20_000, namespace=1)
        if sealed:
            assert all(opened.seal())
        accepted = opened.accepted
    with cold(tmp_path, durability) as again:
        assert labels_of(again.recovered) == {place: label for place, (label, _) in accepted.items()}
        used = {identity.digest for identity in again.recovered.namespaces}
        assert used == {identity.digest for identity in NAMESPACES}
        again.accepted = accepted
        again.assert_readable()
        assert again.recovered.reasons == ({} if sealed else {"segment_unsealed": 1})
        pages = sum(record_bytes(label.raw_length) for label, _ in accepted.values())
        assert sum(segment.live_bytes for segment in again.recovered.segments) == pages
    with cold(tmp_path) as third:
        assert third.recovered.num_records == len(accepted)
        assert not third.recovered.reasons, "what was found unsealed has been sealed"


def test_segments_come_back_in_order_of_sealing(tmp_path: Path) -> None:
    with cold(tmp_path, num_segments=6) as opened:
        for number in (1, 2, 3):
            opened.put([number])
            opened.seal()
        opened.free(0)
        for number in (4, 5):
            opened.put([number])
            opened.seal()
        order = opened.room.sealed_segments()
        opened.put([6])  # unsealed: the last
        last = next(place >> 32 for place, (label, _) in opened.accepted.items() if label.position == 6)
    with cold(tmp_path, num_segments=6) as again:
        assert [segment.number for segment in again.recovered.segments] == [*order, last]
        assert again.room.sealed_segments() == [*order, last]


@pytest.mark.parametrize("sealed", [True, False])
def test_ghosts_of_a_former_life_are_not_recovered(tmp_path: Path, sealed: bool) -> None:
    with cold(tmp_path, num_segments=2) as opened:
        opened.put(range(5))
        opened.seal()
        opened.free(0)
        opened.put([50])
        if sealed:
            opened.seal()
        accepted = opened.accepted
    with cold(tmp_path, num_segments=2) as again:
        assert labels_of(again.recovered).keys() == accepted.keys()


def test_a_freed_segment_stays_forgotten(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put(range(5))
        opened.seal()
        before = (tmp_path / "manifest.1").read_bytes()
        opened.free(0)
    with cold(tmp_path) as again:
        assert again.recovered.num_records == 0
    for name in ("manifest.0", "manifest.1"):
        (tmp_path / name).write_bytes(before)  # a manifest of before the free
    with cold(tmp_path) as again:
        assert again.recovered.num_records == 0, "the tombstone is a second witness"


def test_an_empty_unsealed_segment_is_free_again(tmp_path: Path) -> None:
    io = FaultyIo(failing("write", after=2))  # the manifest's own file, and its event
    with cold(tmp_path, io=io) as opened:
        place = opened.room.reserve(0, 9000) or 0
        outcome = opened.store.write_batch([(place, label_of(1, 9000), in_slot(payload_of(1, 9000)))])[0]
        assert outcome.cause is Cause.IO_ERROR
        opened.room.settle(place)
    with cold(tmp_path) as again:
        assert again.recovered.segments == []
        assert again.room.num_free == NUM_SEGMENTS


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM])
def test_a_segment_that_cannot_be_read_at_a_start_is_there_at_the_next(
    tmp_path: Path, code: int, sealed: bool
) -> None:
    """It was freed, durably, as if nothing were in it."""
    with cold(tmp_path) as opened:
        opened.put(range(8))
        if sealed:
            opened.seal()
        accepted = opened.accepted
    io = FaultyIo(failing("read", code))
    with cold(tmp_path, io=io) as again:
        assert (again.recovered.num_records, again.room.num_free) == (0, NUM_SEGMENTS - 1)
        io.fault = lambda kind, number: None
        for first in range(100, 100 + 8 * (NUM_SEGMENTS - 2), 8):
            again.put(range(first, first + 8))
            again.seal()
        assert not {place >> 32 for place in again.accepted} & {place >> 32 for place in accepted}
    with cold(tmp_path) as last:
        last.accepted = accepted
        assert labels_of(last.recovered).items() >= {at: one for at, (one, _) in accepted.items()}.items()
        last.assert_readable()


class FirstWindowLost(DirectIo):
    """Reads where segments begin fail."""

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if not offset:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().read(fd, buffers, offset)


def test_a_part_of_a_segment_that_cannot_be_read_at_a_start_is_there_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sealed with a footer that left this part out."""
    monkeypatch.setattr(recovery, "WINDOW_BYTES", 64 << 10)
    with cold(tmp_path) as opened:
        opened.put(range(16))
        accepted = opened.accepted
    with cold(tmp_path, io=FirstWindowLost()) as again:
        assert 0 < again.recovered.num_records < 16
    with cold(tmp_path) as last:
        last.accepted = accepted
        assert last.recovered.num_records == 16
        last.assert_readable()


def test_inspecting_a_segment_beside_its_owner_and_after(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put(range(4))
        assert inspect_segment(tmp_path, 0)["num_records"] == 4
        assert inspect_segment(tmp_path, 0)["state"] == "unsealed"
        opened.seal()
        report = inspect_segment(tmp_path, 0)
        assert (report["state"], report["footer"], report["payload_bytes"]) == ("sealed", "valid", 36_000)
        assert report["namespaces"] == {NAMESPACES[0].digest.hex(): 4}
        assert inspect_segment(tmp_path, 1)["state"] == "free"
        opened.free(0)
        assert inspect_segment(tmp_path, 0)["state"] == "free"
        with pytest.raises(FileNotFoundError):
            inspect_segment(tmp_path, 99)


# ------------------------------------------------------------------------------- durability, by order


def test_sealing_flushes_data_before_the_footer_and_the_footer_before_the_manifest(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, "segment", io=io) as opened:
        opened.put([1])
        io.calls.clear()
        opened.seal()
        assert io.calls == ["sync", "durable write", "write", "sync"]


def test_each_mode_flushes_what_it_promises(tmp_path: Path) -> None:
    for durability, expected in (("none", ["write"]), ("segment", ["write"]), ("record", ["durable write"])):
        io = FaultyIo()
        with cold(tmp_path / durability, durability, io=io) as opened:  # type: ignore[arg-type]
            opened.put([1])
            io.calls.clear()
            opened.put([2])
            assert io.calls == expected, durability
            io.calls.clear()
            opened.seal()
            opened.free(0)
            assert io.calls.count("sync") == (1 if durability == "none" else 3), "a free is always flushed"


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("durability", ["none", "segment", "record"])
def test_after_a_power_cut_what_was_promised_is_there(
    tmp_path: Path, durability: Durability, kept: float
) -> None:
    for seed in range(3):
        io, directory = VolatileIo(), tmp_path / str(seed)
        with cold(directory, durability, io=io) as opened:
            opened.put(range(8))
            opened.seal()
            sealed = set(opened.accepted)
            opened.put(range(10, 16))
            accepted = opened.accepted
            io.cut_power(random.Random(seed), kept)
        with cold(directory, durability) as again:
            found = set(labels_of(again.recovered))
            promised = {"none": set(), "segment": sealed, "record": set(accepted)}[durability]
            assert promised <= found <= set(accepted), f"seed {seed}"
            again.accepted = {place: accepted[place] for place in found}
            again.assert_readable(except_for=found - promised)


def test_a_failed_flush_is_not_repeated_and_makes_the_segment_suspect(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, "segment", io=io) as opened:
        opened.put(range(5))
        io.fault = failing("sync")
        io.calls.clear()
        assert opened.seal() == [False]
        assert io.calls == ["sync"], "neither again nor a footer"
        assert opened.store.statistics().failures == {Cause.IO_ERROR: 1}
        opened.assert_readable()
        io.fault = lambda kind, number: None
        opened.put(range(10, 15))
        accepted = opened.accepted
    with cold(tmp_path) as again:
        assert labels_of(again.recovered).keys() == accepted.keys()
        assert again.recovered.reasons["segment_unsealed"] == 2
