"""Who stays and who leaves: pins, sessions, children, reclaim, drain, recovery."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import archiving
from kvtier.appliance.core.catalog.catalog import NO_ROW
from kvtier.appliance.core.instructions import BlockChange, SealSegment
from kvtier.appliance.core.options import TenantQuota
from kvtier.appliance.core.results import PutOutcome
from kvtier.tiers.base import Cause
from kvtier.tiers.block import NamespaceIdentity, Tier, Urgency
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.cold.recovery import RECORD, RecoveredStore, SegmentSummary
from kvtier.v1.shm import place_of
from tests.records import columns

from ..rig import CLIENT, GEOMETRY, RECORD_BYTES, STORED, Rig, hashes


def evict_all(rig: Rig) -> None:
    """Evict from dram whatever may go."""
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))


def test_a_parent_leaves_after_its_children() -> None:
    rig = Rig(nvme_blocks=0)
    chain = rig.put_new("a", 3)
    held = rig.acquire(chain[:2])  # the last one is free, its parents are not
    evict_all(rig)
    assert [bool(rig.where(h)) for h in chain] == [True, True, False]
    rig.release(held)
    evict_all(rig)
    assert rig.planner.catalog.num_blocks == 0
    removed = [
        h for notice in rig.notices if notice.change is BlockChange.REMOVED for h in notice.prefix_hashes
    ]
    assert removed == list(reversed(chain))


def test_a_pinned_block_stays_at_its_floor_until_the_pin_ends() -> None:
    rig = Rig()
    chain = rig.put_new("a", 1)
    call = rig.call()
    rig.do(ev.PinRequested(call, CLIENT, "", rig.namespace_id, chain, Tier.DRAM, 10.0))
    assert rig.answer(call).num_blocks == 1
    evict_all(rig)
    assert rig.where(chain[0]) == {"dram"}
    rig.tick(10.1)
    evict_all(rig)
    assert rig.where(chain[0]) == set()


def test_a_pin_asked_for_again_is_the_same_pin_until_it_ends() -> None:
    rig = Rig()
    chain = rig.put_new("a", 1)

    def pin() -> int:
        call = rig.call()
        rig.do(ev.PinRequested(call, CLIENT, "the one", rig.namespace_id, chain, Tier.DRAM, 10.0))
        pin_id: int = rig.answer(call).pin_id
        return pin_id

    first = pin()
    assert pin() == first
    assert len(rig.planner.pins) == 1
    rig.do(ev.UnpinRequested(first))
    evict_all(rig)
    assert rig.where(chain[0]) == set()
    rig.put(chain)
    assert pin() != first


def test_a_pin_to_nvme_lets_dram_go_once_the_block_is_below() -> None:
    rig = Rig(dram_blocks=1)
    chain = rig.put_new("a", 1)
    rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, chain, Tier.NVME, 10.0))
    rig.put(hashes("b", 1))
    assert rig.where(chain[0]) == {"nvme"}


def test_a_pinned_block_that_never_reached_its_floor_is_kept_below_until_the_pin_ends() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=0, hbm_blocks=2, hbm_is_shared=False)
    chain = rig.put_new("a", 2)
    rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, chain, Tier.HBM, 10.0))
    while rig.copies:
        rig.finish(rig.copies[0], Cause.IO_ERROR)
    assert rig.put(hashes("b", 2)) == rig.put(hashes("c", 2)) == [STORED, STORED]
    evict_all(rig)
    assert [rig.where(h) for h in chain] == [{"dram"}, {"dram"}]
    rig.tick(10.1)
    evict_all(rig)
    assert not any(rig.where(h) for h in chain)
    assert rig.planner.core.pin_floors == {}


def test_a_pinned_block_that_never_reached_its_floor_goes_down_and_no_further() -> None:
    """Memory that is needed is freed: the block is written to nvme, and stays there."""
    rig = Rig(dram_blocks=2, nvme_blocks=2, hbm_blocks=2, hbm_is_shared=False, num_segments=8)
    chain = rig.put_new("a", 2)
    rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, chain, Tier.HBM, 600.0))
    while rig.copies:
        rig.finish(rig.copies[0], Cause.IO_ERROR)
    for number in range(12):
        rig.put(hashes(f"b{number}", 2))
        rig.tick(1.0)
        rig.settle()
    assert rig.found(chain) == 2
    assert all("nvme" in rig.where(h) or "dram" in rig.where(h) for h in chain)
    call = rig.call()
    rig.do(ev.EvictRequested(call, Tier.NVME, 0))
    rig.tick()
    rig.settle()
    assert rig.found(chain) == 2


def test_pins_of_a_fast_tier_leave_room_in_the_slowest() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=0, hbm_blocks=8, hbm_is_shared=False, max_pinned_fraction=0.5)
    chain = rig.put_new("a", 3)
    call = rig.call()
    rig.do(ev.PinRequested(call, CLIENT, "", rig.namespace_id, chain, Tier.HBM, 10.0))
    assert rig.answer(call).reason == "TIER_FULL"


def test_a_pin_in_a_tier_that_there_is_not_is_no_question_of_room() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=0)
    call = rig.call()
    rig.do(ev.PinRequested(call, CLIENT, "", rig.namespace_id, rig.put_new("a", 1), Tier.HBM, 10.0))
    assert rig.answer(call).reason == "BAD_TIER"


def test_a_decoding_session_loses_nothing() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=0)
    chain = hashes("a", 2)
    assert rig.put(chain, session_id="s") == [STORED, STORED]
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.DECODING))
    evict_all(rig)
    assert all(rig.where(h) for h in chain)
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.IDLE))
    evict_all(rig)
    assert not any(rig.where(h) for h in chain)


def test_a_dead_clients_sessions_decode_no_more() -> None:
    rig = Rig(nvme_blocks=0)
    rig.put(hashes("a", 1), session_id="s")
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.DECODING))
    rig.do(ev.ClientGone(CLIENT, "died"))
    evict_all(rig)
    assert rig.planner.catalog.num_blocks == 0


def test_archiving_demotes_the_blocks_of_an_ended_session() -> None:
    rig = Rig()
    chain = rig.put_new("a", 2, session_id="s")
    call = rig.call()
    rig.do(ev.SessionEnded(call, CLIENT, "s", archive=True))
    assert rig.answer(call).count == 2
    rig.settle()
    assert all(rig.where(h) == {"dram", "nvme"} for h in chain)


def test_a_fork_holds_what_its_parent_holds() -> None:
    rig = Rig()
    rig.put(hashes("a", 2), session_id="s")
    call = rig.call()
    rig.do(ev.SessionForked(call, CLIENT, "s", "t"))
    assert rig.answer(call).count == 2


def test_a_tier_that_is_lost_is_not_read_and_comes_back() -> None:
    rig = Rig()
    chain = rig.cool_new("a", 1)
    rig.do(ev.TierLost(Tier.NVME, True, "test"))
    assert rig.found(chain) == 0
    rig.do(ev.TierLost(Tier.NVME, False, "test"))
    assert rig.found(chain) == 1


def test_memory_that_is_lost_is_forgotten_at_once_and_for_good() -> None:
    rig = Rig(hbm_blocks=4, nvme_blocks=0, hbm_is_shared=False)
    chain = rig.put_new("a", 2)
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    rig.settle()
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 1))
    assert [rig.where(block) for block in chain] == [{"hbm", "dram"}, {"hbm"}]
    rig.do(ev.TierLost(Tier.HBM, True, "test"))
    assert [rig.where(block) for block in chain] == [{"dram"}, set()]
    assert rig.planner.rooms[Tier.HBM].statistics().taken_bytes == 0
    assert rig.put(chain) == [PutOutcome.DEDUPLICATED, PutOutcome.STORED]
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, chain, Tier.HBM))
    assert not rig.copies, "nothing is brought to where nothing can be"


def test_reclaim_copies_forward_what_was_used_and_drops_the_rest_with_its_children() -> None:
    rig = Rig(dram_blocks=2, nvme_blocks=3, num_segments=3, min_free_segments=1, max_forward_fraction=0.5)
    used, unused = hashes("used", 1), hashes("unused", 2)
    rig.put(used)
    rig.cool(used)  # its acquire counts as a use
    rig.put(unused)
    num = 0
    while not any(copy.source is Tier.NVME is copy.target for copy in rig.started):
        rig.put(hashes(f"filler-{num}", 1))
        num += 1
        assert num < 30, "reclaim never began"
    rig.settle()
    assert rig.where(used[0]) == {"nvme"}
    dropped = [h for n in rig.notices if n.reason == "segment reclaimed" for h in n.prefix_hashes]
    assert [h for h in dropped if h in unused] == list(reversed(unused))


def test_a_record_without_room_begins_a_reclaim_however_few_segments_should_be_free() -> None:
    """One segment is always kept for copies forward: `min_free_segments=1` must not wedge the store."""
    rig = Rig(dram_blocks=2, nvme_blocks=1, num_segments=3, min_free_segments=1)
    for number in range(12):
        assert rig.put(hashes(str(number), 1)) == [STORED]


def test_a_drain_leaves_everything_in_the_cold_store() -> None:
    rig = Rig()
    chain = rig.put_new("a", 3)
    call = rig.call()
    rig.do(ev.DrainStarted(call))
    assert rig.answer(call).count == 3
    rig.settle()
    assert all("nvme" in rig.where(h) for h in chain)
    refused = rig.answer(rig.start_put(hashes("late", 1)))
    assert refused.reason == "DRAINING"
    assert any(isinstance(i, SealSegment) for i in rig.planner.close_cold_store())


def test_a_drain_looks_at_few_blocks_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: at all of them in one, which took seconds of 400,000."""
    monkeypatch.setattr(archiving, "STEP_BLOCKS", 4)
    rig, chain = Rig(dram_blocks=64, nvme_blocks=64), hashes("a", 40)
    rig.put(chain)
    call, num_steps = rig.call(), 1
    rig.do(ev.DrainStarted(call))
    while call not in rig.answers:
        assert rig.planner.is_busy, "the next step is due at once"
        rig.tick()
        num_steps += 1
    assert rig.answer(call).count == 40
    assert num_steps >= 40 // 4 - 1, "the first step looks twice"
    rig.settle()
    while rig.planner.is_busy:
        rig.tick()
        rig.settle()
    assert all("nvme" in rig.where(name) for name in chain)


