"""The metrics of a real daemon: their names, their labels, and that they add up."""

import re
from collections import defaultdict

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.appliance.errors import REASONS
from kvtier.appliance.histogram import BOUNDS_S, Histogram
from kvtier.appliance.observability.metrics_table import LABELS, METRICS
from kvtier.clients import Client
from kvtier.tiers.codecs.registry import BY_NAME
from kvtier.v1 import admin_pb2, events_pb2, kvcache_pb2
from kvtier.v1.admin_pb2_grpc import AdminServiceStub

from ...waiting import until
from .conftest import IDENTITY, Shown, Start, names, use

MAX_SERIES = 3000  # of one daemon, whatever is done to it
URGENCIES = {"decoding", "prefill", "queued", "waiting", "idle", "ended", "none"}
TIERS = {"hbm", "dram", "nvme"}
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def scrape(shown: Shown) -> Samples:
    """Return samples by name and labels, as Prometheus reads them."""
    samples: Samples = defaultdict(dict)
    for family in text_string_to_metric_families(shown.get("/metrics")):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in samples[sample.name], f"{sample.name}{labels} twice"
            samples[sample.name][labels] = sample.value
    return samples


def total(samples: Samples, name: str, **labels: str) -> float:
    """Return the sum of what has these labels."""
    wanted = set(labels.items())
    found = [value for key, value in samples[name].items() if wanted <= set(key)]
    assert found, f"{name}{labels} is not there"
    return sum(found)


def scrape_until(shown: Shown, text: str) -> Samples:
    """Scrape when the metrics say something: a refused call is counted just after its caller is told."""
    until(lambda: text in shown.get("/metrics"), lambda: f"{text} is not there")
    return scrape(shown)


def test_what_is_asked_is_accounted_for(start: Start) -> None:
    shown = start()
    use(shown)
    samples = scrape(shown)
    asked = total(samples, "kvtier_asked_blocks_total")
    assert asked == 3 * 24 + 48
    assert total(samples, "kvtier_lookup_blocks_total") == asked
    assert total(samples, "kvtier_lookup_blocks_total", outcome="missed") == 24
    assert total(samples, "kvtier_lookup_blocks_total", outcome="dram") > 0
    assert total(samples, "kvtier_lookup_blocks_total", outcome="nvme") > 0
    assert total(samples, "kvtier_stored_blocks_total") == 3 * 24
    for tier in ("dram", "nvme"):
        resident = total(samples, "kvtier_tier_bytes", tier=tier, state="resident")
        assert total(samples, "kvtier_tier_urgency_bytes", tier=tier) == resident > 0
        assert total(samples, "kvtier_tier_bytes", tier=tier) <= total(
            samples, "kvtier_tier_capacity_bytes", tier=tier
        )
    ended = total(samples, "kvtier_prefetch_blocks_total")
    begun = total(samples, "kvtier_prefetch_begun_blocks_total")
    assert begun == ended + total(samples, "kvtier_prefetch_awaited_blocks")
    assert total(samples, "kvtier_copies_total", source="dram", target="nvme", outcome="landed") > 0
    assert total(samples, "kvtier_copy_seconds_count", source="nvme", target="dram") > 0
    assert total(samples, "kvtier_evicted_blocks_total", tier="dram") > 0
    assert total(samples, "kvtier_sessions") == 1
    raw = total(samples, "kvtier_codec_bytes_total", codec="zstd", form="raw")
    assert 0 < total(samples, "kvtier_codec_bytes_total", codec="zstd", form="stored") < raw
    assert total(samples, "kvtier_codec_fragments_total", codec="zstd", outcome="decoded") > 0
    assert shown.audit() == []


def bytes_by_class(shown: Shown) -> dict[str, float]:
    """Return the readable bytes of all tiers by class, without the classes that have none."""
    series = scrape(shown)["kvtier_tier_urgency_bytes"]
    found: dict[str, float] = defaultdict(float)
    for labels, value in series.items():
        found[dict(labels)["urgency"]] += value
    return {name: value for name, value in found.items() if value}


