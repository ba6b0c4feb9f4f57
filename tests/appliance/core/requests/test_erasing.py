"""Erasing a tenant in the planner: what was there goes, what was on its way does not arrive, others stay."""

import hashlib
from collections.abc import Callable

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import reclaim
from kvtier.appliance.core.requests import erasing
from kvtier.appliance.core.requests.erasing import STEP_BLOCKS
from kvtier.appliance.core.results import PutOutcome
from kvtier.tiers.base import Cause
from kvtier.tiers.block import NamespaceIdentity, Tier

from ..rig import CLIENT, GEOMETRY, STORED, Rig, hashes
from .fetching import searches, with_hosts


def erase(rig: Rig, tenant: str = "") -> int:
    """Erase whoever the rig's client is; return the call."""
    call = rig.call()
    rig.do(ev.TenantErased(call, tenant))
    return call


def finish_erasing(rig: Rig, call: int) -> int:
    """Let the planner take its steps; return how many blocks were forgotten."""
    while call not in rig.answers:
        assert rig.planner.is_busy
        rig.tick()
    assert not rig.planner.erasing.is_busy
    count: int = rig.answer(call).count
    return count


def test_what_is_in_memory_and_on_the_disk_is_forgotten() -> None:
    rig = Rig(dram_blocks=8, nvme_blocks=8)
    cold, warm = hashes("cold", 3), hashes("warm", 3)
    rig.put(cold)
    rig.cool(cold)
    rig.put(warm)
    assert finish_erasing(rig, erase(rig)) == 6
    assert rig.found(cold) == rig.found(warm) == 0
    assert not rig.published
    assert rig.planner.catalog.num_blocks == 0
    books = rig.planner.rooms[Tier.DRAM].statistics()
    assert books.taken_bytes == 0
    assert rig.planner.core.transitions.cold_bytes[rig.namespace_id] == 0
    removed = {
        name for notice in rig.notices if notice.reason == "tenant erased" for name in notice.prefix_hashes
    }
    assert removed == {*cold, *warm}
    assert rig.put(warm) == [STORED] * 3  # and it may begin anew


def test_another_tenant_loses_nothing() -> None:
    rig = Rig(dram_blocks=8)
    mine = rig.put_new("mine", 3)
    assert finish_erasing(rig, erase(rig, "tenant:acme")) == 0
    assert rig.found(mine) == 3


def test_all_domains_of_a_tenant_go() -> None:
    rig = Rig(dram_blocks=8, num_extents=3)
    ids = {}
    for number, domain in enumerate(("tenant:acme", "tenant:acme/eu", "tenant:acmeplus")):
        rig.do(ev.ClientOpened(10 + number, "", True, domain))
        call = rig.call()
        rig.do(ev.NamespaceRegistered(call, NamespaceIdentity(b"m" * 16, GEOMETRY, domain=domain)))
        ids[domain] = rig.answer(call).namespace_id
        call = rig.call()
        reserve = ev.ReserveRequested(call, 10 + number, "", ids[domain], b"", hashes(domain, 1))
        rig.do(ev.CommitRequested(call, 10 + number, "", 0, [(0, GEOMETRY.block_bytes)], reserve))
        rig.settle()
    assert finish_erasing(rig, erase(rig, "tenant:acme")) == 2
    left = {domain: len(rig.planner.catalog.namespaces[number].rows) for domain, number in ids.items()}
    assert left == {"tenant:acme": 0, "tenant:acme/eu": 0, "tenant:acmeplus": 1}


def test_a_load_under_way_does_not_arrive() -> None:
    """It may have been decrypted a moment before the key was gone."""
    rig = Rig(dram_blocks=4)
    chain = rig.cool_new("loading", 2)
    acquire = rig.acquire(chain)
    assert rig.copies
    call = erase(rig)
    rig.settle()
    assert finish_erasing(rig, call) == 2
    assert rig.answer(acquire).last
    assert sum(len(answer.ready) for answer in rig.answers[acquire]) == 0
    assert rig.found(chain) == 0
    assert not rig.published