def recovered(chain: list[bytes], missing: set[tuple[int, int]]) -> tuple[RecoveredStore, NamespaceIdentity]:
    """Return what a cold store would report of a chain, without some (position, group)."""
    identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
    rows: list[tuple[object, ...]] = []
    pages = RECORD_BYTES // 4096
    for position, prefix_hash in enumerate(chain):
        for group in range(GEOMETRY.num_groups):
            if (position, group) not in missing:
                parent = chain[position - 1] if position else b"\0" * 32
                rows.append(
                    (0, prefix_hash, parent, position > 0, position, group,
                     place_of(0, len(rows) * pages), GEOMETRY.fragment_bytes[group],
                     GEOMETRY.fragment_bytes[group], b"\7" * 16, 0, False)
                )  # fmt: skip
    segment = SegmentSummary(0, len(rows) * pages, len(rows), len(rows) * RECORD_BYTES)
    return RecoveredStore([identity], columns(np.array(rows, RECORD)), [segment], Counter()), identity


def adopt(chain: list[bytes], missing: set[tuple[int, int]]) -> Rig:
    rig = Rig(nvme_blocks=8)
    log = rig.planner.rooms[Tier.NVME]
    assert isinstance(log, SegmentLog)
    found, _ = recovered(chain, missing)
    rig.planner.adopt(found, 0.0)
    assert not rig.planner.check_integrity()
    return rig


