"""When a fetch is worth its time: how long an acquire waits, and what is not asked for."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.copying.source_speed import DEFAULT_BYTES_PER_S, MARGIN, STORE_LATENCY_S, WEIGHT
from kvtier.appliance.core.requests.fetches import FETCH_FRACTION, PATIENCE_S, PATIENT_SHARE
from kvtier.tiers.base import Cause

from ..rig import GEOMETRY, Rig, hashes
from .fetching import SIZE, begin_all, fetches, land, search_found, searches, state_prefill, with_source


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
