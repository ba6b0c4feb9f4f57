"""Fetches: what an acquire brings from the source, when it waits, and what it leaves behind."""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.copying.source_speed import DEFAULT_BYTES_PER_S, MARGIN, STORE_LATENCY_S, WEIGHT
from kvtier.appliance.core.instructions import FetchBundle, SearchBundles
from kvtier.appliance.core.requests import put_job
from kvtier.appliance.core.requests.fetches import FETCH_FRACTION, PATIENCE_S, PATIENT_SHARE, STEP_FRAGMENTS
from kvtier.appliance.core.results import Refusal
from kvtier.policies.base import AdmissionPolicy, Newcomer, Surroundings, Victim
from kvtier.policies.costs import PrefillModel
from kvtier.policies.registry import ADMISSION, PolicyChoice
from kvtier.tiers.base import Cause, CopyOutcome
from kvtier.tiers.block import NamespaceIdentity, Tier, Urgency

from ..rig import CLIENT, GEOMETRY, Rig, hashes

SIZE = 16  # blocks of a bundle: 256 tokens


def with_source(num_extents: int = 16, **options: Any) -> Rig:
    """Return a rig with an open source."""
    rig = Rig(num_extents=num_extents, **options)
    rig.do(ev.SourceChanged(True))
    return rig


def searches(rig: Rig) -> list[SearchBundles]:
    """Return the searches that the last event began."""
    return [one for one in rig.instructions if isinstance(one, SearchBundles)]


def fetches(rig: Rig) -> list[FetchBundle]:
    """Return the fetches that the last event began."""
    return [one for one in rig.instructions if isinstance(one, FetchBundle)]


def land(rig: Rig, fetch: FetchBundle, group: int, cause: Cause | None = None) -> None:
    """End one batch of a fetch."""
    copy, items = fetch.batches[group]
    rig.do(ev.CopyFinished(copy, [CopyOutcome(cause, b"" if cause else b"\7" * 16)] * len(items)))


def search_found(rig: Rig, num_found: int, num_possible: int | None = None) -> list[FetchBundle]:
    """End the search that the last event began; return the fetches that follow."""
    possible = num_found if num_possible is None else num_possible
    rig.do(ev.SourceSearched(searches(rig)[0].search, num_found, possible))
    return fetches(rig)


def state_prefill(rig: Rig, tokens_per_s: float) -> None:
    """Say how fast prefill is."""
    identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
    rig.do(ev.NamespaceRegistered(rig.call(), identity, PrefillModel(tokens_per_s, 0.0)))


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


def with_hosts() -> Rig:
    """Return a rig that can ask other hosts."""
    rig = Rig(num_extents=16)
    rig.do(ev.SourceChanged(True, takes_exports=False, has_hosts=True))
    return rig


def hosts_have(rig: Rig, num_blocks: int) -> list[FetchBundle]:
    """End the search that the last event began: a host has so many blocks from its first bundle on."""
    (search,) = searches(rig)
    found = num_blocks // SIZE
    rig.do(ev.SourceSearched(search.search, found, -1, is_stored=False, num_blocks=num_blocks))
    return fetches(rig)


def test_of_a_host_blocks_behind_its_last_whole_bundle_come_too() -> None:
    rig, chain = with_hosts(), hashes("a", 3 * SIZE)
    call = rig.acquire(chain)
    assert searches(rig)[0].blocks == chain
    first, tail = hosts_have(rig, SIZE + 5)
    assert (first.bundle.names, tail.bundle.names) == (chain[:SIZE], chain[SIZE : SIZE + 5])
    assert (tail.bundle.position, tail.bundle.parent_hash) == (SIZE, chain[SIZE - 1])
    for fetch in (first, tail):
        for group in (0, 1):
            land(rig, fetch, group)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (SIZE + 5, True)


def test_of_a_host_a_chain_shorter_than_a_bundle_comes() -> None:
    rig, chain = with_hosts(), hashes("a", 7)
    rig.put(chain[:2])
    call = rig.acquire(chain)
    search = searches(rig)[0]
    assert (search.names, search.blocks, search.num_here) == ([], chain[2:], 2)
    (fetch,) = hosts_have(rig, 6)
    assert fetch.bundle.names == chain[:6]
    assert [item.source for item in fetch.batches[0][1]] == [2, 3, 4, 5]
    for group in (0, 1):
        land(rig, fetch, group)
    assert rig.answer(call).num_blocks == 6


