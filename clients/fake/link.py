"""Links that end in a FakeServer: what Client and AsyncClient talk over in place of a socket."""

import itertools
from collections import deque
from typing import Any

from ..errors import CONNECTION_LOST, KvtierError, Unavailable
from ..operations.base import Settings
from ..operations.effects import Answer
from .server import FakeServer


class FakeLink:
    """A connection that answers at once. Implements Link."""

    def __init__(self, server: FakeServer) -> None:
        self.closed = False
        self._server = server
        self._tickets = itertools.count(1)
        self._answers: dict[int, deque[Answer | KvtierError]] = {}
        self.attachment = server.attach()
        self._is_lost = False

    def send(self, call: str, request: Any, timeout_s: float) -> int:
        self._check()
        ticket = next(self._tickets)
        try:
            self._answers[ticket] = deque(self._server.handle(self.attachment, call, request))
        except KvtierError as problem:
            self._answers[ticket] = deque([problem])
        return ticket

    def receive(self, ticket: int) -> Answer:
        self._check()
        answer = self._answers[ticket].popleft()
        if isinstance(answer, KvtierError):
            raise answer
        return answer

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        self.forget(self.send(call, request, 0.0))

    def forget(self, ticket: int) -> None:
        self._answers.pop(ticket, None)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._server.detach(self.attachment.client_id)

    def abandon(self) -> None:
        self.closed = True

    def lose(self) -> None:
        """Break the connection from the other side; the client notices at its next call."""
        self._is_lost = True
        self._server.detach(self.attachment.client_id)

    def _check(self) -> None:
        if self._is_lost:
            self.closed = True
            raise Unavailable("the fake appliance went away", reason=CONNECTION_LOST)


class AsyncFakeLink(FakeLink):
    """The same for AsyncClient. Implements AsyncLink."""

    async def attach(self, settings: Settings) -> None:
        """Nothing to do: attached when made."""

    async def receive(self, ticket: int) -> Answer:  # type: ignore[override]
        return super().receive(ticket)

    async def close(self) -> None:  # type: ignore[override]
        super().close()
