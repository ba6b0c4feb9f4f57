"""Fetches from other hosts, which have blocks that are no whole bundle."""

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.copying.source_speed import DEFAULT_BYTES_PER_S, STORE_LATENCY_S
from kvtier.tiers.base import Cause

from ..rig import GEOMETRY, Rig, hashes
from .fetching import SIZE, hosts_have, land, searches, state_prefill, with_hosts


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


def test_what_a_host_did_not_bring_is_asked_for_again_in_seconds() -> None:
    rig, chain = with_hosts(), hashes("a", SIZE)
    rig.acquire(chain)
    (fetch,) = hosts_have(rig, SIZE)
    for group in (0, 1):
        land(rig, fetch, group, Cause.SHORT_TRANSFER)
    rig.acquire(chain)
    assert not searches(rig), "not at once: it would cost its caller's patience again"
    rig.tick(5.1)
    rig.acquire(chain)
    assert len(hosts_have(rig, SIZE)) == 1


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
