"""Usage: what requests say about the blocks they read or put, for sessions, policies and the catalog."""

from collections.abc import Sequence
from dataclasses import replace

from ....policies.base import Use
from ....tiers.block import NO_SESSION, Urgency
from ..catalog.core_state import CoreState
from ..catalog.runs import touch_run
from ..events import AcquireRequested, RetentionHint
from .retention import RetentionHints
from .sessions import Sessions


class Usage:
    """Notes that blocks were used or stored."""

    def __init__(self, core: CoreState, sessions: Sessions, retention: RetentionHints) -> None:
        self._core = core
        self._sessions = sessions
        self._retention = retention

    def used(
        self,
        rows: list[int],
        client: int,
        session_id: str,
        urgency: Urgency | None,
        num_asked: int,
        deadline_at: float = float("inf"),
    ) -> Urgency:
        """Note that a request of `client` uses these blocks, in a session unless `session_id` is empty.
        Returns the urgency that applies: the session's, which `urgency` changes."""
        core = self._core
        session = self._sessions.open(session_id, client) if session_id else None
        if session is not None:
            if urgency is not None:
                self._sessions.update(session, urgency, session.deadline_at)
            self._sessions.attach(session, rows)
            urgency = session.urgency
        applies = urgency if urgency is not None else Urgency.QUEUED
        number = session.number if session is not None else 0
        core.listeners.used(rows, Use(core.now, number, num_asked, applies, deadline_at))
        touch_run(core, rows, NO_SESSION if session is None else session.urgency)
        core.story.count("blocks_used", len(rows))
        return applies

    def urgency_of(self, event: AcquireRequested) -> Urgency:
        """Return the urgency of an acquire that has not begun: what it says, or its session's."""
        if event.urgency is not None:
            return event.urgency
        session = self._sessions.get(event.session_id)
        return session.urgency if session is not None else Urgency.QUEUED

    def note_urgency(self, event: AcquireRequested) -> AcquireRequested:
        """Set the urgency of the session of an acquire that may have to wait; return the acquire without it.
        Set when its wait has ended, it would undo what the session was told meanwhile."""
        if not event.session_id or event.urgency is None:
            return event
        session = self._sessions.open(event.session_id, event.client)
        self._sessions.update(session, event.urgency, session.deadline_at)
        return replace(event, urgency=None)

    def stored(
        self, readable: list[int], new: Sequence[int], session_id: str, client: int, num_asked: int
    ) -> None:
        """Note that a put of `client` with `num_asked` blocks has ended.
        readable: those of its blocks that can be read; new: those that it brought."""
        core, session = self._core, None
        if session_id:
            session = self._sessions.open(session_id, client)
            self._sessions.attach(session, readable)
            for row in new:
                core.catalog.urgency[row] = session.urgency
        number, urgency = (session.number, session.urgency) if session else (0, Urgency.QUEUED)
        core.listeners.stored(new, Use(core.now, number, num_asked, urgency))

    def retain(self, rows: Sequence[int], hints: Sequence[RetentionHint]) -> None:
        """Give blocks of one chain the priorities that a request said."""
        self._retention.apply(rows, hints)

    def session_number(self, session_id: str) -> int:
        """Return what policies know a session by; 0: it is unknown."""
        session = self._sessions.get(session_id)
        return session.number if session is not None else 0
