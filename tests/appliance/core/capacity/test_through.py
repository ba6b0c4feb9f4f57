"""Copies into the cold store in mode through: at once after the put."""

from dataclasses import replace

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.copying import copies
from kvtier.appliance.core.options import PlannerOptions
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from .. import rig as core_rig
from ..rig import GEOMETRY, STORED, hashes
from .copying_down import BLOCK_BYTES, copies_down, land_puts, num_written, rest, rig_of, where


def test_through_copies_a_put_as_soon_as_it_was_answered() -> None:
    rig = rig_of("through")
    call = rig.start_put(hashes("a", 6))
    land_puts(rig)
    assert list(rig.answer(call).outcomes) == [STORED] * 6
    assert num_written(rig) == 6
    assert not any(copy.in_one for copy in copies_down(rig))
    rig.settle()


def test_room_returns_copy_by_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is cut by the bytes that it has, where fragments of 16 and of 4 KiB take turns."""
    monkeypatch.setattr(core_rig, "GEOMETRY", replace(GEOMETRY, num_layers=5))
    monkeypatch.setattr(copies, "MAX_SPILL_BYTES", 24 << 10)
    rig = rig_of("through")
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    assert num_written(rig) == 6
    *sizes, _ = [sum(item.label.raw_length for item in copy.items) for copy in copies_down(rig)]
    assert sizes
    assert all(24 << 10 <= size < 40 << 10 for size in sizes)
    rig.settle()


def test_through_does_not_wait_for_the_budget_or_the_device() -> None:
    rig = rig_of("through", daily_write_bytes=BLOCK_BYTES)
    for number in range(6):
        rig.start_put(hashes(str(number), 1))
        land_puts(rig)
    assert num_written(rig) == 6
    assert rig.planner.write_budget.is_overdrawn(rig.now)
    rig.settle()


def test_memory_above_its_watermark_is_relieved_where_nothing_is_left_to_copy() -> None:
    """Blocks were left for the next step, and no Tick was asked for."""
    rig = rig_of("through", dram_blocks=240, num_segments=40)
    chain = rig.put_new("a", 200)
    rest(rig)
    rig.do(ev.TierLost(Tier.NVME, True, "gone"))
    options = PlannerOptions(high_watermark=0.1, low_watermark=0.1, write="through")
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    rig.put(hashes("b", 40))
    rig.tick(1.0)
    rig.release(rig.acquire(chain))
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 40 * BLOCK_BYTES))  # b, which waits to be copied
    rig.do(ev.TierLost(Tier.NVME, False, "back"))
    while rig.planner.is_busy:
        rig.tick()
    assert sum("dram" in one for one in where(rig, "a", 200)) == 24


def test_through_begins_a_bounded_number_in_one_step() -> None:
    rig = rig_of("spill", dram_blocks=200, num_segments=40)
    rig.start_put(hashes("a", 200))
    land_puts(rig)
    while rig.planner.is_busy:
        rig.tick()
        land_puts(rig)
    options = PlannerOptions(high_watermark=1.0, low_watermark=1.0, write="through")
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    assert num_written(rig) == 64
    assert rig.planner.is_busy
    while rig.planner.is_busy:
        rig.tick()
    rest(rig)
    assert num_written(rig) == 200


def test_a_put_that_was_retried_under_lower_limits_is_answered_like_the_first_time() -> None:
    """Refused, its client would use the staging memory again that is being copied from."""
    rig = rig_of()
    first = rig.start_put(hashes("a", 4), request_id="r")
    options = PlannerOptions(high_watermark=1.0, low_watermark=1.0, max_blocks_per_request=2)
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    second = rig.start_put(hashes("a", 4), request_id="r")
    assert second not in rig.answers
    land_puts(rig)
    assert [list(rig.answer(call).outcomes) for call in (first, second)] == [[STORED] * 4] * 2
    rig.settle()


@pytest.mark.parametrize("num_segments", [8, 64])
@pytest.mark.parametrize("cause", [Cause.IO_ERROR, Cause.NO_SPACE, Cause.NO_KEY])
def test_a_device_that_fails_for_a_while_gets_everything_afterwards(cause: Cause, num_segments: int) -> None:
    rig = rig_of(num_segments=num_segments)
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    for _ in range(3600):
        rig.tick(1)
        if rig.copies:
            rig.finish(rig.copies[0], cause)
    assert num_written(rig) <= 6 * 70, "a failed copy takes room in the log: one at a time, ever more seldom"
    for _ in range(300):
        rest(rig)
    assert where(rig, "a", 6) == [{"dram", "nvme"}] * 6


def test_a_failed_copy_is_not_tried_again_at_once() -> None:
    for cause in set(Cause) - {Cause.DOES_NOT_FIT}:
        rig = rig_of()
        rig.start_put(hashes("a", 6))
        land_puts(rig)
        rig.tick(1)
        rig.finish(rig.copies[0], cause)
        assert rig.copies == [], cause
