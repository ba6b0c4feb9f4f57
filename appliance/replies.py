"""Queues of the answers of a call that has several, between the planner or the GPU and the transport.

A queue of its own instead of asyncio.Queue: most of what is answered is there when the call returns, and is
taken without waiting, a task or a future.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

from .core.results import AcquireResult, Refusal, Result
from .errors import ApplianceError, from_refusal

T = TypeVar("T")
#: An answer that is known when the call returns, as nearly all are, or a future of it.
NowOrLater: TypeAlias = T | asyncio.Future[T]


class AnswerQueue(Generic[T]):
    """The answers to a call that has several: iterate, or `take` what is already there."""

    def __init__(self) -> None:
        self.ended = False  # nothing will be added
        self._ready: deque[T | ApplianceError] = deque()
        self._arrived = asyncio.Event()

    def add(self, answer: T | ApplianceError, *, is_last: bool) -> None:
        """Add an answer, or the error with which the call ends."""
        self._ready.append(answer)
        self.ended = is_last
        self._arrived.set()

    def take(self) -> list[T]:
        """Return the answers that are there. Raises the refusal when that is the first of them."""
        answers: list[T] = []
        while self._ready:
            if answers and isinstance(self._ready[0], ApplianceError):
                break
            answers.append(self._next())
        return answers

    @property
    def is_last(self) -> bool:
        """Whether the answer taken just now was the last one."""
        return self.ended and not self._ready

    def raise_first(self) -> None:
        """Raise the refusal when the call was refused at once."""
        if self._ready and isinstance(self._ready[0], ApplianceError):
            raise self._ready[0]

    def __aiter__(self) -> "AnswerQueue[T]":
        return self

    async def __anext__(self) -> T:
        while not self._ready:
            if self.ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._next()

    def _next(self) -> T:
        answer = self._ready.popleft()
        if isinstance(answer, ApplianceError):
            raise answer
        return answer


class Replies(AnswerQueue[T]):
    """The planner's answers to one call.

    Each is converted when it comes: what it names (a slot, a generation) is certain only then.
    """

    def __init__(self, call: int, convert: Callable[[AcquireResult], T]) -> None:
        super().__init__()
        self.call = call
        self._convert = convert

    def push(self, result: Result) -> None:
        """Add one result. A refusal, or one marked `last`, is the last."""
        if isinstance(result, AcquireResult):
            self.add(self._convert(result), is_last=result.last)
        else:
            assert isinstance(result, Refusal)
            self.add(from_refusal(result), is_last=True)
