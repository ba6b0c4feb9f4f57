"""What is copied down ahead of need, and that it stays where it was until its room is needed."""

from dataclasses import replace

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity.pressure import MAX_STEPS
from kvtier.policies.registry import PolicyChoice
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from ..rig import GEOMETRY, SLOT_BYTES, STORED, Rig, hashes

LRU = PolicyChoice(eviction="lru")
SMALL = 3  # segments


def rig_of(num_blocks: int, num_segments: int = 8, max_spill_bytes: int = 64 << 20) -> Rig:
    """Return a rig of ten blocks of dram with so many put one after another. Copies ahead begin above the
    fifth. A segment of nvme takes ten; with three of them, five blocks of ten stay dirty."""
    rig = Rig(
        dram_blocks=10,
        nvme_blocks=10,
        num_segments=num_segments,
        policies=LRU,
        high_watermark=0.8,
        low_watermark=0.5,
        max_spill_bytes=max_spill_bytes,
    )
    for number in range(num_blocks):
        put(rig, number)
    return rig


def put(rig: Rig, number: int) -> None:
    assert rig.put(hashes(str(number), 1)) == [STORED]
    rig.tick(1.0)


def tiers(rig: Rig, numbers: range) -> list[set[str]]:
    """Return where these blocks are."""
    return [rig.where(hashes(str(number), 1)[0]) for number in numbers]


def num_spilled(rig: Rig) -> int:
    """Return how many blocks were copied down, or tried to be."""
    num_fragments = sum(len(copy.items) for copy in rig.started if copy.target is Tier.NVME)
    return num_fragments // GEOMETRY.num_groups


def test_a_tier_far_above_its_watermark_is_brought_down_without_another_event() -> None:
    """One event evicts MAX_STEPS blocks at most. Unless the planner then says that it is busy, no tick comes,
    and what is left stays until a client calls."""
    num_blocks = 3 * MAX_STEPS
    rig = Rig(dram_blocks=num_blocks, nvme_blocks=num_blocks, policies=LRU, write="through")
    chains = [hashes(f"{number}", 16) for number in range(num_blocks // 16)]
    for chain in chains:
        rig.put(chain)
        rig.tick()
        rig.settle()
    assert {frozenset(rig.where(name)) for chain in chains for name in chain} == {frozenset({"dram", "nvme"})}
    room = rig.planner.rooms[Tier.DRAM]
    assert room.statistics().taken_bytes == room.statistics().capacity_bytes
    options = replace(rig.planner.core.options, high_watermark=0.1, low_watermark=0.1)
    rig.do(ev.PolicyChanged(options, rig.planner.core.choice, {}))
    for _ in range(num_blocks):
        assert not rig.copies, "all are in nvme"
        if rig.planner.next_deadline() != rig.now:
            break
        rig.tick()
    assert room.statistics().taken_bytes <= 0.1 * room.statistics().capacity_bytes
    assert [rig.found(chain) for chain in chains] == [16] * len(chains)


def test_what_fits_below_the_low_watermark_is_never_written() -> None:
    assert num_spilled(rig_of(5)) == 0


def test_above_it_all_that_was_put_is_copied_and_stays() -> None:
    assert tiers(rig_of(6), range(6)) == [{"dram", "nvme"}] * 6


def test_above_the_high_watermark_clean_blocks_leave_one_for_one() -> None:
    rig = rig_of(10)
    assert tiers(rig, range(10)) == [{"nvme"}] * 2 + [{"dram", "nvme"}] * 8
    assert num_spilled(rig) == 10


def test_where_nvme_is_small_the_newest_blocks_stay_dirty() -> None:
    assert tiers(rig_of(8, SMALL), range(8)) == [{"dram", "nvme"}] * 3 + [{"dram"}] * 5


def test_a_put_into_a_full_tier_waits_for_no_device() -> None:
    rig = rig_of(8)
    call = rig.start_put(hashes("new", 5))
    while copies := [copy for copy in rig.copies if copy.target is Tier.DRAM]:
        rig.finish(copies[0])
    assert list(rig.answer(call).outcomes) == [STORED] * 5
    rig.settle()


def test_a_chain_is_copied_while_all_of_it_is_still_there() -> None:
    rig = rig_of(0)
    rig.put(hashes("chain", 8))
    rig.settle()
    chain = [rig.where(name) for name in hashes("chain", 8)]
    assert chain == [{"dram", "nvme"}] * 8


def test_what_left_or_was_copied_meanwhile_is_not_copied_again() -> None:
    rig = rig_of(5, SMALL)
    row = rig.planner.catalog.find(rig.namespace_id, hashes("0", 1)[0])
    assert rig.planner.pressure.archiving.add(row)
    rig.tick()
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 2 * 2 * SLOT_BYTES))
    assert tiers(rig, range(3)) == [{"nvme"}, set(), {"dram"}]
    for number in range(5, 8):
        put(rig, number)
    assert tiers(rig, range(2, 8)) == [{"dram", "nvme"}] + [{"dram"}] * 5
    assert num_spilled(rig) == 2


def test_who_is_on_its_way_down_holds_nobody_up() -> None:
    rig = rig_of(5)
    row = rig.planner.catalog.find(rig.namespace_id, hashes("0", 1)[0])
    assert rig.planner.pressure.archiving.add(row)
    rig.tick()
    (archived,) = rig.copies
    rig.start_put(hashes("5", 1))
    rig.finish(rig.copies[1])
    assert [item.label.prefix_hash for copy in rig.copies for item in copy.items] == [
        hashes(str(number), 1)[0] for number in range(6) for _ in range(GEOMETRY.num_groups)
    ]
    assert rig.copies[0] is archived
    rig.settle()


def test_a_copy_that_failed_is_made_when_the_block_is_a_victim() -> None:
    rig = rig_of(5, SMALL)
    rig.start_put(hashes("5", 1))
    rig.finish(rig.copies[0])
    (spill,) = rig.copies
    rig.finish(spill, Cause.IO_ERROR)
    assert (tiers(rig, range(1)), rig.copies) == ([{"dram"}], [])
    rig.tick(1.0)
    for number in range(6, 9):
        put(rig, number)
    assert tiers(rig, range(4)) == [{"nvme"}] + [{"dram", "nvme"}] * 3


def test_nobody_is_copied_ahead_with_more_than_half_of_what_may_be_on_its_way() -> None:
    rig = rig_of(0, max_spill_bytes=4 * GEOMETRY.block_bytes)
    call = rig.start_put(hashes("chain", 8))
    while not rig.answers.get(call):
        rig.finish(rig.copies[0])
    assert [len(copy.items) for copy in rig.copies] == [2 * GEOMETRY.num_groups]
    rig.settle()
    assert num_spilled(rig) == 8


def test_nothing_is_copied_into_a_tier_that_is_offline_and_the_queue_stays_short() -> None:
    rig = rig_of(0)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    for number in range(40):
        put(rig, number)
    assert num_spilled(rig) == 0
    assert len(rig.planner.dirty) <= 10
    rig.do(ev.TierLost(Tier.NVME, False, "test"))
    rig.tick()
    rig.settle()
    assert num_spilled(rig) == 10


def test_without_a_cold_store_nothing_is_remembered() -> None:
    rig = Rig(nvme_blocks=0, low_watermark=0.5)
    rig.put(hashes("a", 4))
    assert len(rig.planner.dirty) == 0