def test_a_spill_under_way_does_not_arrive() -> None:
    rig = Rig(dram_blocks=4)
    chain = rig.put_new("spilling", 2, session_id="s")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", True))
    assert [copy.target for copy in rig.copies] == [Tier.NVME]
    call = erase(rig)
    rig.settle()
    finish_erasing(rig, call)
    assert rig.found(chain) == 0
    assert rig.planner.catalog.num_blocks == 0


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_put_whose_bytes_are_being_copied_fails_and_may_be_repeated(num_blocks: int) -> None:
    rig = Rig(dram_blocks=4)
    chain = hashes("writing", num_blocks)
    put = rig.start_put(chain)
    call = erase(rig)
    rig.settle()
    finish_erasing(rig, call)
    assert rig.answer(put).outcomes[0] == PutOutcome.FAILED
    assert rig.found(chain) == 0
    assert rig.put(chain) == [STORED] * num_blocks


def test_a_put_that_has_only_reserved_is_of_the_time_after() -> None:
    rig = Rig(dram_blocks=4)
    chain = hashes("reserved", 2)
    reserved = rig.reserve(chain)
    finish_erasing(rig, erase(rig))
    rig.commit(rig.answer(reserved).reservation_id, 2)
    rig.settle()
    assert rig.found(chain) == 2


def test_whoever_reads_a_block_may_finish() -> None:
    """Its place is free when the lease ends, not before; nobody else finds it meanwhile."""
    rig = Rig(dram_blocks=4)
    chain = rig.put_new("held", 2)
    lease = rig.acquire(chain)
    rig.settle()
    finish_erasing(rig, erase(rig))
    assert rig.found(chain) == 0
    assert not rig.published
    assert rig.planner.core.transitions.condemned_bytes[Tier.DRAM] == 2 * GEOMETRY.block_bytes
    rig.release(lease)
    assert rig.planner.core.transitions.condemned_bytes[Tier.DRAM] == 0
    assert rig.planner.catalog.num_blocks == 0


def test_a_large_tenant_goes_in_steps(record_property: Callable[[str, object], None]) -> None:
    num_blocks = 2 * STEP_BLOCKS + 10
    rig = Rig(dram_blocks=num_blocks, nvme_blocks=0)
    for first in range(0, num_blocks, 64):
        count = min(64, num_blocks - first)
        rig.put([hashlib.sha256(b"%d" % n).digest() for n in range(first, first + count)])
    call = erase(rig)
    assert call not in rig.answers
    num_resident = rig.planner.core.transitions.num_resident
    assert num_resident[Tier.DRAM] == (num_blocks - STEP_BLOCKS) * GEOMETRY.num_groups
    assert rig.planner.is_busy
    assert finish_erasing(rig, call) == num_blocks
    assert rig.planner.catalog.num_blocks == 0
    record_property("erased_in_a_step", STEP_BLOCKS)
    record_property("erased_blocks", num_blocks)


def test_two_at_once_are_answered_one_after_the_other() -> None:
    rig = Rig(dram_blocks=4)
    rig.put(hashes("both", 3))
    first, second = erase(rig), erase(rig)
    assert finish_erasing(rig, second) == 0
    assert rig.answer(first).count == 3


def test_no_key_condemns_a_record() -> None:
    """What a read says that finds no key: the record is not asked again."""
    rig = Rig(dram_blocks=4)
    chain = rig.cool_new("lost", 1)
    rig.acquire(chain)
    rig.finish(rig.copies[0], Cause.NO_KEY)
    rig.settle()
    assert rig.found(chain) == 0


