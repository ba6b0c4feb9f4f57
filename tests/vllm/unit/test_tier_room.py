"""How long a request waits for room in vLLM's pool: a setting, and what computing would take."""

import pytest

from kvtier.clients.vllm_tier.room import RoomWait


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def waited_s(room: RoomWait, clock: Clock, request: str, num_tokens: int) -> float:
    began_s = clock.now_s
    while room.may_wait(request, num_tokens):
        clock.now_s += 0.25
    return clock.now_s - began_s


def compute(room: RoomWait, clock: Clock, num_tokens: int, took_s: float) -> None:
    room.step_ended()
    room.offered(num_tokens)
    clock.now_s += took_s
    room.step_ended()


def test_the_setting_is_the_limit_and_counts_once_for_a_request(clock: Clock) -> None:
    room = RoomWait(5.0, clock)
    assert waited_s(room, clock, "a", 1000) == 5.0
    assert waited_s(room, clock, "a", 1000) == 0.0
    assert waited_s(room, clock, "b", 1000) == 5.0
    room.forget("a")
    assert waited_s(room, clock, "a", 1000) == 5.0


def test_no_longer_than_computing_takes(clock: Clock) -> None:
    room = RoomWait(5.0, clock)
    compute(room, clock, 1000, 1.0)
    assert waited_s(room, clock, "short", 2000) == 2.0
    assert waited_s(room, clock, "long", 64_000) == 5.0


def test_the_speed_is_that_of_steps_that_compute(clock: Clock) -> None:
    room = RoomWait(5.0, clock)
    compute(room, clock, 1000, 1.0)
    clock.now_s += 60.0
    room.step_ended()  # nothing was computed
    assert room.tokens_per_s == 1000.0
    compute(room, clock, 10, 1.0)
    assert room.tokens_per_s == 800.0, "one small step says little"
    compute(room, clock, 4000, 1.0)
    assert room.tokens_per_s == 4000.0


def test_zero_never_waits(clock: Clock) -> None:
    assert waited_s(RoomWait(0.0, clock), clock, "a", 1000) == 0.0
