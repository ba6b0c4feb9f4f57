"""What is left behind: by an eviction by hand, a drain, a lost tier, records of two times."""

import numpy as np

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier

from ..requests.test_keeping import adopt, evict_all, recovered
from ..rig import CLIENT, STORED, Rig, hashes


def test_what_an_administrator_cannot_evict_is_spilled_when_its_room_is_needed() -> None:
    rig = Rig(dram_blocks=3, nvme_blocks=16)
    chain = rig.put_new("a", 3)
    rig.tick(1.0)
    rig.put(hashes("b", 2))
    assert [rig.where(name) for name in chain] == [{"dram"}, {"nvme"}, {"nvme"}]
    evict_all(rig)
    assert rig.where(chain[0]) == {"dram"}, "what continues it would be left behind"
    assert rig.put(hashes("c", 3)) == [STORED] * 3
    assert rig.found(chain) == 3


def test_a_put_that_ends_during_a_drain_is_saved_too() -> None:
    rig = Rig(nvme_blocks=16)
    chain = hashes("a", 2)
    reservation_id = rig.answer(rig.reserve(chain)).reservation_id
    rig.do(ev.DrainStarted(rig.call()))
    call = rig.commit(reservation_id, 2)
    rig.settle()
    assert list(rig.answer(call).outcomes) == [STORED] * 2
    assert [rig.where(name) for name in chain] == [{"dram", "nvme"}] * 2


def test_nothing_is_kept_for_a_cold_store_that_is_lost() -> None:
    """Whoever ends a session goes on asking for its blocks to be archived, for days."""
    rig = Rig(nvme_blocks=16)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    for number in range(8):
        rig.put(hashes(f"{number}", 2), session_id="s")
        rig.do(call := ev.SessionEnded(rig.call(), CLIENT, "s", True))
        assert rig.answer(call.call).count == 0
    assert not rig.planner.pressure.archiving


def test_records_that_name_each_other_as_parents_tie_no_circle() -> None:
    chain = hashes("a", 3)
    rig = Rig(nvme_blocks=8)
    found, _ = recovered(chain, set())
    of_head = found.records["prefix_hash"] == np.void(chain[0])
    found.records["parent_hash"][of_head] = np.void(chain[2])
    found.records["has_parent"][of_head] = True
    rig.planner.adopt(found, 0.0)
    assert no_circle(rig, chain)
    assert rig.found(chain) == 3


def test_a_parent_that_is_put_again_ties_no_circle() -> None:
    """A block was found without its parent; a client puts that behind what continues the block."""
    chain = hashes("a", 2)
    rig = adopt(chain, {(0, 0), (0, 1)})
    rig.put(hashes("b", 1), parent=chain[1])
    rig.put(chain[:1], parent=hashes("b", 1)[0])
    rig.put(chain[1:], parent=chain[0])
    assert no_circle(rig, [*chain, *hashes("b", 1)])


def no_circle(rig: Rig, names: list[bytes]) -> bool:
    """Whether each of these blocks has a first ancestor."""
    catalog = rig.planner.catalog
    rows = [catalog.find(rig.namespace_id, name) for name in names]
    for _ in range(catalog.num_blocks + 1):
        rows = [catalog.parent[row] for row in rows if row != NO_ROW]
    return not rows


def test_what_a_device_has_lost_is_read_by_nobody_any_more() -> None:
    """A bit fell over in hbm, and the host that fetched the block to dram noticed."""
    rig = Rig(nvme_blocks=0, hbm_blocks=4)
    chain = rig.put_new("a", 2)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    evict_all(rig)
    assert [rig.where(name) for name in chain] == [{"hbm"}] * 2
    assert rig.planner.pressure.shed(Tier.HBM, 1)
    rig.tick()
    assert {copy.source for copy in rig.copies} == {Tier.HBM}
    while rig.copies:
        rig.finish(rig.copies[0], Cause.WRONG_CHECKSUM)
    assert rig.found(chain) == 1
    assert rig.put(chain[1:], parent=chain[0]) == [STORED]
    assert rig.found(chain) == 2
