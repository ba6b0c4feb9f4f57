"""When is a rate back? Steps are (time, tokens); the blow falls at 100 s."""

import math

from bench.vllm.recovery import time_until_back

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
