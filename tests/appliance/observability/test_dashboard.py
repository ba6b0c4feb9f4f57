"""Dashboard and alert rules: every expression parses, and asks for nothing that is not exported."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from helm.dashboard import ROWS, expression
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.errors import REASONS
from kvtier.appliance.observability.metrics import Metric
from kvtier.appliance.observability.metrics_table import METRICS

from ...generated import ROOT
from .conftest import Start, use

FILES = ROOT / "helm" / "kvtier" / "files"
ALERTS = [
    rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
OF_TARGET = {"instance", "job"}  # labels that Prometheus adds
BY_NAME = {metric.name: metric for metric in METRICS}
PARTS = {"_bucket": {"le"}, "_count": set[str](), "_sum": set[str]()}
CUMULATIVE = {"rate", "increase", "irate"}


def concrete(query: str) -> str:
    """Return a query of Grafana's with its variables filled in."""
    return query.replace("$__rate_interval", "5m").replace("$instance", "node-1:9464")


def expressions() -> list[str]:
    """Return every expression that is shipped, from the shipped files."""
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    return [*found, *(rule["expr"] for rule in ALERTS)]


def series(expr: object) -> list[tuple[str, promql.VectorSelector]]:
    """Return the series an expression asks for, by name."""
    found = [node for node in nodes(expr) if isinstance(node, promql.VectorSelector)]
    assert all(selector.name for selector in found), "a selector names its metric"
    return [(selector.name or "", selector) for selector in found]


def nodes(expr: object) -> Iterator[object]:
    """Yield an expression and everything in it."""
    yield expr
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (inner := getattr(expr, name, None)) is not None and not isinstance(inner, str):
            yield from nodes(inner)
    for argument in getattr(expr, "args", None) or ():
        yield from nodes(argument)


def metric_of(name: str) -> tuple[Metric, set[str]]:
    """Return the metric behind a series, and the labels it has."""
    if name == "up":  # Prometheus's own
        return BY_NAME["kvtier_ready"], OF_TARGET
    if name in BY_NAME and BY_NAME[name].kind != "histogram":
        return BY_NAME[name], {*BY_NAME[name].labels, *OF_TARGET}
    for suffix, more in PARTS.items():
        metric = BY_NAME.get(name.removesuffix(suffix))
        if name.endswith(suffix) and metric is not None and metric.kind == "histogram":
            return metric, {*metric.labels, *OF_TARGET, *more}
    raise AssertionError(f"{name} is not exported")


def check(query: str) -> int:
    """Check one expression; return how many series it asks for."""
    tree = promql.parse(concrete(query))
    for name, selector in series(tree):
        for matcher in selector.matchers.matchers:
            assert matcher.name in metric_of(name)[1], f"{name} has no label {matcher.name}"
    for node in nodes(tree):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            inside = [metric_of(name)[1] for name, _ in series(node.expr)]
            for label in node.modifier.labels:
                assert all(label in labels for labels in inside), f"by {label} in {query}"
        if isinstance(node, promql.Call):
            for name, _ in series(node):
                metric, _ = metric_of(name)
                if node.func.name in CUMULATIVE:
                    assert metric.kind != "gauge", f"{node.func.name} of a gauge, {metric.name}"
    for name, _ in series(tree):
        metric, _ = metric_of(name)
        assert metric.kind == "gauge" or re.search(rf"(rate|increase)\({name}\b", query), query
    return len(series(tree))


@pytest.mark.parametrize("query", expressions())
def test_an_expression_asks_for_what_is_exported(query: str) -> None:
    assert check(query) >= 1


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("sum(kvtier_nothing)", "not exported"),
        ("rate(kvtier_ready[5m])", "of a gauge"),
        ('kvtier_ready{tier="dram"}', "no label tier"),
        ("sum by (tier) (rate(kvtier_asked_blocks_total[5m]))", "by tier"),
        ("sum(kvtier_asked_blocks_total)", "kvtier_asked_blocks_total"),
        ("rate(kvtier_rpc_seconds[5m])", "not exported"),
    ],
)
def test_the_check_finds_what_it_is_for(query: str, what: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(what)):
        check(query)
    with pytest.raises(ValueError, match="unclosed"):
        promql.parse("sum by (")


def test_values_that_are_asked_for_exist(start: Start, tmp_path: Path) -> None:
    more = {"listen": ["127.0.0.1:0"], "access": {"insecure": True}, "peers": {"hosts": ["127.0.0.1:9"]}}
    shown = start(objects={"url": f"file://{tmp_path}"}, more=more)
    use(shown)
    exported: dict[tuple[str, str], set[str]] = {("kvtier_refusals_total", "reason"): set(REASONS)}
    for family in text_string_to_metric_families(shown.get("/metrics")):
        for sample in family.samples:
            for label, value in sample.labels.items():
                exported.setdefault((sample.name, label), set()).add(value)
    for query in expressions():
        for name, selector in series(promql.parse(concrete(query))):
            for matcher in selector.matchers.matchers:
                if matcher.name in OF_TARGET:
                    continue
                for value in matcher.value.split("|"):
                    known = exported[name, matcher.name]
                    assert value in known, f"{name}: {matcher.name} is never {value}"


def test_every_panel_is_shipped() -> None:
    wanted = [expression(query) for _, row in ROWS for panel in row for _, query in panel.queries]
    assert expressions()[: len(wanted)] == wanted
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in dashboard["panels"]]
    assert len(set(places)) == len(places)


def test_every_alert_says_what_to_do() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+[mh]", alert["for"])
        assert alert["annotations"]["summary"].endswith(".")
        assert len(alert["annotations"]["description"]) > 20


def test_a_tier_that_stands_at_its_high_watermark_wakes_nobody() -> None:
    (alert,) = [alert for alert in ALERTS if alert["alert"] == "KvtierAboveWatermark"]
    (share,) = re.findall(r"capacity_bytes\) > ([0-9.]+)", alert["expr"])
    assert PlannerOptions().high_watermark < float(share) < 1.0
    assert 'kvtier_tier_bytes{tier!="nvme"}' in alert["expr"], "nvme has no watermark: it is full in the end"


def test_a_rollout_that_takes_its_time_wakes_nobody() -> None:
    """Until its turn comes, a pod refuses a file that needs a restart."""
    (alert,) = [alert for alert in ALERTS if alert["alert"] == "KvtierPolicyRefused"]
    assert alert["for"] == "30m"