def test_what_no_host_has_is_asked_for_again_at_once() -> None:
    rig, chain = with_hosts(), hashes("a", SIZE)
    for _ in range(2):
        call = rig.acquire(chain)
        assert hosts_have(rig, 0) == []
        assert rig.answer(call).last


def test_what_only_hosts_have_is_still_to_be_stored() -> None:
    rig, chain = Rig(num_extents=16), hashes("a", SIZE)
    rig.do(ev.SourceChanged(True, has_hosts=True))
    rig.acquire(chain)
    assert len(hosts_have(rig, SIZE)) == 1
    index, namespace = rig.planner.source_index, next(iter(rig.planner.catalog.namespaces))
    assert index.is_present(namespace, chain[-1])
    assert not index.is_stored(namespace, chain[-1])


def test_for_another_host_nothing_is_fetched() -> None:
    rig, chain = with_hosts(), hashes("a", SIZE)
    call = rig.acquire(chain, is_local=True)
    assert not searches(rig)
    assert rig.answer(call).last


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
    rig.tick(61)
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


def test_an_acquire_waits_no_longer_than_computing_takes() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    state_prefill(rig, 256.0)  # a second
    call = rig.acquire(chain)
    assert searches(rig)
    rig.tick(0.9)
    assert call not in rig.answers
    rig.tick(0.2)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (0, True)


def test_a_search_takes_a_tenth_of_the_time_at_most_and_a_fetch_leaves_some() -> None:
    """A store that hardly answers does not cost what is stored here."""
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    rig.put(chain[:SIZE])
    call = rig.acquire(chain, deadline_at=5.0)
    search = searches(rig)[0]
    rig.tick(0.4)
    assert call not in rig.answers
    rig.tick(0.2)
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (SIZE, True)
    assert not fetches(rig)
    rig.do(ev.SourceSearched(search.search, 1, 1))
    rig.acquire(chain, deadline_at=rig.now + 5.0)
    latest_at = rig.now + FETCH_FRACTION * 5.0  # an answer at the last moment would come too late
    assert [fetch.deadline_at for fetch in fetches(rig)] == [latest_at], "it is known to the next one"


def test_what_the_caller_has_itself_is_not_fetched_for_it() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE + 4)
    assert rig.answer(rig.acquire(chain, first_block=2 * SIZE)).last
    assert not searches(rig)
    rig.acquire(chain, first_block=2 * SIZE - 1)
    assert searches(rig)


def test_the_deadline_of_a_fetch_counts_from_the_request() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    state_prefill(rig, 256.0)
    rig.acquire(chain)
    search = searches(rig)[0]
    rig.now = 0.5
    rig.do(ev.SourceSearched(search.search, 1, 1))
    assert fetches(rig)[0].deadline_at == rig.planner.costs.recompute_s(rig.namespace_id, 0, SIZE)


def test_what_is_computed_sooner_is_not_fetched() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    state_prefill(rig, 1e6)
    assert rig.answer(rig.acquire(chain)).last
    assert not searches(rig)
    rig.acquire(chain, load_anyway=True)
    assert searches(rig)


def test_a_slow_source_is_asked_for_less() -> None:
    rig = with_source(256)
    state_prefill(rig, 512.0)  # half a second a bundle
    num_late = 0
    for number in range(20):
        rig.acquire(hashes(f"late {number}", SIZE))
        if searches(rig):
            (fetch,) = search_found(rig, 1)
            rig.now += 0.5
            land(rig, fetch, 0)
            land(rig, fetch, 1, Cause.CANCELLED)
            num_late += 1
    assert 0 < num_late < 12, "each was late, so the next was expected to take longer"
    rig.tick(61)
    rig.acquire(hashes("a minute later", SIZE))
    assert searches(rig)


def measure(rig: Rig, seconds: float) -> float:
    """Fetch a bundle in so many seconds; return the bytes per second that follow, latency apart."""
    rig.acquire(hashes(f"measured in {seconds} at {rig.now}", SIZE))
    (fetch,) = search_found(rig, 1)
    rig.now += STORE_LATENCY_S + seconds
    land(rig, fetch, 0)
    land(rig, fetch, 1)
    num_bytes = SIZE * GEOMETRY.block_bytes
    return (1 - WEIGHT) * DEFAULT_BYTES_PER_S + WEIGHT * num_bytes / seconds


