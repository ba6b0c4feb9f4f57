"""What a verification found damaged: condemned in its tier, read from elsewhere, written again, or lost."""

from typing import Any

from kvtier.appliance.core import events as ev
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from ..rig import CLIENT, Rig, hashes


def damage(rig: Rig, tier: Tier, names: list[bytes]) -> Any:
    """Report every fragment of these blocks in `tier` as damaged; return the answer."""
    catalog = rig.planner.catalog
    rows = [catalog.find(rig.namespace_id, name) for name in names]
    places = [catalog.place[tier][one] for row in rows for one in catalog.fragments(row)]
    call = rig.call()
    rig.do(ev.FragmentsDamaged(call, tier, dict.fromkeys(places, Cause.WRONG_CHECKSUM)))
    return rig.answer(call)


def in_both(rig: Rig, chain: list[bytes]) -> None:
    rig.put(chain, session_id="archive")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "archive", True))
    for _ in range(4):
        rig.tick()
        rig.settle()
    assert all(rig.where(name) == {"dram", "nvme"} for name in chain)


def test_a_damaged_slot_is_read_from_nvme() -> None:
    rig = Rig(dram_blocks=8, nvme_blocks=8, num_segments=4)
    chain = hashes("a", 3)
    in_both(rig, chain)
    answer = damage(rig, Tier.DRAM, chain[1:2])
    assert {(one.prefix_hash, one.readable_from) for one in answer.blocks} == {(chain[1], "nvme")}
    assert [rig.where(name) for name in chain] == [{"dram", "nvme"}, {"nvme"}, {"dram", "nvme"}]
    assert rig.found(chain) == 3


def test_a_damaged_slot_without_a_record_is_a_miss() -> None:
    rig = Rig(dram_blocks=8, nvme_blocks=8, num_segments=4)
    chain = rig.put_new("a", 3)
    answer = damage(rig, Tier.DRAM, chain[1:2])
    assert {one.readable_from for one in answer.blocks} == {""}
    assert rig.found(chain) == 1
    assert damage(rig, Tier.DRAM, chain[:1]).blocks != []
    assert rig.found(chain) == 0


def test_a_damaged_record_of_what_memory_has_is_written_again() -> None:
    rig = Rig(dram_blocks=8, nvme_blocks=8, num_segments=4, write="idle")
    chain = hashes("a", 3)
    in_both(rig, chain)
    before = [rig.planner.catalog.find(rig.namespace_id, chain[1])]
    answer = damage(rig, Tier.NVME, chain[1:2])
    assert {one.readable_from for one in answer.blocks} == {"dram"}
    for _ in range(8):
        rig.now += 1.0
        rig.tick()
        rig.settle()
    assert rig.where(chain[1]) == {"dram", "nvme"}
    assert before == [rig.planner.catalog.find(rig.namespace_id, chain[1])]


def test_places_of_nothing_are_not_judged() -> None:
    rig = Rig(dram_blocks=8)
    rig.put(hashes("a", 1))
    call = rig.call()
    rig.do(ev.FragmentsDamaged(call, Tier.DRAM, {999 << 32: Cause.WRONG_CHECKSUM}))
    assert rig.answer(call).blocks == []
    assert rig.found(hashes("a", 1)) == 1
