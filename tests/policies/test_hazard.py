"""Hazards against the same sums done one observation at a time, in plain Python, from the formulas."""

import math
from array import array
from random import Random

import numpy as np
import pytest

from kvtier.policies.urgency import hazard
from kvtier.policies.urgency.ages import NUM_BINS
from kvtier.policies.urgency.hazard import Hazards, Observations

NUM_KINDS, SIZES, NUM_GAPS = 3, (6, 6), 2
LINES = {1: (0.0, 0.0, 1.0, 2.0, 4.0, 8.0)}  # values 6 to 11


class Sums:
    """What hazard.py says it does, with dicts."""

    def __init__(self) -> None:
        self.used = [[0.0] * NUM_BINS for _ in range(NUM_KINDS)]
        self.at_risk = [[0.0] * NUM_BINS for _ in range(NUM_KINDS)]
        self.effects: dict[object, float] = {}
        self.precision: dict[object, float] = {}
        self.trust = dict.fromkeys(range(4), 1.0)
        self.trust_precision = dict.fromkeys(range(4), 0.0)
        self.slope = dict.fromkeys(range(4), 0.0)
        self.slope_precision = dict.fromkeys(range(4), 0.0)

    def feature(self, name: object) -> int:
        if isinstance(name, tuple):
            return 2 + int(name[0])
        assert isinstance(name, int)
        return name // 6

    def place(self, name: object) -> float:
        """Return where a value lies on its line."""
        if isinstance(name, tuple):
            return max(-4.0, min(4.0, name[1] / 2)) if name[0] == 0 else 0.0
        assert isinstance(name, int)
        return LINES[1][name - 6] if name >= 6 else 0.0

    def told(self, name: object) -> float:
        feature = self.feature(name)
        return self.trust[feature] * self.effects.get(name, 0.0) + self.slope[feature] * self.place(name)

    def names(self, features: tuple[int, ...], gap_bins: tuple[int, ...], number: int) -> list[object]:
        """Return the feature values of an age bin that have an effect."""
        near = [
            (which, max(1 - 32, min(31, number - gap)))  # 64 values, 32 for "as long as last time"
            for which, gap in enumerate(gap_bins)
            if gap
        ]
        return [*(value for value in features if value), *near]

    def factor(self, names: list[object]) -> float:
        total = sum(self.told(name) for name in names)
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
        width = len(seen.descriptions) // len(seen)
        for first, number, use, weight in zip(
            range(0, len(seen.descriptions), width), seen.bins, seen.uses, seen.weights, strict=True
        ):
            kind, *values = seen.descriptions[first : first + width]
            features, gap_bins = values[: len(SIZES)], values[len(SIZES) :]
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
        self.judge(surprise, evidence)
        for name, part in surprise.items():
            self.precision[name] = self.precision.get(name, 1.0) + evidence[name]
            step = hazard.STEP * part / (hazard.PRIOR_PRECISION + self.precision[name])
            self.effects[name] = self.effects.get(name, 0.0) + step

    def judge(self, surprise: dict[object, float], evidence: dict[object, float]) -> None:
        for feature in range(4):
            mine = [name for name in surprise if self.feature(name) == feature]
            effects = {name: self.effects.get(name, 0.0) for name in mine}
            self.trust_precision[feature] += sum(evidence[name] * effects[name] ** 2 for name in mine)
            foretold = sum(surprise[name] * effects[name] for name in mine)
            step = foretold / (hazard.TRUST_PRECISION + self.trust_precision[feature])
            self.trust[feature] = max(0.0, min(hazard.MAX_TRUST, self.trust[feature] + step))
            self.slope_precision[feature] += sum(evidence[name] * self.place(name) ** 2 for name in mine)
            tilt = hazard.STEP * sum(surprise[name] * self.place(name) for name in mine)
            self.slope[feature] += tilt / (hazard.PRIOR_PRECISION + self.slope_precision[feature])


def made() -> Hazards:
    """Return hazards of these features."""
    return Hazards(NUM_KINDS, SIZES, NUM_GAPS, LINES, gaps_on_line=(0,))


def test_it_learns_what_the_formulas_say() -> None:
    rng = Random(8)
    hazards, sums = made(), Sums()
    for _ in range(4):
        seen = Observations()
        for _ in range(200):
            features = (rng.choice((0, 3, 4)), rng.choice((0, 7, 8, 9)))
            gap_bins = (rng.choice((0, 1, 12, NUM_BINS)), rng.choice((0, 5)))
            number = rng.choice((0, 1, 5, 6, 7, 20, NUM_BINS - 1))
            use, weight = float(rng.random() < 0.3), rng.uniform(0.3, 2.0)
            description = array("h", (rng.randrange(NUM_KINDS), *features, *gap_bins))
            seen.add(description, number, use, weight)
        hazards.learn(seen)
        sums.learn(seen)
        for kind in range(NUM_KINDS):
            for features, gap_bins in (((0, 0), (0, 0)), ((3, 8), (12, 0)), ((4, 9), (NUM_BINS, 5))):
                got = hazards.hazards(np.array([kind]), np.array([features]), np.array([gap_bins]))[0]
                expected = [sums.hazard(kind, features, gap_bins, n) for n in range(NUM_BINS)]
                assert got == pytest.approx(expected, rel=1e-9)
                later = hazards.hazards(np.array([kind]), np.array([features]), np.array([gap_bins]), 7)[0]
                assert later == pytest.approx(expected[7:], rel=1e-9)


def live_through(hazards: Hazards, rng: Random, chances: dict[int, float], num: int) -> None:
    """Let `num` stretches with a value of the second feature live through bin 8, used with its chance."""
    seen = Observations()
    for _ in range(num):
        value = rng.choice(list(chances))
        seen.add(array("h", (0, 0, value, 0, 0)), 8, float(rng.random() < chances[value]), 1.0)
    hazards.learn(seen)


def chance_of(hazards: Hazards, value: int) -> float:
    """Return the hazard in bin 8 of a value of the second feature."""
    asked = np.array([0]), np.array([[0, value]]), np.zeros((1, NUM_GAPS), np.int64)
    return float(hazards.hazards(*asked)[0, 8])


@pytest.mark.parametrize("seed", range(5))
def test_features_that_foretell_are_trusted_and_those_that_do_not_are_not(seed: int) -> None:
    rng, telling, noise = Random(seed), made(), Hazards(NUM_KINDS, SIZES, NUM_GAPS)
    for _ in range(60):
        live_through(telling, rng, {7: 0.005, 8: 0.6}, 128)
        live_through(noise, rng, dict.fromkeys(range(7, 12), 0.3), 128)
    assert 1.2 < telling._trust[1] <= hazard.MAX_TRUST
    assert noise._trust[1] < 1.0
    assert noise._trust[0] == 1.0, "nobody had a value of this one"


def test_values_on_a_line_say_something_of_one_that_was_never_seen() -> None:
    rng, with_line, without = Random(2), made(), Hazards(NUM_KINDS, SIZES, NUM_GAPS)
    for hazards in (with_line, without):
        for _ in range(20):
            live_through(hazards, rng, {7: 0.03, 8: 0.06, 9: 0.12}, 128)
    assert chance_of(without, 10) < 1.1 * chance_of(without, 8), "of this one nothing is known"
    assert chance_of(with_line, 10) > 1.3 * chance_of(with_line, 8)
    fresh = made()
    fresh.load(with_line.dump())
    assert chance_of(fresh, 10) == chance_of(with_line, 10)
