"""Hazards against the same sums done one observation at a time, in plain Python, from the formulas."""

import math
from random import Random

import numpy as np
import pytest

from kvtier.policies import hazard
from kvtier.policies.ages import NUM_BINS
from kvtier.policies.hazard import Hazards, Observations

NUM_KINDS, NUM_VALUES, NUM_GAPS = 3, 12, 2


class Sums:
    """What hazard.py says it does, with dicts."""

    def __init__(self) -> None:
        self.used = [[0.0] * NUM_BINS for _ in range(NUM_KINDS)]
        self.at_risk = [[0.0] * NUM_BINS for _ in range(NUM_KINDS)]
        self.effects: dict[object, float] = {}
        self.precision: dict[object, float] = {}

    def names(self, features: tuple[int, ...], gap_bins: tuple[int, ...], number: int) -> list[object]:
        """Return the feature values of an age bin that have an effect."""
        near = [
            (which, max(1 - 32, min(31, number - gap)))  # 64 values, 32 for "as long as last time"
            for which, gap in enumerate(gap_bins)
            if gap
        ]
        return [*(value for value in features if value), *near]

    def factor(self, names: list[object]) -> float:
        total = sum(self.effects.get(name, 0.0) for name in names)
        return math.exp(max(-hazard.MAX_EFFECT, min(hazard.MAX_EFFECT, total)))

    def base(self, kind: int, number: int) -> float:
        root_used = sum(of_kind[number] for of_kind in self.used)
        root_risk = sum(of_kind[number] for of_kind in self.at_risk)
        weight = hazard.PRIOR_WEIGHT
        root = (weight * hazard.PRIOR_HAZARD + root_used) / (weight + root_risk)
        shares = {number: 1.0, number - 1: hazard.NEIGHBOUR, number + 1: hazard.NEIGHBOUR}
        used = sum(share * self.used[kind][n] for n, share in shares.items() if 0 <= n < NUM_BINS)
        risk = sum(share * self.at_risk[kind][n] for n, share in shares.items() if 0 <= n < NUM_BINS)
        return (weight * root + used) / (weight + risk)

    def hazard(self, kind: int, features: tuple[int, ...], gap_bins: tuple[int, ...], number: int) -> float:
        names = self.names(features, gap_bins, number)
        return min(hazard.MAX_HAZARD, self.base(kind, number) * self.factor(names))

    def learn(self, seen: Observations) -> None:
        surprise: dict[object, float] = {}
        evidence: dict[object, float] = {}
        counted = []
        for kind, features, gap_bins, number, use, weight in zip(
            seen.kinds, seen.features, seen.gap_bins, seen.bins, seen.uses, seen.weights, strict=True
        ):
            risk, happened = weight * (1 - use / 2), weight * use
            expected = risk * self.hazard(kind, tuple(features), tuple(gap_bins), number)
            names = self.names(tuple(features), tuple(gap_bins), number)
            counted.append((kind, number, happened, risk * self.factor(names)))
            for name in names:
                surprise[name] = surprise.get(name, 0.0) + happened - expected
                evidence[name] = evidence.get(name, 0.0) + (happened + expected) / 2
        for kind, number, happened, risk in counted:
            self.used[kind][number] += happened
            self.at_risk[kind][number] += risk
        for name, part in surprise.items():
            self.precision[name] = self.precision.get(name, 1.0) + evidence[name]
            step = hazard.STEP * part / (hazard.PRIOR_PRECISION + self.precision[name])
            self.effects[name] = self.effects.get(name, 0.0) + step


def test_it_learns_what_the_formulas_say() -> None:
    rng = Random(8)
    hazards, sums = Hazards(NUM_KINDS, NUM_VALUES, NUM_GAPS), Sums()
    for _ in range(4):
        seen = Observations()
        for _ in range(200):
            features = (rng.choice((0, 3, 4)), rng.choice((0, 7, 8, 9)))
            gap_bins = (rng.choice((0, 1, 12, NUM_BINS)), rng.choice((0, 5)))
            number = rng.choice((0, 1, 5, 6, 7, 20, NUM_BINS - 1))
            use, weight = float(rng.random() < 0.3), rng.uniform(0.3, 2.0)
            seen.add(rng.randrange(NUM_KINDS), features, gap_bins, number, use, weight)
        hazards.learn(seen)
        sums.learn(seen)
        for kind in range(NUM_KINDS):
            for features, gap_bins in (((0, 0), (0, 0)), ((3, 8), (12, 0)), ((4, 9), (NUM_BINS, 5))):
                got = hazards.hazards(np.array([kind]), np.array([features]), np.array([gap_bins]))[0]
                expected = [sums.hazard(kind, features, gap_bins, n) for n in range(NUM_BINS)]
                assert got == pytest.approx(expected, rel=1e-9)
