"""Links that end in a FakeServer: what Client and AsyncClient talk over in place of a socket."""

import itertools
from collections import deque
from typing import Any

from ..errors import CONNECTION_LOST, KvtierError, Unavailable
from ..operations.base import ClientSettings
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
        """Answer a call at once; return its ticket."""
        self._check()
        ticket = next(self._tickets)
        try:
            self._answers[ticket] = deque(self._server.handle(self.attachment, call, request))
        except KvtierError as problem:
            self._answers[ticket] = deque([problem])
        return ticket

    def receive(self, ticket: int) -> Answer:
        """Return the next answer of a call. Raises KvtierError."""
        self._check()
        answer = self._answers[ticket].popleft()
        if isinstance(answer, KvtierError):
            raise answer
        return answer

    def post(self, call: str, request: Any, is_hint: bool) -> None:
        """Make a call and drop its answer."""
        self.forget(self.send(call, request, 0.0))

    def forget(self, ticket: int) -> None:
        """Drop the answers of a call."""
        self._answers.pop(ticket, None)

    def close(self) -> None:
        """Give back what the client holds. Idempotent."""
        if not self.closed:
            self.closed = True
            self._server.detach(self.attachment.client_id)

    def abandon(self) -> None:
        """Count as closed, and give nothing back."""
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

    async def attach(self, settings: ClientSettings) -> None:
        """Nothing to do: attached when made."""

    async def receive(self, ticket: int) -> Answer:  # type: ignore[override]
        """Return the next answer of a call. Raises KvtierError."""
        return super().receive(ticket)

    async def close(self) -> None:  # type: ignore[override]
        """Give back what the client holds. Idempotent."""
        super().close()
