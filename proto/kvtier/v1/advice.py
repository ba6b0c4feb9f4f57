"""Load or recompute: the arithmetic, for the daemon's cost model and for clients that look up by themselves.

The numbers come from the daemon (policies/costs.py says what they are and where it has them from); both sides
compute with them here, so that a lookup is the same answer whether it was asked for or read.
"""

from typing import NamedTuple

import numpy as np

from .types import Tier


class Speed(NamedTuple):
    """How fast an engine computes prompts of one namespace, and the size of its blocks."""

    block_tokens: int
    block_bytes: int
    tokens_per_s: float  # at the start of a context
    doubling_tokens: float  # context at which a token takes twice as long
    source: str  # of the speed: stated, measured or geometry

    def seconds(self, position: int, num_blocks: int) -> float:
        """Return the seconds of prefill of `num_blocks` blocks from `position` on."""
        start, count = position * self.block_tokens, num_blocks * self.block_tokens
        return count * (1.0 + (start + count / 2) / self.doubling_tokens) / self.tokens_per_s


class LoadSpeed(NamedTuple):
    """How fast blocks come up from the slowest tier."""

    tier: Tier
    bandwidth_bytes_per_s: float
    start_s: float  # until the first byte: latency, and what is queued before


class Prices(NamedTuple):
    """What either costs."""

    num_blocks: int  # worth loading, counted from the start of the chain
    load_s: float  # until the whole stored part is readable
    recompute_s: float  # prefill of the whole stored part (from the first block asked for)
    reason: str  # why not all of it is worth loading; empty when it is


def advise(speed: Speed, edge: LoadSpeed, is_slow: bytes, first_block: int = 0) -> Prices:
    """Return how much of the stored part of a chain is worth loading.

    `is_slow` holds a byte per stored block, 1 for those that come up by `edge`; blocks before `first_block`
    are with the caller already. Only a beginning can be used, so the answer is the length k that makes
    loading the first k blocks and computing the others quickest; among equals the longest.
    """
    num_asked = max(0, len(is_slow) - first_block)
    recompute_s = speed.seconds(first_block, num_asked) if num_asked else 0.0
    if is_slow.find(1, first_block) < 0:
        return Prices(len(is_slow), 0.0, recompute_s, "")
    per_block_s = speed.block_bytes / edge.bandwidth_bytes_per_s
    loads = np.cumsum(np.frombuffer(is_slow, np.uint8)[first_block:] == 1) * per_block_s
    loads[loads > 0] += edge.start_s
    middles = (np.arange(num_asked) + first_block + 0.5) * speed.block_tokens
    saved = np.cumsum(1.0 + middles / speed.doubling_tokens) * speed.block_tokens / speed.tokens_per_s
    gains = np.concatenate(([0.0], saved - loads))
    best = num_asked - int(np.argmax(gains[::-1]))
    load_s = float(loads[-1])
    reason = ""
    if best < num_asked:
        reason = (
            f"{edge.tier.label} is slower than prefill from block {first_block + best} on: "
            f"{load_s:.3g} s to load, {recompute_s:.3g} s to compute ({speed.source})"
        )
    return Prices(first_block + best, load_s, recompute_s, reason)
