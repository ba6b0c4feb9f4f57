"""Counters as the engine wants them: one stats object per step, and Prometheus counters in its front end."""

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from .counters import NAMES

PREFIX = "vllm:kvtier_"


class KvtierStats(KVConnectorStats):
    """Counted since the last step, by name."""

    data: dict[str, float]

    def __getitem__(self, name: str) -> Any:
        """As other processes get it; vLLM 0.28 takes it so under MultiConnector in one process, too."""
        return getattr(self, name)

    def reset(self) -> None:
        """Forget what was counted."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvtierStats":
        """Add what another rank or step has counted; return self."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for the engine's log."""
        return {name: round(amount, 3) for name, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class KvtierPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters `vllm:kvtier_<name>`, one per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for name, meaning in NAMES.items():
            counter = metric_types[Counter](
                name=PREFIX + name, documentation=f"kvtier: {meaning}", labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one step's counts to the engine's counters."""
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount > 0:
                self._counters[name][engine_idx].inc(amount)
