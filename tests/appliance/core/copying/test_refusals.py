"""A cold store that takes nothing: memory goes on being a cache, and what is cold goes on being read."""

from collections.abc import Callable
from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity.reclaim import FRUITLESS_PAUSE_S, MAX_FRUITLESS_PAUSE_S
from kvtier.appliance.core.copying.refusals import MAX_REFUSALS, PAUSE_S
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier
from kvtier.tiers.memory.slots import SlotPool

from ..rig import CLIENT, STORED, Rig, hashes


def settle(rig: Rig, cause: Cause | None = Cause.IO_ERROR) -> int:
    """End every copy, those into nvme with `cause`; return how many of these there were."""
    num_spills = 0
    while rig.copies:
        is_spill = rig.copies[0].target is Tier.NVME
        rig.finish(rig.copies[0], cause if is_spill else None)
        num_spills += is_spill
        assert num_spills < 100, "it goes on for ever"
    return num_spills


def test_puts_find_room_although_nothing_can_be_spilled() -> None:
    rig = Rig(nvme_blocks=64)
    rig.put(hashes("a", 4))
    call = rig.start_put(hashes("b", 4))
    assert settle(rig) == MAX_REFUSALS
    assert list(rig.answer(call).outcomes) == [STORED] * 4
    assert rig.planner.story.counters["spills_refused"] == 1
    for number in range(5):
        assert rig.put(hashes(f"{number}", 4)) == [STORED] * 4


def test_it_is_asked_again_and_used_when_it_says_yes() -> None:
    rig = Rig(nvme_blocks=64)
    rig.put(hashes("a", 4))
    rig.start_put(hashes("b", 4))
    settle(rig)
    rig.tick(PAUSE_S)
    call = rig.start_put(hashes("c", 4))
    assert settle(rig) == 1, "one more try"
    assert list(rig.answer(call).outcomes) == [STORED] * 4
    rig.tick(PAUSE_S)
    rig.start_put(hashes("d", 4))
    settle(rig, None)
    assert rig.found(hashes("c", 4)) == 4, "spilled, as ever"
    assert rig.found(hashes("d", 4)) == 4


def test_a_batch_that_failed_now_and_then_costs_nobody_a_block() -> None:
    rig = Rig(nvme_blocks=64)
    for number in range(6):
        rig.start_put(hashes(f"{number}", 4))
        while rig.copies:
            is_spill = rig.copies[0].target is Tier.NVME
            num_spills = sum(copy.target is Tier.NVME for copy in rig.started)
            rig.finish(rig.copies[0], Cause.IO_ERROR if is_spill and num_spills % 2 else None)
    assert [rig.found(hashes(f"{number}", 4)) for number in range(6)] == [4] * 6


def test_what_is_cold_is_read_all_the_same_and_who_was_passed_over_leaves_later() -> None:
    rig = Rig(nvme_blocks=64)
    chain = rig.put_new("a", 4)
    rig.tick(1.0)
    rig.put(hashes("b", 2))
    assert [rig.where(block) for block in chain] == [{"dram"}] * 2 + [{"nvme"}] * 2
    rig.start_put(hashes("c", 2))
    settle(rig)
    assert rig.found(chain) == 4, "what others continue has stayed"
    rig.tick(PAUSE_S)
    for name in "def":
        rig.start_put(hashes(name, 4))
        settle(rig, None)
        assert rig.found(hashes(name, 4)) == 4
    assert [rig.where(block) for block in chain] == [{"nvme"}] * 4


def test_a_put_waits_where_room_would_cost_what_nvme_has() -> None:
    """A store that refuses writes is read all the same. Only where it is full of what dram keeps there do the
    ends of chains make way (below): that would change nothing here, and lose all four blocks."""
    rig = Rig(nvme_blocks=64)
    chain = rig.put_new("a", 4)
    rig.tick(1.0)
    rig.put(hashes("b", 2))
    assert [rig.where(block) for block in chain] == [{"dram"}] * 2 + [{"nvme"}] * 2
    rig.start_put(hashes("c", 2))
    settle(rig)
    call = rig.start_put(hashes("d", 3))
    settle(rig)
    assert rig.planner.refusals.is_pausing
    assert not rig.planner.refusals.is_full
    assert [rig.where(block) for block in chain] == [{"dram"}] * 2 + [{"nvme"}] * 2
    assert call not in rig.answers, "there is room for two"
    rig.tick(PAUSE_S)
    settle(rig, None)
    assert list(rig.answer(call).outcomes) == [STORED] * 3
    assert rig.found(chain) == 4


def test_a_fragment_that_is_too_long_is_no_refusal() -> None:
    rig = Rig(nvme_blocks=64)
    refusals = rig.planner.refusals
    for cause in (Cause.DOES_NOT_FIT, Cause.NO_KEY, Cause.CANCELLED, Cause.TIER_OFFLINE):
        for _ in range(MAX_REFUSALS):
            refusals.spilled([cause])
    assert not refusals.is_pausing