def test_a_fetch_hardly_sooner_than_computing_is_not_begun() -> None:
    rig = with_source(256)
    bytes_per_s = measure(rig, 0.01)
    fetch_s = STORE_LATENCY_S + SIZE * GEOMETRY.block_bytes / bytes_per_s
    for number, times, is_worth in ((0, 1.4, False), (1, 1.6, True)):
        state_prefill(rig, SIZE * GEOMETRY.block_tokens / (times * fetch_s))
        chain = hashes(f"{number}", SIZE)
        rig.acquire(chain)
        assert bool(searches(rig)) == is_worth


def test_what_is_on_its_way_is_waited_for_first() -> None:
    """A store that everybody asks at once is asked no more when computing would be over before it answers."""
    rig = with_source(256)
    bytes_per_s = measure(rig, 0.01)
    fetch_s = STORE_LATENCY_S + SIZE * GEOMETRY.block_bytes / bytes_per_s
    state_prefill(rig, SIZE * GEOMETRY.block_tokens / (4 * fetch_s))
    num_begun = 0
    for number in range(200):
        rig.acquire(hashes(f"{number}", SIZE))
        if not searches(rig):
            break
        num_begun += len(search_found(rig, 1))
    assert num_begun > 0
    for num_ahead, is_worth in ((num_begun - 1, True), (num_begun, False)):
        expected_s = STORE_LATENCY_S + (num_ahead + 1) * SIZE * GEOMETRY.block_bytes / bytes_per_s
        recompute_s = rig.planner.costs.recompute_s(rig.namespace_id, 0, SIZE)
        assert (MARGIN * expected_s < recompute_s) == is_worth


def test_a_source_of_known_speed_is_not_waited_for_as_long_as_computing_takes() -> None:
    rig = with_source(256)
    bytes_per_s = measure(rig, 0.01)
    state_prefill(rig, 1.0)  # minutes
    rig.acquire(hashes("a", SIZE))
    (fetch,) = search_found(rig, 1)
    expected_s = STORE_LATENCY_S + SIZE * GEOMETRY.block_bytes / bytes_per_s
    recompute_s = rig.planner.costs.recompute_s(rig.namespace_id, 0, SIZE)
    assert PATIENT_SHARE * recompute_s > max(PATIENCE_S, MARGIN * expected_s)
    assert fetch.deadline_at == pytest.approx(rig.now + PATIENT_SHARE * recompute_s)


def test_fetches_that_are_late_together_are_one_lesson() -> None:
    rig = with_source(256)
    state_prefill(rig, 16.0)  # much slower than any source
    rig.acquire(hashes("a", 8 * SIZE))
    begun = search_found(rig, 8)
    rig.now += 10
    for fetch in begun:
        for group in (0, 1):
            land(rig, fetch, group, Cause.CANCELLED)
    namespace = rig.planner.catalog.namespaces[rig.namespace_id]
    seconds = rig.planner.fetches.bundle_seconds(namespace)
    assert seconds is not None
    assert seconds[0] == pytest.approx(
        STORE_LATENCY_S + SIZE * GEOMETRY.block_bytes / (DEFAULT_BYTES_PER_S / 2)
    )


def test_a_store_that_could_not_be_asked_says_nothing_of_what_searches_find() -> None:
    rig = with_source(256)
    state_prefill(rig, 256.0)  # a second
    for number in range(200):
        rig.acquire(hashes(f"new {number}", SIZE))
        rig.do(ev.SourceSearched(searches(rig)[0].search, 0, -1, is_answered=False))
    call = rig.acquire(hashes("one more", SIZE))
    assert call not in rig.answers, "it waits for the search as before"


def test_a_fast_host_says_nothing_of_how_fast_the_store_is() -> None:
    rig = Rig(num_extents=256)
    rig.do(ev.SourceChanged(True, has_hosts=True))
    state_prefill(rig, 256.0)  # a second a bundle
    for number in range(10):
        rig.acquire(hashes(f"of a host {number}", SIZE))
        (fetch,) = hosts_have(rig, SIZE)
        rig.now += 0.01
        for group in (0, 1):
            land(rig, fetch, group)
    namespace = rig.planner.catalog.namespaces[rig.namespace_id]
    seconds = rig.planner.fetches.bundle_seconds(namespace)
    assert seconds is not None
    assert seconds[0] == STORE_LATENCY_S + SIZE * GEOMETRY.block_bytes / DEFAULT_BYTES_PER_S


