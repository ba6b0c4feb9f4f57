"""Exports: which bundles are stored in the source, and what they hold meanwhile."""

import pytest

from kvtier.appliance.core import events as ev
from kvtier.appliance.core.capacity.exports import MAX_RETRIES, RETRY_S, SPEED_TRUST_S
from kvtier.appliance.core.copying.source_speed import MARGIN
from kvtier.appliance.core.worth import KEPT_DAYS
from kvtier.tiers.block import Tier

from ..rig import GEOMETRY, hashes
from .exporting import BUNDLE_BYTES, SIZE, Exporting, priced, stated, ticked


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


def test_prices_are_not_compared_before_prefill_is_known() -> None:
    rig, chain = Exporting(prices=priced(2.5, 1e9, 1000.0)), hashes("a", SIZE)
    rig.put(chain)
    rig.read(chain)
    assert len(rig.exports) == 1


def test_a_bundle_of_a_tenant_without_a_key_is_counted_once_and_not_tried_again() -> None:
    """One tenant's key made failures of a store, several for each of its bundles."""
    rig, chain = Exporting("eager"), hashes("a", SIZE)
    rig.put(chain)
    [export] = rig.exports
    rig.do(ev.ExportFinished(export.export, False, has_key=False))
    for _ in range(10):
        rig.now += 3600.0
        ticked(rig)
    assert len(rig.exports) == 1
    assert rig.count("exports_no_key") == 1
    assert "exports_failed" not in rig.planner.story.counters
