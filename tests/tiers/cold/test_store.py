"""The cold store at work: round trips, direct I/O, life of segments, sizes, owners."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from kvtier.tiers.base import Buffer, Cause, ColdStoreError, CopyError
from kvtier.tiers.cold.buffered_io import BufferedIo
from kvtier.tiers.cold.direct_io import DirectIo
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.footer import footer_bytes_for
from kvtier.tiers.cold.opening import Durability
from kvtier.tiers.cold.ownership import DirectoryOwned
from kvtier.tiers.cold.segment_files import segment_path
from kvtier.v1.shm import PAGE_BYTES
from tests.tiers.cold.store import (
    NAMESPACES,
    NUM_SEGMENTS,
    SEGMENT_BYTES,
    address_of,
    aligned,
    cold,
    in_slot,
    label_of,
    labels_of,
    payload_of,
    without_checksum,
)

LENGTHS = [1, 511, 4095, 4096, 4097, 8192, 12_345, 40_960]


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shift", [0, 1, 512], ids=["aligned", "odd", "512"])
def test_every_length_and_alignment_comes_back(tmp_path: Path, length: int, shift: int) -> None:
    with cold(tmp_path) as opened:
        place = opened.room.reserve(0, length)
        assert place is not None
        payload, label = payload_of(1, length), label_of(1, length)
        assert opened.store.write(place, label, in_slot(payload, shift=shift)) == label.checksum
        opened.room.settle(place)
        for buffer in (aligned(length), aligned(length)[:length], aligned(length + shift)[shift:][:length]):
            opened.store.read(place, label, buffer)
            assert bytes(buffer[:length]) == payload


def test_a_read_only_payload_can_be_written(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        place = opened.room.reserve(0, 9000) or 0
        opened.store.write(place, label_of(1, 9000), memoryview(payload_of(1, 9000)))
        opened.room.settle(place)
        assert opened.get(place, label_of(1, 9000)) == payload_of(1, 9000)


class SpyIo(DirectIo):
    """Remembers the addresses and lengths of the buffers of every direct transfer."""

    def __init__(self) -> None:
        self.transfers: list[list[tuple[int, int]]] = []

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.transfers.append([(address_of(buffer), len(buffer)) for buffer in buffers])
        return super().read(fd, buffers, offset)

    def write(self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False) -> int:
        self.transfers.append([(address_of(memoryview(buffer)), len(buffer)) for buffer in buffers])
        return super().write(fd, buffers, offset, durable=durable)


def test_aligned_payloads_move_without_a_bounce(tmp_path: Path) -> None:
    io = SpyIo()
    with cold(tmp_path, io=io) as opened:
        place, length = opened.room.reserve(0, 10_000) or 0, 10_000
        source, target, slot = in_slot(payload_of(1, length)), aligned(length)[:length], aligned(length)
        opened.store.store_namespace(NAMESPACES[0])
        opened.store.write(place, label_of(1, length), source)
        assert (address_of(source), 8192) in io.transfers[-1]
        opened.store.read(place, label_of(1, length), target)
        assert (address_of(target), 8192) in io.transfers[-1], "whole pages; the last one through scratch"
        opened.store.read(place, label_of(1, length), slot)
        assert (address_of(slot), 12_288) in io.transfers[-1], "a whole slot takes the last page too"
        opened.room.settle(place)


def test_neighbours_share_a_system_call(tmp_path: Path) -> None:
    io = SpyIo()
    with cold(tmp_path, io=io) as opened:
        opened.store.store_namespace(NAMESPACES[0])
        opened.put([99])
        before = len(io.transfers)
        opened.put(range(10))
        assert len(io.transfers) == before + 1
        items = [(place, label, aligned(9000)) for place, (label, _) in opened.accepted.items()]
        random.Random(1).shuffle(items)
        before = len(io.transfers)
        outcomes = opened.store.read_batch(items)
        assert len(io.transfers) == before + 1, "in whatever order they are asked for"
        assert [outcome.checksum for outcome in outcomes] == [label.checksum for _, label, _ in items]
        for place, _, view in items:
            assert bytes(view[:9000]) == opened.accepted[place][1]


def test_a_run_keeps_within_the_limits_of_the_kernel(tmp_path: Path) -> None:
    with cold(tmp_path, segment_bytes=32 << 20, num_segments=2) as opened:
        opened.put(range(700), length=5000)  # more buffers than one call may have
        opened.put(range(700, 706), length=2 << 20)  # more bytes than one call should have
        items = [(place, label, aligned(label.raw_length)) for place, (label, _) in opened.accepted.items()]
        assert {outcome.cause for outcome in opened.store.read_batch(items)} == {None}
        opened.assert_readable()


def test_what_stands_behind_a_payload_is_not_written(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        dirty = in_slot(b"S" * 60_000, shift=1)  # goes through scratch, and stays there
        elsewhere = opened.room.reserve(0, 60_000) or 0
        opened.store.write(elsewhere, replace(label_of(2, 60_000), checksum=b"c" * 16), dirty)
        opened.room.settle(elsewhere)
        slot = aligned(8192)
        slot[:] = b"S" * 8192  # secrets of the slot's former tenant
        slot[:5000] = payload_of(1, 5000)
        place = opened.room.reserve(0, 5000) or 0
        opened.store.write(place, label_of(1, 5000), slot[:5000])
        opened.room.settle(place)
    segment = segment_path(tmp_path, place >> 32).read_bytes()
    assert segment.count(b"S" * 60_000) == 1
    assert b"SSSS" not in segment.replace(b"S" * 60_000, b"")


def test_without_a_checksum_the_stored_copy_is_what_is_hashed(tmp_path: Path) -> None:
    payload = in_slot(payload_of(1, 20_000))

    class SwappingIo(DirectIo):
        def write(
            self, fd: int, buffers: Sequence[Buffer | bytes], offset: int, *, durable: bool = False
        ) -> int:
            payload[:] = os.urandom(20_000)  # the client changes its staging extent during the put
            return super().write(fd, buffers, offset, durable=durable)

    with cold(tmp_path, io=SwappingIo()) as opened:
        place = opened.room.reserve(0, 20_000) or 0
        payload[:] = payload_of(3, 20_000)
        label = without_checksum(label_of(1, 20_000))
        checksum = opened.store.write(place, label, payload)
        opened.room.settle(place)
        into = aligned(20_000)
        opened.store.read(place, replace(label, checksum=checksum), into)
        assert xxhash.xxh3_128_digest(into[:20_000]) == checksum


@pytest.mark.parametrize(
    "other",
    [
        {"prefix_hash": b"x" * 32},
        {"namespace_digest": b"x" * 32},
        {"parent_hash": b"x" * 32},
        {"parent_hash": b""},
        {"position": 77},
        {"group": 1},
        {"raw_length": 9001},
    ],
    ids=str,
)
def test_another_identity_is_refused(tmp_path: Path, other: dict[str, object]) -> None:
    with cold(tmp_path) as opened:
        opened.put([1, 2])
        place, (label, _) = next(iter(opened.accepted.items()))
        assert opened.get(place, replace(label, **other)) is Cause.WRONG_IDENTITY  # type: ignore[arg-type]
        opened.assert_readable()


def test_another_checksum_is_refused(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put([1])
        place, (label, _) = next(iter(opened.accepted.items()))
        assert opened.get(place, replace(label, checksum=b"x" * 16)) is Cause.WRONG_CHECKSUM


def test_a_closed_store_is_offline(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put([1])
        place, (label, _) = next(iter(opened.accepted.items()))
        opened.store.close()
        assert opened.get(place, label) is Cause.TIER_OFFLINE
        with pytest.raises(CopyError, match="closed"):
            opened.store.free(0)
        with pytest.raises(CopyError, match="closed"):
            opened.store.store_namespace(NAMESPACES[2])
        assert opened.store.statistics().failures == {Cause.TIER_OFFLINE: 1}
        opened.store.close()


# --------------------------------------------------------------------------------- life of segments


def test_a_freed_place_answers_nothing(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put(range(5))
        gone = dict(opened.accepted)
        opened.seal()
        opened.free(0)
        assert {opened.get(place, label) for place, (label, _) in gone.items()} == {Cause.WRONG_IDENTITY}
        opened.put(range(10, 15))  # in the next segment
        opened.store.free(0)  # again: no effect


def test_a_record_of_a_former_life_is_refused_where_it_still_stands(tmp_path: Path) -> None:
    with cold(tmp_path, num_segments=2) as opened:
        opened.put(range(5))
        former = dict(opened.accepted)
        opened.seal()
        opened.free(0)
        opened.put([50])
        assert [place >> 32 for place in opened.accepted] == [0], "the same segment again"
        for place, (label, _) in list(former.items())[1:]:
            assert opened.get(place, label) is Cause.WRONG_IDENTITY
        opened.assert_readable()


def test_appending_to_a_sealed_segment_is_a_bug(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put([1])
        opened.seal()
        with pytest.raises(AssertionError, match="sealed"):
            opened.store.write(20, label_of(2, 100), in_slot(payload_of(2, 100)))


def test_a_record_beyond_the_data_pages_is_a_bug(tmp_path: Path) -> None:
    with cold(tmp_path) as opened, pytest.raises(AssertionError, match="leaves"):
        opened.store.write(opened.store.data_pages - 1, label_of(1, 4096), in_slot(payload_of(1, 4096)))


def test_more_namespaces_than_a_footer_can_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiers.cold.segment_io.MAX_NAMESPACES", 2)
    with cold(tmp_path) as opened:
        outcomes = [opened.put([n], namespace=n)[0].cause for n in range(3)]
        assert outcomes == [None, None, Cause.NO_SPACE]
        opened.assert_readable()
        opened.seal()
    with cold(tmp_path) as opened:
        assert opened.recovered.num_records == 2


def test_of_two_records_of_a_fragment_the_newest_wins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with cold(tmp_path) as opened:
        opened.put([1, 2])
        opened.seal()
        opened.put([2, 3])
        opened.seal()
        newest = {label.position: place for place, (label, _) in opened.accepted.items()}
    with cold(tmp_path) as again:
        found = {label.position: place for place, label in labels_of(again.recovered).items()}
        assert found == newest
        assert again.recovered.reasons == {"duplicate": 1}
        assert [segment.num_live for segment in again.recovered.segments] == [1, 2]
    assert "no damage, but left behind: older copies of records: 1" in caplog.text
    assert "WARNING" not in caplog.text


# ------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("length", [1, 9000])
def test_what_one_segment_says_is_not_written_over_by_the_next(tmp_path: Path, length: int) -> None:
    """More segments than threads read them, of a record each: each thread's memory holds many footers."""
    with cold(tmp_path, num_segments=24) as opened:
        for number in range(20):
            opened.put([number], length)
            assert opened.seal() == [True]
        labels = {place: label for place, (label, _) in opened.accepted.items()}
    with cold(tmp_path, num_segments=24) as again:
        assert {place: label.prefix_hash for place, label in labels_of(again.recovered).items()} == {
            place: label.prefix_hash for place, label in labels.items()
        }


