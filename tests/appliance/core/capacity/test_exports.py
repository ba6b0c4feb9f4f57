"""Exports: which bundles are stored in the source, and what they hold meanwhile."""

from dataclasses import replace
from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import export_queue, exports
from kvtier.appliance.core.capacity.exports import MAX_RETRIES, RETRY_S, SPEED_TRUST_S
from kvtier.appliance.core.copying.source_speed import MARGIN, TRUST_S
from kvtier.appliance.core.instructions import ExportBundle
from kvtier.appliance.core.worth import KEPT_DAYS, SourcePrices
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.block import NamespaceIdentity, Tier

from ..rig import CLIENT, GEOMETRY, Rig, hashes

SIZE = 16  # blocks of a bundle
BUNDLE_BYTES = SIZE * GEOMETRY.block_bytes


class Exporting(Rig):
    """A rig with an open source that collects exports."""

    def __init__(self, share: str = "worth", num_extents: int = 64, **options: Any) -> None:
        self.exports: list[ExportBundle] = []
        super().__init__(num_extents=num_extents, share=share, **options)
        self.do(ev.SourceChanged(True))

    def do(self, event: ev.Event) -> Any:
        """Carry out an event; exports are noted."""
        instructions = super().do(event)
        self.exports += [one for one in instructions if isinstance(one, ExportBundle)]
        return instructions

    def read(self, chain: list[bytes]) -> None:
        """Acquire and release a chain."""
        call = self.acquire(chain)
        self.settle()
        self.release(call)

    def stored(self, export: ExportBundle, *, is_stored: bool = True) -> None:
        """End an export."""
        self.do(ev.ExportFinished(export.export, is_stored, BUNDLE_BYTES if is_stored else 0))

    def count(self, name: str) -> int:
        """Return a counter."""
        return self.planner.story.counters[name]


def ticked(rig: Exporting) -> None:
    """Let the planner do what it has to do at once."""
    while rig.planner.is_busy:
        rig.do(ev.Tick())


def test_a_bundle_is_worth_it_when_it_is_used_again() -> None:
    rig, chain = Exporting(), hashes("a", 2 * SIZE + 3)
    rig.put(chain)
    assert not rig.exports
    rig.read(chain[: SIZE + 2])
    (export,) = rig.exports
    assert (export.bundle.position, export.bundle.parent_hash) == (0, b"")
    assert export.bundle.names == chain[:SIZE]
    labels = [label for _, _, label in export.fragments]
    assert [(one.group, one.position) for one in labels] == [(g, b) for g in (0, 1) for b in range(SIZE)]
    assert all(rig.published[tier, place] == label.prefix_hash for tier, place, label in export.fragments)
    assert all(len(one.checksum) == 16 for one in labels)


def test_eager_exports_what_is_put() -> None:
    rig, chain = Exporting("eager"), hashes("a", 2 * SIZE + 3)
    rig.put(chain)
    assert [one.bundle.position for one in rig.exports] == [0, SIZE]
    assert rig.exports[1].bundle.parent_hash == chain[SIZE - 1]


@pytest.mark.parametrize("share", ["off", "worth"])
def test_nothing_is_exported_unasked(share: str) -> None:
    rig, chain = Exporting(share), hashes("a", SIZE)
    rig.put(chain)
    if share == "off":
        rig.read(chain)
    assert not rig.exports


def test_what_is_exported_stays_until_it_is_stored() -> None:
    rig, chain = Exporting("eager"), hashes("a", SIZE)
    rig.put(chain)
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.settle()
    assert all("dram" in rig.where(name) for name in chain)
    rig.stored(rig.exports[0])
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.settle()
    assert not any("dram" in rig.where(name) for name in chain)


def test_a_bundle_is_exported_once_an_hour() -> None:
    rig, chain = Exporting(), hashes("a", SIZE)
    rig.put(chain)
    rig.read(chain)
    rig.stored(rig.exports[0])
    rig.read(chain)
    assert len(rig.exports) == 1
    rig.now += 3601
    rig.read(chain)
    assert len(rig.exports) == 2


