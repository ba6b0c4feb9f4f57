"""UseRates by counts: what prices lean on before anything is learned, and no longer after."""

import math
from typing import Any

import numpy as np
import pytest

from kvtier.policies.urgency.appraiser import Appraiser
from kvtier.policies.urgency.rates import EXPONENT, HALF_LIFE, LEAST_EXPONENT, UseRates
from kvtier.policies.urgency.stretches import Stretches
from kvtier.policies.urgency.visits import PRIVATE, Visit


def test_a_new_block_is_the_measure_and_uses_count_and_time_takes_away() -> None:
    rates = UseRates()
    assert rates.factor(0, 0.0) == 1.0
    by_uses = np.asarray(rates.factors([0, 1, 2, 10], np.full(4, 100.0)))
    assert (np.diff(by_uses) > 0).all()
    by_age = np.asarray(rates.factors(3, np.array([0.0, 1.0, 60.0, 3600.0])))
    assert (np.diff(by_age) < 0).all()
    few = rates.factor(2, 1000.0)
    assert rates.factors(2, np.array([1000.0])) == pytest.approx(few)
    assert few == pytest.approx(((2 + 0.2) / (1000 + 120) * 120 / 0.2) ** EXPONENT)


def test_who_has_learned_enough_asks_for_no_counts() -> None:
    rates = UseRates()
    before = rates.factor(5, 100.0)
    rates.fade(int(HALF_LIFE))
    assert rates.exponent == pytest.approx(EXPONENT / 2)
    assert rates.factor(5, 100.0) == pytest.approx(math.sqrt(before))
    rates.fade(int(HALF_LIFE * EXPONENT / LEAST_EXPONENT))
    assert rates.exponent == 0.0
    assert rates.factors([5, 0], np.array([100.0, 0.0])) == 1.0 == rates.factor(5, 100.0)


def test_the_scale_of_time_is_that_of_the_gaps() -> None:
    """A service a hundred times as slow has the same factors."""
    quick, slow = UseRates(), UseRates()
    for number in range(2000):
        quick.add_gap(2.0 + number % 3)
        slow.add_gap(100 * (2.0 + number % 3))
    lives_s = np.array([1.0, 10.0, 100.0])
    expected = quick.factors(2, lives_s.copy())
    assert slow.factors(2, 100 * lives_s) == pytest.approx(expected, rel=1e-4)
    assert slow.factors(2, lives_s) != pytest.approx(expected, rel=0.1)


def price_of(appraiser: Appraiser, stretches: Stretches, num_uses: int, known_s: float) -> float:
    """Return the price of a block of one conversation that was used now."""
    visit = Visit(0.0, 0, -1, num_blocks=1, num_known=0)
    stretch = stretches.open(visit, 0.0, PRIVATE, 0, num_uses, 10.0, known_s)
    visit.stretches.append(stretch)
    stretches.put([stretch], stretch)
    appraiser.describe(visit)
    return appraiser.price(stretch, 0.0)


def test_prices_lean_on_counts_from_the_first_request_on() -> None:
    stretches = Stretches(0)
    appraiser = Appraiser(stretches)
    often, seldom = (price_of(appraiser, stretches, num_uses, 100.0) for num_uses in (9, 1))
    assert often > 1.5 * seldom
    appraiser._rates.fade(10**9)
    often, seldom = (price_of(appraiser, stretches, num_uses, 100.0) for num_uses in (9, 1))
    assert often == pytest.approx(seldom)


def test_what_was_learned_of_rates_is_kept_and_older_dumps_are_read() -> None:
    learned = Appraiser(Stretches(0))
    for _ in range(50):
        learned._rates.add_gap(7.0)
    learned._rates.fade(1000)
    saved = learned.dump()
    other = Appraiser(Stretches(0))
    other.load(saved)
    assert other.dump() == saved
    del saved["rates"]
    old = Appraiser(Stretches(0))
    old.load(saved)
    assert old._rates.dump() == UseRates().dump()


@pytest.mark.parametrize(
    "broken",
    [
        7,
        {},
        {"log_gap": "x", "num_gaps": 1, "num_learned": 0},
        {"log_gap": math.nan, "num_gaps": 1, "num_learned": 0},
        {"log_gap": 1.0, "num_gaps": 0, "num_learned": 0},
        {"log_gap": 1.0, "num_gaps": 1, "num_learned": -1},
        {"log_gap": 1.0, "num_gaps": 1, "num_learned": math.inf},
    ],
)
def test_impossible_rates_are_refused_and_nothing_changes(broken: Any) -> None:
    appraiser = Appraiser(Stretches(0))
    before = appraiser.dump()
    with pytest.raises(ValueError, match="rates"):
        appraiser.load({**before, "rates": broken})
    assert appraiser.dump() == before