def test_what_recovery_finds_can_be_read() -> None:
    chain = hashes("a", 3)
    rig = adopt(chain, set())
    assert rig.found(chain) == 3
    call = rig.acquire(chain)
    labels = [item.label for copy in rig.copies for item in copy.items]
    assert {label.checksum for label in labels} == {b"\7" * 16}
    rig.settle()
    assert rig.answer(call).num_blocks == 3


def test_a_block_with_a_missing_fragment_is_a_miss_until_it_is_put_again() -> None:
    chain = hashes("a", 2)
    rig = adopt(chain, {(1, 0)})
    assert rig.found(chain) == 1
    assert rig.put(chain[1:], parent=chain[0])[0] == STORED
    assert rig.found(chain) == 2


def test_a_block_without_its_parent_still_names_it() -> None:
    """Its record says who its parent was, and every read compares. (Simulator, seed 61.)"""
    chain = hashes("a", 2)
    rig = adopt(chain, {(0, 0), (0, 1)})
    assert rig.found(chain) == 0
    rig.put(chain[:1])
    rig.acquire(chain)
    child = [i.label for c in rig.copies for i in c.items if i.label.prefix_hash == chain[1]]
    assert child
    assert all(label.parent_hash == chain[0] for label in child)
    rig.settle()
    rig.put(chain)
    catalog = rig.planner.catalog
    rows = [catalog.find(rig.namespace_id, h) for h in chain]
    assert catalog.parent[rows[1]] == rows[0]