def test_a_failed_export_is_tried_at_the_next_use() -> None:
    rig, chain = Exporting(), hashes("a", SIZE)
    rig.put(chain)
    rig.read(chain)
    rig.stored(rig.exports[0], is_stored=False)
    assert rig.count("exports_failed") == 1
    rig.read(chain)
    assert len(rig.exports) == 2


def test_a_failed_export_is_tried_again_ever_later() -> None:
    rig, chain = Exporting("eager"), hashes("a", SIZE)
    rig.put(chain)
    for number in range(1, MAX_RETRIES + 1):
        rig.stored(rig.exports[-1], is_stored=False)
        due_at = rig.planner.exports.next_deadline() or 0.0
        assert due_at == rig.now + RETRY_S * 2 ** (number - 1)
        rig.do(ev.Tick())
        assert len(rig.exports) == number, "not before its time"
        rig.now = due_at
        rig.do(ev.Tick())
        assert len(rig.exports) == number + 1
        assert rig.exports[-1].bundle == rig.exports[0].bundle
    rig.stored(rig.exports[-1], is_stored=False)
    assert rig.planner.exports.next_deadline() is None
    rig.read(chain)
    assert len(rig.exports) == MAX_RETRIES + 2, "at the next use"


def test_what_was_stored_or_is_gone_is_not_tried_again() -> None:
    rig, chain, other = Exporting("eager"), hashes("a", SIZE), hashes("b", SIZE)
    rig.put(chain)
    rig.put(other)
    for export in rig.exports:
        rig.stored(export, is_stored=False)
    rig.read(chain)  # which exports it at once
    rig.stored(rig.exports[-1])
    rig.do(ev.EvictRequested(rig.call(), Tier.DRAM, 0))
    rig.settle()
    rig.now += RETRY_S
    rig.do(ev.Tick())
    assert (len(rig.exports), rig.planner.exports.num_pending) == (3, 0)


def test_what_waits_for_its_turn_is_exported_after_an_outage() -> None:
    rig = Exporting("eager")  # two bundles at a time
    for name in "abc":
        rig.put(hashes(name, SIZE))
    rig.do(ev.SourceChanged(False))
    for export in rig.exports[:2]:
        rig.stored(export, is_stored=False)
    rig.now += 100 * RETRY_S
    rig.do(ev.Tick())
    assert (len(rig.exports), rig.planner.exports.next_deadline()) == (2, None)
    rig.do(ev.SourceChanged(True))
    for number in (2, 3, 4):
        rig.stored(rig.exports[number])
    assert {one.bundle.names[-1] for one in rig.exports[2:]} == {hashes(name, SIZE)[-1] for name in "abc"}


def test_no_more_than_a_share_of_memory_is_in_flight() -> None:
    rig = Exporting("eager", num_extents=64)  # room for 16 bundles
    for name in "abcd":
        rig.put(hashes(name, SIZE))
    assert len(rig.exports) == 2
    rig.stored(rig.exports[0])
    assert len(rig.exports) == 3


def test_beyond_the_budget_nothing_is_exported() -> None:
    rig = Exporting("eager", daily_export_bytes=BUNDLE_BYTES)
    rig.now = 86_400.0
    rig.put(hashes("a", SIZE))
    rig.stored(rig.exports[0])
    rig.put(hashes("b", SIZE))
    assert len(rig.exports) == 1
    assert rig.count("exports_over_budget") == 1


class ExportingTenants(Exporting):
    """A rig of two tenants with a namespace each."""

    def __init__(self, share: str = "eager", **options: Any) -> None:
        super().__init__(share, num_tenants=2, **options)
        self.numbers: dict[str, tuple[int, int]] = {}  # tenant -> its client, its namespace
        for client, tenant in enumerate(("acme", "bolt"), CLIENT + 1):
            self.do(ev.ClientOpened(client, tenant, True, f"tenant:{tenant}"))
            call = self.call()
            identity = NamespaceIdentity(b"m" * 16, GEOMETRY, domain=f"tenant:{tenant}")
            self.do(ev.NamespaceRegistered(call, identity, PrefillModel(1000.0, 1e12)))
            self.numbers[tenant] = client, self.answer(call).namespace_id

    def put_as(self, tenant: str, *names: str) -> None:
        """Put a chain of one bundle for each name."""
        self.client, self.namespace_id = self.numbers[tenant]
        for name in names:
            self.put(hashes(name, SIZE))

    def read_as(self, tenant: str, name: str) -> None:
        """Read a chain of one bundle."""
        self.client, self.namespace_id = self.numbers[tenant]
        self.read(hashes(name, SIZE))

    def exported(self) -> list[str]:
        """Return the tenants of exports, in order."""
        return [one.bundle.identity.domain.removeprefix("tenant:") for one in self.exports]