def test_one_bundle_tells_whether_a_source_is_faster_than_assumed() -> None:
    num_bundles = 40
    rig, chain = with_source(256), hashes("a", num_bundles * SIZE)
    assumed_s = STORE_LATENCY_S + len(chain) * GEOMETRY.block_bytes / DEFAULT_BYTES_PER_S
    state_prefill(rig, 1e6)
    at_a_million_s = rig.planner.costs.recompute_s(rig.namespace_id, 0, len(chain))
    state_prefill(rig, 1e6 * at_a_million_s / (1.2 * assumed_s))
    call = rig.acquire(chain)
    (fetch,) = search_found(rig, num_bundles)
    assert fetch.bundle.names == chain[:SIZE]
    for group in (0, 1):
        land(rig, fetch, group)
    assert rig.answer(call).num_blocks == SIZE
    rig.acquire(chain)
    begun = begin_all(rig)
    assert [one.bundle.position for one in begun] == list(range(SIZE, len(chain), SIZE)), "it is faster"


def begin_all(rig: Rig) -> list[FetchBundle]:
    """Give the planner turns until it has no more to begin; return the fetches that the last event began,
    too."""
    begun = fetches(rig)
    while rig.planner.fetches.is_busy:
        assert rig.planner.is_busy, "it asks for the next turn"
        rig.tick()
        begun += fetches(rig)
    return begun


LONG = 4 * STEP_FRAGMENTS // (SIZE * GEOMETRY.num_groups)  # bundles: more than two steps begin


def with_a_long_chain(num_extents: int = 256) -> tuple[Rig, list[bytes], int, list[FetchBundle]]:
    """Return a rig, a chain that the source holds, the call of its acquire, and what one step began."""
    rig, chain = with_source(num_extents), hashes("long", LONG * SIZE)
    call = rig.acquire(chain)
    begun = search_found(rig, LONG)
    assert 0 < len(begun) < LONG, "no step begins all of it"
    assert call not in rig.answers, "it waits until all is begun"
    return rig, chain, call, begun


def test_a_long_chain_is_begun_in_steps_and_answered_as_a_whole() -> None:
    rig, chain, call, begun = with_a_long_chain()
    for fetch in begun:  # each lands while there is more to begin, and lets the planner begin it
        for group in (0, 1):
            land(rig, fetch, group)
            begun += fetches(rig)
    assert [one.bundle.position for one in begun] == list(range(0, len(chain), SIZE))
    assert (rig.answer(call).num_blocks, rig.answer(call).last) == (len(chain), True)
    assert rig.found(chain) == len(chain)


def test_an_acquire_of_a_long_chain_gets_what_there_is_room_for() -> None:
    rig, chain = with_source(16), hashes("long", LONG * SIZE)
    call = rig.acquire(chain)
    rig.do(ev.SourceSearched(searches(rig)[0].search, len(searches(rig)[0].names), -1))
    begun = begin_all(rig)
    assert 0 < rig.answer(call).num_blocks < len(chain)
    assert begun


@pytest.mark.parametrize("how", ["source", "erased"])
def test_what_ends_the_beginning_of_a_long_chain_lets_its_acquire_go(how: str) -> None:
    rig, chain, call, _ = with_a_long_chain()
    if how == "source":
        rig.do(ev.SourceChanged(False))
    else:
        rig.planner.fetches.erased.add(rig.namespace_id)
    assert len(begin_all(rig)) < LONG
    assert rig.answer(call).num_blocks < len(chain)


@pytest.mark.parametrize("how", ["client", "abandoned"])
def test_an_acquire_that_is_gone_begins_no_more(how: str) -> None:
    rig, _, call, _ = with_a_long_chain()
    if how == "client":
        rig.do(ev.ClientGone(CLIENT, "died"))
        assert isinstance(rig.answer(call), Refusal)
    else:
        rig.do(ev.AcquireAbandoned(call))
        assert call not in rig.answers
    assert not rig.planner.fetches.is_busy
    rig.tick()
    assert not fetches(rig)


def test_a_search_that_seldom_finds_is_not_waited_for() -> None:
    rig = with_source(256)
    state_prefill(rig, 256.0)  # a second
    num_waited = 0
    for number in range(200):
        call = rig.acquire(hashes(f"new {number}", SIZE))
        assert searches(rig), "it goes on for the next one"
        num_waited += call not in rig.answers
        search_found(rig, 0)
    assert 0 < num_waited < 150
    for number in range(5):  # what others store now is found, and waited for again
        rig.acquire(hashes(f"stored {number}", SIZE))
        search_found(rig, 1)
    call = rig.acquire(hashes("one more", SIZE))
    assert call not in rig.answers


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