def test_a_copy_that_begins_while_a_large_tenant_goes_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block that has not had its turn is spilled; then it has its turn; then the spill ends."""
    monkeypatch.setattr(erasing, "STEP_BLOCKS", 8)
    num_blocks = 2 * erasing.STEP_BLOCKS
    rig = Rig(dram_blocks=num_blocks, nvme_blocks=num_blocks)
    chains = [[hashlib.sha256(b"one of many %d" % n).digest()] for n in range(num_blocks)]
    for chain in chains:
        rig.put(chain, session_id=chain[0].hex())
    call = erase(rig)
    last = max(chains)  # blocks go in the order of their names' first bytes
    assert rig.found(last) == 1
    rig.do(ev.SessionEnded(rig.call(), CLIENT, last[0].hex(), True))
    spills = list(rig.copies)
    assert [copy.target for copy in spills] == [Tier.NVME]
    while rig.planner.is_busy:
        rig.tick()
    assert call not in rig.answers, "a copy from before is still under way"
    rig.finish(spills[0])
    assert finish_erasing(rig, call) > 0
    assert rig.planner.catalog.num_blocks == 0
    assert rig.planner.core.transitions.cold_bytes[rig.namespace_id] == 0


def test_the_answer_waits_for_what_was_under_way() -> None:
    rig = Rig(dram_blocks=4)
    rig.put(hashes("there", 1))
    rig.start_put(hashes("coming", 1))
    call = erase(rig)
    for _ in range(3):
        rig.tick()
    assert call not in rig.answers
    assert not rig.planner.is_busy, "waiting is not work"
    rig.settle()
    assert rig.answer(call).count >= 1


def test_a_segment_is_emptied_of_what_was_erased_while_its_copy_in_dram_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planner stopped itself: a block was to leave nvme that had left already. (Simulator, 400502.)"""
    rig = Rig(dram_blocks=2, nvme_blocks=2, num_segments=3, hbm_blocks=2, hbm_is_shared=False)
    read = rig.put_new("read", 1, session_id="s")
    rig.do(ev.SessionEnded(rig.call(), CLIENT, "s", True))
    rig.settle()
    rig.do(ev.PrefetchRequested(rig.call(), CLIENT, rig.namespace_id, read, Tier.HBM))
    reading = list(rig.copies)
    assert reading
    monkeypatch.setattr(reclaim, "STEP_BLOCKS", 0)  # whoever has its segment emptied is not decided about yet
    number = 0
    while not rig.planner.reclaim.is_busy:
        number += 1
        rig.start_put(hashes(str(number), 1))
        while others := [copy for copy in rig.copies if copy not in reading]:
            rig.finish(others[0])
    assert rig.where(read[0]) == {"dram", "nvme"}
    call = erase(rig)
    monkeypatch.undo()
    rig.tick()
    assert not rig.planner.reclaim.is_busy
    for copy in reading:
        rig.finish(copy)
    assert finish_erasing(rig, call) == 1 + number
    assert rig.planner.catalog.num_blocks == 0


def test_a_retry_is_not_answered_with_what_was_erased_meanwhile() -> None:
    """Its lease still stands, and its slots are not others' yet; but nobody new may read them."""
    rig = Rig(dram_blocks=4)
    mine = rig.put_new("mine", 2)
    first = rig.acquire(mine, request_id="once")
    assert len(rig.answer(first).ready) == 4
    again = rig.acquire(mine, request_id="once")
    assert list(rig.answer(again).ready) == list(rig.answer(first).ready), "as long as it is there"
    erase(rig)
    late = rig.acquire(mine, request_id="once")
    assert rig.answer(late).num_blocks == 0
    assert list(rig.answer(late).ready) == []


@pytest.mark.parametrize("is_known", [True, False])
def test_nothing_of_an_erased_tenant_comes_back_from_other_hosts(is_known: bool) -> None:
    """Those that are erased a moment later may still have it, also of models that nobody used here yet."""
    rig, chain = with_hosts(), hashes("elsewhere", 16)
    identity = NamespaceIdentity(b"n" * 16, GEOMETRY)
    if is_known:
        rig.do(ev.NamespaceRegistered(rig.call(), identity))
    finish_erasing(rig, erase(rig))
    rig.do(ev.NamespaceRegistered(call := rig.call(), identity))
    rig.namespace_id = rig.answer(call).namespace_id
    call = rig.acquire(chain, load_anyway=True)
    assert not searches(rig)
    assert rig.answer(call).num_blocks == 0
