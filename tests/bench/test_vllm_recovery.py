"""When is a rate back? Steps are (time, tokens); the blow falls at 100 s."""

import math

import pytest

from bench.vllm.overhead import interval
from bench.vllm.recovery import BEFORE_S, series_of, time_until_back

RATE = 40.0


def steps(first_s: float, last_s: float, every_s: float = 0.1, num: int = 4) -> list[tuple[float, int]]:
    count = round((last_s - first_s) / every_s)
    return [(100.0 + first_s + index * every_s, num) for index in range(count + 1)]


def test_a_rate_that_never_fell_is_back_at_once() -> None:
    assert time_until_back(steps(-5, 10), 100.0, RATE) == 0.0


def test_a_gap_counts_from_the_blow() -> None:
    assert 1.9 < time_until_back(steps(-5, 0) + steps(2.1, 10), 100.0, RATE) < 2.2


def test_a_slow_phase_is_not_back() -> None:
    slow, fast = steps(0.1, 5, num=1), steps(5.1, 10)
    assert 4.0 < time_until_back(slow + fast, 100.0, RATE) <= 5.1


def test_a_rate_that_stays_low_is_never_back() -> None:
    assert math.isinf(time_until_back(steps(0, 10, num=1), 100.0, RATE))
    assert math.isinf(time_until_back([], 100.0, RATE))


def test_the_line_of_time_has_a_slot_for_every_half_second_and_counts_each_token_once() -> None:
    rates = series_of(steps(-BEFORE_S + 0.05, 2.96, num=4), 100.0)
    assert len(rates) == 15
    assert rates == [pytest.approx(40.0)] * 15
    assert series_of(steps(-BEFORE_S - 3, 1.0), 100.0)[0] == pytest.approx(40.0, rel=0.25), (
        "what is earlier is left out"
    )
    assert series_of(steps(0.05, 1.01), 100.0)[: round(BEFORE_S / 0.5)] == [0.0] * 10
    assert series_of([], 100.0) == []


def test_the_interval_of_a_median_holds_it_and_narrows_with_agreement() -> None:
    median, low, high = interval([0.98, 1.0, 1.01, 1.02, 1.03, 1.10, 0.99])
    assert median == 1.01
    assert 0.98 <= low <= 1.0
    assert 1.02 <= high <= 1.10
    assert interval([1.05] * 5) == (1.05, 1.05, 1.05)
