"""What the tier is told in its entry of `secondary_tiers`, checked before anything else happens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..connector.plugin_options import bad_option, check_choice, digest_from, options_from


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Settings of one tier. Raises InvalidRequest (a ValueError) naming the setting and what it may be."""

    target: str = ""  # of the daemon; empty: KVTIER_TARGET, or the usual socket
    name: str = "vllm-tier"
    domain: str = ""  # isolation domain
    weights: str = ""  # folder of the weights when `model` is neither a folder nor in the hub's cache
    weights_digest: str = ""  # hexadecimal; instead of reading the weights
    revision: str = ""  # of a model of the hub
    variant: str = ""  # whatever else changes the KV: hf_overrides, quantization at load time, ...
    offload: str = "chunk"  # "request": offer also blocks that were hits, so that a lost tier fills again
    on_reset: str = "forget"  # after reset_cache (weights updated?) never use what was stored before
    lookup_timeout_s: float = 0.5
    load_timeout_s: float = 5.0
    store_timeout_s: float = 5.0
    max_waiting_fraction: float = 0.25  # of the primary pool's blocks, pinned by stores that wait
    staging_bytes: int = 64 << 20

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "TierOptions":
        """Make options of the entry's keys (those of vLLM itself are taken out before)."""
        return options_from(cls, settings, "a KvtierTier")

    def __post_init__(self) -> None:
        check_choice("offload", self.offload, ("chunk", "request"))
        check_choice("on_reset", self.on_reset, ("forget", "keep"))
        if self.max_waiting_fraction > 1:
            raise bad_option(f"max_waiting_fraction must be at most 1, is {self.max_waiting_fraction}")
        if self.weights_digest:
            digest_from(self.weights_digest)