def test_what_several_chains_begin_with_outlives_the_reclaim_of_its_segment() -> None:
    """Before: it had no use since the start, and went with all that continued it, in whatever segment."""
    beginning = hashes("a", 2)
    identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
    blocks = [(beginning[0], b"\0" * 32, 0, 0), (beginning[1], beginning[0], 1, 0)]
    blocks += [(hashes(f"e{number}", 1)[0], beginning[1], 2, 1) for number in range(6)]
    rows: list[tuple[object, ...]] = []
    num_pages = [0, 0]
    for name, parent, position, segment in blocks:
        for group in range(GEOMETRY.num_groups):
            length = GEOMETRY.fragment_bytes[group]
            place = place_of(segment, num_pages[segment])
            num_pages[segment] += RECORD_BYTES // 4096
            rows.append(
                (0, name, parent, position > 0, position, group, place, length, length, b"\7" * 16, 0, False)
            )
    segments = [
        SegmentSummary(number, pages, pages * 4096 // RECORD_BYTES, pages * 4096)
        for number, pages in enumerate(num_pages)
    ]
    rig = Rig(nvme_blocks=8, num_segments=4)
    found = RecoveredStore([identity], columns(np.array(rows, RECORD)), segments, Counter())
    rig.planner.adopt(found, 0.0)
    number = 0
    while not rig.planner.story.counters.get("segments_reclaimed"):
        rig.put(hashes(f"new {number}", 1))
        rig.settle()
        rig.tick(1.0)
        number += 1
    assert rig.found(beginning) == 2


@pytest.mark.parametrize("seed", range(8))
def test_recovery_links_chains_in_whatever_order_their_records_are(seed: int) -> None:
    """Behind their parent, before it, group by group: what is read and what it continues is the same."""
    chain = hashes("a", 6)
    rig = Rig(nvme_blocks=8)
    found, _ = recovered(chain, {(2, 1)})
    order = np.lexsort((found.records["position"], found.records["group"]))[::-1].tolist()  # for seed 0
    if seed:
        Random(seed).shuffle(order)
    found.records = {name: column[order] for name, column in found.records.items()}
    assert rig.planner.adopt(found, 0.0) == 6
    assert not rig.planner.check_integrity()
    catalog = rig.planner.catalog
    rows = [catalog.find(rig.namespace_id, name) for name in chain]
    assert [catalog.parent[row] for row in rows] == [NO_ROW, *rows[:-1]]
    assert [catalog.children(row) for row in rows] == [*([row] for row in rows[1:]), []]
    assert rig.found(chain) == 2
    assert rig.put(chain[2:3], parent=chain[1])[0] == STORED
    assert rig.found(chain) == 6


def test_recovery_tells_parents_apart_whose_names_begin_alike() -> None:
    chain = [b"the same eight!!"[:8] + name[8:] for name in hashes("a", 6)]
    rig = adopt(chain, set())
    for position in range(1, 6):
        block = rig.planner.inspection.block(rig.namespace_id, chain[position])
        assert block is not None
        assert block["parent_hash"] == chain[position - 1].hex()


def test_records_of_another_shape_are_given_back() -> None:
    """A record that is no fragment of its namespace's geometry is not adopted, and the books agree."""
    chain = hashes("a", 3)
    rig = Rig(nvme_blocks=8)
    found, _ = recovered(chain, set())
    found.records["group"][2] = GEOMETRY.num_groups
    rig.planner.adopt(found, 0.0)
    assert not rig.planner.check_integrity()
    assert rig.found(chain) == 1
    assert rig.planner.story.counters["records_of_wrong_shape"] == 1


def test_a_tenant_with_few_blocks_keeps_the_newest_within_its_quota() -> None:
    """Few blocks are spread thinly over the table; an older one must be found to go for a newer one."""
    rig = Rig(dram_blocks=1, nvme_blocks=8, quotas={"": TenantQuota(cold_bytes=GEOMETRY.block_bytes)})
    names = [hashes(f"prompt {number}", 1) for number in range(8)]
    for name in names:
        rig.put(name)
    assert [rig.found(name) for name in names] == [0] * 6 + [1, 1], "one in nvme, one in dram"


def test_what_comes_back_at_start_beyond_a_quota_goes_from_the_end() -> None:
    """Records that were given up lie in their segments and are found again. (Simulator, seed 101670.)"""
    chain = hashes("a", 4)
    rig = Rig(nvme_blocks=8, quotas={"": TenantQuota(cold_bytes=2 * GEOMETRY.block_bytes)})
    found, _ = recovered(chain, set())
    assert rig.planner.adopt(found, 0.0) == 2
    assert not rig.planner.check_integrity()
    assert rig.found(chain) == 2
    assert rig.planner.core.transitions.cold_bytes[rig.namespace_id] == 2 * GEOMETRY.block_bytes
    rig.tick()
    assert rig.found(chain) == 2


def test_using_a_session_does_not_take_it_over() -> None:
    """Another client's put into a decoding session, and its death, leave the promise where it was."""
    rig = Rig()
    chain = hashes("a", 2)
    rig.put(chain[:1], session_id="s")
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.DECODING))
    rig.do(ev.ClientOpened(2, "other", True, ""))
    rig.do(ev.Touched(2, rig.namespace_id, chain[:1], "s"))
    rig.do(ev.ClientGone(2, "died"))
    session = rig.planner.sessions.get("s")
    assert session is not None
    assert session.urgency.name == "DECODING"
    rig.do(ev.ClientGone(CLIENT, "died"))
    assert session.urgency.name == "IDLE"
