"""What is delivered on a device more than once comes to rest there; nothing else does."""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.promotion import promotions
from kvtier.tiers.block import Tier, Urgency

from ..rig import GEOMETRY, Rig, hashes


def make_rig(hbm_blocks: int = 4, **options: Any) -> Rig:
    return Rig(dram_blocks=12, hbm_blocks=hbm_blocks, nvme_blocks=0, hbm_is_shared=False, **options)


def deliver(rig: Rig, chain: list[bytes], **named: Any) -> None:
    """A whole get on the device; what it sets off ends, too."""
    rig.now += 1.0
    call = rig.acquire(chain, on_device=True, **named)
    rig.settle()
    rig.release(call)
    assert rig.planner.check_integrity() == []


def in_hbm(rig: Rig, chain: list[bytes]) -> list[bool]:
    return ["hbm" in rig.where(name) for name in chain]


def test_the_second_delivery_promotes_and_the_third_reads_there() -> None:
    rig = make_rig()
    chain = rig.put_new("a", 2)
    deliver(rig, chain)
    assert in_hbm(rig, chain) == [False, False]
    deliver(rig, chain)
    assert in_hbm(rig, chain) == [True, True]
    third = rig.answer(rig.acquire(chain, on_device=True))
    assert {ready.tier for ready in third.ready} == {Tier.HBM}
    assert rig.where(chain[0]) == {"hbm", "dram"}, "clean: it leaves without a copy"


def test_nobody_waits_for_it() -> None:
    rig = make_rig()
    chain = rig.put_new("a", 2)
    deliver(rig, chain)
    call = rig.acquire(chain, on_device=True)
    assert rig.answer(call).last, "answered before a byte went up"
    assert {copy.target for copy in rig.copies} == {Tier.HBM}
    assert all(copy.urgency > Urgency.QUEUED for copy in rig.copies)
    rig.release(call)
    rig.settle()
    assert in_hbm(rig, chain) == [True, True]


def test_the_shared_beginning_only() -> None:
    rig = make_rig()
    system, ends = hashes("system", 2), [hashes(name, 1) for name in "abc"]
    rig.put(system)
    for end in ends:
        rig.put(end, parent=system[-1])
    for end in ends:
        deliver(rig, [*system, *end])
    assert in_hbm(rig, system) == [True, True]
    assert not any(in_hbm(rig, end)[0] for end in ends)


def test_on_the_host_and_in_a_scan_nothing_is_promoted() -> None:
    rig = make_rig()
    chains = [hashes(name, 1) for name in "abcdef"]
    for chain in chains:
        rig.put(chain)
        deliver(rig, chain)
    for _ in range(3):
        call = rig.acquire(chains[0])
        rig.settle()
        rig.release(call)
    assert not any(in_hbm(rig, chain)[0] for chain in chains)


def test_a_hot_set_larger_than_hbm_does_not_turn_over() -> None:
    """Everybody is asked for as often: whoever came first stays."""
    rig = make_rig(hbm_blocks=2)
    chains = [hashes(name, 1) for name in "abcd"]
    for chain in chains:
        rig.put(chain)
    for _ in range(6):
        for chain in chains:
            deliver(rig, chain)
    assert [in_hbm(rig, chain)[0] for chain in chains] == [True, True, False, False]
    assert sum(copy.target is Tier.HBM for copy in rig.started) == 2 * GEOMETRY.num_groups


def test_colder_blocks_make_room() -> None:
    rig = make_rig(hbm_blocks=2)
    old, new = hashes("old", 2), hashes("new", 2)
    rig.put(old)
    rig.put(new)
    for _ in range(2):
        deliver(rig, old)
    for _ in range(2):
        deliver(rig, new)
    assert in_hbm(rig, new) == [True, True]
    assert in_hbm(rig, old) == [False, False]


def test_never_a_child_without_its_parent() -> None:
    """A get that has the beginning already asks for the rest; that rest is of no use there alone."""
    rig = make_rig()
    chain = rig.put_new("a", 3)
    for _ in range(3):
        deliver(rig, chain, first_block=1)
    assert in_hbm(rig, chain) == [False] * 3


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotions, "MAX_BYTES", GEOMETRY.block_bytes)
    rig = make_rig()
    chain = rig.put_new("a", 3)
    deliver(rig, chain)
    call = rig.acquire(chain, on_device=True)
    num_bytes = sum(item.label.raw_length for copy in rig.copies for item in copy.items)
    assert num_bytes == GEOMETRY.block_bytes, "one block at a time"
    rig.settle()
    rig.release(call)
    monkeypatch.setattr(promotions, "MAX_COUNTED", 1)
    others = [hashes(name, 1) for name in "bc"]
    for other in others:
        rig.put(other)
    for _ in range(3):
        for other in others:
            deliver(rig, other)
    assert not any(in_hbm(rig, other)[0] for other in others), "each forgot the other"


def test_without_a_device_or_when_it_is_lost() -> None:
    rig = make_rig(hbm_blocks=0)
    chain = rig.put_new("a", 1)
    for _ in range(3):
        deliver(rig, chain)
    rig = make_rig()
    rig.put(chain)
    rig.do(ev.TierLost(Tier.HBM, True, "gone"))
    for _ in range(3):
        deliver(rig, chain)
    assert not any(copy.target is Tier.HBM for copy in rig.started)


def test_who_was_kept_while_its_room_was_wanted_may_leave_afterwards() -> None:
    rig = make_rig()
    chain = hashes("a", 4)
    rig.put(chain[:3])
    for _ in range(2):
        deliver(rig, chain[:2])
    assert in_hbm(rig, chain[:3]) == [True, True, False]
    reservation = rig.answer(rig.reserve(chain)).reservation_id
    kept = rig.call()
    rig.do(ev.EvictRequested(kept, Tier.HBM, 0))
    assert rig.answer(kept).num_blocks == 0, "a put continues them"
    rig.commit(reservation, 1)
    rig.settle()
    let_go = rig.call()
    rig.do(ev.EvictRequested(let_go, Tier.HBM, 0))
    assert rig.answer(let_go).num_blocks == 2, "in dram they stay, for what continues them there"
    assert rig.planner.check_integrity() == []


@pytest.mark.skipif(promotions.__file__.endswith(".so"), reason="compiled: no method can be exchanged")
def test_a_block_that_found_no_room_twice_waits_for_its_next_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What made room lost its record at once, and made room again, for ever. (Simulator, seed 7379.)"""
    rig = make_rig()
    chain = rig.put_new("a", 1)
    deliver(rig, chain)
    asked: list[int] = []
    monkeypatch.setattr(rig.planner.loads, "promote", lambda row, *_: asked.append(row))
    deliver(rig, chain)
    for _ in range(5):
        rig.tick(1.0)
    assert len(asked) == 2
    deliver(rig, chain)
    for _ in range(5):
        rig.tick(1.0)
    assert len(asked) == 4
