"""Copies into the cold store before memory needs the room, in mode idle."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity.dirty import COMPLETE_LOOKS, Dirty
from kvtier.appliance.core.options import PlannerOptions, TenantQuota
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from ..rig import CLIENT, GEOMETRY, STORED, Rig, hashes
from .copying_down import BLOCK_BYTES, TO_NVME, copies_down, land_puts, num_written, rest, rig_of, where


def test_what_was_put_is_in_both_tiers_once_the_device_was_idle() -> None:
    rig = rig_of()
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    rest(rig)
    assert where(rig, "a", 6) == [{"dram", "nvme"}] * 6


@pytest.mark.parametrize(
    ("write", "what"), [("idle", "idle_copy_dram"), ("through", "copy_ahead_dram"), ("spill", "spill_dram")]
)
def test_the_story_says_why_a_block_was_copied_down(write: str, what: str) -> None:
    rig = rig_of(write, dram_blocks=4)
    rig.start_put(hashes("a", 4))
    land_puts(rig)
    rest(rig)
    if write == "spill":  # nothing is copied before its room is needed
        rig.start_put(hashes("b", 4))
        rest(rig)
    lines = rig.planner.story.of(hashes("a", 4)[0], rig.namespace_id)
    copied = [line.what for line in lines if line.what.endswith("_dram")]
    assert [word for word in copied if word not in ("stored_dram", "evicted_dram")] == [what]


def test_a_drained_block_is_archived() -> None:
    rig = rig_of("spill")
    rig.start_put(hashes("a", 1))
    land_puts(rig)
    rig.do(ev.DrainStarted(rig.call()))
    rest(rig)
    assert "archive_dram" in [line.what for line in rig.planner.story.of(hashes("a", 1)[0], rig.namespace_id)]


def test_parents_are_copied_before_their_children() -> None:
    rig = rig_of()
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    rest(rig)
    order = [item.label.position for copy in copies_down(rig) for item in copy.items]
    assert order == sorted(order)


def test_the_put_is_answered_before_anything_is_written() -> None:
    rig = rig_of()
    call = rig.start_put(hashes("a", 2))
    while call not in rig.answers:
        assert not copies_down(rig)
        rig.finish(rig.copies[0])
    assert list(rig.answer(call).outcomes) == [STORED] * 2


def test_a_clean_block_is_not_written_again_when_it_leaves() -> None:
    rig = rig_of(dram_blocks=4)
    rig.start_put(hashes("a", 4))
    land_puts(rig)
    rest(rig)
    assert num_written(rig) == 4
    call = rig.start_put(hashes("b", 4))
    while call not in rig.answers:  # into full memory, and no device was waited for
        assert rig.copies[0].target is Tier.DRAM
        rig.finish(rig.copies[0])
    assert where(rig, "a", 4) == [{"nvme"}] * 4
    rest(rig)
    assert num_written(rig) == 8


def test_in_mode_spill_nothing_is_written_that_fits() -> None:
    rig = rig_of("spill")
    rig.start_put(hashes("a", 6))
    land_puts(rig)
    rest(rig, 3600.0)
    assert num_written(rig) == 0


def test_one_thread_makes_an_idle_copy_and_there_is_one_at_a_time() -> None:
    rig = rig_of(dram_blocks=40, num_segments=16)
    for number in range(20):
        rig.start_put(hashes(str(number), 1))
        land_puts(rig)
        assert len([copy for copy in rig.copies if copy.target is Tier.NVME]) <= 1
    rest(rig)
    assert all(copy.in_one for copy in copies_down(rig))
    assert num_written(rig) == 20


def test_nothing_begins_while_a_load_is_on_its_way() -> None:
    rig = rig_of(dram_blocks=8)
    rig.start_put(hashes("old", 2))
    land_puts(rig)
    rest(rig)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.acquire(hashes("old", 2))
    loads = list(rig.copies)
    assert {copy.source for copy in loads} == {Tier.NVME}
    rig.start_put(hashes("new", 2))
    land_puts(rig)
    rig.tick(1.0)
    assert rig.copies == loads
    for load in loads:
        rig.finish(load)
    assert [(copy.source, copy.target) for copy in rig.copies] == [TO_NVME]
    rest(rig)


def test_while_clients_ask_there_is_a_pause_between_idle_copies() -> None:
    rig = rig_of(dram_blocks=40, num_segments=16)
    rig.start_put(hashes("a", 1))
    land_puts(rig)
    rig.settle()
    rig.start_put(hashes("b", 1))
    land_puts(rig)
    assert not rig.copies
    assert rig.planner.next_deadline() == pytest.approx(rig.now + 0.01)
    rig.tick(0.02)
    assert len(rig.copies) == 1
    rig.settle()


def test_an_idle_copy_is_small() -> None:
    rig = rig_of(dram_blocks=60, num_segments=20)
    rig.start_put(hashes("a", 60))
    land_puts(rig)
    assert len([copy for copy in rig.copies if copy.target is Tier.NVME]) == 1
    rest(rig)
    assert max(len(copy.items) for copy in copies_down(rig)) == 32
    assert num_written(rig) == 60


def test_a_copy_that_failed_is_made_again() -> None:
    rig = rig_of()
    rig.start_put(hashes("a", 2))
    land_puts(rig)
    rig.finish(rig.copies[0], Cause.IO_ERROR)
    rest(rig)
    assert where(rig, "a", 2) == [{"dram", "nvme"}] * 2


def test_a_device_that_takes_nothing_is_asked_three_times_a_second() -> None:
    rig = rig_of()
    rig.start_put(hashes("a", 1))
    land_puts(rig)
    for _ in range(10):
        while rig.copies:
            rig.finish(rig.copies[0], Cause.IO_ERROR)
        deadline = rig.planner.next_deadline()
        assert deadline is not None
        rig.tick(max(0.0, deadline - rig.now))
    assert len(copies_down(rig)) <= 3 * (rig.now + 1)


def test_a_tier_that_is_offline_gets_nothing_and_all_of_it_later() -> None:
    rig = rig_of()
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    rig.start_put(hashes("a", 3))
    land_puts(rig)
    rest(rig)
    assert not copies_down(rig)
    rig.do(ev.TierLost(Tier.NVME, False, "test"))
    rest(rig)
    assert where(rig, "a", 3) == [{"dram", "nvme"}] * 3


def test_a_store_smaller_than_twice_dram_keeps_half_for_what_memory_has_not() -> None:
    rig = rig_of(dram_blocks=40, num_segments=4)
    rig.start_put(hashes("a", 40))
    land_puts(rig)
    rest(rig)
    num_clean = where(rig, "a", 40).count({"dram", "nvme"})
    assert 20 <= num_clean <= 26  # half of the store, in bytes of payload
    assert num_written(rig) == num_clean  # and it is not written in circles


@pytest.mark.parametrize("write", ["idle", "through"])
def test_what_is_used_again_stays_in_the_cold_store_although_memory_has_it(write: str) -> None:
    rig = rig_of(write, num_segments=6, policies=PolicyChoice(eviction="lru"))
    rig.start_put(hashes("hot", 1))
    land_puts(rig)
    rest(rig)
    for number in range(200):  # three times what the store holds
        rig.do(ev.Touched(CLIENT, rig.namespace_id, hashes("hot", 1), ""))
        rig.start_put(hashes(str(number), 1))
        rest(rig)
        assert "dram" in rig.where(hashes("hot", 1)[0])
    assert rig.planner.story.counters["segments_reclaimed"] > 6
    assert where(rig, "hot", 1) == [{"dram", "nvme"}]


def test_what_an_administrator_evicted_from_the_cold_store_does_not_come_back_by_itself() -> None:
    rig = rig_of()
    rig.start_put(hashes("a", 4))
    land_puts(rig)
    rest(rig)
    rig.do(ev.EvictRequested(rig.call(), Tier.NVME, 0))
    while rig.planner.is_busy:
        rig.tick()
    rest(rig)
    assert where(rig, "a", 4) == [{"dram"}] * 4
    rest(rig, 3600.0)
    assert num_written(rig) == 4


def test_what_admission_declines_is_not_written() -> None:
    policies = PolicyChoice(
        admission="tests.sim.policies:SenselessAdmissionToNvme", allowed_modules=("tests.sim",)
    )
    rig = rig_of(policies=policies, dram_blocks=40, num_segments=16)
    for number in range(40):
        rig.start_put(hashes(str(number), 1))
        land_puts(rig)
    rest(rig)
    assert 0 < num_written(rig) < 40
    assert len(rig.planner.dirty) == 0


def test_a_tenant_at_its_quota_gives_up_nothing_for_an_idle_copy() -> None:
    quota = TenantQuota(cold_bytes=2 * GEOMETRY.block_bytes)
    rig = rig_of(quotas={"": quota})
    rig.start_put(hashes("a", 2))
    land_puts(rig)
    rest(rig)
    rig.start_put(hashes("b", 2))
    land_puts(rig)
    rest(rig)
    assert where(rig, "a", 2) == [{"dram", "nvme"}] * 2
    assert where(rig, "b", 2) == [{"dram"}] * 2


def test_the_mode_changes_while_everything_goes_on() -> None:
    rig = rig_of("spill")
    rig.start_put(hashes("a", 4))
    land_puts(rig)
    rest(rig)
    options = PlannerOptions(high_watermark=1.0, low_watermark=1.0, write="idle")
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    rest(rig)
    assert where(rig, "a", 4) == [{"dram", "nvme"}] * 4


def test_what_nobody_waited_for_before_the_mode_changed_is_copied_then() -> None:
    """In mode spill a line forgets its oldest when more was put since than memory holds."""
    rig = rig_of("spill")
    rig.start_put(hashes("oldest", 1))
    land_puts(rig)
    pin = ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, hashes("oldest", 1), Tier.DRAM, 3600.0)
    rig.do(pin)
    for number in range(30):
        rig.start_put(hashes(str(number), 1))
        rest(rig, 0.001)
    assert where(rig, "oldest", 1) == [{"dram"}]
    options = PlannerOptions(high_watermark=1.0, low_watermark=1.0, write="idle")
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    rest(rig)
    assert where(rig, "oldest", 1) == [{"dram", "nvme"}]


def test_a_change_of_mode_looks_at_a_bounded_number_of_blocks_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: at all of them in one, seconds for a million."""
    num_blocks = 5 * COMPLETE_LOOKS
    looked_at: list[int] = []
    is_dirty = Dirty.is_dirty

    def counting(self: Dirty, row: int) -> bool:
        looked_at.append(row)
        return is_dirty(self, row)

    monkeypatch.setattr(Dirty, "is_dirty", counting)
    rig = rig_of("spill", dram_blocks=num_blocks, num_segments=2)
    for number in range(num_blocks // 64):
        rig.start_put(hashes(str(number), 64))
        land_puts(rig)
    dirty = rig.planner.dirty
    rig.do(ev.TierLost(Tier.NVME, True, "test"))  # nothing is copied meanwhile
    dirty.puts.by_tenant()[0][1].pop()  # as of a copy that failed
    options = PlannerOptions(high_watermark=1.0, low_watermark=1.0, write="idle")
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    most = len(looked_at)
    while rig.planner.is_busy:
        del looked_at[:]
        rig.tick()
        most = max(most, len(looked_at))
    assert 0 < most <= 2 * COMPLETE_LOOKS
    assert len(dirty.puts.rows()) == len(dirty.puts) == num_blocks


def test_without_a_cold_store_the_mode_means_nothing() -> None:
    rig = Rig(nvme_blocks=0, write="spill")
    rig.put(hashes("a", 4))
    options = PlannerOptions(high_watermark=1.0, low_watermark=1.0, write="idle")
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    rest(rig)
    assert where(rig, "a", 4) == [{"dram"}] * 4


def test_the_line_stays_bounded_and_keeps_what_is_dirty() -> None:
    """With a budget that is used up memory goes on being filled; the oldest block is pinned and stays."""
    rig = rig_of(dram_blocks=10, daily_write_bytes=BLOCK_BYTES // 2)
    rig.start_put(hashes("oldest", 1))
    land_puts(rig)
    rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, hashes("oldest", 1), Tier.DRAM, 3600.0))
    for number in range(60):
        rig.start_put(hashes(str(number), 1))
        rest(rig, 0.001)
    ahead = rig.planner.ahead
    assert len(ahead.dirty.puts) <= 15
    assert rig.planner.catalog.find(rig.namespace_id, hashes("oldest", 1)[0]) in ahead.dirty.puts.rows()
