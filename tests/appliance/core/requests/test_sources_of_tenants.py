"""What one tenant can take of a source that all tenants fetch from: never what others need."""

from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.copying import source_index
from kvtier.appliance.core.copying.source_speed import DEFAULT_BYTES_PER_S, STORE_LATENCY_S
from kvtier.appliance.core.instructions import FetchBundle, SearchBundles
from kvtier.appliance.core.turns import TenantTurns
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.base import CopyOutcome
from kvtier.tiers.block import NamespaceIdentity

from ..rig import CLIENT, GEOMETRY, Rig, hashes

SIZE = 16  # blocks of a bundle


class Fetching(Rig):
    """A rig of two tenants, ACME and BOLT, with an open source; collects what it begins."""

    def __init__(self, num_extents: int = 64, tokens_per_s: float = 100.0, **options: Any) -> None:
        self.begun: list[Any] = []
        super().__init__(num_extents=num_extents, num_tenants=2, **options)
        self.numbers: dict[str, tuple[int, int]] = {}  # tenant -> its client, its namespace
        for client, tenant in enumerate(("acme", "bolt"), CLIENT + 1):
            self.do(ev.ClientOpened(client, tenant, True, f"tenant:{tenant}"))
            call = self.call()
            identity = NamespaceIdentity(b"m" * 16, GEOMETRY, domain=f"tenant:{tenant}")
            self.do(ev.NamespaceRegistered(call, identity, PrefillModel(tokens_per_s, 0.0)))
            self.numbers[tenant] = client, self.answer(call).namespace_id
        self.do(ev.SourceChanged(True))

    def do(self, event: ev.Event) -> Any:
        """Carry out an event; what it begins is noted."""
        instructions = super().do(event)
        self.begun += instructions
        return instructions

    def take(self, kind: type) -> list[Any]:
        """Return, once, what was begun of a kind."""
        found = [one for one in self.begun if isinstance(one, kind)]
        self.begun = [one for one in self.begun if not isinstance(one, kind)]
        return found

    def look_up(self, tenant: str, chain: list[bytes]) -> None:
        """Look a chain up."""
        self.do(ev.LookedUp(self.numbers[tenant][1], chain))

    def acquire_as(self, tenant: str, chain: list[bytes], **named: Any) -> int:
        """Acquire a chain; return the call."""
        self.client, self.namespace_id = self.numbers[tenant]
        return self.acquire(chain, **{"deadline_at": self.now + 100.0, **named})


def test_searches_of_one_tenant_leave_the_others_their_share() -> None:
    """Before: each of any number was begun, and went before what others fetch."""
    rig = Fetching()
    for number in range(1000):
        rig.look_up("acme", hashes(f"a {number}", SIZE))
    acme = rig.take(SearchBundles)
    assert len(acme) == 128  # of 256: 64 reserved for each tenant, half of the other 128 for one alone
    assert rig.planner.story.counters["searches_beyond_share"] == 872
    call = rig.acquire_as("acme", hashes("b", SIZE))
    assert rig.answer(call).num_blocks == 0, "answered at once with what there is"
    call = rig.acquire_as("bolt", hashes("c", SIZE))
    assert len(rig.take(SearchBundles)) == 1
    assert call not in rig.answers, "it waits for its search"
    rig.do(ev.SourceSearched(acme[0].search, 0, 0))
    rig.look_up("acme", hashes("d", SIZE))
    rig.look_up("acme", hashes("e", SIZE))
    assert len(rig.take(SearchBundles)) == 1, "in the place of the one that ended"


