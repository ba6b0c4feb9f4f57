"""Blocks of which only a part is here: they leave like others, and keep nobody else from leaving."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.residency import SPARE_HALF
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier, Urgency

from ..rig import CLIENT, SLOT_BYTES, STORED, Rig, hashes
from ..test_changes import ResizableRig


def in_tier(rig: Rig, name: bytes, tier: Tier) -> int:
    """Return how many fragments of a block can be read from a tier."""
    catalog = rig.planner.catalog
    row = catalog.find(rig.namespace_id, name)
    return catalog.num_resident[tier][row] if row >= 0 else 0


def lose_record(rig: Rig, name: bytes, group: int, tier: Tier = Tier.NVME) -> None:
    """Condemn what a tier has of one layer group of a block: its bytes failed verification."""
    residency = rig.planner.residency
    row = rig.planner.catalog.find(rig.namespace_id, name)
    residency.condemn(rig.planner.catalog.first_fragment[row] + group, tier, "wrong_checksum")
    rig.tick()


def leave_torso(rig: Rig, chain: list[bytes], floor: Tier | None = None) -> None:
    """Of the second block of a chain only the first layer group is left; the third is in nvme only.

    `floor`: of a pin on the first two, taken while they were whole."""
    rig.put(chain)
    rig.cool(chain)
    if floor is not None:
        rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, chain[:2], floor, 600.0))
    rig.acquire(chain[:2], first_block=1)
    first, second = rig.copies
    assert [copy.items[0].label.group for copy in (first, second)] == [0, 1]
    rig.finish(first)
    rig.finish(second, Cause.WRONG_CHECKSUM)
    rig.settle()
    held = list(rig.planner.leases.clients[CLIENT].leases)
    rig.do(ev.ReleaseRequested(None, CLIENT, held))
    assert in_tier(rig, chain[1], Tier.DRAM) == 1
    assert rig.found(chain) == 1


def test_a_torso_makes_room_for_a_put() -> None:
    rig = Rig(dram_blocks=3, nvme_blocks=16)
    chain = hashes("a", 3)
    leave_torso(rig, chain)
    assert rig.put(hashes("new", 3)) == [STORED] * 3
    assert in_tier(rig, chain[1], Tier.DRAM) == 0
    assert rig.found(chain) == 1, "the first block is where it was"


def test_a_torso_does_not_stop_a_tier_that_shrinks() -> None:
    rig = ResizableRig(2, nvme_blocks=16)
    chain, others = hashes("a", 3), hashes("b", 3)
    leave_torso(rig, chain)
    for name in others:
        rig.put([name])
    rig.tick(1.0)
    rig.change(dram=1)
    rig.settle()
    rig.tick(5.0)
    rig.settle()
    assert rig.dram.leaving == set()
    assert rig.found(others[:1]) == 1


def test_what_continues_a_torso_is_there_again_with_it() -> None:
    rig = Rig(dram_blocks=3, nvme_blocks=16)
    chain = hashes("a", 3)
    leave_torso(rig, chain)
    rig.put(hashes("new", 3))
    assert rig.put([chain[1]], parent=chain[0]) == [STORED]
    assert rig.found(chain) == 3


def test_a_pinned_torso_leaves_what_it_has_at_its_floor() -> None:
    rig = Rig(dram_blocks=3, nvme_blocks=16)
    chain = hashes("a", 3)
    leave_torso(rig, chain, floor=Tier.NVME)
    assert rig.put(hashes("new", 3)) == [STORED] * 3
    assert in_tier(rig, chain[1], Tier.NVME) == 1


def test_a_block_leaves_hbm_when_the_rest_of_it_is_in_two_tiers() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=16, hbm_blocks=2)
    chain = hashes("a", 2)
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain[:1], Tier.HBM))
    rig.settle()
    assert rig.where(chain[0]) == {"hbm", "dram", "nvme"}
    lose_record(rig, chain[0], 1, Tier.DRAM)
    lose_record(rig, chain[0], 0)
    assert (in_tier(rig, chain[0], Tier.DRAM), in_tier(rig, chain[0], Tier.NVME)) == (1, 1)
    rig.do(ev.EvictRequested(rig.call(), Tier.HBM, 0))
    assert in_tier(rig, chain[0], Tier.HBM) == 0
    assert rig.found(chain) == 2


def test_two_copies_of_one_half_are_no_block() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=16, hbm_blocks=2)
    chain = hashes("a", 2)
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain[:1], Tier.HBM))
    rig.settle()
    lose_record(rig, chain[0], 1, Tier.DRAM)
    lose_record(rig, chain[0], 1)
    assert (in_tier(rig, chain[0], Tier.DRAM), in_tier(rig, chain[0], Tier.NVME)) == (1, 1)
    rig.do(ev.EvictRequested(rig.call(), Tier.HBM, 0))
    assert in_tier(rig, chain[0], Tier.HBM) == 2, "only hbm has its second half"
    assert rig.found(chain) == 2


def test_what_is_in_hbm_does_not_hold_its_copy_in_dram() -> None:
    """A chain in hbm: its copies in dram leave for a put, tail first. (Simulator, seed 103038.)"""
    rig = Rig(dram_blocks=2, nvme_blocks=0, hbm_blocks=4)
    chain = hashes("a", 2)
    rig.put(chain)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    assert rig.put(hashes("new", 2)) == [STORED] * 2
    assert [rig.where(name) for name in chain] == [{"hbm"}] * 2
    assert rig.found(chain) == 2


def test_a_block_does_not_leave_dram_before_a_child_that_only_the_other_one_has_in_hbm() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=16, hbm_blocks=4)
    chain = hashes("a", 2)
    rig.put(chain)
    row = rig.planner.catalog.find(rig.namespace_id, chain[1])
    rig.planner.loads.promote(row, Tier.HBM, Urgency.WAITING, float("inf"))
    rig.planner.loads.start(Urgency.WAITING, float("inf"))
    rig.tick()
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert [rig.where(name) for name in chain] == [{"dram"}, {"hbm"}]


def test_a_block_that_nvme_has_leaves_dram_before_a_child_in_hbm() -> None:
    """Half of it was in hbm, where nothing asked for room; all of dram was such blocks, and no put found any.
    (Simulator, seed 3132.)"""
    rig = Rig(dram_blocks=2, nvme_blocks=16, hbm_blocks=4, write="through")
    chain = hashes("a", 2)
    rig.put(chain)
    rig.settle()
    first, second = (rig.planner.catalog.find(rig.namespace_id, name) for name in chain)
    rig.planner.loads.bring(rig.planner.catalog.first_fragment[first], Tier.HBM, None)
    rig.planner.loads.promote(second, Tier.HBM, Urgency.WAITING, float("inf"))
    rig.planner.loads.start(Urgency.WAITING, float("inf"))
    rig.tick()
    rig.settle()
    assert rig.put(hashes("new", 2)) == [STORED] * 2
    assert [rig.where(name) for name in chain] == [{"nvme"}, {"hbm", "nvme"}]
    assert in_tier(rig, chain[0], Tier.HBM) == 1
    assert rig.found(chain) == 2


def test_a_block_of_hbm_that_finds_little_room_below_does_not_go_in_circles() -> None:
    """Only what nvme has not is spilled to dram; one fragment does not push the other out. (Seed 102826.)"""
    rig = Rig(dram_blocks=1, nvme_blocks=16, hbm_blocks=2)
    chain = hashes("a", 1)
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    lose_record(rig, chain[0], 1)
    assert rig.where(chain[0]) == {"hbm"}
    rig.started.clear()
    assert rig.planner.pressure.shed(Tier.HBM, 1)
    rig.tick()
    assert [item.label.group for copy in rig.started for item in copy.items] == [1]
    rig.settle()
    assert rig.planner.pressure.shed(Tier.HBM, 1)
    rig.tick()
    assert (in_tier(rig, chain[0], Tier.HBM), rig.found(chain)) == (0, 1)


def test_a_drain_saves_what_only_hbm_has_of_a_block() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=16, hbm_blocks=2)
    chain = hashes("a", 1)
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    lose_record(rig, chain[0], 1, Tier.DRAM)
    lose_record(rig, chain[0], 1)
    rig.do(ev.DrainStarted(rig.call()))
    rig.settle()
    assert in_tier(rig, chain[0], Tier.NVME) == 2


def test_the_segment_that_makes_room_for_a_half_is_not_that_of_the_other_half() -> None:
    """The oldest segment has what dram has not. Were it dropped, what is being spilled would be gone, too."""
    rig = Rig(nvme_blocks=1, num_segments=3, min_free_segments=0, max_forward_fraction=0.0)
    chain = hashes("a", 1)
    for names in (chain, hashes("b", 1)):
        rig.put(names)
        rig.cool(names)
    rig.release(rig.acquire(chain))
    rig.settle()
    lose_record(rig, chain[0], 1, Tier.DRAM)
    lose_record(rig, chain[0], 0)
    assert rig.found(chain) == 1
    rig.planner.pressure.shed(Tier.DRAM, 1)
    rig.tick()
    rig.settle()
    assert rig.found(chain) == 1


def test_a_half_block_in_dram_whose_record_was_lost_is_spilled_before_it_leaves() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=16)
    chain = hashes("a", 4)
    rig.put(chain)
    rig.cool(chain)
    call = rig.acquire(chain)
    rig.settle()
    rig.release(call)
    lose_record(rig, chain[3], 1, Tier.DRAM)
    lose_record(rig, chain[3], 0)
    assert rig.found(chain) == 4, "dram has what nvme lost"
    rig.put(hashes("new", 4))
    rig.put(hashes("newer", 4))
    assert in_tier(rig, chain[3], Tier.DRAM) == 0
    assert rig.found(chain) == 4


def in_dram_and_half_in_nvme(rig: Rig, chain: list[bytes]) -> int:
    """All of a chain is in dram and in nvme, but for one record of its first block; it was used twice.

    Returns the call whose lease keeps it in dram."""
    rig.put(chain)
    rig.cool(chain)
    call = rig.acquire(chain)
    rig.settle()
    residency = rig.planner.residency
    row = rig.planner.catalog.find(rig.namespace_id, chain[0])
    assert not residency.may_leave(row, Tier.NVME), "after a restart its child would have no beginning"
    lose_record(rig, chain[0], 0)
    assert [in_tier(rig, name, Tier.DRAM) for name in chain] == [2] * len(chain)
    assert [in_tier(rig, name, Tier.NVME) for name in chain] == [1] + [2] * (len(chain) - 1)
    return call


def test_what_nvme_has_of_half_a_block_may_go_when_memory_has_all_of_it() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=16)
    chain = hashes("a", 2)
    in_dram_and_half_in_nvme(rig, chain)
    residency = rig.planner.residency
    row = rig.planner.catalog.find(rig.namespace_id, chain[0])
    assert residency.may_leave(row, Tier.NVME)
    rig.planner.core.transitions.keep(row)
    assert not residency.may_leave(row, Tier.NVME), "a session decodes on it"
    residency.unkeep(row)
    assert residency.evict(row, Tier.NVME, "test") == SLOT_BYTES
    rig.tick()
    assert rig.notices[-1].reason == SPARE_HALF, "what continues it stays (simulator, seed 11509)"
    assert rig.found(chain) == 2


def test_half_a_block_that_memory_has_is_not_copied_forward() -> None:
    """A store full of such halves found no room to copy them into. (Simulator, seeds 136174 and 141348.)"""
    rig = Rig(dram_blocks=4, nvme_blocks=2, num_segments=3, max_forward_fraction=1.0)
    chain = hashes("a", 2)
    in_dram_and_half_in_nvme(rig, chain)
    for number in range(12):
        assert rig.put(hashes(str(number), 1)) == [STORED]
        rig.tick(1.0)
        rig.settle()
        if any(notice.reason == SPARE_HALF for notice in rig.notices):
            break
    assert in_tier(rig, chain[0], Tier.NVME) == 0
    assert [in_tier(rig, name, Tier.DRAM) for name in chain] == [2, 2]
    forward = [i.label.prefix_hash for c in rig.started if c.source is c.target for i in c.items]
    assert chain[0] not in forward
