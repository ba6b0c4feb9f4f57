"""The Grafana dashboard that comes with kvtier, as a table of panels.

Grafana's own JSON spells out every default of every panel; so the panels are declared here, and the
JSON (helm/kvtier/files/dashboard.json) is generated (`make docs`). Every expression is parsed and checked
against the table of metrics by tests/appliance/observability/test_dashboard.py.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 24  # Grafana's grid
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ON_NODES = 'instance=~"$instance"'  # every selector carries it; `{}` below stands for its place


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture. `queries` are (legend, expression), `@` in them stands for the choice of nodes."""

    title: str
    what: str
    unit: str  # Grafana's name of it
    queries: Sequence[tuple[str, str]]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    maximum: float | None = None


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{{@}}[$__rate_interval]))"


def _quantile(metric: str, by: str, fraction: float = 0.99) -> str:
    return f"histogram_quantile({fraction}, sum by (le, {by}) (rate({metric}_bucket{{@}}[$__rate_interval])))"


FOUND = 'sum(rate(kvtier_lookup_blocks_total{@, outcome!~"missed|declined"}[$__rate_interval]))'
ASKED = "sum(rate(kvtier_asked_blocks_total{@}[$__rate_interval]))"
STORED = 'sum by (codec) (rate(kvtier_codec_bytes_total{@, form="stored"}[$__rate_interval]))'
RAW = 'sum by (codec) (rate(kvtier_codec_bytes_total{@, form="raw"}[$__rate_interval]))'
FAILED = 'rate(kvtier_copies_total{@, outcome="failed"}[$__rate_interval])'
TAKEN = "sum by (tier) (kvtier_tier_bytes{@})"
CAPACITY = "sum by (tier) (kvtier_tier_capacity_bytes{@})"

