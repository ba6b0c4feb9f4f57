"""What an administrator evicts by hand: from memory, and out of the cold store."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.requests import evicting
from kvtier.appliance.core.requests.evicting import PATIENCE_S
from kvtier.tiers.block import Tier, Urgency
from kvtier.tiers.cold.log import SegmentLog, SegmentState
from kvtier.tiers.cold.recovery import RECORD, RecoveredStore
from tests.records import columns

from ..rig import CLIENT, SLOT_BYTES, Rig, hashes


def evict(rig: Rig, tier: Tier, num_bytes: int = 0) -> Any:
    """Evict, let all that follows happen, return the answer."""
    call = rig.call()
    rig.do(ev.EvictRequested(call, tier, num_bytes))
    rig.tick()
    rig.settle()
    return rig.answer(call)


def archive(rig: Rig, chain: list[bytes]) -> None:
    """Have a chain in dram and in nvme."""
    rig.put(chain, session_id="archive")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "archive", True))
    for _ in range(4):
        rig.tick()
        rig.settle()
    assert all(rig.where(name) == {"dram", "nvme"} for name in chain)


def states(rig: Rig) -> set[SegmentState]:
    """Return in which states the segments are."""
    log = rig.planner.rooms[Tier.NVME]
    assert isinstance(log, SegmentLog)
    return {segment.state for segment in log.segments}


def test_the_cold_store_is_emptied_and_its_segments_are_free() -> None:
    rig = Rig(dram_blocks=16, nvme_blocks=2, num_segments=8)
    rig.cool_new("a", 6)
    answer = evict(rig, Tier.NVME)
    assert (answer.num_blocks, answer.num_readable, answer.num_kept) == (6, 0, {})
    assert answer.num_bytes == 6 * 2 * (16 << 10)
    assert rig.planner.catalog.num_blocks == 0
    assert states(rig) == {SegmentState.FREE}  # what is in one is found again by a restart


@pytest.mark.parametrize("num_segments", [8, 5])
def test_a_segment_that_could_not_be_read_at_the_start_keeps_nothing_waiting(num_segments: int) -> None:
    """It counted as being emptied: an eviction was refused after a while, a shrink below it never ended."""
    rig = Rig(dram_blocks=16, nvme_blocks=2, num_segments=8)
    found = RecoveredStore([], columns(np.array([], RECORD)), [], unreadable=[5])
    rig.planner.adopt(found, 0.0)
    rig.cool_new("a", 6)
    log = rig.planner.rooms[Tier.NVME]
    assert isinstance(log, SegmentLog)
    if num_segments < 8:
        options, choice = rig.planner.core.options, rig.planner.core.choice
        rig.do(ev.PolicyChanged(options, choice, {Tier.NVME: num_segments}))
        for _ in range(4):
            rig.tick(1.0)
            rig.settle()
        assert not rig.planner.resizing.is_active
    answer = evict(rig, Tier.NVME)
    assert (answer.num_blocks, answer.num_kept) == (6, {})
    kept = {SegmentState.GONE} if num_segments < 8 else set()
    assert states(rig) == {SegmentState.FREE, SegmentState.UNREADABLE} | kept


def test_what_memory_has_stays_readable_and_is_written_again_when_its_room_is_wanted() -> None:
    rig = Rig(dram_blocks=4, nvme_blocks=4, num_segments=4)
    chain = hashes("a", 4)
    archive(rig, chain)
    answer = evict(rig, Tier.NVME)
    assert (answer.num_blocks, answer.num_readable, answer.num_kept) == (4, 4, {})
    assert [rig.where(name) for name in chain] == [{"dram"}] * 4
    assert states(rig) == {SegmentState.FREE}
    rig.put(hashes("b", 4))
    assert [rig.where(name) for name in chain] == [{"nvme"}] * 4
    assert rig.found(chain) == 4


def test_what_must_stay_stays_with_what_it_continues_and_is_said_by_reason() -> None:
    rig = Rig(dram_blocks=16, nvme_blocks=4, num_segments=8)
    pinned, decoded, free = hashes("pinned", 3), hashes("decoded", 2), hashes("free", 2)
    continued = hashes("continued", 3)
    for chain in (pinned, decoded, free, continued[:2]):
        rig.put(chain)
        rig.cool(chain)
    rig.put(continued[2:], continued[1])  # in dram only, where the others are not
    rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, pinned[:2], Tier.NVME, 60.0))
    rig.settle()
    rig.put(decoded, session_id="d")
    rig.do(ev.SessionUpdated(CLIENT, "d", Urgency.DECODING))
    answer = evict(rig, Tier.NVME)
    assert answer.num_kept == {
        "pinned": 2,
        "of decoding sessions or puts": 2,
        "needed by blocks that continue them": 2,
    }
    assert answer.num_blocks == 3
    assert [rig.found(chain) for chain in (pinned, decoded, free, continued)] == [2, 2, 0, 3]
    assert all("nvme" in rig.where(name) for name in pinned[:2] + decoded + continued[:2])
    assert evict(rig, Tier.NVME).num_blocks == 0


def test_some_of_it_is_the_oldest_segments() -> None:
    rig = Rig(dram_blocks=16, nvme_blocks=2, num_segments=8)
    old, new = hashes("old", 2), hashes("new", 4)
    for chain in (old, new):
        rig.put(chain)
        rig.cool(chain)
    answer = evict(rig, Tier.NVME, 1)
    assert answer.num_blocks == 2
    assert (rig.found(old), rig.found(new)) == (0, 4)
    assert SegmentState.FREE in states(rig)


def test_a_chain_loses_its_end_with_the_segment_that_holds_its_beginning() -> None:
    rig = Rig(dram_blocks=16, nvme_blocks=2, num_segments=8)
    chain = hashes("a", 6)
    for start in (0, 2, 4):  # a segment each, the beginning in the oldest
        rig.put(chain[start : start + 2], chain[start - 1] if start else b"")
        rig.cool(chain[: start + 2])
    answer = evict(rig, Tier.NVME, 1)
    assert answer.num_blocks == 6
    assert rig.planner.catalog.num_blocks == 0


def test_what_memory_keeps_is_said_by_reason() -> None:
    rig = Rig(dram_blocks=8, nvme_blocks=0)
    held, pinned, free = hashes("held", 2), hashes("pinned", 1), hashes("free", 1)
    for chain in (held, pinned, free):
        rig.put(chain)
    lease = rig.acquire(held[1:])
    rig.do(ev.PinRequested(rig.call(), CLIENT, "", rig.namespace_id, pinned, Tier.DRAM, 60.0))
    answer = evict(rig, Tier.DRAM)
    assert (answer.num_blocks, answer.num_readable) == (1, 0)
    assert answer.num_kept == {
        "read or written now": 1,
        "needed by blocks that continue them": 1,
        "pinned": 1,
    }
    rig.release(lease)
    assert evict(rig, Tier.DRAM, 1).num_kept == {}


def test_a_store_that_frees_nothing_says_so_instead_of_keeping_the_caller() -> None:
    rig = Rig(dram_blocks=16, nvme_blocks=2, num_segments=8)
    chain = rig.cool_new("a", 2)
    rig.acquire(chain)  # its loads read the segment, and never end
    call = rig.call()
    rig.do(ev.EvictRequested(call, Tier.NVME, 0))
    assert call not in rig.answers
    assert rig.planner.next_deadline() is not None
    rig.tick(PATIENCE_S)
    assert rig.answer(call).reason == "TIER_FULL"
    assert "cannot be freed" in rig.answer(call).message
    rig.settle()
    assert evict(rig, Tier.NVME).num_readable == 2


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.NVME])
def test_a_tier_that_is_not_there_is_refused(tier: Tier) -> None:
    assert evict(Rig(nvme_blocks=0), tier).reason == "BAD_TIER"


def test_a_tier_that_went_offline_is_refused() -> None:
    rig = Rig()
    rig.do(ev.TierLost(Tier.NVME, True, "gone"))
    assert evict(rig, Tier.NVME).reason == "BAD_TIER"


@pytest.mark.parametrize(("tier", "is_namespace"), [(Tier.DRAM, False), (Tier.DRAM, True), (Tier.NVME, True)])
def test_much_is_evicted_in_steps(
    tier: Tier,
    is_namespace: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    """One event decides STEP_BLOCKS blocks at most, a chain from its end, and asks for a Tick."""
    monkeypatch.setattr(evicting, "STEP_BLOCKS", 4)
    rig = Rig(dram_blocks=32, nvme_blocks=8, num_segments=8)
    chains = [hashes("a", 10), hashes("b", 9)]
    for chain in chains:
        archive(rig, chain)
    call = rig.call()
    rig.do(ev.EvictRequested(call, tier, 0, rig.namespace_id if is_namespace else 0))
    left = [sum(tier.label in rig.where(name) for chain in chains for name in chain)]
    assert 19 - 4 <= left[0] <= 19
    while rig.planner.is_busy:
        rig.tick()
        left.append(sum(tier.label in rig.where(name) for chain in chains for name in chain))
    most = max(before - after for before, after in itertools.pairwise([19, *left]))
    record_property("evicted_in_a_step", most)
    assert most <= 4
    rig.settle()
    rig.tick()
    rig.settle()
    answer = rig.answer(call)
    assert (answer.num_blocks, answer.num_readable, answer.num_kept) == (19, 19, {})
    assert left[-1] == 0
    other = {Tier.DRAM: "nvme", Tier.NVME: "dram"}[tier]
    assert all(rig.where(name) == {other} for chain in chains for name in chain)


def test_a_segment_that_reclaim_freed_meanwhile_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written into it since left, and the caller was refused: it was waited for as if full."""
    rig = Rig(dram_blocks=16, nvme_blocks=8, num_segments=4, min_free_segments=1)
    for name in "abc":
        rig.cool_new(name, 8)
    monkeypatch.setattr(evicting, "STEP_BLOCKS", 1)
    call = rig.call()
    rig.do(ev.EvictRequested(call, Tier.NVME, 2 * 8 * 2 * SLOT_BYTES))
    new = hashes("d", 8)
    rig.put(new, session_id="s")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", True))
    rig.settle()
    log = rig.planner.rooms[Tier.NVME]
    assert isinstance(log, SegmentLog)
    assert [one.state for one in log.segments[:2]] == [SegmentState.FREE, SegmentState.OPEN]
    while rig.planner.is_busy:
        rig.tick()
    assert rig.answer(call).num_readable == 0
    assert all(rig.where(name) == {"dram", "nvme"} for name in new)


def test_a_refused_eviction_of_hbm_ends_no_other_ones_wait() -> None:
    """The other one was answered as if its segments were free: a restart would have found the blocks."""
    rig = Rig(dram_blocks=16, nvme_blocks=2, num_segments=8, hbm_blocks=1)
    rig.cool_new("a", 2)
    rig.to_free = []
    call = rig.call()
    rig.do(ev.EvictRequested(call, Tier.NVME, 0))
    rig.do(ev.TierLost(Tier.HBM, True, "gone"))
    assert evict(rig, Tier.HBM).reason == "BAD_TIER"
    assert call not in rig.answers
    for segment in rig.to_free:
        rig.do(ev.SegmentFreed(segment))
    assert rig.answer(call).num_blocks == 2
