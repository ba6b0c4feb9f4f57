"""Metric: one row of the table in metrics_table.py, and how it becomes a family of Prometheus's.

Read at scrape time from counters that are kept anyway, so that no request pays for a metric; durations are
the one exception (histogram.py). prometheus_client writes the format; its counters were rejected as a second
set of counters that could disagree with the first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ..histogram import Histogram
from .daemon_view import DaemonView

Value: TypeAlias = float | Histogram
Reading: TypeAlias = Iterable[tuple[tuple[str, ...], Value]]
Family: TypeAlias = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. `read` yields (label values, value)."""

    name: str
    kind: str  # gauge, counter, histogram
    labels: tuple[str, ...]
    what: str
    use: str
    read: Callable[[DaemonView], Reading]
    invariant: str = ""

    def family(self, view: DaemonView) -> Family:
        """Return what it is now."""
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, self.what, labels=self.labels)
            for labels, value in self.read(view):
                assert isinstance(value, Histogram)
                histogram.add_metric(labels, value.cumulative(), value.sum_s)
            return histogram
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.what, labels=self.labels)
        for labels, value in self.read(view):
            assert not isinstance(value, Histogram)
            family.add_metric(labels, value)
        return family