def test_names_that_one_tenant_asks_for_do_not_make_those_of_others_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before: 65,536 lookups of one tenant, and every bundle of another had to be searched for again."""
    monkeypatch.setattr(source_index, "MAX_NAMES", 8)
    rig = Fetching()
    index, (_, acme), (_, bolt) = rig.planner.source_index, rig.numbers["acme"], rig.numbers["bolt"]
    index.note(bolt, mine := hashes("b", 1)[0], True)
    for name in hashes("a", 20):
        index.note(acme, name, True)
    assert index.is_stored(bolt, mine)
    assert [index.is_stored(acme, name) for name in hashes("a", 20)] == [False] * 13 + [True] * 7
    index.note(acme, hashes("a", 20)[13], False)
    assert [index.is_present(acme, name) for name in hashes("a", 20)[12:15]] == [None, False, True]


class Store:
    """A store of DEFAULT_BYTES_PER_S that brings one bundle at a time, of tenants in turns."""

    def __init__(self, rig: Fetching) -> None:
        self._rig = rig
        self._queue: TenantTurns[FetchBundle] = TenantTurns()
        self.num_landed: dict[str, int] = {}  # bundles, by domain

    def serve(self, until: float) -> None:
        """Bring what is asked for until a time; the planner takes its steps meanwhile."""
        rig = self._rig
        while rig.now < until:
            for fetch in rig.take(FetchBundle):
                self._queue.add(fetch.bundle.identity.domain, fetch)
            if not self._queue:
                return
            domain, fetch = self._queue.pop()
            num_bytes = sum(item.label.raw_length for _, items in fetch.batches for item in items)
            rig.now += num_bytes / DEFAULT_BYTES_PER_S
            for copy, items in fetch.batches:
                rig.do(ev.CopyFinished(copy, [CopyOutcome(None, b"\7" * 16)] * len(items)))
            self.num_landed[domain] = self.num_landed.get(domain, 0) + 1


def test_what_one_tenant_fetches_leaves_another_its_part_of_the_source() -> None:
    """Before: behind 32 bundles of another tenant nothing was worth fetching."""
    rig = Fetching(num_extents=2048, tokens_per_s=8000.0)
    store, calls = Store(rig), dict[str, int]()
    for tenant, num_bundles in (("acme", 32), ("bolt", 4)):
        chain = hashes(tenant, num_bundles * SIZE)
        rig.look_up(tenant, chain)
        for search in rig.take(SearchBundles):
            rig.do(ev.SourceSearched(search.search, num_bundles, num_bundles))
        calls[tenant] = rig.acquire_as(tenant, chain, load_anyway=tenant == "acme")
        while rig.planner.is_busy:
            rig.tick()
    assert [rig.answer(calls[tenant]).num_blocks for tenant in calls] == [32 * SIZE, 4 * SIZE]
    num_bytes, began_at = 4 * SIZE * GEOMETRY.block_bytes, rig.now
    store.serve(began_at + 2 * num_bytes / DEFAULT_BYTES_PER_S + STORE_LATENCY_S)
    assert store.num_landed["tenant:bolt"] == 4, "in twice the time that it takes alone"
    assert store.num_landed["tenant:acme"] > 4, "what bolt leaves is of use"
    store.serve(float("inf"))
    assert store.num_landed == {"tenant:acme": 32, "tenant:bolt": 4}
    assert not rig.planner.fetches.host_speed.on_their_way
    assert not rig.planner.source_index.store_speed.on_their_way


def test_tenants_take_turns_in_beginning_to_fetch() -> None:
    """Before: the first step of an acquire came behind all steps of those that came before it."""
    rig = Fetching(num_extents=4096)
    for tenant, num_bundles in (("acme", 128), ("bolt", 16)):
        chain = hashes(tenant, num_bundles * SIZE)
        rig.look_up(tenant, chain)
        for search in rig.take(SearchBundles):
            rig.do(ev.SourceSearched(search.search, num_bundles, num_bundles))
        rig.acquire_as(tenant, chain)
    rig.take(FetchBundle)
    begun = []
    for _ in range(4):
        rig.tick()
        begun.append({one.bundle.identity.domain for one in rig.take(FetchBundle)})
    assert sorted(map(sorted, begun)) == [["tenant:acme"]] * 2 + [["tenant:bolt"]] * 2
