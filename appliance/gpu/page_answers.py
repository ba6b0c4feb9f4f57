"""Answers: what the daemon says, one after another, to one get into a runtime's pages."""

import asyncio
from collections import deque

from ...v1 import direct_pb2
from ..errors import ApplianceError


class Answers:
    """The answers of one delivery, as the local channel streams them."""

    def __init__(self) -> None:
        self._ready: deque[direct_pb2.GetPagesResponse | ApplianceError] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False

    def push(self, answer: direct_pb2.GetPagesResponse | ApplianceError) -> None:
        """Add an answer; an error, or one marked `last`, is the last."""
        self._ready.append(answer)
        self._has_ended = isinstance(answer, ApplianceError) or answer.last
        self._arrived.set()

    @property
    def is_last(self) -> bool:
        """Whether the answer taken just now was the last one."""
        return self._has_ended and not self._ready

    def __aiter__(self) -> "Answers":
        return self

    async def __anext__(self) -> direct_pb2.GetPagesResponse:
        while not self._ready:
            if self._has_ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        answer = self._ready.popleft()
        if isinstance(answer, ApplianceError):
            raise answer
        return answer
