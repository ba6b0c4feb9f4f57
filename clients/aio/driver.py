"""AsyncDriver: performs the operations of AsyncClient on an event loop.

Any number of tasks may share one client; their calls overlap on one connection. A cancelled get leaves its
target undefined and copies nothing afterwards; a cancelled put copies nothing more from the caller's memory.
Copies of THREAD_BYTES and more run in a thread, so that the loop goes on.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self, TypeVar

from ..errors import BROKEN_ANSWER, CONNECTION_LOST, InvalidRequest, KvtierError, Unavailable
from ..links.aio_link import AsyncLink, open_link
from ..links.forks import reset_after_fork
from ..operations.base import ClientSettings, Operations
from ..operations.effects import Attach, Effect, Forget, Operation, Post, Receive, Send, Work

T = TypeVar("T")
THREAD_BYTES = 1 << 20  # fewer are copied faster than a thread is woken


class AsyncDriver:
    """One connection, opened when it is needed, and the retry of calls on a new one."""

    @classmethod
    def over(cls, open_link: Callable[[], Awaitable[AsyncLink]], settings: ClientSettings) -> Self:
        """Make a client over another kind of link, e.g. FakeAppliance's."""
        client = cls.__new__(cls)
        client._set_up(settings, open_link)
        return client

    def _set_up(
        self, settings: ClientSettings, open_with: Callable[[], Awaitable[AsyncLink]] | None = None
    ) -> None:
        self.operations = Operations(settings)
        self._open_link = open_with or partial(open_link, settings)
        self._link: AsyncLink | None = None
        self._connecting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        reset_after_fork(self)

    def forget_connection(self) -> None:
        """Forget the connection: in a child that was forked it is the parent's (forks.py)."""
        link, self._link, self._loop = self._link, None, None
        self._connecting = asyncio.Lock()
        self.operations = Operations(self.operations.settings)
        if link is not None:
            link.abandon()

    async def run(self, make: Callable[[], Operation[T]], *, repeat: bool = True) -> T:
        """Perform an operation; once more on a new connection when the old one turned out dead."""
        attempt = 0
        while True:
            attempt += 1
            used: list[AsyncLink] = []
            try:
                return await self._drive(make(), used)
            except KvtierError as problem:
                is_repeated = repeat and self.operations.should_repeat(problem, attempt)
                if is_repeated or problem.reason == BROKEN_ANSWER:
                    await self._leave(used)
                if not is_repeated:
                    raise

    async def _disconnect(self) -> None:
        """Report what was read one-sidedly, then close the connection, if there is one."""
        with contextlib.suppress(KvtierError):
            await self._drive(self.operations.leave())
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def _leave(self, used: list[AsyncLink]) -> None:
        """Close the connection of an operation that failed; not one that another task has made since."""
        for link in used:
            if link is self._link:
                self._link = None
            await link.close()

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect anew on another event loop, once that of the connection has ended."""
        if self._loop is not None:
            if not self._loop.is_closed():
                raise InvalidRequest("this client is used on another event loop; make one for each loop")
            self.forget_connection()
        self._loop = loop

    async def _drive(self, operation: Operation[T], used: list[AsyncLink] | None = None) -> T:
        link: AsyncLink | None = None  # the one this operation started on; never changed under it
        try:
            effect = next(operation)
            while True:
                try:
                    if type(effect) is Attach:
                        link = await self._attached(effect.connect)
                        if used is not None:
                            used[:] = [link] if link else []
                        result: Any = link.attachment if link else None
                    else:
                        result = await _perform(effect, link)
                except BaseException as problem:
                    effect = operation.throw(problem)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    async def _attached(self, connect: bool) -> AsyncLink | None:
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._move_to(loop)
        if connect and (self._link is None or self._link.closed):
            async with self._connecting:
                if self._link is None or self._link.closed:
                    self._link = await self._open_link()
        return self._link if self._link and not self._link.closed else None


async def _perform(effect: Effect, link: AsyncLink | None) -> Any:
    if type(effect) is Work:
        return await _work(effect)
    if link is None or link.closed:
        raise Unavailable("the connection was lost during the call", reason=CONNECTION_LOST)
    if type(effect) is Send:
        return link.send(effect.call, effect.request, effect.timeout_s)
    if type(effect) is Receive:
        return await link.receive(effect.ticket)
    if type(effect) is Post:
        return link.post(effect.call, effect.request, effect.is_hint)
    assert type(effect) is Forget
    return link.forget(effect.ticket)


async def _work(effect: Work) -> Any:
    """Run it; in a thread when it moves much. Even when cancelled, return only after it has ended:
    nothing may be copied after the caller was told that the call is over."""
    if effect.num_bytes < THREAD_BYTES:
        return effect.function()
    running = asyncio.get_running_loop().run_in_executor(None, effect.function)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