def test_tenants_take_turns() -> None:
    """Two are in flight; a tenant that comes after four of another waits for one of them, not for all."""
    rig = ExportingTenants()
    rig.put_as("acme", "a", "b", "c", "d")
    rig.put_as("bolt", "e")
    rig.stored(rig.exports[0])
    rig.stored(rig.exports[1])
    assert "bolt" in rig.exported()[2:4]


@pytest.mark.parametrize("ends", [False, True])
def test_one_tenant_does_not_use_up_the_budget_of_all(ends: bool) -> None:
    """Of four bundles a day two tenants have one each for certain, and one that is alone has three at most.
    What is on its way counts as what was sent."""
    rig = ExportingTenants(daily_export_bytes=4 * BUNDLE_BYTES, max_export_fraction=1.0)
    rig.now = 86_400.0
    for name in "abcd":
        rig.put_as("acme", name)
    for export in rig.exports if ends else ():
        rig.stored(export)
    rig.put_as("bolt", "e")
    assert rig.exported() == ["acme", "acme", "bolt"]
    assert rig.count("exports_over_budget") == 2


def test_what_was_not_sent_is_given_back_to_the_budget() -> None:
    """The store had it already, or the export failed."""
    rig = ExportingTenants(daily_export_bytes=4 * BUNDLE_BYTES, max_export_fraction=1.0)
    rig.now = 86_400.0
    rig.put_as("acme", "a", "b")
    rig.do(ev.ExportFinished(rig.exports[0].export, True, 0))
    rig.put_as("acme", "c", "d")
    assert rig.exported() == ["acme"] * 3


def test_bundles_of_one_tenant_that_wait_leave_the_others_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The oldest of the tenant's own is dropped."""
    monkeypatch.setattr(export_queue, "MAX_QUEUED", 8)
    rig = ExportingTenants(num_extents=128)  # four in flight
    rig.put_as("acme", *(f"many {number}" for number in range(12)))
    assert rig.count("exports_dropped") == 4
    rig.put_as("bolt", "mine")
    for export in rig.exports:
        rig.stored(export)
    assert rig.exported() == ["acme"] * 5 + ["bolt"] + ["acme"] * 3
    assert hashes("many 11", SIZE)[-1] == rig.exports[-1].bundle.names[-1], "the oldest was dropped"


def test_uses_of_one_tenant_do_not_make_those_of_others_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "MAX_COUNTED", 8)
    rig = ExportingTenants("worth", num_extents=128, prices=priced(2.5, 1.9, 1000.0))
    rig.put_as("bolt", "mine")
    rig.read_as("bolt", "mine")
    for number in range(12):
        rig.put_as("acme", f"many {number}")
        rig.read_as("acme", f"many {number}")
    assert not rig.exports
    rig.read_as("bolt", "mine")
    assert rig.exported() == ["bolt"]


def test_what_left_memory_is_exported_when_it_is_used_again() -> None:
    rig, chain = Exporting("eager", nvme_blocks=SIZE, num_segments=8), hashes("a", SIZE)
    rig.do(ev.SourceChanged(False))
    rig.put(chain)
    rig.cool(chain)
    rig.do(ev.SourceChanged(True))
    rig.read(chain)
    assert not rig.exports, "it was in nvme at that moment"
    assert rig.count("exports_not_in_memory") == 1
    rig.read(chain)
    assert len(rig.exports) == 1


def priced(gpu_hour: float, num_reads: float, speed: float) -> SourcePrices:
    """Return prices at which a bundle of the rig pays after so many reads."""
    saved = SIZE * GEOMETRY.block_tokens / speed * gpu_hour / 3600
    return SourcePrices(thousand_puts=1000 * saved * num_reads, gpu_hour=gpu_hour)


