"""What a drain exports: the best first, a bounded step at a time, tenants in turn."""

from collections import Counter

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import drained_bundles, export_queue
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.block import NamespaceIdentity, Tier

from ..rig import CLIENT, GEOMETRY, hashes
from .exporting import SIZE, Exporting, stated, ticked


def used_while_closed(share: str, uses: dict[str, int]) -> Exporting:
    """Return a rig whose chains, of two bundles each, were used so often before the source opened."""
    rig = Exporting(share)
    rig.do(ev.SourceChanged(False))
    for name, num_uses in uses.items():
        rig.put(hashes(name, 2 * SIZE))
        for _ in range(num_uses):
            rig.read(hashes(name, 2 * SIZE))
    rig.do(ev.SourceChanged(True))
    assert not rig.exports
    return rig


def drained(rig: Exporting) -> list[bytes]:
    """Drain a rig; return the last names of the bundles that it exports, in order."""
    rig.do(ev.DrainStarted(rig.call()))
    ticked(rig)
    ended = 0
    while ended < len(rig.exports):
        assert rig.planner.exports.num_pending
        rig.stored(rig.exports[ended])
        ticked(rig)
        ended += 1
    assert not rig.planner.exports.num_pending
    return [one.bundle.names[-1] for one in rig.exports]


def ends(name: str) -> list[bytes]:
    """Return the last names of a chain's two bundles."""
    return [hashes(name, 2 * SIZE)[SIZE - 1], hashes(name, 2 * SIZE)[-1]]


@pytest.mark.parametrize(("share", "expected"), [("worth", "ca"), ("eager", "cab"), ("off", "")])
def test_a_drain_exports_what_is_worth_most_first(share: str, expected: str) -> None:
    rig = used_while_closed(share, {"a": 1, "b": 0, "c": 3})
    assert drained(rig) == [last for name in expected for last in ends(name)]


def test_a_drain_exports_the_start_of_a_chain_before_what_continues_it() -> None:
    rig = used_while_closed("worth", {"a": 1, "b": 1})
    order = drained(rig)
    assert all(order.index(first) < order.index(second) for first, second in (ends("a"), ends("b")))


def test_a_drain_looks_at_few_blocks_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drained_bundles, "STEP_BLOCKS", 5)
    rig = used_while_closed("worth", {"a": 1, "b": 3})
    took, looked = drained_bundles.DrainedBundles._take, Counter[int]()
    step = 0

    def counted(self: drained_bundles.DrainedBundles, row: int) -> None:
        looked[step] += 1
        took(self, row)

    monkeypatch.setattr(drained_bundles.DrainedBundles, "_take", counted)
    rig.do(ev.DrainStarted(rig.call()))
    while rig.planner.exports._drained.is_looking:
        assert rig.planner.exports.num_pending
        assert rig.planner.is_busy
        assert not rig.exports, "the best one may be among what is left"
        step += 1
        rig.do(ev.Tick())
    assert sum(looked.values()) == 4 * SIZE
    assert max(looked.values()) == 5
    rig.do(ev.Tick())
    assert [one.bundle.names[-1] for one in rig.exports] == [*ends("b"), *ends("a")][: len(rig.exports)]
    assert rig.exports


def draining_into_a_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> Exporting:
    """Return a rig whose drain, of a queue of one, can do nothing before a retry is due."""
    monkeypatch.setattr(export_queue, "MAX_QUEUED", 1)
    rig = used_while_closed("worth", {"a": 1, "b": 1})
    rig.do(ev.DrainStarted(rig.call()))
    ticked(rig)
    for export in list(rig.exports):
        rig.stored(export, is_stored=False)
    ticked(rig)
    return rig


def test_a_drain_waits_for_what_failed_where_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = draining_into_a_store_that_fails(monkeypatch)
    assert rig.planner.exports.num_pending
    num_exports, rig.now = len(rig.exports), rig.planner.exports.next_deadline() or 0.0
    rig.do(ev.Tick())
    ticked(rig)
    assert len(rig.exports) > num_exports


def test_a_drain_goes_on_where_what_it_waited_for_has_left_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = draining_into_a_store_that_fails(monkeypatch)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.now = rig.planner.exports.next_deadline() or 0.0
    rig.do(ev.Tick())
    ticked(rig)
    assert not rig.planner.exports.num_pending


def test_a_drain_gives_each_tenant_its_turn() -> None:
    rig = used_while_closed("eager", {"a": 2})
    rig.do(ev.SourceChanged(False))
    for tenant in ("x", "y"):
        call = rig.call()
        identity = NamespaceIdentity(tenant.encode() * 16, GEOMETRY, domain=f"tenant:{tenant}")
        rig.do(ev.ClientGone(CLIENT, "gone"))
        rig.do(ev.ClientOpened(CLIENT, "client", True, f"tenant:{tenant}"))
        rig.do(ev.NamespaceRegistered(call, identity))
        rig.namespace_id = rig.answer(call).namespace_id
        rig.put(hashes(tenant, 2 * SIZE))
    rig.do(ev.SourceChanged(True))
    drained(rig)
    assert {one.bundle.identity.domain for one in rig.exports[:3]} == {"", "tenant:x", "tenant:y"}


def test_a_drain_weighs_bytes_of_prefill_by_what_they_save() -> None:
    """One use of a slow model's bundle is worth more than three of a fast one's."""
    rig = used_while_closed("worth", {"a": 3})
    rig.do(ev.SourceChanged(False))
    stated(rig, 1e6)
    fast, call = rig.namespace_id, rig.call()
    slow = NamespaceIdentity(b"s" * 16, GEOMETRY)
    rig.do(ev.NamespaceRegistered(call, slow, PrefillModel(100.0, 1e12)))
    rig.namespace_id = rig.answer(call).namespace_id
    assert rig.namespace_id != fast
    rig.put(hashes("z", SIZE))
    rig.read(hashes("z", SIZE))
    rig.do(ev.SourceChanged(True))
    assert drained(rig) == [hashes("z", SIZE)[-1], *ends("a")]


def test_a_drain_does_not_export_what_is_there_or_on_its_way() -> None:
    rig, chain = Exporting(), hashes("a", 2 * SIZE)
    rig.put(chain)
    rig.read(chain)
    assert len(rig.exports) == 2
    rig.stored(rig.exports[0])
    rig.do(ev.DrainStarted(rig.call()))
    ticked(rig)
    assert len(rig.exports) == 2
    rig.stored(rig.exports[1])
    assert (len(rig.exports), rig.planner.exports.num_pending) == (2, 0)


def test_a_drain_ends_when_the_source_closes() -> None:
    rig = used_while_closed("eager", dict.fromkeys("abcd", 0))
    rig.do(ev.DrainStarted(rig.call()))
    ticked(rig)
    assert rig.planner.exports.num_pending > len(rig.exports) > 0
    rig.do(ev.SourceChanged(False))
    for export in rig.exports:
        rig.stored(export, is_stored=False)
    assert not rig.planner.exports.num_pending
