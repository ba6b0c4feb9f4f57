"""Exposition: the table of metrics as Prometheus reads it."""

from collections.abc import Iterator

from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from .daemon_view import DaemonView
from .metrics import Family
from .metrics_table import METRICS

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
