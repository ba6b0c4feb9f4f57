"""What it takes to get blocks back: the one place that knows seconds of prefill and seconds of loading.

Prefill of `count` tokens behind `start` tokens costs a linear part (every weight once per token) and a
quadratic one (every token looks at all before it):

    seconds = count * (1 + (start + count / 2) / doubling_tokens) / tokens_per_s

`tokens_per_s` is the speed at the start of a context, `doubling_tokens` the context at which a token takes
twice as long. Both follow from the FLOPs of a transformer's forward pass, 2 per parameter and 4 * layers *
width * context for attention (Kaplan et al. 2020, table 1, before causal halving; the same count as Marconi,
MLSys 2025): with 12 * layers * width**2 parameters the ratio of the two is 6 * width.

A client that knows its speed says so when it registers; a put may say how long the prefill of its blocks
took, and the speed follows that. Until then it is guessed from the geometry: width = 128 * layers, as in most
published models (Llama, Mistral, Qwen, GPT-3 and DeepSeek-V3 lie within a factor of 1.5; models below a
billion parameters are up to seven times cheaper than that), on an accelerator that sustains
DEFAULT_FLOP_PER_S. Guessing the width from the KV heads was rejected: grouped queries and tensor parallel
shards put it off by a factor of four to sixteen. A guess is good enough to rank blocks by, and never
withholds anything (`Advice.is_certain`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..tiers.block import Geometry, Tier
from ..tiers.ladder import STANDARD, Ladder
from ..v1.advice import LoadSpeed, Speed, advise

#: What one accelerator sustains in prefill: half of an A100's dense bf16 peak of 312 TFLOP/s.
DEFAULT_FLOP_PER_S = 150e12
#: Model width over number of layers, where no client states a speed.
WIDTH_PER_LAYER = 128
#: Measurements after which a speed counts as known: the first ones are of engines that still warm up.
MIN_MEASUREMENTS = 3
#: Weight of the newest measurement, once there are 1 / WEIGHT of them.
WEIGHT = 0.2
#: One measurement is believed up to this factor: a stalled or a partly cached prefill is no speed.
MAX_SURPRISE = 8.0
#: Bounds of measured and stated speeds, so that prices stay finite numbers.
LEAST_TOKENS_PER_S = 1e-3
MOST_TOKENS_PER_S = 1e12
#: Bound of the context at which a token takes twice as long.
MOST_DOUBLING_TOKENS = 1e12
#: An older measurement of an edge does not count as certain: an edge is not measured while loads on it are
#: withheld, and a device that was slow once would be avoided for ever.
EDGE_TRUST_S = 30.0


class PrefillModel(NamedTuple):
    """Parameters of the cost of an engine's prefill."""

    tokens_per_s: float  # at the start of a context
    doubling_tokens: float = 0.0  # context at which a token takes twice as long; 0: from the geometry


class Advice(NamedTuple):
    """Load or recompute: the cost of either for the stored part of a chain."""

    num_blocks: int  # worth loading, counted from the start of the chain
    load_s: float  # until the whole stored part is readable
    recompute_s: float  # prefill of the whole stored part (from the first block asked for)
    is_certain: bool  # both prices were measured or stated, none is a guess
    reason: str  # why not all of it is worth loading; empty when it is


