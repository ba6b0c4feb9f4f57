"""What urgency learns: ages and their bins, hazards, the index of both, and forecasts over a restart."""

import math
from array import array
from random import Random

import numpy as np
import pytest

from kvtier.policies.base import Newcomer
from kvtier.policies.learned import pack, unpack
from kvtier.policies.urgency.ages import (
    EDGES_S,
    NUM_BINS,
    NUM_STEPS,
    STEP_EDGES_S,
    STEP_WIDTHS_S,
    bin_of,
    step_of,
    steps_of,
)
from kvtier.policies.urgency.forecast import Forecast
from kvtier.policies.urgency.hazard import MAX_AT_RISK, Hazards, Observations
from kvtier.policies.urgency.worth import index_at
from kvtier.tiers.block import Urgency

from .tree import Facts, chain_of, name, plant

LOOKS = np.zeros((1, 2), np.int64)
NO_GAPS = np.zeros((1, 1), np.int64)


@pytest.mark.parametrize("age_s", [0.0, 0.1, 0.25, 0.49, 0.5, 0.7071, 3.0, 100.0, 31_000.0, 1e9])
def test_ages_are_in_their_bins_and_steps(age_s: float) -> None:
    number, step = bin_of(age_s), int(step_of(age_s) + 1e-12)
    assert steps_of(np.array([age_s]))[0] == pytest.approx(step_of(age_s))
    assert EDGES_S[number] <= age_s
    assert age_s < EDGES_S[number + 1] or number == NUM_BINS - 1
    assert STEP_EDGES_S[step] <= age_s
    assert age_s < STEP_EDGES_S[step + 1] or step == NUM_STEPS - 1
    assert step // 2 == number


def test_the_index_is_the_best_ratio_over_all_horizons() -> None:
    rng = np.random.default_rng(3)
    hazards = rng.uniform(0, 0.3, (2, NUM_BINS)) ** 2
    got = index_at(hazards, np.tile(np.arange(NUM_STEPS), (2, 1)))
    for stretch in range(2):
        for first in range(0, NUM_STEPS, 7):
            survival, used, kept_s, best = 1.0, 0.0, 0.0, 0.0
            for step in range(first, NUM_STEPS):
                hazard = 1 - math.sqrt(1 - hazards[stretch, step // 2])
                used += survival * hazard
                kept_s += survival * (1 - hazard / 2) * STEP_WIDTHS_S[step]
                survival *= 1 - hazard
                if step % 2:  # the end of a bin
                    best = max(best, used / kept_s)
            assert got[stretch, first] == pytest.approx(best)
    for first_bin in (1, 9, NUM_BINS - 1):
        later = np.tile(np.arange(2 * first_bin, NUM_STEPS), (2, 1))
        assert index_at(hazards[:, first_bin:], later, first_bin) == pytest.approx(got[:, 2 * first_bin :])


def test_before_anything_is_learned_prices_fall_with_age() -> None:
    hazards = Hazards(3, (10,), 1).hazards(np.array([0]), LOOKS, NO_GAPS)
    prices = index_at(hazards, np.arange(NUM_STEPS)[None, :])[0]
    assert (np.diff(prices[2:]) < 0).all(), "from the end of the first bin, which is as wide as three"


def observe(hazards: Hazards, kind: int, feature: int, chance: float, num: int, seed: int) -> None:
    """Let `num` stretches live through bin 8, used in it with a chance."""
    rng = Random(seed)
    seen = Observations()
    for _ in range(num):
        seen.add(array("h", (kind, feature, 0, 0)), 8, float(rng.random() < chance), 1.0)
    hazards.learn(seen)


def test_hazards_are_learned_per_kind_and_feature() -> None:
    hazards = Hazards(3, (10,), 1)
    for part in range(180):
        observe(hazards, 0, 4, 0.4, 50, part)
        observe(hazards, 0, 5, 0.1, 50, 1000 + part)
        observe(hazards, 1, 0, 0.02, 50, 2000 + part)
    features = np.array([[4, 0], [5, 0], [0, 0]])
    got = hazards.hazards(np.array([0, 0, 1]), features, np.zeros((3, 1), np.int64))[:, 8]
    # Half a bin at risk for those used: the hazard of a life table, p / (1 - p / 2).
    # Far apart, so a wide margin says enough; steps get shorter, the last tenth takes for ever.
    assert got == pytest.approx([0.5, 0.1053, 0.0202], rel=0.4)


def test_hazards_forget() -> None:
    hazards = Hazards(1, (10,), 1)
    for part in range(40):
        observe(hazards, 0, 0, 0.3, 2000, part)
    assert hazards._at_risk.max() <= MAX_AT_RISK
    for part in range(40):
        observe(hazards, 0, 0, 0.01, 2000, part)
    assert hazards.hazards(np.array([0]), LOOKS, NO_GAPS)[0, 8] < 0.06


def test_what_was_learned_survives_a_restart() -> None:
    one, other = Hazards(3, (10,), 1), Hazards(3, (10,), 1)
    observe(one, 1, 4, 0.4, 500, 1)
    other.load(one.dump())
    asked = np.array([1]), np.array([[4, 0]]), NO_GAPS
    assert (one.hazards(*asked) == other.hazards(*asked)).all()
    with pytest.raises(ValueError, match="another version"):
        Hazards(4, (10,), 1).load(one.dump())


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 1},
        {"used": None},
        {"used": [[-1.0] * NUM_BINS] * 3},
        {"at_risk": [[math.nan] * NUM_BINS] * 3},
        {"at_risk": [[10**400] * NUM_BINS] * 3},
        {"precision": "many"},
        {"precision": [0.0] * 74},
        {"effects": [1e300] * 74},
        {"effects": {"1": 2}},
        {"trust": [1.0, 1e6]},
        {"trust_precision": [-1.0, 0.0]},
        {"slopes": [math.inf, 0.0]},
        {"slope_precision": [0.0]},
    ],
)
def test_hazards_that_make_no_sense_are_refused_and_change_nothing(damage: dict[str, object]) -> None:
    hazards, other = Hazards(3, (10,), 1), Hazards(3, (10,), 1)
    observe(other, 1, 4, 0.4, 500, 1)
    before = hazards.dump()
    with pytest.raises(ValueError, match=r"learned|could not convert"):
        hazards.load({**other.dump(), **damage})
    assert hazards.dump() == before


