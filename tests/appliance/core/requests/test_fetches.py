"""Fetches: what an acquire brings from the source, and what it leaves behind."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.requests import put_job
from kvtier.appliance.core.results import Refusal
from kvtier.policies.base import AdmissionPolicy, Newcomer, Surroundings, Victim
from kvtier.policies.registry import ADMISSION, PolicyChoice
from kvtier.tiers.base import Cause
from kvtier.tiers.block import Tier, Urgency

from ..rig import CLIENT, GEOMETRY, Rig, hashes
from .fetching import SIZE, fetches, land, search_found, searches, with_source


def test_layers_are_readable_as_they_land() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    call = rig.acquire(chain)
    assert call not in rig.answers, "it waits for the search"
    assert [one.names for one in searches(rig)] == [[chain[SIZE - 1], chain[-1]]]
    first, second = search_found(rig, 2)
    assert (first.bundle.position, first.bundle.parent_hash) == (0, b"")
    assert (second.bundle.position, second.bundle.parent_hash) == (SIZE, chain[SIZE - 1])
    assert [item.source for item in second.batches[1][1]] == list(range(SIZE))
    assert rig.answer(call).num_blocks == 2 * SIZE
    assert rig.answer(call).tiers == bytes([Tier.DRAM] * 2 * SIZE)
    land(rig, first, 0)
    assert {(r.block, r.group) for r in rig.answer(call).ready} == {(n, 0) for n in range(SIZE)}
    assert not rig.answer(call).last
    for fetch, group in ((second, 0), (second, 1), (first, 1)):
        land(rig, fetch, group)
    assert rig.answer(call).last
    assert rig.found(chain) == 2 * SIZE
    assert all(rig.published[r.tier, r.place] == chain[r.block] for r in rig.answer(call).ready)


def test_a_batch_is_in_the_order_of_the_bundle_however_its_blocks_got_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16 blocks two runs of six get room at once, and the last four one by one."""
    monkeypatch.setitem(vars(put_job), "MAX_STEP_FRAGMENTS", 6 * GEOMETRY.num_groups)
    monkeypatch.setitem(vars(put_job), "MIN_RUN", 5)
    rig = with_source()
    rig.acquire(hashes("a", SIZE))
    [fetch] = search_found(rig, 1)
    for group, (_, items) in enumerate(fetch.batches):
        assert [(item.label.group, item.source) for item in items] == [(group, n) for n in range(SIZE)]


def test_without_a_source_nothing_is_asked() -> None:
    rig, chain = Rig(num_extents=16), hashes("a", SIZE)
    assert rig.answer(rig.acquire(chain)).last
    assert not searches(rig)


def test_two_acquires_share_search_and_fetch() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    calls = [rig.acquire(chain)]
    search = searches(rig)[0]
    calls.append(rig.acquire(chain))
    assert not searches(rig)
    rig.do(ev.SourceSearched(search.search, 1, 1))
    (fetch,) = fetches(rig)
    calls.append(rig.acquire(chain))
    assert not searches(rig)
    assert not fetches(rig)
    for group in (0, 1):
        land(rig, fetch, group)
    for call in calls:
        assert rig.answer(call).last
        assert rig.answer(call).num_blocks == SIZE


def test_only_blocks_that_are_missing_are_fetched() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    rig.put(chain[:6])
    rig.acquire(chain)
    (fetch,) = search_found(rig, 1)
    assert fetch.bundle.names == chain
    assert [item.source for item in fetch.batches[0][1]] == list(range(6, SIZE))


def test_what_only_an_offline_nvme_has_is_fetched() -> None:
    """A lookup promised that the source has it, and the acquire asked for nothing."""
    rig = with_source(nvme_blocks=SIZE)
    chain = rig.cool_new("a", SIZE)
    rig.do(ev.TierLost(Tier.NVME, True, "gone"))
    assert rig.found(chain) == 0
    call = rig.acquire(chain)
    (fetch,) = search_found(rig, 1)
    for group in (0, 1):
        land(rig, fetch, group)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (SIZE, True)
    assert rig.found(chain) == SIZE


def test_a_failed_fetch_is_a_shorter_prefix_and_not_tried_again_at_once() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    call = rig.acquire(chain)
    first, second = search_found(rig, 2)
    land(rig, first, 0)
    land(rig, first, 1)
    land(rig, second, 0)
    land(rig, second, 1, Cause.WRONG_CHECKSUM)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (SIZE, True)
    rig.release(call)
    assert rig.answer(rig.acquire(chain)).num_blocks == SIZE
    assert not searches(rig)
    assert not fetches(rig)
    rig.tick(50)
    rig.acquire(chain)
    assert not searches(rig)
    rig.tick(11)
    rig.acquire(chain)
    assert searches(rig), "a minute later it is asked for again"


def test_a_session_is_as_urgent_as_it_was_told_last() -> None:
    """Not as an acquire said that has waited since then: blocks of a decoding session are never evicted."""
    rig, chain = with_source(), hashes("a", SIZE)
    call = rig.acquire(chain, session_id="s", urgency=Urgency.QUEUED)
    search = searches(rig)[0].search
    rig.do(ev.SessionUpdated(CLIENT, "s", Urgency.DECODING))
    rig.do(ev.SourceSearched(search, 0, 0))
    assert rig.answer(call).last
    session = rig.planner.sessions.get("s")
    assert session is not None
    assert session.urgency is Urgency.DECODING