@dataclass(slots=True)
class _Prefill:
    """Coefficients of one namespace."""

    block_tokens: int
    block_bytes: int
    tokens_per_s: float
    doubling_tokens: float
    is_stated: bool = False
    num_measured: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the speed was stated or measured often enough."""
        return self.is_stated or self.num_measured >= MIN_MEASUREMENTS

    def seconds(self, position: int, num_blocks: int) -> float:
        """Return the seconds of prefill of `num_blocks` blocks from `position` on."""
        start, count = position * self.block_tokens, num_blocks * self.block_tokens
        return count * (1.0 + (start + count / 2) / self.doubling_tokens) / self.tokens_per_s


class CostModel:
    """Estimates seconds of prefill and of loading. Implements base.Costs; namespaces are known by number."""

    def __init__(
        self,
        default_bandwidth_bytes_per_s: float,
        default_latency_s: float,
        queued_bytes: Callable[[Tier], int] = lambda tier: 0,
        ladder: Ladder = STANDARD,
    ) -> None:
        """`queued_bytes`: bytes queued on the edge from a tier upwards that go before a new load. Loads
        are from the log of `ladder`: what is in memory is read there."""
        self._log_tier = ladder.log_tier
        self._default_edge = (default_bandwidth_bytes_per_s, default_latency_s)
        self._edges: dict[Tier, tuple[float, float]] = {}  # by source: bandwidth, latency
        self._measured_at: dict[Tier, float] = {}
        self._prefills: dict[int, _Prefill] = {}
        self._queued_bytes = queued_bytes
        self._is_slow = bytes(tier == ladder.log_tier for tier in range(256))  # by tier
        self.num_changes = 0  # of namespaces and their speeds, ever

    # ------------------------------------------------------------------------------- what is known

    def add_namespace(self, namespace_id: int, geometry: Geometry) -> None:
        """Store the shape of a namespace's blocks; its prefill speed is guessed from that for now."""
        width = WIDTH_PER_LAYER * geometry.num_layers
        flop_per_token = 24.0 * geometry.num_layers * width**2
        self._prefills[namespace_id] = _Prefill(
            geometry.block_tokens,
            geometry.block_bytes,
            DEFAULT_FLOP_PER_S / flop_per_token,
            6.0 * width,
        )
        self.num_changes += 1

    def forget_namespace(self, namespace_id: int) -> None:
        """Forget a namespace that is no more."""
        del self._prefills[namespace_id]
        self.num_changes += 1

    def state_speed(self, namespace_id: int, speed: PrefillModel) -> None:
        """Set the prefill speed of a namespace to what a client states; the last statement counts."""
        prefill = self._prefills[namespace_id]
        prefill.tokens_per_s = speed.tokens_per_s
        if speed.doubling_tokens > 0:
            prefill.doubling_tokens = speed.doubling_tokens
        prefill.is_stated = True
        prefill.num_measured = 0
        self.num_changes += 1

    def prefilled(self, namespace_id: int, position: int, num_blocks: int, seconds: float) -> None:
        """Update the speed of a namespace from a prefill of `seconds`; ignore impossible values."""
        prefill = self._prefills[namespace_id]
        if num_blocks <= 0 or not 0.0 < seconds < math.inf:
            return
        surprise = prefill.seconds(position, num_blocks) / seconds
        if prefill.is_known:
            surprise = min(max(surprise, 1 / MAX_SURPRISE), MAX_SURPRISE)
        prefill.num_measured += 1
        self.num_changes += 1
        # The mean of logarithms: a speed twice too high weighs as much as one twice too low.
        share = WEIGHT if prefill.is_stated else max(WEIGHT, 1 / prefill.num_measured)
        tokens_per_s = prefill.tokens_per_s * surprise**share
        prefill.tokens_per_s = min(max(tokens_per_s, LEAST_TOKENS_PER_S), MOST_TOKENS_PER_S)

    def measured(
        self, source: Tier, bandwidth_bytes_per_s: float, latency_s: float, now: float = 0.0
    ) -> None:
        """Store the latest measurement of the edge from `source` to the tier above it."""
        if bandwidth_bytes_per_s > 0:
            self._edges[source] = (bandwidth_bytes_per_s, latency_s)
            self._measured_at[source] = now

    def bandwidth_of(self, source: Tier) -> float:
        """Return the bytes per second that come up from `source`."""
        return self._edges.get(source, self._default_edge)[0]

    def prefill_speed(self, namespace_id: int) -> tuple[PrefillModel, str]:
        """Return a namespace's prefill speed, and its source: stated, measured or geometry."""
        prefill = self._prefills[namespace_id]
        source = "stated" if prefill.is_stated else "measured" if prefill.num_measured else "geometry"
        return PrefillModel(prefill.tokens_per_s, prefill.doubling_tokens), source

    def speed(self, namespace_id: int) -> Speed:
        """Return what a namespace's prefill is priced with."""
        prefill = self._prefills[namespace_id]
        model, source = self.prefill_speed(namespace_id)
        return Speed(prefill.block_tokens, prefill.block_bytes, *model, source)

    def edge(self) -> LoadSpeed:
        """Return what loading from the log is priced with, now."""
        tier = self._log_tier
        bandwidth, latency_s = self._edges.get(tier, self._default_edge)
        return LoadSpeed(tier, bandwidth, latency_s + self._queued_bytes(tier) / bandwidth)

    # -------------------------------------------------------------------------------------- prices

    def recompute_s(self, namespace_id: int, position: int, num_blocks: int = 1) -> float:
        """Return the seconds of prefill of `num_blocks` blocks, the first at `position` in its chain."""
        return self._prefills[namespace_id].seconds(position, num_blocks)

    def load_s(self, namespace_id: int, num_blocks: int, tier: Tier) -> float:
        """Return the seconds until blocks in `tier` are readable from the fastest one, on an idle edge."""
        if tier < self._log_tier or not num_blocks:
            return 0.0
        bandwidth, latency_s = self._edges.get(tier, self._default_edge)
        return latency_s + num_blocks * self._prefills[namespace_id].block_bytes / bandwidth

    def wait_s(self, tier: Tier) -> float:
        """Return the seconds that a load from `tier` waits for those queued before it."""
        return self._queued_bytes(tier) / self.bandwidth_of(tier)

    def advise(
        self, namespace_id: int, tiers: bytes | bytearray, first_block: int = 0, now: float = 0.0
    ) -> Advice:
        """Return how much of the stored part of a chain is worth loading.

        `tiers` holds one Tier per stored block; blocks before `first_block` are with the caller already
        (v1/advice.py has the arithmetic).
        """
        if self._log_tier not in tiers:  # most often; replay asks this for every request
            num_asked = max(0, len(tiers) - first_block)
            recompute_s = self.recompute_s(namespace_id, first_block, num_asked) if num_asked else 0.0
            return Advice(len(tiers), 0.0, recompute_s, True, "")
        is_slow = bytes(tiers).translate(self._is_slow)
        prices = advise(self.speed(namespace_id), self.edge(), is_slow, first_block)
        num_blocks, load_s, recompute_s, reason = prices
        if not load_s:
            return Advice(num_blocks, 0.0, recompute_s, True, "")
        is_fresh = now - self._measured_at.get(self._log_tier, -math.inf) <= EDGE_TRUST_S
        is_certain = self._prefills[namespace_id].is_known and is_fresh
        return Advice(num_blocks, load_s, recompute_s, is_certain, reason)
