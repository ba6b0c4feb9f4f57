"""Acquires and gets over gRPC: how the calls of a client are spread over its connections."""

from collections.abc import Callable

import pytest

from kvtier.clients.links import remote
from kvtier.v1.channels import MAX_CALLS


class Call:
    """One call, until `end`."""

    def add_done_callback(self, callback: Callable[["Call"], None]) -> None:
        self._callback = callback

    def end(self) -> None:
        self._callback(self)


class Stub:
    """One connection, and the calls that it was given."""

    def __init__(self, channel: object) -> None:
        self.calls: list[Call] = []
        self.Get = self._begin
        made.append(self)

    def _begin(self, request: object) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


made: list[Stub] = []


def test_calls_go_where_the_fewest_are_once_all_connections_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(remote, "KVCacheServiceStub", Stub)
    waiting = remote.WaitingCalls(object)
    for _ in range(remote.MAX_CONNECTIONS * MAX_CALLS + 4):
        waiting.begin("Get", None)
    assert [len(one.calls) for one in made] == [MAX_CALLS + 1] * remote.MAX_CONNECTIONS
    for call in made[1].calls[:5]:
        call.end()
    for _ in range(5):
        waiting.begin("Get", None)
    assert [len(one.calls) for one in made] == [MAX_CALLS + 1, MAX_CALLS + 6, MAX_CALLS + 1, MAX_CALLS + 1]


def test_a_connection_is_made_when_all_others_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    made.clear()
    monkeypatch.setattr(remote, "KVCacheServiceStub", Stub)
    waiting = remote.WaitingCalls(object)
    for number in range(3 * MAX_CALLS):
        waiting.begin("Get", None)
        assert len(made) == len(waiting.channels) == number // MAX_CALLS + 1