def test_a_lookup_marks_what_would_be_fetched_and_asks_nothing() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    rig.put(chain[:4])
    lookup = rig.planner.lookup(rig.namespace_id, chain)
    assert not isinstance(lookup, Refusal)
    assert (lookup.num_blocks, lookup.num_fetchable) == (4, 0)
    rig.acquire(chain)
    rig.do(ev.SourceSearched(searches(rig)[0].search, 2, 2))
    other = [*chain[:4], *hashes("elsewhere", SIZE - 4)]
    lookup = rig.planner.lookup(rig.namespace_id, chain)
    assert not isinstance(lookup, Refusal)
    assert lookup.num_fetchable == 2 * SIZE - lookup.num_blocks
    assert lookup.fetch_s > 0
    lookup = rig.planner.lookup(rig.namespace_id, other)
    assert not isinstance(lookup, Refusal)
    assert lookup.num_fetchable == 0


def test_a_lookup_says_how_long_a_search_is_worth() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    state_prefill(rig, 256.0)
    search_s = rig.planner.fetches.search_s
    assert search_s(rig.namespace_id, chain, 0) == 0
    rig.do(ev.LookedUp(rig.namespace_id, chain))
    computing_s = rig.planner.costs.recompute_s(rig.namespace_id, 0, 2 * SIZE)
    assert search_s(rig.namespace_id, chain, 0) == computing_s
    assert search_s(rig.namespace_id, chain[:SIZE], 0) == rig.planner.costs.recompute_s(
        rig.namespace_id, 0, SIZE
    )
    assert search_s(rig.namespace_id, hashes("another", 2 * SIZE), 0) == 0
    rig.do(ev.SourceSearched(searches(rig)[0].search, 1, 1))
    assert search_s(rig.namespace_id, chain, 0) == 0


def test_a_lookup_marks_nothing_that_is_computed_sooner() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    rig.acquire(chain)
    rig.do(ev.SourceSearched(searches(rig)[0].search, 1, 1))
    state_prefill(rig, 1e6)
    lookup = rig.planner.lookup(rig.namespace_id, chain)
    assert not isinstance(lookup, Refusal)
    assert (lookup.num_fetchable, lookup.fetch_s) == (0, 0)
    rig.do(ev.LookedUp(rig.namespace_id, hashes("another", SIZE)))
    assert not searches(rig)


def test_draining_fetches_nothing() -> None:
    rig, chain = with_source(), hashes("a", SIZE)
    rig.do(ev.DrainStarted(rig.call()))
    assert rig.answer(rig.acquire(chain)).last
    assert not searches(rig)


def test_a_lookup_that_found_too_little_begins_a_search_for_the_next_one() -> None:
    rig, chain = with_source(), hashes("a", 2 * SIZE)
    rig.put(chain[:4])
    rig.do(ev.LookedUp(rig.namespace_id, chain))
    (search,) = searches(rig)
    assert search.names == [chain[SIZE - 1], chain[-1]]
    rig.do(ev.LookedUp(rig.namespace_id, chain))
    assert not searches(rig), "one at a time"
    call = rig.acquire(chain)
    assert not searches(rig), "an acquire joins it"
    rig.do(ev.SourceSearched(search.search, 2, 2))
    assert [fetch.bundle.position for fetch in fetches(rig)] == [0, SIZE]
    assert rig.answer(call).num_blocks == 2 * SIZE
    rig.do(ev.LookedUp(rig.namespace_id, chain))
    assert not searches(rig), "all of it is known"


def test_a_lookup_without_a_source_begins_nothing() -> None:
    rig, chain = Rig(), hashes("a", SIZE)
    rig.do(ev.LookedUp(rig.namespace_id, chain))
    rig.do(ev.LookedUp(99, chain))
    assert not searches(rig)


def test_a_fetch_reads_the_urgency_of_a_session_and_opens_none() -> None:
    """Before: each bundle opened the session of its acquire, which no block was used in yet."""
    rig, chain = with_source(num_extents=64), hashes("a", 16 * SIZE)
    rig.acquire(chain, session_id="new")
    (first, *_) = search_found(rig, 16)
    assert rig.planner.is_busy, "an acquire is answered when all of its fetches are begun"
    assert (first.bundle.urgency, rig.planner.sessions.get("new")) == (Urgency.QUEUED, None)