def test_what_is_missing_is_remembered() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    call = rig.acquire(chain)
    assert not search_found(rig, 0)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (0, True)
    assert rig.answer(rig.acquire(chain)).last
    assert not searches(rig)


def test_a_search_that_failed_says_nothing() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    call = rig.acquire(chain)
    assert not search_found(rig, 0, -1)
    assert rig.answer(call).last
    rig.acquire(chain)
    assert searches(rig)


def test_what_the_caller_has_itself_is_not_fetched_for_it() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE + 4)
    assert rig.answer(rig.acquire(chain, first_block=2 * SIZE)).last
    assert not searches(rig)
    rig.acquire(chain, first_block=2 * SIZE - 1)
    assert searches(rig)


def test_a_source_that_is_lost_lets_acquires_go() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    call = rig.acquire(chain)
    search = searches(rig)[0]
    rig.do(ev.SourceChanged(False))
    assert rig.answer(call).last
    rig.do(ev.SourceSearched(search.search, 1, 1))
    assert not fetches(rig)


def test_a_client_that_is_gone_leaves_nothing() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    call = rig.acquire(chain)
    search = searches(rig)[0]
    rig.do(ev.ClientGone(CLIENT, "died"))
    assert isinstance(rig.answer(call), Refusal)
    rig.do(ev.SourceSearched(search.search, 2, 2))
    assert not fetches(rig)
    assert len(rig.planner.fetches) == 0
    assert not rig.planner.reads.namespaces()


def test_an_abandoned_acquire_is_not_answered() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    call = rig.acquire(chain)
    search = searches(rig)[0]
    rig.do(ev.AcquireAbandoned(call))
    rig.do(ev.SourceSearched(search.search, 1, 1))
    assert call not in rig.answers
    assert not fetches(rig)


def test_a_retry_while_the_search_is_under_way_gets_the_same_answer() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    first = rig.acquire(chain, "r")
    search = searches(rig)[0]
    second = rig.acquire(chain, "r")
    rig.do(ev.SourceSearched(search.search, 1, 1))
    (fetch,) = fetches(rig)
    for group in (0, 1):
        land(rig, fetch, group)
    assert rig.answer(first).last
    assert rig.answer(second).last
    assert rig.answer(first).lease_id == rig.answer(second).lease_id


def test_a_fetch_goes_on_when_its_acquire_is_over() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    call = rig.acquire(chain, deadline_at=1.0)
    (fetch,) = search_found(rig, 1)
    rig.tick(1.5)
    assert rig.answer(call).last
    for group in (0, 1):
        land(rig, fetch, group)
    assert rig.found(chain) == SIZE


def test_a_fetch_takes_the_room_that_can_be_had_at_once() -> None:
    """Four blocks fit beside those that are being written; the rest of the bundle is not waited for."""
    rig, chain = with_source(num_extents=6, nvme_blocks=0), hashes("a", SIZE)
    rig.reserve(hashes("b", 20))
    call = rig.acquire(chain)
    (fetch,) = search_found(rig, 1)
    assert [item.source for item in fetch.batches[0][1]] == [0, 1, 2, 3]
    for group in (0, 1):
        land(rig, fetch, group)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (4, True)
    assert "puts_without_room" not in rig.planner.story.counters


def test_a_bundle_is_admitted_as_a_part_of_its_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself each would be a short prompt, the end of which comes back soonest."""
    newcomers: list[Newcomer] = []

    class Recorder(AdmissionPolicy):
        def __init__(self, surroundings: Surroundings) -> None:
            del surroundings

        def admits(self, newcomer: Newcomer, victim: Victim | None) -> bool:
            newcomers.append(newcomer)
            return True

    monkeypatch.setitem(ADMISSION, "recorder", Recorder)
    policies = PolicyChoice(admission="recorder")
    rig, chain = with_source(num_extents=8, nvme_blocks=0, policies=policies), hashes("a", 2 * SIZE)
    rig.put(hashes("b", 2 * SIZE))
    rig.acquire(chain)
    for number, fetch in enumerate(search_found(rig, 2)):
        for group in (0, 1):
            land(rig, fetch, group)
        of_bundle = [one for one in newcomers if one.position == number * SIZE]
        assert {tuple(one.prefix_hashes) for one in of_bundle} == {tuple(chain[number * SIZE :])}


def test_draining_fetches_nothing() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    rig.do(ev.DrainStarted(rig.call()))
    assert rig.answer(rig.acquire(chain)).last
    assert not searches(rig)


def test_a_fetch_reads_the_urgency_of_a_session_and_opens_none() -> None:
    """Before: each bundle opened the session of its acquire, which no block was used in yet."""
    rig, chain = with_source(num_extents=64), hashes("a", 16 * SIZE)
    rig.acquire(chain, session_id="new")
    (first, *_) = search_found(rig, 16)
    assert rig.planner.is_busy, "an acquire is answered when all of its fetches are begun"
    assert (first.bundle.urgency, rig.planner.sessions.get("new")) == (Urgency.QUEUED, None)
