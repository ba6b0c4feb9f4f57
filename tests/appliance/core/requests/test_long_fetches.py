"""Fetches of a chain that no single step begins."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.instructions import FetchBundle
from kvtier.appliance.core.requests.fetches import STEP_FRAGMENTS
from kvtier.appliance.core.results import Refusal

from ..rig import CLIENT, GEOMETRY, Rig, hashes
from .fetching import SIZE, begin_all, fetches, land, search_found, searches, with_source

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
        rig.do(ev.TenantErased(rig.call(), ""))
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