@pytest.mark.parametrize(
    ("segment_bytes", "num_segments", "durability", "what"),
    [
        (100_000, 4, "none", "multiple"),
        (8192, 4, "none", "segment_bytes"),
        (0, 4, "none", "segment_bytes"),
        (SEGMENT_BYTES, 1, "none", "num_segments"),
        (SEGMENT_BYTES, 4, "always", "durability"),
    ],
)
def test_senseless_sizes_are_refused(
    tmp_path: Path, segment_bytes: int, num_segments: int, durability: Durability, what: str
) -> None:
    with pytest.raises(ColdStoreError, match=what):
        ColdStore.open(tmp_path / "store", segment_bytes, num_segments, durability)
    assert not (tmp_path / "store").exists()


def test_the_smallest_segment_works(tmp_path: Path) -> None:
    assert 32768 - footer_bytes_for(32768) >= 2 * PAGE_BYTES
    with cold(tmp_path, segment_bytes=32768) as opened:
        opened.put([1], length=4096)
        assert opened.seal() == [True]


# ------------------------------------------------------------------------------------ owners, fallback


def test_a_second_owner_fails_at_once_and_is_told_who_the_first_is(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        link = tmp_path.parent / f"{tmp_path.name}-link"
        link.symlink_to(tmp_path)
        for path in (tmp_path, link):
            with pytest.raises(DirectoryOwned, match=f"pid {os.getpid()} on .*give this daemon another"):
                ColdStore.open(path, SEGMENT_BYTES, NUM_SEGMENTS)
        opened.put([1])
    with cold(tmp_path) as again:
        assert again.recovered.num_records == 1


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import sys; from kvtier.tiers.cold.engine import ColdStore\n"
        f"store = ColdStore.open({str(tmp_path)!r}, {SEGMENT_BYTES}, {NUM_SEGMENTS})\n"
        "print('owned', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "owned\n"
        with pytest.raises(DirectoryOwned, match=f"pid {child.pid}"):
            ColdStore.open(tmp_path, SEGMENT_BYTES, NUM_SEGMENTS)
        child.kill()
        child.wait()
    with cold(tmp_path):
        pass


def test_a_replaced_lock_is_noticed(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        lock = tmp_path / "lock"
        kept = lock.rename(tmp_path / "kept")
        lock.touch()
        assert "another owner" in opened.store.check_integrity()[0]
        kept.rename(lock)


def test_without_direct_io_aiofiles_serves_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvtier.tiers.cold.opening.supports_direct", lambda directory: False)
    with cold(tmp_path, "record") as opened:
        assert opened.store.statistics().backend == "aiofiles"
        assert "O_DIRECT" in caplog.text
        opened.put(range(10))
        opened.seal()
        opened.put(range(20, 25))
        opened.assert_readable()
        accepted = opened.accepted
    monkeypatch.undo()
    with cold(tmp_path) as again:
        assert again.store.statistics().backend.startswith("direct")
        again.accepted = accepted
        again.assert_readable()


def test_the_fallback_ends_its_thread(tmp_path: Path) -> None:
    io = BufferedIo()
    with cold(tmp_path, io=io) as opened:
        opened.put([1])
    assert not io._thread.is_alive()
    io.shut_down()
