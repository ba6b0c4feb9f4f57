"""What the tier is told in its entry of `secondary_tiers`, checked before anything else happens."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

_CHOICES = {"offload": ("chunk", "request"), "on_reset": ("forget", "keep")}


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Settings of one tier. Raises ValueError naming the setting and what it may be."""

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
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(settings) - set(known)):
            raise ValueError(f"unknown setting {unknown[0]!r} of a KvtierTier; it knows {', '.join(known)}")
        return cls(**settings)

    def __post_init__(self) -> None:
        for name, wanted in get_type_hints(type(self)).items():
            given: Any = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, (int, float) if wanted is float else wanted):
                raise ValueError(f"{name} of a KvtierTier must be {wanted.__name__}, is {given!r}")
            if wanted is not str and given <= 0:
                raise ValueError(f"{name} of a KvtierTier must be above 0, is {given!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{name} of a KvtierTier must be one of {', '.join(choices)}, is {getattr(self, name)!r}"
                )
        if self.max_waiting_fraction > 1:
            raise ValueError(f"max_waiting_fraction must be at most 1, is {self.max_waiting_fraction}")
        try:
            digest = bytes.fromhex(self.weights_digest)
        except ValueError:
            raise ValueError(f"weights_digest must be hexadecimal, is {self.weights_digest!r}") from None
        if digest and not 16 <= len(digest) <= 64:
            raise ValueError(f"weights_digest must be 16 to 64 bytes, is {len(digest)}")
