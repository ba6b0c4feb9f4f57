"""The guard: nothing leaves it but answers, every loss has a cause, and the log tells the weather, not the
rain.
"""

import logging

import pytest

from kvtier.clients import NotFound, Unavailable
from kvtier.clients.connector.breaker import Breaker
from kvtier.clients.connector.guard import BREAKER_OPEN, LOG_PERIOD_S, PLUGIN_BUG, Defects, Guard, harmless
from kvtier.testing import FakeAppliance


def test_answers_pass_and_errors_become_none() -> None:
    guard = Guard("test")
    assert guard.ask("six", lambda: 6) == 6
    assert guard.ask("find", lambda: _raise(NotFound("no", reason="LEASE_EXPIRED"))) is None
    assert guard.ask("bug", lambda: _raise(ZeroDivisionError("ours"))) is None
    assert guard.causes == {"LEASE_EXPIRED": 1, PLUGIN_BUG: 1}
    assert guard.take_causes() == {"LEASE_EXPIRED": 1, PLUGIN_BUG: 1}
    assert guard.take_causes() == {}


def test_a_dead_appliance_is_not_asked_again_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    guard = Guard("test", Breaker(pause_s=1.0, clock=lambda: now_s))
    appliance = FakeAppliance()
    appliance.unavailable = True
    with appliance.client() as client, caplog.at_level(logging.INFO):
        assert [guard.ask("info", lambda: client.info) for _ in range(50)] == [None] * 50
        assert guard.causes == {"NOT_RUNNING": 1, BREAKER_OPEN: 49}
        appliance.unavailable = False
        now_s = 1.0
        assert guard.ask("info", lambda: client.info)
        assert guard.ask("info", lambda: client.info)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "going on without kvtier" in caplog.records[0].message
    assert "answers again" in caplog.records[1].message


def test_what_is_held_is_given_back_also_to_a_dead_appliance(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard("test", Breaker(max_failures=1))
    guard.ask("find", lambda: _raise(Unavailable("dead", reason="NOT_RUNNING")))
    assert guard.breaker.is_open
    closed: list[str] = []
    guard.give_back("close", lambda: closed.append("socket"))
    guard.give_back("close", lambda: _raise(Unavailable("dead", reason="NOT_RUNNING")))
    assert closed == ["socket"]
    assert guard.take_causes() == {"NOT_RUNNING": 1}, "nothing was lost"
    guard.give_back("close", lambda: _raise(ZeroDivisionError("ours")))
    assert guard.take_causes() == {PLUGIN_BUG: 1}


def test_interrupts_are_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        Guard("test").ask("stop", lambda: _raise(KeyboardInterrupt()))


def test_a_broken_plugin_opens_the_breaker_too() -> None:
    guard = Guard("test", Breaker(max_failures=3))
    for _ in range(3):
        guard.ask("bug", lambda: _raise(TypeError("ours")))
    assert guard.ask("fine", lambda: 1) is None
    guard = Guard("test", Breaker(max_failures=3))
    guard.ask("gone", lambda: _raise(Unavailable("gone", reason="CONNECTION_LOST")))
    assert guard.breaker.is_open


class _Plugin:
    """Something with hooks."""

    def __init__(self, guard: Guard | Defects) -> None:
        self.guard = guard

    @harmless(lambda number, *_: -number)
    def hook(self, number: int) -> int:
        return 10 // (number - 1)


def test_a_hook_returns_its_default_instead_of_raising(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    guard = Guard("test", clock=lambda: now_s)
    plugin = _Plugin(guard)
    assert plugin.hook(3) == 5
    assert [plugin.hook(1) for _ in range(4)] == [-1] * 4
    assert guard.causes == {PLUGIN_BUG: 4}
    assert [record.message for record in caplog.records] == ["hook failed; going on as if kvtier had nothing"]
    now_s = LOG_PERIOD_S
    plugin.hook(1)
    assert len(caplog.records) == 2


def test_defects_alone_are_enough_for_hooks(caplog: pytest.LogCaptureFixture) -> None:
    """A plug-in that counts in its own way, and whose threads have breakers of their own."""
    counted: list[None] = []
    plugin = _Plugin(Defects(logging.getLogger("test"), lambda: counted.append(None)))
    assert [plugin.hook(1) for _ in range(3)] == [-1] * 3
    assert (len(counted), len(caplog.records)) == (3, 1)


def _raise(problem: BaseException) -> None:
    raise problem
