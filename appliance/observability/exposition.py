"""Exposition: the table of metrics as Prometheus reads it, and as people do."""

from collections.abc import Iterator

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from .daemon_view import DaemonView
from .metrics import Family
from .metrics_table import GROUPS, LABELS, METRICS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collector(Collector):
    def __init__(self, view: DaemonView) -> None:
        self._view = view

    def collect(self) -> Iterator[Family]:
        """Yield every metric as it is now."""
        for metric in METRICS:
            yield metric.family(self._view)


def exposition(view: DaemonView) -> bytes:
    """Return all metrics in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(view))
    return bytes(generate_latest(registry))


def reference_markdown() -> str:
    """Return the table for docs/metrics.md."""
    parts = []
    for title, metrics in GROUPS.items():
        parts.append(
            f"\n## {title}\n\n| metric | kind | labels | what it is | what it is for |\n"
            "|---|---|---|---|---|\n"
        )
        for metric in metrics:
            what = metric.what + (f" Always: {metric.invariant}." if metric.invariant else "")
            labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
            parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {what} | {metric.use} |\n")
    labels = "".join(f"| `{label}` | {values} |\n" for label, values in sorted(LABELS.items()))
    parts.append(f"\n## Labels\n\nAll from closed sets.\n\n| label | values |\n|---|---|\n{labels}")
    return "".join(parts)
