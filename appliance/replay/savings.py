"""Savings: how much smaller a cache of another policy gives the hits of lru.

Between two sizes of a sweep the hit ratio is taken to grow with the logarithm of the size. Nothing is
extrapolated: where the smallest size of a sweep already has the hits, it is a bound.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .outcomes import Outcome

BASELINE = "lru"


class CacheSaving(NamedTuple):
    """What a policy needs for the token hits of the baseline at one size."""

    policy: str
    capacity: str  # of the baseline, as it was asked for
    baseline_bytes: int
    token_hit_ratio: float  # of the baseline
    needed_bytes: int
    is_bound: bool  # needed_bytes or less

    @property
    def saved_share(self) -> float:
        """Return the share of the baseline's bytes that is not needed; negative: more is needed."""
        return 1 - self.needed_bytes / self.baseline_bytes


def savings(outcomes: Sequence[Outcome]) -> list[CacheSaving]:
    """Return what each policy saves at each size of the baseline.

    Empty without a baseline, or with several tiers. A policy that reaches the baseline's hits at no size of
    the sweep has no entry."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for outcome in outcomes:
        if len(outcome.capacity_bytes) != 1:
            return []
        (size_bytes,) = outcome.capacity_bytes.values()
        curves.setdefault(outcome.policy, []).append((size_bytes, outcome.token_hit_ratio))
    found = []
    for policy, points in curves.items():
        if policy == BASELINE or len(points) < 2:
            continue
        for outcome in outcomes:
            if outcome.policy == BASELINE and outcome.token_hit_ratio > 0:
                saving = _saving(policy, sorted(points), outcome)
                if saving is not None:
                    found.append(saving)
    return found


def _saving(policy: str, points: Sequence[tuple[int, float]], baseline: Outcome) -> CacheSaving | None:
    wanted = baseline.token_hit_ratio
    (size_bytes,) = baseline.capacity_bytes.values()
    if points[0][1] >= wanted:
        if points[0][0] >= size_bytes:  # nothing smaller was tried
            return None
        return CacheSaving(policy, baseline.capacity, size_bytes, wanted, points[0][0], is_bound=True)
    for (small, less), (large, more) in pairwise(points):
        if less < wanted <= more:
            logarithm = np.interp(wanted, (less, more), np.log((small, large)))
            return CacheSaving(
                policy, baseline.capacity, size_bytes, wanted, round(float(np.exp(logarithm))), is_bound=False
            )
    return None
