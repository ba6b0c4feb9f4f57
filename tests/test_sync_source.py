"""The blocking client is made from the asynchronous one: what the generator changes, and what it leaves."""

import inspect

import pytest

from kvtier.clients import aio, sync

from .sync_source import blocking, sync_modules

SOURCE = '''"""AsyncThing: ends with its `async with`; use `await thing.wait()`."""

from collections.abc import AsyncIterator


class AsyncThing(AsyncBase):
    def __init__(self, client: "AsyncClient") -> None:
        self.asynchronous = client  # await nothing here

    async def __aiter__(self) -> AsyncIterator[int]:
        async for one in self._client.each(
            repeat=False,
        ):
            yield await one

    async def __aenter__(self) -> "AsyncThing":
        return self
'''
BLOCKING = '''"""Thing: ends with its `with`; use `thing.wait()`."""

from collections.abc import Iterator


class Thing(Base):
    def __init__(self, client: "Client") -> None:
        self.asynchronous = client  # await nothing here

    def __iter__(self) -> Iterator[int]:
        for one in self._client.each(
            repeat=False,
        ):
            yield one

    def __enter__(self) -> "Thing":
        return self
'''


def test_what_only_an_event_loop_needs_is_dropped() -> None:
    assert blocking(SOURCE) == BLOCKING


def test_a_blocking_module_stays_as_it_is() -> None:
    assert blocking(BLOCKING) == BLOCKING


def test_every_module_that_is_generated_says_so() -> None:
    for path, content in sync_modules():
        assert content.decode().startswith(f"# Generated from clients/aio/{path.name} ")


@pytest.mark.parametrize("name", sorted(aio.__all__))
def test_both_faces_have_the_same_calls_with_documentation(name: str) -> None:
    asynchronous, twin = getattr(aio, name), getattr(sync, name.removeprefix("Async"))
    calls = [call for call in vars(asynchronous) if not call.startswith("_")]
    assert calls == [call for call in vars(twin) if not call.startswith("_")]
    for call in calls:
        documented = inspect.getdoc(getattr(asynchronous, call))
        assert documented
        assert inspect.getdoc(getattr(twin, call)) == documented.replace("Async", "")
        if inspect.isfunction(vars(twin)[call]):
            ours, theirs = (inspect.signature(vars(kind)[call]) for kind in (asynchronous, twin))
            assert list(ours.parameters.values()) == list(theirs.parameters.values())
