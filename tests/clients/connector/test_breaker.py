"""The circuit breaker: opens on silence, probes alone, closes by itself; answers never open it."""

import threading

import pytest

from kvtier.clients import (
    DataLoss,
    DeadlineExceeded,
    InvalidRequest,
    KvtierError,
    NotFound,
    Overloaded,
    PreconditionFailed,
    ServerBug,
    Unavailable,
)
from kvtier.clients.connector.breaker import Breaker

GONE = Unavailable("nobody", reason="NOT_RUNNING")
LATE = DeadlineExceeded("too late", reason="DEADLINE")


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(max_failures=3, pause_s=1.0, max_pause_s=4.0, clock=clock)


def test_nobody_listens_opens_at_once(breaker: Breaker) -> None:
    assert breaker.allows()
    assert breaker.failed(GONE)
    assert breaker.is_open
    assert breaker.turns_away()
    assert not breaker.allows()


@pytest.mark.parametrize("problem", [LATE, ServerBug("bug", reason="BUG"), ValueError("ours")])
def test_other_failures_open_after_three_in_a_row(breaker: Breaker, problem: Exception) -> None:
    assert not breaker.failed(problem)
    assert not breaker.failed(problem)
    breaker.succeeded()  # not in a row any more
    assert not breaker.failed(problem)
    assert not breaker.failed(problem)
    assert breaker.allows()
    assert breaker.failed(problem)
    assert not breaker.allows()


@pytest.mark.parametrize("family", [NotFound, Overloaded, InvalidRequest, PreconditionFailed, DataLoss])
def test_answers_never_open_it_and_close_an_open_one(breaker: Breaker, family: type[KvtierError]) -> None:
    answer = family("an answer", reason="ANSWER")
    for _ in range(10):
        assert not breaker.failed(answer)
    assert breaker.allows()
    breaker.failed(GONE)
    breaker.failed(answer)
    assert not breaker.is_open


def test_one_probe_per_pause_and_pauses_that_grow(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(GONE)
    pauses = []
    for _ in range(5):
        began_s = clock.now_s
        while not breaker.allows():
            clock.now_s += 0.5
        pauses.append(clock.now_s - began_s)
        assert not breaker.allows()  # the probe is on its way; nobody else
        assert not breaker.failed(GONE)  # it was open already
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_probe_that_works_closes_it_and_forgets_the_past(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(GONE)
    clock.now_s += 1.0
    assert not breaker.turns_away()  # asking does not take the probe
    assert breaker.allows()
    assert breaker.turns_away()
    breaker.failed(GONE)
    clock.now_s += 2.0
    assert breaker.allows()
    breaker.succeeded()
    assert not breaker.turns_away()
    assert not breaker.is_open
    assert all(breaker.allows() for _ in range(3))
    breaker.failed(GONE)
    clock.now_s += 1.0  # the first pause again
    assert breaker.allows()


def test_a_probe_that_is_only_late_counts_as_failed(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(GONE)
    clock.now_s += 1.0
    assert breaker.allows()
    breaker.failed(LATE)
    clock.now_s += 2.0
    assert breaker.allows()
    clock.now_s += 3.5
    assert not breaker.allows()  # the pause has doubled twice
    clock.now_s += 0.5
    assert breaker.allows()


def test_a_probe_that_never_reports_does_not_close_the_door_for_ever(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(GONE)
    clock.now_s += 1.0
    assert breaker.allows()
    clock.now_s += 2.0
    assert breaker.allows()


def test_threads_get_one_probe_between_them(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(GONE)
    clock.now_s += 1.0
    barrier = threading.Barrier(8)
    answers: list[bool] = []

    def ask() -> None:
        barrier.wait()
        answers.append(breaker.allows())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False] * 7 + [True]
