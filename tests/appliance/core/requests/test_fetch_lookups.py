"""What lookups say of a source, and begin for those that come after them."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.results import Refusal

from ..rig import Rig, hashes
from .fetching import SIZE, fetches, searches, state_prefill, with_source


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
