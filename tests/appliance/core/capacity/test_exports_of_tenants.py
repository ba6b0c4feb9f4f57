"""Exports of tenants: turns, the day's budget, places to wait, shares by tenant and namespace."""

from dataclasses import replace
from typing import Any

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity import export_queue, exports
from kvtier.policies.costs import PrefillModel
from kvtier.tiers.block import NamespaceIdentity

from ..rig import CLIENT, GEOMETRY, hashes
from .exporting import BUNDLE_BYTES, SIZE, Exporting, priced


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
