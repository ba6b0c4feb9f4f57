"""The appraiser keeps prices no longer than they are worth, and makes few of them anew at a time."""

import numpy as np
import pytest

from kvtier.policies.urgency.ages import NUM_BINS
from kvtier.policies.urgency.appraiser import MAX_REPRICED, Appraiser
from kvtier.policies.urgency.stretches import I32, NUM_PRICES, OUTDATED, PRICED, UNPRICED, Stretches
from kvtier.policies.urgency.visits import NEW, PRIVATE, Visit

NUM_STRETCHES = 3 * MAX_REPRICED
LATE_S = 40.0


def open_one(stretches: Stretches, appraiser: Appraiser, used_at: float) -> int:
    """Return a stretch of one block that was used at a time."""
    visit = Visit(used_at, 0, -1, num_blocks=1, num_known=0)
    stretch = stretches.open(visit, used_at, NEW, 0, 0, -1.0, 0.0)
    visit.stretches.append(stretch)
    stretches.put([stretch], stretch)
    appraiser.describe(visit)
    appraiser.watch(stretch)
    return stretch


@pytest.fixture
def outdated() -> tuple[Stretches, Appraiser, I32]:
    """Stretches used one after the other within 40 s, priced then, that outlived a bin since."""
    stretches = Stretches(0)
    appraiser = Appraiser(stretches)
    ages_s = np.linspace(0, LATE_S, NUM_STRETCHES)
    numbers = np.array([open_one(stretches, appraiser, -age_s) for age_s in ages_s], np.int32)
    appraiser.prices(numbers, 0.0)
    assert is_fresh(stretches, numbers).all(), "those without a price do not wait"
    for _ in range(2 * NUM_BINS):  # a bounded number of bins at a time
        appraiser.advance(4 * LATE_S)
    assert {stretches.freshness[number] for number in numbers} == {OUTDATED}
    return stretches, appraiser, numbers


def is_fresh(stretches: Stretches, numbers: I32) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    return np.array([stretches.freshness[number] == PRICED for number in numbers])


def test_the_cheapest_are_priced_anew_and_the_others_in_their_turn(
    outdated: tuple[Stretches, Appraiser, I32],
) -> None:
    stretches, appraiser, numbers = outdated
    ended = int(numbers[0])  # the youngest, but its session said that it is over
    stretches.share[ended] = 1e-3
    now = 5 * LATE_S
    first = appraiser.prices(numbers, now)
    fresh = is_fresh(stretches, numbers)
    assert fresh.sum() == MAX_REPRICED
    assert fresh[0]
    assert fresh[-MAX_REPRICED + 1 :].all(), "the oldest ones are the cheapest"
    assert first.argmin() == 0
    for _ in range(2):
        appraiser.prices(numbers, now)
    assert is_fresh(stretches, numbers).all()
    exact = np.array([appraiser.price(int(number), now) for number in numbers])
    assert appraiser.prices(numbers, now) == pytest.approx(exact, rel=1e-5)


def test_who_was_dear_and_is_long_overdue_is_looked_at(outdated: tuple[Stretches, Appraiser, I32]) -> None:
    """A return that did not come: its price was high, and nobody knows yet that it fell."""
    stretches, appraiser, numbers = outdated
    overdue, young = numbers[10], numbers[0]
    np.frombuffer(stretches.prices, np.float32).reshape(-1, NUM_PRICES)[[overdue, young]] = 1.0
    stretches.used_at[overdue] = -100 * LATE_S
    appraiser.prices(numbers, 5 * LATE_S)
    fresh = is_fresh(stretches, numbers)
    assert fresh.sum() == MAX_REPRICED
    assert fresh[10]
    assert not fresh[0]


def test_who_was_described_anew_is_priced_at_once(outdated: tuple[Stretches, Appraiser, I32]) -> None:
    stretches, appraiser, numbers = outdated
    for number in numbers[: 2 * MAX_REPRICED].tolist():
        visit = stretches.visit[number]
        assert visit is not None
        appraiser.describe(visit)
        assert stretches.freshness[number] == UNPRICED
    appraiser.prices(numbers, 5 * LATE_S)
    fresh = is_fresh(stretches, numbers)
    assert fresh[: 2 * MAX_REPRICED].all()
    assert fresh.sum() == 2 * MAX_REPRICED


def test_prices_made_together_are_those_made_one_by_one() -> None:
    """Of stretches of all ages: the young ones and the old ones are parted."""
    stretches = Stretches(0)
    appraiser = Appraiser(stretches)
    now = 5_000.0
    ages_s = [0.1 * 1.06**number for number in reversed(range(240))]  # the last ones outlived all bins
    numbers = np.array([open_one(stretches, appraiser, now - age_s) for age_s in ages_s], np.int32)
    for _ in range(4 * NUM_BINS):
        appraiser.advance(now)
    bins = np.frombuffer(stretches.bin, np.int8)[numbers]
    assert bins.min() == 0
    assert bins.max() == NUM_BINS
    together = appraiser.prices(numbers, now)
    for number in numbers:
        stretches.freshness[number] = OUTDATED
    assert [appraiser.price(number, now) for number in numbers.tolist()] == pytest.approx(together, rel=1e-6)


def test_stretches_that_outlived_all_bins_have_a_price() -> None:
    """Nobody used them for longer than there are ages. (Simulator, seed 44.)"""
    stretches = Stretches(0)
    appraiser = Appraiser(stretches)
    now = 1e9
    numbers = np.array([open_one(stretches, appraiser, age_s) for age_s in range(3)], np.int32)
    for _ in range(4 * NUM_BINS):
        appraiser.advance(now)
    assert {stretches.bin[number] for number in numbers} == {NUM_BINS}
    assert (appraiser.prices(numbers, now) > 0).all()
    assert appraiser.price(int(numbers[0]), now) > 0


def test_stretches_are_described_anew_when_their_visit_changed_or_their_number_is_another_one_s() -> None:
    stretches = Stretches(0)
    appraiser = Appraiser(stretches)
    visit = Visit(0.0, 0, -1, num_blocks=9, num_known=4)

    def described(stretch: int) -> list[int]:
        stretches.freshness[stretch] = PRICED
        appraiser.describe(visit)
        assert stretches.freshness[stretch] == UNPRICED, "whatever changed"
        return stretches.description_of(stretch).tolist()

    first = stretches.open(visit, 0.0, NEW, 0, 0, -1.0, 0.0)
    visit.stretches.append(first)
    before = described(first)
    assert described(first) == before
    visit.num_blocks = 90
    assert described(first) != before
    visit.num_blocks = 9
    assert described(first) == before
    stretches.close_if_empty(first)
    assert stretches.open(visit, 0.0, PRIVATE, 0, 3, 5.0, 5.0) == first
    visit.stretches.append(first)
    assert described(first)[0] == PRIVATE
