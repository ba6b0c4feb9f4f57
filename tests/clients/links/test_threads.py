"""Threads that share one blocking client: which of them calls next."""

import threading
import time
from collections.abc import Callable
from typing import Any

from kvtier.clients import Client
from kvtier.clients.operations.base import ClientSettings
from kvtier.clients.operations.effects import Operation, Work


def test_a_thread_that_waits_calls_before_one_that_calls_again() -> None:
    """Before: the thread that had just called mostly had the lock again before the other one woke up."""
    client = Client.over(lambda: None, ClientSettings("unix:///nowhere"))  # type: ignore[arg-type,return-value]
    order: list[str] = []
    is_calling, may_end = threading.Event(), threading.Event()

    def call(name: str) -> None:
        def operation() -> Operation[Any]:
            order.append(name)
            is_calling.set()
            yield Work(may_end.wait, 0)

        client.run(operation)

    def call_twice() -> None:
        call("first")
        call("again")

    twice = threading.Thread(target=call_twice)
    twice.start()
    assert is_calling.wait(5.0)
    waits = threading.Thread(target=call, args=("waits",))
    waits.start()
    until = time.monotonic() + 5.0
    while not client._next.locked() and time.monotonic() < until:
        pass
    may_end.set()
    twice.join(5.0)
    waits.join(5.0)
    assert order == ["first", "waits", "again"]


def test_a_call_inside_of_a_call_waits_for_no_thread() -> None:
    """As a signal handler of the thread that calls makes it, while another thread waits for its turn."""
    client = Client.over(lambda: None, ClientSettings("unix:///nowhere"))  # type: ignore[arg-type,return-value]
    order: list[str] = []

    def operation(name: str, work: Callable[[], object]) -> Operation[Any]:
        order.append(name)
        yield Work(work, 0)

    def handler() -> None:
        waits.start()
        until = time.monotonic() + 5.0
        while not client._next.locked() and time.monotonic() < until:
            pass
        client.run(lambda: operation("inside", lambda: None))

    waits = threading.Thread(target=lambda: client.run(lambda: operation("waits", lambda: None)))
    outside = threading.Thread(target=lambda: client.run(lambda: operation("outside", handler)))
    outside.start()
    outside.join(10.0)
    waits.join(10.0)
    assert order == ["outside", "inside", "waits"]