def test_puts_find_room_although_nvme_is_full_of_what_must_stay() -> None:
    """What dram has continues what nvme has, which therefore stays; so nothing of dram found room there, and
    puts waited in vain, for ever."""
    rig = Rig(dram_blocks=4, nvme_blocks=1, num_segments=4, min_free_segments=1)
    beginnings, ends = hashes("a", 3), hashes("b", 3)
    for beginning in beginnings:
        rig.put([beginning])
        rig.cool([beginning])
    for beginning, end in zip(beginnings, ends, strict=True):
        rig.put([end], parent=beginning)
    assert [rig.where(name) for name in beginnings + ends] == [{"nvme"}] * 3 + [{"dram"}] * 3
    rig.put(hashes("fills dram", 1))
    call = rig.start_put(hashes("new", 1))
    for _ in range(6):
        rig.settle()
        rig.tick(FRUITLESS_PAUSE_S)
    assert list(rig.answer(call).outcomes) == [STORED]
    assert rig.planner.story.counters["nvme_full"] == 1
    dropped = [n for n in rig.notices if n.reason == "coldest, nvme takes nothing"]
    assert [name for notice in dropped for name in notice.prefix_hashes] == ends[:1], (
        "the coldest, and no more"
    )
    assert [rig.where(name) for name in beginnings + ends[1:]] == [{"nvme"}] * 3 + [{"dram"}] * 2


def rig_of_a_chain_that_keeps_itself(**named: Any) -> tuple[Rig, list[bytes]]:
    """A rig with room for two blocks in dram and nvme. The end of a chain in nvme keeps its middle in dram,
    the middle keeps the beginning in nvme, and there is only as much room as copying forward needs."""
    rig = Rig(nvme_blocks=1, num_segments=3, min_free_segments=1, **named)
    beginning, middle, end = chain = hashes("a", 3)
    rig.put([beginning])
    rig.cool([beginning])
    rig.put([middle], parent=beginning)
    rig.put([end], parent=middle)
    call = rig.acquire([beginning])
    rig.settle()
    rig.release(call)
    assert [rig.where(name) for name in chain] == [{"dram", "nvme"}, {"dram"}, {"nvme"}]
    return rig, chain


def fail_forward(rig: Rig) -> None:
    """Let the copy fail that would have emptied a segment of nvme: nothing can be emptied any more."""
    (copy,) = rig.copies
    assert (copy.source, copy.target) == (Tier.NVME, Tier.NVME)
    rig.finish(copy, Cause.NO_SPACE)


def test_the_end_of_a_chain_in_nvme_makes_way_for_a_put() -> None:
    """The put found no room, and no later one did."""
    rig, chain = rig_of_a_chain_that_keeps_itself(dram_blocks=2)
    call = rig.start_put(hashes("new", 1))
    fail_forward(rig)
    rig.tick(0.01)
    settle(rig, None)
    assert list(rig.answer(call).outcomes) == [STORED]
    assert [rig.where(name) for name in chain] == [{"dram"}, set(), set()]


def test_the_end_of_a_chain_in_nvme_makes_way_for_a_smaller_dram() -> None:
    """The extent never left dram (simulator seed 1000335)."""
    rig, chain = rig_of_a_chain_that_keeps_itself(dram_blocks=1, num_extents=2)
    planner = rig.planner
    rig.do(ev.PolicyChanged(planner.core.options, planner.core.choice, {Tier.DRAM: 1}))
    fail_forward(rig)
    for _ in range(20):  # nothing happens but what the planner asks for
        settle(rig, None)
        if (due := planner.next_deadline()) is not None:
            rig.tick(max(0.0, due - rig.now))
    room = planner.rooms[Tier.DRAM]
    assert isinstance(room, SlotPool)
    assert not room.leaving
    assert [rig.where(name) for name in chain] == [{"dram"}, set(), set()]


def test_a_store_too_small_for_what_must_stay_is_tried_ever_more_rarely(
    record_property: Callable[[str, object], None],
) -> None:
    """A segment was emptied, and written elsewhere, every second for as long as the pins lasted."""
    rig = Rig(dram_blocks=5, nvme_blocks=1, num_segments=4, min_free_segments=1)
    beginnings, ends = hashes("a", 2), hashes("b", 2)
    for beginning in beginnings:
        rig.put([beginning])
        rig.cool([beginning])
    pins = []
    for beginning, end in zip(beginnings, ends, strict=True):
        rig.put([end], parent=beginning)
        pins.append(rig.call())
        rig.do(ev.PinRequested(pins[-1], CLIENT, "", rig.namespace_id, [beginning, end], Tier.NVME, 3600.0))
    counters = rig.planner.story.counters
    calls = []
    for second in range(600):
        calls.append(rig.start_put(hashes(f"{second}", 1)))
        rig.settle()
        rig.tick(1.0)
    rig.settle()
    assert [list(rig.answer(call).outcomes) for call in calls] == [[STORED]] * 600
    assert counters["nvme_full"] > 0
    record_property("segments_in_vain", counters["segments_reclaimed"])
    assert counters["segments_reclaimed"] < 40
    for call in pins:
        rig.do(ev.UnpinRequested(rig.answer(call).pin_id))
    num_stored = counters["stored_nvme"]
    rig.tick(MAX_FRUITLESS_PAUSE_S)
    rig.start_put(hashes("after", 2))
    while counters["stored_nvme"] == num_stored:
        rig.finish(rig.copies[0])