def test_blocks_are_of_the_class_of_the_session_that_used_them_last(start: Start) -> None:
    shown = start()
    use(shown, session_id="s")
    shown.until(lambda: bytes_by_class(shown).keys() == {"idle"})  # its client is gone
    with Client(shown.target) as client:
        client.get(client.register(IDENTITY), names("2"))
    shown.until(lambda: bytes_by_class(shown).keys() == {"idle", "none"})


def test_what_a_start_finds_belongs_to_no_session(start: Start) -> None:
    """Before any session says something: in the metric, on the page, in `kvtier top`."""
    use(start())
    shown = start(again=True)
    found = bytes_by_class(shown)
    assert found.keys() == {"none"}
    assert found["none"] == total(scrape(shown), "kvtier_tier_bytes", state="resident") > 0
    assert total(scrape(shown), "kvtier_sessions") == 0


def test_every_call_is_timed_on_both_transports(start: Start) -> None:
    shown = start()
    use(shown)
    with grpc.insecure_channel(shown.target) as channel:
        stub = AdminServiceStub(channel)
        stub.GetStatus(admin_pb2.GetStatusRequest())
        with pytest.raises(grpc.RpcError, match="there is no session nobody"):
            stub.Inspect(admin_pb2.InspectRequest(session_id="nobody"))
    samples = scrape_until(shown, 'code="NOT_FOUND"')
    for method, transport, code in (
        ("Attach", "local", "OK"),
        ("Commit", "local", "OK"),
        ("Acquire", "local", "OK"),
        ("GetStatus", "grpc", "OK"),
        ("Inspect", "grpc", "NOT_FOUND"),
    ):
        assert total(samples, "kvtier_rpc_seconds_count", method=method, transport=transport, code=code) >= 1
    buckets = total(samples, "kvtier_rpc_seconds_bucket", method="Commit", le="+Inf")
    assert buckets == total(samples, "kvtier_rpc_seconds_count", method="Commit")


def test_labels_come_from_closed_sets(start: Start) -> None:
    shown = start()
    use(shown)
    use(shown, session_id="another", chains=2)
    methods = {
        method.name
        for module in (kvcache_pb2, admin_pb2, events_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    } | {"Attach", "MapExtents"}
    closed = {
        "method": methods,
        "tier": TIERS,
        "source": {"staging", *TIERS},
        "target": TIERS,
        "urgency": URGENCIES,
        "transport": {"local", "grpc"},
        "state": {"resident", "reserved", "condemned"},
        "codec": set(BY_NAME),
        "form": {"raw", "stored"},
        "direction": {"encode", "decode"},
    }
    samples = scrape(shown)
    for name, series in samples.items():
        for labels in series:
            for label, value in labels:
                if label == "le":
                    continue
                assert label in LABELS, f"{name} has a label {label} that no page explains"
                assert value in closed.get(label, {value}), f"{name}: {label}={value}"
                if label == "reason":
                    assert value in REASONS or re.fullmatch(r"[a-z, _]+", value), value
    assert sum(map(len, samples.values())) < MAX_SERIES


def test_the_table_is_what_is_exported_and_keeps_the_conventions(start: Start) -> None:
    exported = {
        family.name: family for family in text_string_to_metric_families(start(nvme=False).get("/metrics"))
    }
    for metric in METRICS:
        family = exported.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.kind, metric.name
        assert family.documentation == metric.what
        assert (metric.kind == "counter") == metric.name.endswith("_total")
        assert re.fullmatch(r"kvtier_[a-z_]+", metric.name)
        assert metric.use.endswith((".", "it.")), metric.name
        assert set(metric.labels) <= set(LABELS)
    assert exported == {}


def test_a_histogram_counts_each_duration_once() -> None:
    histogram = Histogram()
    for seconds in (0.0, 1e-5, 1.1e-5, 0.3, 1e9):
        histogram.observe(seconds)
    assert histogram.num == 5
    pairs = dict(histogram.cumulative())
    assert (pairs["1e-05"], pairs["2.5e-05"], pairs["0.5"], pairs["30.0"], pairs["+Inf"]) == (2, 3, 4, 4, 5)
    assert histogram.quantile(0.5) == 2.5e-5
    assert histogram.quantile(1.0) == BOUNDS_S[-1]
    assert Histogram().quantile(0.5) is None
