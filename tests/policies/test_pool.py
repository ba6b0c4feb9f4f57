"""How often a pool looks at its candidates: once a moment, and anew when something happened."""

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.policies.urgency.pool import FRESH_S, I32, NUM_READY, PORTION, CandidatePool


class Prices:
    """A row is worth its number. Counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, rows: I32, now: float) -> npt.NDArray[np.float64]:
        self.num_asked += 1
        return rows.astype(np.float64)


@pytest.fixture
def prices() -> Prices:
    return Prices()


@pytest.fixture
def pool(prices: Prices) -> CandidatePool:
    pool = CandidatePool(prices)
    for row in range(10):
        pool.add(row)
    return pool


def popped(pool: CandidatePool, now: float) -> int:
    found = pool.pop(now)
    assert found is not None
    return found[0][1]


def test_victims_of_one_moment_cost_one_look(pool: CandidatePool, prices: Prices) -> None:
    assert [popped(pool, 7.0), popped(pool, 7.0 + FRESH_S / 2), popped(pool, 7.0 + FRESH_S / 2)] == [0, 1, 2]
    assert prices.num_asked == 1


def test_prices_are_others_after_a_while(pool: CandidatePool, prices: Prices) -> None:
    assert [popped(pool, 7.0), popped(pool, 7.0 + 2 * FRESH_S)] == [0, 1]
    assert prices.num_asked == 2


def test_prices_are_others_when_something_happened(pool: CandidatePool, prices: Prices) -> None:
    popped(pool, 7.0)
    pool.reprice()
    assert popped(pool, 7.0) == 1
    assert prices.num_asked == 2


def test_who_left_meanwhile_is_no_victim(pool: CandidatePool) -> None:
    popped(pool, 7.0)
    pool.discard([1, 2])
    assert popped(pool, 7.0) == 3


def crowd(prices: Prices, anew: dict[int, float]) -> CandidatePool:
    """Return a pool of more than a portion in which some prices are others by now."""
    pool = CandidatePool(prices, lambda row, now: anew.pop(row, None))
    for row in range(PORTION + 2):
        pool.add(row)
    return pool


def test_in_a_crowd_those_who_are_ready_stay_so_when_something_happened(prices: Prices) -> None:
    pool = crowd(prices, {})
    assert popped(pool, 7.0) == 0
    pool.reprice()
    assert [popped(pool, 7.0), popped(pool, 7.0 + FRESH_S / 2)] == [1, 2]
    assert prices.num_asked == 1
    assert popped(pool, 7.0 + 2 * FRESH_S) == 3
    assert prices.num_asked == 2


def test_in_a_crowd_whoever_became_dearer_waits_for_its_turn(prices: Prices) -> None:
    anew = {1: 2.5, 3: 1e9}
    pool = crowd(prices, anew)
    assert popped(pool, 7.0) == 0
    assert popped(pool, 7.0) == 1, "nothing happened"
    pool.add_priced(1, 0.5)
    pool.reprice()
    found = [pool.pop(7.0) for _ in range(3)]
    assert [each[0] for each in found if each is not None] == [(2.0, 2), (2.5, 1), (4.0, 4)]
    assert 3 in pool
    assert prices.num_asked == 1


def test_in_a_crowd_a_look_ends_all_doubts(prices: Prices) -> None:
    anew: dict[int, float] = {}
    pool = crowd(prices, anew)
    popped(pool, 7.0)
    pool.reprice()
    assert popped(pool, 7.0 + 2 * FRESH_S) == 1  # looked at anew
    anew[2] = 1e9
    assert popped(pool, 7.0 + 2 * FRESH_S) == 2, "nothing happened since"


def test_in_a_crowd_of_doubts_somebody_leaves(prices: Prices) -> None:
    pool = CandidatePool(prices, lambda row, now: 1e6 - row)  # a row that is priced gets dearer
    for row in range(PORTION + 2):
        pool.add(row)
    popped(pool, 7.0)
    pool.reprice()
    assert popped(pool, 7.0) == NUM_READY - 1, "the cheapest by the new prices"


def test_a_pool_of_one_portion_is_looked_at_whole_when_something_happened(prices: Prices) -> None:
    pool = CandidatePool(prices, lambda row, now: None)
    for row in range(PORTION):
        pool.add(row)
    popped(pool, 7.0)
    pool.reprice()
    popped(pool, 7.0)
    assert prices.num_asked == 2
