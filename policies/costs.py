"""What it takes to get blocks back: the one place that knows seconds of prefill and seconds of loading."""

from ..tiers.block import Geometry, Tier


class CostModel:
    """Implements base.Costs. First version: constant prefill speed, measured or default edges."""

    def __init__(self, default_bandwidth_bytes_per_s: float, default_latency_s: float) -> None:
        self._default = (default_bandwidth_bytes_per_s, default_latency_s)
        self._edges: dict[Tier, tuple[float, float]] = {}  # by source: bandwidth, latency
        self._geometries: dict[int, Geometry] = {}

    def add_namespace(self, namespace_id: int, geometry: Geometry) -> None:
        """Note the shape of a namespace's blocks."""
        self._geometries[namespace_id] = geometry

    def measured(self, source: Tier, bandwidth_bytes_per_s: float, latency_s: float) -> None:
        """Note the latest measurement of the edge from `source` to the tier above it."""
        self._edges[source] = (bandwidth_bytes_per_s, latency_s)

    def recompute_s(self, namespace_id: int, position: int, num_blocks: int = 1) -> float:
        """Return the seconds of prefill of blocks whose first stands at `position` in its chain."""
        return self._geometries[namespace_id].block_tokens * num_blocks / 10_000

    def load_s(self, namespace_id: int, num_blocks: int, tier: Tier) -> float:
        """Return the seconds until blocks that are in `tier` are readable from the fastest one."""
        if tier <= Tier.DRAM or not num_blocks:
            return 0.0
        bandwidth, latency_s = self._edges.get(tier, self._default)
        return latency_s + num_blocks * self._geometries[namespace_id].block_bytes / bandwidth
