"""Drives AsyncClient from blocking code, so that one suite holds both clients to the same answers."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any


class Blocking:
    """Wraps an AsyncClient, or what one of its calls returned: coroutines are run to their end."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def _wrap(self, value: Any) -> Any:
        if inspect.isawaitable(value):
            value = self._runner.run(_awaited(value))
        if type(value).__name__.startswith("Async"):
            return Blocking(value, self._runner)
        return value

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if inspect.iscoroutine(value):  # an async property
            return self._wrap(value)
        if callable(value):
            return lambda *args, **kwargs: self._wrap(value(*args, **kwargs))
        return value

    def __enter__(self) -> Any:
        return self._wrap(self._target.__aenter__())

    def __exit__(self, *exc: Any) -> None:
        self._wrap(self._target.__aexit__(*exc))

    def __iter__(self) -> Iterator[Any]:
        async def collect() -> list[Any]:
            return [one async for one in self._target]

        return iter(self._runner.run(collect()))


async def _awaited(value: Any) -> Any:
    return await value
