"""Records copied forward before their segment is freed: what was safe stays safe on the way."""

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from kvtier.appliance.transfer.forward import ForwardCopier
from kvtier.tiers.base import Cause, CopyItem, CopyOutcome

from .store import Cold, FaultyIo, VolatileIo, cold, failing, labels_of


def forward(opened: Cold, place: int) -> tuple[int, CopyOutcome]:
    """Copy one accepted record to a new place; return it and how that ended."""
    label, payload = opened.accepted[place]
    target = opened.room.reserve(0, label.raw_length, forward=True)
    assert target is not None
    with ThreadPoolExecutor(1) as pool:
        (outcome,) = ForwardCopier(opened.store, pool).start([CopyItem(place, target, label)]).result()
    opened.room.settle(target)
    if outcome.cause is None:
        opened.accepted[target] = (label, payload)
    else:
        opened.room.release(target, label.raw_length)
    return target, outcome


@pytest.mark.parametrize("code", ["EIO", "short"])
def test_a_record_that_could_not_be_written_anew_is_not_lost_where_it_is(tmp_path: Path, code: str) -> None:
    """The planner gives up what a copy says it could not read; this one could not write."""
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put([1])
        (place,) = opened.accepted
        opened.seal()
        opened.put([2])  # opens the segment that the manifest has to hear of
        forward(opened, place)
        is_writing = failing("write")
        io.fault = is_writing if code == "EIO" else lambda kind, number: 4096 if kind == "write" else None
        _, outcome = forward(opened, place)
        io.fault = lambda kind, number: None
        assert outcome.cause is Cause.NO_SPACE
        opened.assert_readable()


def test_a_record_that_could_not_be_read_says_so(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, io=io) as opened:
        opened.put([1])
        (place,) = opened.accepted
        opened.seal()
        io.fault = failing("read")
        _, outcome = forward(opened, place)
        io.fault = lambda kind, number: None
        assert outcome.cause is Cause.IO_ERROR


@pytest.mark.parametrize("durability", ["segment", "record"])
def test_what_was_sealed_survives_a_power_cut_after_it_was_copied_forward(
    tmp_path: Path, durability: str
) -> None:
    """Its segment is freed for good while the new one is still being filled."""
    io = VolatileIo()
    with cold(tmp_path, durability, io=io) as opened:  # type: ignore[arg-type]
        opened.put([1])
        (place,) = opened.accepted
        opened.seal()
        target, outcome = forward(opened, place)
        assert outcome.cause is None
        opened.free(place >> 32)
        io.cut_power(Random(1), 0.0)
        accepted = opened.accepted
    with cold(tmp_path) as again:
        assert target in labels_of(again.recovered)
        again.accepted = {target: accepted[target]}
        again.assert_readable()


def test_a_flush_that_fails_meanwhile_is_not_repeated_and_leaves_no_footer(tmp_path: Path) -> None:
    io = FaultyIo()
    with cold(tmp_path, "segment", io=io) as opened:
        opened.put([1])
        (place,) = opened.accepted
        opened.seal()
        forward(opened, place)
        io.fault = _first_sync_fails()
        opened.free(place >> 32)
        assert opened.seal() == [False]
        opened.assert_readable()


def _first_sync_fails() -> Callable[[str, int], int | None]:
    syncs = iter([True])

    def fault(kind: str, number: int) -> int | None:
        if kind == "sync" and next(syncs, False):
            raise OSError(errno.EIO, "test")
        return None

    return fault
