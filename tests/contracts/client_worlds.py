"""Everything a Client can stand before, under one face: the fake, the fake behind real gRPC, the daemon.

A new implementation is one more entry of WORLDS.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest

from kvtier.clients import AsyncClient, Client
from kvtier.testing import FakeAppliance

from ..clients.links.bridge import grpc_bridge
from ..daemon import Daemon
from .blocking import Blocking

CAPACITY_BYTES = 8 << 20


class World(NamedTuple):
    """`client(**settings)` returns a new, blocking client of the implementation under test."""

    name: str
    client: Callable[..., Any]
    capacity_bytes: int


MakeWorld = Callable[[pytest.FixtureRequest], AbstractContextManager[World]]


def _face(kind: str, stack: ExitStack, target: str, **fixed: Any) -> Callable[..., Any]:
    """Return a maker of clients of `target`, sync or async behind Blocking."""
    if kind == "sync":
        return lambda **settings: stack.enter_context(Client(target, **fixed, **settings))
    runner = stack.enter_context(asyncio.Runner())
    return lambda **settings: _entered(stack, Blocking(AsyncClient(target, **fixed, **settings), runner))


def _entered(stack: ExitStack, client: Blocking) -> Any:
    stack.push(client.__exit__)
    return client


def _fake(kind: str) -> MakeWorld:
    @contextmanager
    def make(_: pytest.FixtureRequest) -> Iterator[World]:
        appliance = FakeAppliance(CAPACITY_BYTES)
        with ExitStack() as stack:
            if kind == "sync":
                yield World(
                    "fake-sync", lambda **s: stack.enter_context(appliance.client(**s)), CAPACITY_BYTES
                )
            else:
                runner = stack.enter_context(asyncio.Runner())

                def client(**settings: Any) -> Any:
                    return _entered(stack, Blocking(appliance.async_client(**settings), runner))

                yield World("fake-async", client, CAPACITY_BYTES)
        assert appliance.check_integrity() == []

    return make


def _bridge(kind: str) -> MakeWorld:
    @contextmanager
    def make(_: pytest.FixtureRequest) -> Iterator[World]:
        appliance = FakeAppliance(CAPACITY_BYTES)
        with grpc_bridge(appliance) as target, ExitStack() as stack:
            yield World(f"grpc-{kind}", _face(kind, stack, target), CAPACITY_BYTES)
        assert appliance.check_integrity() == []

    return make


def _daemon(kind: str, fixture: str = "shared_daemon", **fixed: Any) -> MakeWorld:
    @contextmanager
    def make(request: pytest.FixtureRequest) -> Iterator[World]:
        daemon: Daemon = request.getfixturevalue(fixture)
        capacity_bytes = (24 if fixture == "two_memories" else 16) << 20
        with ExitStack() as stack:
            yield World(f"daemon-{kind}", _face(kind, stack, daemon.target, **fixed), capacity_bytes)

    return make


WORLDS: dict[str, MakeWorld] = {
    "fake-sync": _fake("sync"),
    "fake-async": _fake("async"),
    "grpc-sync": _bridge("sync"),
    "grpc-async": _bridge("async"),
    "daemon-local-sync": _daemon("sync", shared_memory=True),
    "daemon-local-async": _daemon("async", shared_memory=True),
    "daemon-grpc-sync": _daemon("sync", shared_memory=False),
    "daemon-grpc-async": _daemon("async", shared_memory=False),
    "two-memories-local-sync": _daemon("sync", "two_memories", shared_memory=True),
    "two-memories-local-async": _daemon("async", "two_memories", shared_memory=True),
    "two-memories-grpc-sync": _daemon("sync", "two_memories", shared_memory=False),
}
