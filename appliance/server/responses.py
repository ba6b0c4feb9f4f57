"""`respond`: from an answer of the planner, known now or later, to the response of a call."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ..core.results import Refusal, Result
from ..errors import from_refusal
from ..replies import NowOrLater

R = TypeVar("R")
T = TypeVar("T")


def respond(answer: NowOrLater[Result], kind: type[T], to_response: Callable[[T], R]) -> NowOrLater[R]:
    """Return the response to an answer of the planner, or a future of it where the answer is one.

    `kind` is the class of the answer that `to_response` takes; a refusal is raised as ApplianceError, now or
    by the future.
    """

    def convert(result: Result) -> R:
        if isinstance(result, Refusal):
            raise from_refusal(result)
        assert isinstance(result, kind)
        return to_response(result)

    if not isinstance(answer, asyncio.Future):
        return convert(answer)
    later: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def arrived(future: "asyncio.Future[Result]") -> None:
        if later.done():  # its caller is gone
            return
        try:
            later.set_result(convert(future.result()))
        except Exception as problem:
            later.set_exception(problem)

    answer.add_done_callback(arrived)
    return later