def stated(rig: Exporting, speed: float) -> None:
    """State the speed of prefill, in tokens a second."""
    identity = NamespaceIdentity(b"m" * 16, GEOMETRY)
    rig.do(ev.NamespaceRegistered(rig.call(), identity, PrefillModel(speed, 1e12)))


def test_with_prices_a_bundle_is_stored_when_its_reads_have_paid_for_it() -> None:
    rig, chain = Exporting(prices=priced(2.5, 2.9, 1000.0)), hashes("a", SIZE)
    stated(rig, 1000.0)
    rig.put(chain)
    for num_reads in (1, 2):
        rig.read(chain)
        assert not rig.exports
        assert rig.count("exports_not_worth") == num_reads
    rig.read(chain)
    assert len(rig.exports) == 1


def test_reads_before_the_days_that_are_paid_for_do_not_count() -> None:
    rig, chain = Exporting(prices=priced(2.5, 1.9, 1000.0)), hashes("a", SIZE)
    stated(rig, 1000.0)
    rig.put(chain)
    rig.read(chain)
    rig.now += KEPT_DAYS * 86_400.0 + 1
    rig.read(chain)
    assert not rig.exports
    rig.read(chain)
    assert len(rig.exports) == 1


def test_what_is_computed_sooner_than_fetched_is_not_stored() -> None:
    """The whole chain of a use counts: its first bundles are fetched with the others."""
    rig, chain = Exporting(), hashes("a", 2 * SIZE)
    speed = rig.planner.source_index.store_speed
    speed.ended(
        speed.began(BUNDLE_BYTES, rig.now), BUNDLE_BYTES, BUNDLE_BYTES, is_late=False, now=rig.now + 1.0
    )
    rig.now += 1.0
    one_s, two_s = (speed.fetch_s(num * BUNDLE_BYTES, rig.now) for num in (1, 2))
    rig.put(chain)
    # A bundle of the two is computed in less than MARGIN times its fetch, both are not: the latency is one.
    stated(rig, 2 * SIZE * GEOMETRY.block_tokens / (MARGIN * two_s * 1.01))
    assert MARGIN * one_s > rig.planner.costs.recompute_s(rig.namespace_id, 0, SIZE)
    rig.read(chain[:SIZE])
    assert not rig.exports
    assert rig.count("exports_not_worth") == 1
    rig.read(chain)
    assert len(rig.exports) == 2
    for export in rig.exports:
        rig.stored(export)
    rig.now += SPEED_TRUST_S + 1
    other = hashes("b", SIZE)
    rig.put(other)
    rig.read(other)
    assert len(rig.exports) == 3, "how fast the source is now is not known"


def read_once(num_chains: int) -> Exporting:
    """Return a rig of known prefill in which chains of a bundle were used, over a source of unknown speed."""
    rig = Exporting()
    stated(rig, 1000.0)
    for number in range(num_chains):
        rig.put(hashes(f"{number}", SIZE))
        rig.read(hashes(f"{number}", SIZE))
    return rig


def ended_trial(rig: Exporting, read_s: float) -> None:
    """End the one export that is under way."""
    trial = rig.exports[-1]
    assert trial.is_trial
    rig.do(ev.ExportFinished(trial.export, True, BUNDLE_BYTES, read_s))
    rig.now += RETRY_S
    rig.do(ev.Tick())


@pytest.mark.parametrize("is_slow", [True, False])
def test_one_export_tells_how_fast_the_source_is_before_others_begin(is_slow: bool) -> None:
    rig = read_once(3)
    assert [one.is_trial for one in rig.exports] == [True], "the others wait for it"
    assert not rig.planner.is_busy
    compute_s = rig.planner.costs.recompute_s(rig.namespace_id, 0, SIZE)
    ended_trial(rig, compute_s if is_slow else compute_s / 2)
    assert [one.is_trial for one in rig.exports[1:]] == ([] if is_slow else [False] * 2)
    assert rig.planner.story.counters.get("exports_not_worth", 0) == (2 if is_slow else 0)
    if is_slow:  # for an hour, and not only while fetches are expected by it
        rig.now += TRUST_S + 1
        rig.put(hashes("soon", SIZE))
        rig.read(hashes("soon", SIZE))
        assert len(rig.exports) == 1
    for export in rig.exports[1:]:
        rig.stored(export)
    rig.now += SPEED_TRUST_S + 1
    rig.put(hashes("later", SIZE))
    rig.read(hashes("later", SIZE))
    assert rig.exports[-1].is_trial


