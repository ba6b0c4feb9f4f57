"""Puts of blocks that the catalog knows and nobody can read: what is acknowledged is there afterwards."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import BlockChange
from kvtier.appliance.core.results import PutOutcome
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from ..catalog.test_half_blocks import in_tier, lose_record
from ..rig import CLIENT, STORED, Rig, hashes


def test_a_block_of_a_tier_that_is_offline_is_stored_anew() -> None:
    rig = Rig(nvme_blocks=16)
    chain = rig.cool_new("a", 3)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    rig.notices.clear()
    assert rig.put(chain) == [STORED] * 3
    assert rig.found(chain) == 3
    assert [rig.where(name) for name in chain] == [{"dram"}] * 3
    came = [one for one in rig.notices if one.change is not BlockChange.REMOVED]
    told = [name for one in came for name in one.prefix_hashes]
    assert told == chain, "once each"


def test_its_old_record_does_not_count_when_the_tier_is_back() -> None:
    """Its bytes may be others than those that were put since, and a fragment has one checksum."""
    rig = Rig(nvme_blocks=16)
    chain = rig.cool_new("a", 1)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    rig.put(chain)
    rig.do(ev.TierLost(Tier.NVME, False, "test"))
    rig.put(hashes("b", 4))
    assert rig.where(chain[0]) == {"nvme"}, "it was spilled before it left"
    assert sum(copy.target is Tier.NVME for copy in rig.started) == 2


def test_half_a_block_is_put_again_where_the_other_half_is_out_of_reach() -> None:
    rig = Rig(nvme_blocks=16)
    chain = rig.cool_new("a", 1)
    lose_record(rig, chain[0], 0)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    assert rig.put(chain) == [STORED]
    assert rig.found(chain) == 1


def test_what_is_condemned_and_still_read_is_put_again() -> None:
    """A device reads what turns out to be damaged: a put meanwhile is not told that it stored it."""
    rig = Rig(nvme_blocks=16, hbm_blocks=4)
    chain = rig.cool_new("a", 1)
    rig.do(ev.ColdEdgeOpened(frozenset({0})))
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    assert {copy.target for copy in rig.copies} == {Tier.HBM}
    lose_record(rig, chain[0], 0)
    lose_record(rig, chain[0], 1)
    assert list(rig.answer(rig.start_put(chain)).outcomes) == [PutOutcome.IN_PROGRESS]
    while rig.copies:
        rig.finish(rig.copies[0], Cause.WRONG_CHECKSUM)
    assert rig.found(chain) == 0
    assert rig.put(chain) == [STORED]
    assert rig.found(chain) == 1


def test_a_block_that_a_lost_device_still_holds_is_put_again() -> None:
    """A lease holds what hbm had: condemned, it is nobody's, and dram may have the block anew."""
    rig = Rig(nvme_blocks=0, hbm_blocks=4)
    chain = rig.put_new("a", 1)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    assert rig.where(chain[0]) == {"hbm"}
    call = rig.acquire(chain)
    rig.do(ev.TierLost(Tier.HBM, True, "test"))
    assert rig.put(chain) == [STORED]
    assert rig.found(chain) == 1
    rig.release(call)
    assert in_tier(rig, chain[0], Tier.DRAM) == 2


def test_a_put_that_fails_takes_no_record_along() -> None:
    rig = Rig(nvme_blocks=16)
    chain = rig.cool_new("a", 1)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    call = rig.start_put(chain)
    rig.finish(rig.copies[0], Cause.SOURCE_GONE)
    assert list(rig.answer(call).outcomes) == [PutOutcome.FAILED]
    rig.do(ev.TierLost(Tier.NVME, False, "test"))
    assert rig.found(chain) == 1
    call = rig.acquire(chain)
    rig.settle()
    assert rig.answer(call).num_blocks == 1
