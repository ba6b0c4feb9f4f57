"""The judges of the end-to-end tests, judged."""

from dataclasses import replace

import pytest

from bench.vllm.process import Output

from ..e2e.comparison import NOISE, difference, exact_difference
from ..e2e.traffic import Traffic

RIGHT = Output(
    tokens=(7, 8, 9),
    logprobs=(-0.5, -1.5, -0.25),
    runners_up=(-2.0, -1.5 - NOISE / 2, -3.0),
    num_cached=32,
    num_preemptions=0,
    added_at_s=1.0,
    first_at_s=1.5,
    last_at_s=2.0,
    finish="length",
    transfer=None,
)


def test_the_same_is_the_same() -> None:
    assert exact_difference(RIGHT, replace(RIGHT, num_cached=0, finish="stop")) == ""
    assert difference(RIGHT, RIGHT) == ""


def test_one_bit_is_a_difference_and_noise_is_none_in_substance() -> None:
    noisy = replace(RIGHT, logprobs=(-0.5, -1.5000001, -0.25))
    assert "log-probability 1" in exact_difference(RIGHT, noisy)
    assert difference(RIGHT, noisy) == ""


@pytest.mark.parametrize(
    "wrong",
    [
        replace(RIGHT, tokens=(6, 8, 9)),  # no tie there
        replace(RIGHT, tokens=(7, 8, 6)),
        replace(RIGHT, logprobs=(-0.5, -1.5, -0.25 - 2 * NOISE)),
        replace(RIGHT, tokens=(7, 8), logprobs=(-0.5, -1.5)),
        replace(RIGHT, tokens=(), logprobs=(), finish="error"),
    ],
)
def test_wrong_answers_are_told(wrong: Output) -> None:
    assert difference(RIGHT, wrong)
    assert exact_difference(RIGHT, wrong)


def test_after_a_tie_nothing_can_be_compared() -> None:
    assert difference(RIGHT, replace(RIGHT, tokens=(7, 5, 4), logprobs=(-0.5, -1.5, -9.0))) == ""


def test_an_aborted_answer_is_compared_as_far_as_it_goes() -> None:
    assert difference(RIGHT, replace(RIGHT, tokens=(7,), logprobs=(-0.5,), finish="aborted")) == ""
    assert difference(RIGHT, replace(RIGHT, tokens=(6,), logprobs=(-0.5,), finish="aborted"))


@pytest.mark.parametrize("seed", range(20))
def test_traffic_is_its_seed_and_keeps_its_promises(seed: int) -> None:
    runs = [Traffic(seed, 32, max_tokens=900, may_align=False) for _ in range(2)]
    for _ in range(60):
        first, second = (traffic.turn() for traffic in runs)
        assert first.request == second.request
        assert len(first.tokens) + first.num_new <= 900
        assert not first.is_aligned(32)
        for traffic, turn in zip(runs, (first, second), strict=True):
            traffic.answered(turn, tuple(traffic.words(first.num_new)))
