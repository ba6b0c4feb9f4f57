"""Lanes: bounded, in order, never blocking the one who submits, and every job ends exactly once."""

import threading
from collections.abc import Callable, Iterator

import pytest

from kvtier.clients.vllm_tier.lanes import WorkerLane

WAIT_S = 60.0


class Work:
    """Doubles numbers, when it is allowed to."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.is_broken = False

    def __call__(self, job: int) -> int:
        self.began.release()
        assert self.gate.acquire(timeout=WAIT_S)
        if self.is_broken:
            raise ZeroDivisionError("the work itself is wrong")
        return 2 * job


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def lane(work: Work) -> Iterator[WorkerLane[int, int]]:
    made: WorkerLane[int, int] = WorkerLane("test", work, lambda job: -job, 10)
    yield made
    assert made.check_integrity() == []
    work.gate.release(100)
    assert made.stop(WAIT_S)


def finished(lane: WorkerLane[int, int], number: int) -> list[int]:
    """Wait for so many results."""
    results: list[int] = []

    def is_enough() -> bool:
        results.extend(lane.take_finished())
        return len(results) >= number

    with lane._changed:
        assert lane._changed.wait_for(is_enough, WAIT_S)
    return results


def test_jobs_are_done_in_order(lane: WorkerLane[int, int], work: Work) -> None:
    assert lane.take_finished() == []
    for job in (1, 2, 3):
        assert lane.submit(job, 1)
    work.gate.release(3)
    assert finished(lane, 3) == [2, 4, 6]


def test_beyond_the_weight_a_job_fails_at_once(lane: WorkerLane[int, int], work: Work) -> None:
    assert lane.submit(1, 9)
    assert work.began.acquire(timeout=WAIT_S)
    assert not lane.submit(5, 2)  # the one that runs weighs too: it pins the same memory
    assert lane.submit(2, 1)
    assert not lane.submit(3, 1)
    assert lane.take_finished() == [-5, -3]
    work.gate.release(2)
    assert finished(lane, 2) == [2, 4]
    assert lane.submit(4, 10)
    work.gate.release()
    assert finished(lane, 1) == [8]


def test_a_job_heavier_than_the_lane_goes_alone(lane: WorkerLane[int, int], work: Work) -> None:
    assert lane.submit(1, 1000)
    assert not lane.submit(2, 1)
    work.gate.release()
    assert sorted(finished(lane, 2)) == [-2, 2]


def test_broken_work_is_a_failed_job_and_the_lane_goes_on(
    lane: WorkerLane[int, int], work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    work.is_broken = True
    assert lane.submit(1, 1)
    work.gate.release()
    assert finished(lane, 1) == [-1]
    assert "the work itself is wrong" in caplog.text
    work.is_broken = False
    assert lane.submit(2, 1)
    work.gate.release()
    assert finished(lane, 1) == [4]


@pytest.mark.parametrize("ending", ["drain", "stop"])
def test_ending_fails_what_waits_and_waits_for_what_runs(
    lane: WorkerLane[int, int], work: Work, ending: str
) -> None:
    for job in (1, 2, 3):
        assert lane.submit(job, 1)
    assert work.began.acquire(timeout=WAIT_S)
    end: Callable[[], object] = lane.drain if ending == "drain" else (lambda: lane.stop(WAIT_S))
    ended = threading.Thread(target=end)
    with lane._changed:  # it begins when somebody waits for what it fails
        ended.start()
        assert finished(lane, 2) == [-2, -3]  # before the running one ended
    assert ended.is_alive()
    work.gate.release()
    ended.join(WAIT_S)
    assert not ended.is_alive()
    assert lane.take_finished() == [2]
    assert lane.submit(4, 1) is (ending == "drain")
    if ending == "drain":
        work.gate.release()
        assert finished(lane, 1) == [8]
    else:
        assert lane.take_finished() == [-4]


def test_a_stuck_job_is_told_instead_of_waited_for(lane: WorkerLane[int, int], work: Work) -> None:
    assert lane.submit(1, 1)
    assert work.began.acquire(timeout=WAIT_S)
    assert not lane.stop(0.01)
