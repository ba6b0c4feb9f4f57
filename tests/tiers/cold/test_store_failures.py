"""A cold store whose system calls fail: full disks, short and torn transfers, bad sectors, rings."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from kvtier.tiers.base import Cause, ColdStoreError, CopyError
from kvtier.tiers.cold import direct_io
from kvtier.tiers.cold.engine import ColdStore
from tests.tiers.cold.store import (
    NAMESPACES,
    SEGMENT_BYTES,
    FaultyIo,
    aligned,
    cold,
    failing,
    flip,
    labels_of,
    payload_of,
)


def test_a_full_disk_is_an_error_at_open_and_leaves_nothing_behind(tmp_path: Path) -> None:
    io = FaultyIo(failing("allocate", errno.ENOSPC, after=2))
    with pytest.raises(ColdStoreError, match=r"bytes are free; lower tiers.nvme.capacity or make room"):
        ColdStore.open(tmp_path / "store", SEGMENT_BYTES, 4, io=io)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["lock"]
    with cold(tmp_path / "store"):
        pass


def test_a_store_that_cannot_grow_keeps_what_it_has(tmp_path: Path) -> None:
    with cold(tmp_path) as opened:
        opened.put(range(5))
        opened.seal()
    with pytest.raises(ColdStoreError, match="make room"):
        ColdStore.open(tmp_path, SEGMENT_BYTES, 8, io=FaultyIo(failing("allocate", errno.ENOSPC)))
    with cold(tmp_path) as again:
        assert again.recovered.num_records == 5


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (failing("write", errno.ENOSPC), Cause.NO_SPACE),
        (failing("write", errno.EIO), Cause.IO_ERROR),
        (lambda kind, number: 4096 if kind == "write" else None, Cause.SHORT_TRANSFER),
        (lambda kind, number: 0 if kind == "write" else None, Cause.SHORT_TRANSFER),
    ],
    ids=["full", "broken", "short", "nothing"],
)
def test_a_failed_write_stores_nothing(tmp_path: Path, fault: object, cause: Cause) -> None:
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put([1])
        io.fault = fault  # type: ignore[assignment]
        assert [outcome.cause for outcome in opened.put([2, 3])] == [cause, cause]
        io.fault = lambda kind, number: None
        opened.put([4])
        opened.assert_readable()
        assert opened.store.statistics().failures == {cause: 2}
        accepted = opened.accepted
    with cold(tmp_path) as again:
        assert labels_of(again.recovered).keys() == accepted.keys(), "the hole is skipped"


def test_metadata_that_cannot_be_written_counts_as_failed_writes(tmp_path: Path) -> None:
    """The alert for a failing disk looks at them, and no record comes to be written."""
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put([1])
        io.fault = failing("write", errno.EROFS)
        with pytest.raises(CopyError):
            opened.store.store_namespace(NAMESPACES[1])
        assert opened.store.statistics().failures == {Cause.IO_ERROR: 1}
        io.fault = lambda kind, number: None


def test_one_bad_sector_does_not_take_its_neighbours_along(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put(range(5))
        items = [(place, label, aligned(9000)) for place, (label, _) in opened.accepted.items()]
        io.calls.clear()
        # The run of five, then one by one, the third of which fails again.
        io.fault = lambda kind, number: _broken() if number in (0, 3) else None
        causes = [outcome.cause for outcome in opened.store.read_batch(items)]
        assert causes == [None, None, Cause.IO_ERROR, None, None]
        assert io.calls == ["read"] * 6


def _broken() -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_short_read_is_a_miss(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put([1])
        place, (label, _) = next(iter(opened.accepted.items()))
        io.fault = lambda kind, number: 8192
        assert opened.get(place, label) is Cause.SHORT_TRANSFER


def test_the_nth_system_call_failing_never_loses_the_thread(tmp_path: Path) -> None:
    """Whatever call fails, and however: only typed errors, never wrong bytes, and a clean restart."""
    total = _scenario(tmp_path / "probe", FaultyIo())
    for code in (errno.EIO, errno.ENOSPC):
        for number in range(total):
            directory = tmp_path / f"{code}-{number}"
            _scenario(directory, FaultyIo(_failing_once(number, code)))


def _failing_once(at: int, code: int) -> Callable[[str, int], int | None]:
    def fault(kind: str, number: int) -> int | None:
        if number == at:
            raise OSError(code, os.strerror(code))
        return None

    return fault


def _scenario(directory: Path, io: FaultyIo) -> int:
    """Fill, seal, free, restart; return how many system calls the faulty part took."""
    accepted = {}
    try:
        with cold(directory, "segment", io=io) as opened:
            accepted = opened.accepted
            for first in (0, 10, 20):
                try:
                    opened.put(range(first, first + 3))
                except CopyError:  # the namespace could not be remembered
                    continue
                opened.seal()
            for number in opened.room.sealed_segments()[:1]:
                opened.room.begin_reclaim(number)
                try:
                    opened.store.free(number)
                except CopyError:
                    continue
                for place in [place for place in accepted if place >> 32 == number]:
                    opened.room.release(place, accepted.pop(place)[0].raw_length)
                opened.room.finish_reclaim(number)
            opened.assert_readable(except_for=set(accepted))
    except ColdStoreError:
        pass
    with cold(directory, "segment") as again:
        found = labels_of(again.recovered)
        for place, label in found.items():
            assert again.get(place, label) == payload_of(label.position, label.raw_length)
        assert len(io.calls) < 20 or found, "one failure does not lose everything"
    return len(io.calls)


@pytest.mark.parametrize("number", range(4))
def test_one_bad_record_among_reads_at_the_same_time_is_one_miss(tmp_path: Path, number: int) -> None:
    """Records that are no neighbours are all at the disk at once; each has its own outcome and bytes."""
    with cold(tmp_path) as opened:
        opened.put(range(8))
        chosen = list(opened.accepted.items())[::2]
        bad_place = chosen[number][0]
        path, _, offset = opened.store.whereabouts(bad_place)
        flip(path, offset + 4096 + 17)
        items = [(place, label, aligned(9000)) for place, (label, _) in chosen]
        outcomes = opened.store.read_batch(items)
        for (place, _, into), outcome, (_, (_, payload)) in zip(items, outcomes, chosen, strict=True):
            if place == bad_place:
                assert outcome.cause is Cause.WRONG_CHECKSUM
            else:
                assert outcome.cause is None
                assert into[:9000] == payload


@pytest.mark.parametrize("begins", [True, False])
def test_what_only_a_ring_says_loses_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """A file that preadv reads may be refused in a ring: the kernel had no memory for the request."""

    class Busy:
        waiting: ClassVar[list[int]] = []

        @staticmethod
        def open_ring(num_reads: int) -> object:
            return object()

        @classmethod
        def begin_reads(cls, ring: object, reads: tuple[object, ...]) -> bool:
            cls.waiting += range(len(reads)) if begins else ()
            return begins

        @classmethod
        def wait_read(cls, ring: object) -> tuple[int, int] | None:
            return (cls.waiting.pop(), -errno.EAGAIN) if cls.waiting else None

    monkeypatch.setattr(direct_io, "native", Busy)
    with cold(tmp_path, io=direct_io.RingIo()) as opened:
        opened.put(range(8))
        chosen = list(opened.accepted.items())[::2]
        items = [(place, label, aligned(9000)) for place, (label, _) in chosen]
        assert {outcome.cause for outcome in opened.store.read_batch(items)} == {None}
        for (_, _, into), (_, (_, payload)) in zip(items, chosen, strict=True):
            assert into[:9000] == payload
