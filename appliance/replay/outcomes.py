"""Outcomes: the numbers of one replay, and how they are added up.

A token counts as hit when its block is in the contiguous prefix that was there; the last block of a prompt
may be partial and counts with the tokens that it has. Ratios are over all requests of one pass, the first
ones included: a cold start is part of the truth.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...tiers.ladder import STANDARD, Ladder
from .traces import F64, I32, Trace

PERCENTILES = (50, 90, 95, 99)
DAY_S = 86_400.0


@dataclass(slots=True)
class Outcome:
    """What one setup did with one trace. Bytes are raw payload; seconds are virtual unless they say cpu."""

    label: str
    policy: str
    capacity: str  # as it was asked for
    capacity_bytes: dict[str, int]  # by tier
    num_requests: int
    num_blocks: int  # asked for
    num_tokens: int  # asked for
    block_hits: dict[str, int]  # by tier
    token_hits: dict[str, int]
    prefill_s: float  # of what was missing
    prefill_saved_s: float
    edge_bytes: dict[str, int]  # "source>target"
    duration_s: float
    #: Seconds from arrival to the first token, by percentile; empty when the replay was not timed.
    ttft_s: dict[str, float] = field(default_factory=dict)
    #: Seconds of prefill of what a request missed, by percentile: its first token if loads took no time.
    missing_prefill_s: dict[str, float] = field(default_factory=dict)
    #: What the planner counted, by name.
    counters: dict[str, int] = field(default_factory=dict)
    num_refused_blocks: int = 0  # of puts: no room, parent missing, not admitted
    #: What an object store was used for, by name; empty without one.
    store: dict[str, float] = field(default_factory=dict)
    cpu_s: float = 0.0
    #: What the audit after the run found; empty: nothing.
    problems: list[str] = field(default_factory=list)

    @property
    def block_hit_ratio(self) -> float:
        """Return the share of the blocks asked for that were found."""
        return sum(self.block_hits.values()) / self.num_blocks if self.num_blocks else 0.0

    @property
    def token_hit_ratio(self) -> float:
        """Return the share of the prompt tokens asked for that were found."""
        return sum(self.token_hits.values()) / self.num_tokens if self.num_tokens else 0.0

    @property
    def ideal_speed_up(self) -> float:
        """Return how many times as many prompt tokens a second prefill takes in, if loads take no time.

        1 / (1 - hit ratio); at least one token is computed."""
        return self.num_tokens / max(self.num_tokens - sum(self.token_hits.values()), 1) or 1.0

    @property
    def nvme_written_bytes_per_day(self) -> float:
        """Return bytes a day written into the cold store, records copied forward included."""
        written = sum(count for edge, count in self.edge_bytes.items() if edge.endswith(">nvme"))
        return written * DAY_S / self.duration_s if self.duration_s else 0.0

    @property
    def refusals(self) -> dict[str, int]:
        """Return the number of refused calls by reason: a client computes what they asked for."""
        return {
            name.removeprefix("refused_"): count
            for name, count in self.counters.items()
            if name.startswith("refused_")
        }

    @property
    def prefetch(self) -> dict[str, int]:
        """Return counts of prefetched blocks by outcome, from the planner's own counters."""
        return {name: count for name, count in self.counters.items() if "prefetch" in name}

    def plain(self) -> dict[str, Any]:
        """Return everything as plain values, ratios included."""
        return {
            **asdict(self),
            "block_hit_ratio": self.block_hit_ratio,
            "token_hit_ratio": self.token_hit_ratio,
            "ideal_speed_up": self.ideal_speed_up,
            "nvme_written_bytes_per_day": self.nvme_written_bytes_per_day,
            "prefetch": self.prefetch,
        }


def hits_by_tier(
    trace: Trace, num_hits: I32, tiers: Mapping[int, bytes], ladder: Ladder = STANDARD
) -> tuple[dict[str, int], dict[str, int]]:
    """Return (blocks, tokens) hit per tier.

    `num_hits` holds the blocks hit per request, `tiers` one Tier per hit block of a request; requests that
    are not in it hit in the put tier only.
    """
    tokens = trace.tokens_of(num_hits)
    put_tier = ladder.put_tier
    blocks_of, tokens_of = {put_tier: int(num_hits.sum())}, {put_tier: int(tokens.sum())}
    block_tokens = trace.block_tokens_of_requests()
    for request, places in tiers.items():
        size, total = int(block_tokens[request]), int(tokens[request])
        for position, tier in enumerate(places):
            if tier == put_tier:
                continue
            here = ladder.tiers[tier]
            num_tokens = min(size, total - position * size)
            blocks_of[here] = blocks_of.get(here, 0) + 1
            tokens_of[here] = tokens_of.get(here, 0) + num_tokens
            blocks_of[put_tier] -= 1
            tokens_of[put_tier] -= num_tokens
    return (
        {tier.label: blocks_of[tier] for tier in sorted(blocks_of)},
        {tier.label: tokens_of[tier] for tier in sorted(tokens_of)},
    )


def percentiles(samples: F64) -> dict[str, float]:
    """Return mean and PERCENTILES by name; empty for no samples."""
    if not len(samples):
        return {}
    named = {
        f"p{p}": float(value)
        for p, value in zip(PERCENTILES, np.percentile(samples, PERCENTILES), strict=True)
    }
    return {"mean": float(samples.mean()), **named}