ROWS: tuple[tuple[str, Sequence[Panel]], ...] = (
    ("What it is worth", (
        Panel("Hit ratio", "Blocks found in any tier, of those asked.", "percentunit",
              [("hit ratio", f"{FOUND} / {ASKED}")], "stat", 4, maximum=1),
        Panel("Prefill saved", "Seconds of prefill saved per second, as the cost model has it.", "s",
              [("per second", "sum(rate(kvtier_saved_seconds_total{@}[$__rate_interval]))")], "stat", 4),
        Panel("Ready", "Nodes that serve calls.", "short",
              [("ready", "sum(kvtier_ready{@})"), ("of", "count(kvtier_ready{@})")], "stat", 4),
        Panel("Asked blocks by where they were", "Which tier earns the hits.", "short",
              [("{{outcome}}", _rate("kvtier_lookup_blocks_total", "outcome"))], width=12, stacked=True),
    )),
    ("Tiers", (
        Panel("Fill", "Bytes taken, of capacity.", "percentunit",
              [("{{tier}}", f"{TAKEN} / {CAPACITY}")],
              maximum=1),
        Panel("Bytes by urgency", "Whether the fast tiers hold what is needed soon.", "bytes",
              [("{{tier}} {{urgency}}", "sum by (tier, urgency) (kvtier_tier_urgency_bytes{@})")],
              stacked=True),
        Panel("Blocks that leave", "By reason.", "short",
              [("{{tier}}: {{reason}}", _rate("kvtier_evicted_blocks_total", "tier, reason"))]),
    )),
    ("Traffic", (
        Panel("Between tiers", "Bytes copied along each edge.", "Bps",
              [("{{source}} → {{target}}", _rate("kvtier_copy_bytes_total", "source, target"))]),
        Panel("Copies, 99th percentile", "From being handed to the device.", "s",
              [("{{source}} → {{target}}", _quantile("kvtier_copy_seconds", "source, target"))]),
        Panel("Queued and in flight", "Batches.", "short",
              [("{{source}} → {{target}} queued", "sum by (source, target) (kvtier_copies_queued{@})"),
               ("{{source}} → {{target}} in flight",
                "sum by (source, target) (kvtier_copies_in_flight{@})")]),
        Panel("Prefetched blocks", "What became of them.", "short",
              [("{{outcome}}", _rate("kvtier_prefetch_blocks_total", "outcome"))], stacked=True),
        Panel("Failed copies", "Each is a miss, never a wrong byte.", "short",
              [("{{source}} → {{target}}", f"sum by (source, target) ({FAILED})")]),
        Panel("Corrupt fragments", "Dropped when they failed verification.", "short",
              [("{{tier}}", _rate("kvtier_corrupt_fragments_total", "tier"))]),
    )),
    ("Compression", (
        Panel("Stored of raw", "What the device holds per byte that was put.", "percentunit",
              [("{{codec}}", f"{STORED} / {RAW}")], maximum=1),
        Panel("Encoding and decoding", "Threads busy with it.", "short",
              [("{{codec}} {{direction}}", _rate("kvtier_codec_seconds_total", "codec, direction"))]),
        Panel("Fragments", "By codec and outcome.", "short",
              [("{{codec}} {{outcome}}", _rate("kvtier_codec_fragments_total", "codec, outcome"))]),
    )),
    ("Object store", (
        Panel("Requests", "By outcome; retries inside the client are not counted.", "reqps",
              [("{{operation}} {{outcome}}", _rate("kvtier_source_requests_total", "operation, outcome"))]),
        Panel("With the store", "Bytes of objects.", "Bps",
              [("{{direction}}", _rate("kvtier_source_bytes_total", "direction"))]),
        Panel("Searches, fetches and exports, 99th percentile", "Several requests each.", "s",
              [("{{work}}", _quantile("kvtier_source_seconds", "work"))]),
        Panel("Fetched bundles", "What other hosts have computed, and what did not arrive.", "short",
              [("{{outcome}}", _rate("kvtier_source_fetches_total", "outcome"))], stacked=True),
        Panel("Bundles to store", "Stored for others, and why not.", "short",
              [("{{outcome}}", _rate("kvtier_source_exports_total", "outcome"))], stacked=True),
        Panel("Bill of 24 hours", "By the prices of the settings.", "currencyUSD",
              [("{{reason}}", "sum by (reason) (kvtier_source_day_dollars{@})")], stacked=True),
    )),
    ("Calls", (
        Panel("Calls, 99th percentile", "Inside the daemon.", "s",
              [("{{method}} ({{transport}})", _quantile("kvtier_rpc_seconds", "method, transport"))]),
        Panel("Calls", "Per second, by code.", "reqps",
              [("{{method}} {{code}}", _rate("kvtier_rpc_seconds_count", "method, code"))]),
        Panel("Refusals", "By reason; docs/api.md says what to do.", "short",
              [("{{reason}}", _rate("kvtier_refusals_total", "reason"))]),
        Panel("Event loop late", "99th percentile; every call waits that long.", "s",
              [("{{instance}}", _quantile("kvtier_loop_late_seconds", "instance"))]),
        Panel("Sessions", "By urgency.", "short",
              [("{{urgency}}", "sum by (urgency) (kvtier_sessions{@})")], stacked=True),
        Panel("Leases, pins, waiting", "What is held, and requests that wait for room.", "short",
              [("leases", "sum(kvtier_leases{@})"), ("pins", "sum(kvtier_pins{@})"),
               ("waiting", "sum(kvtier_waiting_requests{@})")]),
    )),
)  # fmt: skip


def expression(query: str) -> str:
    """Return a query with the choice of nodes in it."""
    return query.replace("@", ON_NODES)


def dashboard_json() -> str:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y, x = y + 1, 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y = 0, y + HEIGHT
            panels.append(_panel(panel, x, y))
            x += panel.width
        y += HEIGHT
    for number, entry in enumerate(panels, 1):
        entry["id"] = number
    dashboard = {
        "title": "kvtier",
        "uid": "kvtier",
        "tags": ["kvtier"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1, ensure_ascii=False) + "\n"


def _variables() -> list[dict[str, Any]]:
    nodes = {
        "name": "instance",
        "label": "node",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(kvtier_ready, instance)", "refId": "instances"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
    return [
        {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"},
        nodes,
    ]


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {}}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 8,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.what,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "legendFormat": legend,
                "expr": expression(query),
            }
            for i, (legend, query) in enumerate(panel.queries)
        ],
    }
