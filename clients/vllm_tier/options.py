"""What the tier is told in its entry of `secondary_tiers`, checked before anything else happens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..connector.plugin_options import ChainOptions, check_choice, options_from


@dataclass(frozen=True, slots=True)
class TierOptions(ChainOptions):
    """Settings of one tier. Raises InvalidRequest (a ValueError) naming the setting and what it may be.
    Limits of numbers are `from_settings`'."""

    name: str = "vllm-tier"
    offload: str = "chunk"  # "request": offer also blocks that were hits, so that a lost tier fills again
    on_reset: str = "forget"  # after reset_cache (weights updated?) never use what was stored before
    wait_for_room_s: float = 5.0  # at most, by a request with chunks found and no room for them; 0: never
    max_waiting_fraction: float = 0.25  # of the primary pool's blocks, pinned by stores that wait

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "TierOptions":
        """Make options of the entry's keys (those of vLLM itself are taken out before)."""
        least, most = {"wait_for_room_s": 0}, {"max_waiting_fraction": 1}
        return options_from(cls, settings, "a KvtierTier", least, most)

    def __post_init__(self) -> None:
        ChainOptions.__post_init__(self)  # super() does not know a dataclass with slots
        check_choice("offload", self.offload, ("chunk", "request"))
        check_choice("on_reset", self.on_reset, ("forget", "keep"))
