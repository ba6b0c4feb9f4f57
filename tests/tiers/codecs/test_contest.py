"""The contest between sending as it is and encoding: what costs less is found, whatever the noise, and asking
costs little."""

import random
from collections.abc import Callable

import pytest

from kvtier.tiers.codecs.contest import MAX_HOLD, RUN_BYTES, SETTLE_BYTES, EncodingContest

FRAGMENT_BYTES = 512 << 10
CALL_BYTES = 64 << 20


def send(
    contest: EncodingContest,
    num_bytes: int,
    seconds: Callable[[bool, int], float],
    fragment_bytes: int = FRAGMENT_BYTES,
) -> float:
    """Send fragments; `seconds` of a fragment, by whether it is encoded and what was sent before it in its
    call. Return which share was encoded."""
    num_coded = 0
    for start in range(0, num_bytes, fragment_bytes):
        is_coded = contest.is_coded
        num_coded += is_coded
        contest.sent(is_coded, fragment_bytes, seconds(is_coded, start % CALL_BYTES))
    return num_coded * fragment_bytes / num_bytes


@pytest.mark.parametrize("fragment_bytes", [FRAGMENT_BYTES, 32 << 20])
@pytest.mark.parametrize(
    ("gain", "pays"), [(1.4, True), (1.1, True), (1.0, False), (0.9, False), (0.5, False)]
)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_what_costs_less_wins(gain: float, pays: bool, noise: float, fragment_bytes: int) -> None:
    """Noise changes whole calls, as neighbours do. Where it is as strong as what is gained, only the average
    over connections is asked."""
    shares = []
    run_bytes = max(RUN_BYTES, 2 * fragment_bytes)
    for seed in range(8):
        rng = random.Random(seed)
        contest = EncodingContest()
        factor = 1.0

        def seconds(is_coded: bool, before_bytes: int, rng: random.Random = rng) -> float:
            nonlocal factor
            if before_bytes == 0:
                factor = 1 + noise * rng.random()
            return factor * (1 / gain if is_coded else 1.0) * fragment_bytes / 1e9

        send(contest, 128 * run_bytes, seconds, fragment_bytes)
        shares.append(send(contest, 256 * run_bytes, seconds, fragment_bytes))
    share = sum(shares) / len(shares)
    if gain == 1.0:
        assert share < 0.6  # nothing is lost either way; without a reason to, nobody works
    elif not noise:
        assert share > 0.85 if pays else share < 0.15
    else:
        assert share > 0.7 if pays else share < 0.3


@pytest.mark.parametrize(("cost", "pays"), [(0.8, True), (1.3, False)])
def test_who_has_the_beginning_of_every_call_has_no_advantage(cost: float, pays: bool) -> None:
    """Empty buffers take the first megabytes at once; calls as long as four runs put the same turn there."""
    contest = EncodingContest()

    def seconds(is_coded: bool, before_bytes: int) -> float:
        if before_bytes < 16 << 20:
            return 1e-6
        return FRAGMENT_BYTES * (cost if is_coded else 1.0) / 1e9

    share = send(contest, 4 << 30, seconds)
    assert share > 0.8 if pays else share < 0.2


def test_what_buffers_still_hold_is_not_the_next_ones_work() -> None:
    """A transport that takes megabytes before it makes anybody wait."""
    contest = EncodingContest()
    held: list[bool] = []

    def seconds(is_coded: bool, before_bytes: int) -> float:
        held.append(is_coded)
        gone = held.pop(0) if len(held) > SETTLE_BYTES // FRAGMENT_BYTES else None
        return 0.0 if gone is None else FRAGMENT_BYTES * (0.7 if gone else 1.0) / 1e9

    assert send(contest, 4 << 30, seconds) > 0.8


def test_asking_costs_little_and_a_change_is_noticed() -> None:
    contest = EncodingContest()
    dear = {True: 2.0, False: 1.0}

    def seconds(is_coded: bool, before_bytes: int) -> float:
        return FRAGMENT_BYTES * dear[is_coded] / 1e9

    send(contest, 16 << 30, seconds)
    assert send(contest, 16 << 30, seconds) < 0.02
    dear[True] = 0.5
    send(contest, 2 * MAX_HOLD * RUN_BYTES, seconds)
    assert send(contest, 4 << 30, seconds) > 0.9


def test_what_set_off_before_its_run_does_not_count() -> None:
    """Fragments encoded ahead arrive when the turn is another's."""
    contest = EncodingContest()
    for _ in range(1 << 12):
        contest.sent(not contest.is_coded, FRAGMENT_BYTES, 1.0)
    assert not contest.is_coded
    contest.sent(False, RUN_BYTES, 1.0)
    contest.sent(False, RUN_BYTES, 1.0)  # the first run; the duel begins, as it is
    assert not contest.is_coded
    contest.sent(False, RUN_BYTES, 1.0)
    contest.sent(False, RUN_BYTES, 1.0)
    assert contest.is_coded
