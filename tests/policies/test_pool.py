"""How often a pool looks at its candidates: once a moment, and anew when something happened."""

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.policies.pool import FRESH_S, I32, Pool


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
def pool(prices: Prices) -> Pool:
    pool = Pool(prices)
    for row in range(10):
        pool.add(row)
    return pool


def popped(pool: Pool, now: float) -> int:
    found = pool.pop(now)
    assert found is not None
    return found[0][1]


def test_victims_of_one_moment_cost_one_look(pool: Pool, prices: Prices) -> None:
    assert [popped(pool, 7.0), popped(pool, 7.0 + FRESH_S / 2), popped(pool, 7.0 + FRESH_S / 2)] == [0, 1, 2]
    assert prices.num_asked == 1


def test_prices_are_others_after_a_while(pool: Pool, prices: Prices) -> None:
    assert [popped(pool, 7.0), popped(pool, 7.0 + 2 * FRESH_S)] == [0, 1]
    assert prices.num_asked == 2


def test_prices_are_others_when_something_happened(pool: Pool, prices: Prices) -> None:
    popped(pool, 7.0)
    pool.reprice()
    assert popped(pool, 7.0) == 1
    assert prices.num_asked == 2


def test_who_left_meanwhile_is_no_victim(pool: Pool) -> None:
    popped(pool, 7.0)
    pool.discard([1, 2])
    assert popped(pool, 7.0) == 3