def test_a_trial_that_tells_nothing_is_not_repeated_for_an_hour() -> None:
    rig = read_once(3)
    ended_trial(rig, 0.0)
    assert [one.is_trial for one in rig.exports] == [True, False, False]


def test_a_trial_that_fails_is_followed_by_another_one() -> None:
    rig = read_once(2)
    rig.stored(rig.exports[0], is_stored=False)
    rig.now += RETRY_S
    rig.do(ev.Tick())
    assert [one.is_trial for one in rig.exports] == [True, True]
    ended_trial(rig, 1e-3)
    assert [one.is_trial for one in rig.exports] == [True, True, False]


def test_a_trial_holds_back_only_what_waits_for_its_answer() -> None:
    rig = read_once(2)
    rig.do(ev.DrainStarted(rig.call()))
    ticked(rig)
    assert [one.is_trial for one in rig.exports] == [True, False], "what a drain stores is not compared"


def test_a_known_speed_needs_no_trial() -> None:
    rig = Exporting()
    stated(rig, 1000.0)
    rig.planner.source_index.store_speed.tried(BUNDLE_BYTES, 1e-3, rig.now)
    rig.put(hashes("a", SIZE))
    rig.read(hashes("a", SIZE))
    assert [one.is_trial for one in rig.exports] == [False]


def test_prices_are_not_compared_before_prefill_is_known() -> None:
    rig, chain = Exporting(prices=priced(2.5, 1e9, 1000.0)), hashes("a", SIZE)
    rig.put(chain)
    rig.read(chain)
    assert len(rig.exports) == 1


@pytest.mark.parametrize(("of_all", "of_tenant"), [("eager", "off"), ("off", "eager")])
def test_a_tenant_has_a_share_of_its_own(of_all: str, of_tenant: str) -> None:
    rig = Exporting(of_all, shares={"tenant:acme": of_tenant})
    rig.put(hashes("a", SIZE))
    assert len(rig.exports) == (of_all == "eager")
    rig.do(ev.ClientGone(CLIENT, "gone"))
    rig.do(ev.ClientOpened(CLIENT, "client", True, "tenant:acme"))
    call = rig.call()
    rig.do(ev.NamespaceRegistered(call, NamespaceIdentity(b"m" * 16, GEOMETRY, domain="tenant:acme")))
    rig.namespace_id = rig.answer(call).namespace_id
    rig.put(hashes("b", SIZE))
    assert len(rig.exports) == 1


DIGEST = NamespaceIdentity(b"m" * 16, GEOMETRY).digest.hex()
MODEL = (b"m" * 16).hex()


@pytest.mark.parametrize(
    ("namespaces", "shares", "expected"),
    [
        ({DIGEST[:8]: "eager"}, {}, "eager"),
        ({MODEL[:8]: "eager"}, {}, "eager"),
        ({"f" * 8: "eager", "00" + DIGEST: "eager"}, {}, "off"),
        ({DIGEST: "worth", MODEL: "eager"}, {}, "worth"),
        ({DIGEST: "eager"}, {"": "off"}, "off"),
        ({DIGEST: "worth"}, {"": "eager"}, "worth"),
        ({"0" * 8: "off"}, {"": "eager"}, "eager"),
    ],
)
def test_a_namespace_has_a_share_of_its_own(namespaces: Any, shares: Any, expected: str) -> None:
    """Of those that match, and of its tenant's, the least counts. They are live."""
    rig, chain = Exporting("off", namespace_shares=namespaces, shares=shares), hashes("a", SIZE)
    rig.put(chain)
    assert len(rig.exports) == (expected == "eager")
    rig.read(chain)
    assert len(rig.exports) == (expected != "off")
    rig.do(
        ev.PolicyChanged(
            replace(rig.planner.core.options, namespace_shares={}, shares={}), rig.planner.core.choice, {}
        )
    )
    rig.put(hashes("b", SIZE))
    rig.read(hashes("b", SIZE))
    assert len(rig.exports) == (expected != "off"), "there are none any more"