def taught() -> Forecast:
    """Return a forecast that knows more than nothing."""
    tree, forecast = plant(60)
    for number in range(200):
        tree.now += 3.0
        tree.request(chain_of(number % 12, length=3 + number % 5))
    forecast._usual_silence, forecast._usual_log_decoded = int(Urgency.WAITING), 6.5
    return forecast


def test_a_forecast_that_was_packed_and_unpacked_prices_as_before() -> None:
    before, after, fresh = taught(), Forecast(Facts()), Forecast(Facts())
    assert unpack(pack({"forecast": before}), {"forecast": after}) == {}
    newcomer = Newcomer(0.0, -1, 0, 5, 1, Urgency.PREFILL, [name("new", n) for n in range(5)])
    assert pack({"forecast": after}) == pack({"forecast": before})
    assert after.price_of_new(newcomer) != fresh.price_of_new(newcomer)
    # A session that did not say anything is taken for the usual one, which is remembered, too.
    visit = after._priced.visit if after._priced else None
    assert visit is not None
    assert (visit.silence, visit.num_decoded_tokens) == (Urgency.WAITING, int(2**6.5) - 1)


GARBAGE = [
    b"\0\xff\x93NUMPY",
    b"[" * 100_000,
    b"[]",
    b"null",
    b"{}",
    b'{"format": 1}',
    b'{"format": 1, "learners": []}',
    b'{"format": 2, "learners": {"forecast": {}}}',
    b'{"format": 1, "learners": {"forecast": 7}}',
    b'{"format": 1, "learners": {"forecast": {"hazards": 7}}}',
    b'{"format": 1, "learners": {"forecast": {"hazards": {}, "usual_silence": [], "usual_log_decoded": 0}}}',
    b'{"format": 1, "learners": {"forecast": {"hazards": {}, "usual_silence": 0, "usual_log_decoded": NaN}}}',
    b'{"format": 1, "learners": {"nobody": {}}}',
]


@pytest.mark.parametrize("data", GARBAGE)
def test_what_is_not_understood_is_named_and_changes_nothing(data: bytes) -> None:
    forecast = taught()
    before = pack({"forecast": forecast})
    assert len(unpack(data, {"forecast": forecast})) == 1
    assert len(unpack(before[: len(before) // 2], {"forecast": forecast})) == 1, "cut off"
    assert pack({"forecast": forecast}) == before


def test_one_learner_that_fails_does_not_keep_the_others_from_learning() -> None:
    class Broken:
        def dump(self) -> dict[str, object]:
            return {}

        def load(self, saved: object) -> None:
            raise RuntimeError("no")

    forecast = Forecast(Facts())
    data = pack({"broken": Broken(), "forecast": taught(), "not a learner": object()})
    assert unpack(data, {"broken": Broken(), "forecast": forecast}) == {"broken": "RuntimeError: no"}
    assert pack({"forecast": forecast}) == pack({"forecast": taught()})
    assert pack({"not a learner": object()}) == b""
