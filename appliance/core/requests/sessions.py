"""Sessions: which blocks each holds, and how soon they are needed.

A session holds blocks by handle, so that a forgotten block leaves no dangling reference and needs no
search. Decoding is the one urgency that is a promise: while it lasts, the blocks of the session are
kept (invariant 4). Every other urgency is a hint for the policies.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ....policies.base import SessionChange
from ....tiers.block import Urgency
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..shares import Shares

NO_CLIENT = 0  # numbers of clients start at 1
MIN_TIDY = 1024
NUM_REVIEWED = 4  # sessions, for each new one: more than one, so that ended ones do not gather
SILENT_S = 60.0  # a session that spoke since then may be about to store its next blocks


@dataclass(slots=True)
class SessionEntry:
    """One conversation or agent run."""

    id: str
    number: int  # what the policies know it by, from 1; never used again in one life of the planner
    client: int
    urgency: Urgency = Urgency.QUEUED
    deadline_at: float = float("inf")
    last_active: float = 0.0
    num_turns: int = 0
    #: Handles of the blocks it used, in order. A dict is used as an ordered set.
    blocks: dict[int, None] = field(default_factory=dict)
    #: Rows it protects while it is decoding.
    kept_rows: list[int] = field(default_factory=list)
    #: With so many blocks those that are forgotten meanwhile are looked for.
    tidy_at: int = MIN_TIDY
    tenant: str = ""
    order: "OrderedDict[str, SessionEntry]" = field(default_factory=OrderedDict)  # of its tenant's sessions


class Sessions:
    """All sessions. Bounded: the longest idle one of the same tenant is forgotten, not its blocks.

    The inner name of a tenant's session begins with the tenant and a tab (security/callers.py).
    """

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency

        self._sessions: dict[str, SessionEntry] = {}
        #: By tenant, longest silent first. A plain dict finds its first entry behind the holes of what moved.
        self._orders: dict[str, OrderedDict[str, SessionEntry]] = {}
        self._shares = Shares(core.options.max_sessions, core.options.num_tenants)
        self._to_review: deque[SessionEntry] = deque()
        self._next_number = 1
        self._idle_until = 0.0  # sessions that were active last before this are idle already

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[SessionEntry]:
        return iter(self._sessions.values())

    def by_activity(self) -> Iterator[SessionEntry]:
        """Iterate over the sessions, the most recently active first."""
        orders = [reversed(order.values()) for order in self._orders.values()]
        return heapq.merge(*orders, key=lambda session: -session.last_active)

    def get(self, session_id: str) -> SessionEntry | None:
        """Return a session, None when it is unknown."""
        return self._sessions.get(session_id)

    def open(self, session_id: str, client: int) -> SessionEntry:
        """Return the session, created if need be, and note that it is active.

        It belongs to the client that opened it until that one is gone or another one claims it with an
        urgency of its own (`claim`): using a session's blocks is no reason to inherit its promises.
        """
        session = self._sessions.get(session_id)
        if session is None:
            session = self._add(session_id, client)
            self._core.story.tell(self._core.now, session_id, "session_opened")
        if session.client == NO_CLIENT:
            session.client = client
        session.last_active = self._core.now
        session.order.move_to_end(session_id)  # most recently active last
        return session

    def claim(self, session_id: str, client: int) -> SessionEntry:
        """Return the session, which belongs to `client` from now on."""
        session = self.open(session_id, client)
        session.client = client
        return session

    def update(
        self,
        session: SessionEntry,
        urgency: Urgency,
        deadline_at: float,
        back_at: float = float("inf"),
        num_decoded_tokens: int = 0,
    ) -> None:
        """Change how soon a session needs its blocks; `back_at`: it said when it will need them again."""
        core = self._core
        session.deadline_at = deadline_at
        if back_at < float("inf"):
            back_in = f"{round(back_at - core.now, 1):g} s"
            core.story.tell(core.now, session.id, "session_back_in", back_in)
        if urgency != session.urgency or back_at < float("inf") or num_decoded_tokens:
            change = SessionChange(core.now, session.number, urgency, back_at, num_decoded_tokens)
            core.listeners.session_changed(change)
        if urgency == session.urgency:
            return
        core.story.tell(core.now, session.id, "session_urgency", urgency.name.lower())
        was_decoding = session.urgency is Urgency.DECODING
        session.urgency = urgency
        rows, urgencies = self.rows(session), core.catalog.urgency
        for row in rows:
            urgencies[row] = urgency
        if urgency is Urgency.DECODING:
            for row in rows:
                core.transitions.keep(row)
            session.kept_rows += rows
        if was_decoding:
            self._unkeep(session)

    def attach(self, session: SessionEntry, rows: list[int]) -> None:
        """Note that a session uses these blocks."""
        serial = self._core.catalog.serial
        if session.urgency is not Urgency.DECODING:
            handles = dict.fromkeys([serial[row] << 32 | row for row in rows])
            if session.blocks:
                session.blocks.update(handles)
            else:
                session.blocks = handles
        else:
            for row in rows:
                handle = self._core.catalog.handle(row)
                if handle not in session.blocks:
                    session.blocks[handle] = None
                    self._core.transitions.keep(row)
                    session.kept_rows.append(row)
        if len(session.blocks) >= session.tidy_at:  # an agent may go on for days, its blocks come and go
            session.tidy_at = max(MIN_TIDY, 2 * len(self.rows(session)))

    def fork(self, session: SessionEntry, new_id: str, client: int) -> int:
        """A new session holds the blocks of another one. Returns how many there are."""
        rows = self.rows(session)
        fork = self.open(new_id, client)
        self.attach(fork, rows)
        return len(rows)

    def end(self, session: SessionEntry) -> list[int]:
        """Forget a session; returns the rows it held."""
        self.update(session, Urgency.ENDED, float("inf"))
        rows = self.rows(session)
        self._remove(session)
        self._core.story.tell(self._core.now, session.id, "session_ended")
        return rows

    def rows(self, session: SessionEntry) -> list[int]:
        """Return the rows of the session's blocks that still exist; forgets the others."""
        serial = self._core.catalog.serial
        # Catalog.row_of for each: long prompts have many. A row that was freed has another serial since then.
        rows = [h & 0xFFFF_FFFF for h in session.blocks if serial[h & 0xFFFF_FFFF] == h >> 32]
        if len(rows) < len(session.blocks):
            session.blocks = dict.fromkeys([serial[row] << 32 | row for row in rows])
        return rows

    def client_gone(self, client: int) -> None:
        """The client of these sessions died: none of them is decoding any more."""
        for session in self._sessions.values():
            if session.client == client:
                session.client = NO_CLIENT
                self.update(session, Urgency.IDLE, float("inf"))

    def expire(self, now: float) -> None:
        """Turn a session idle that was silent too long.
        Looks at the longest silent ones only, and not before another one can be due: tens of thousands may be
        idle for days."""
        if now - self._idle_until < self._core.options.session_idle_s:
            return
        idle_until = now
        for order in self._orders.values():
            for session in order.values():
                if now - session.last_active < self._core.options.session_idle_s:
                    idle_until = min(idle_until, session.last_active)
                    break
                if session.urgency < Urgency.IDLE:
                    self.update(session, Urgency.IDLE, float("inf"))
                    return  # one a call: the rest at the next tick
        self._idle_until = idle_until

    def check_integrity(self) -> list[str]:
        """Audit: a decoding session keeps each of its living blocks, any other keeps none."""
        problems = []
        for session in self._sessions.values():
            expected = len(self.rows(session)) if session.urgency is Urgency.DECODING else 0
            if len(session.kept_rows) != expected:
                problems.append(f"session {session.id}: keeps {len(session.kept_rows)}, expected {expected}")
        return problems

    def _unkeep(self, session: SessionEntry) -> None:
        rows, session.kept_rows = session.kept_rows, []
        for row in rows:
            self._residency.unkeep(row)

    def _review(self) -> None:
        """Look at a few sessions in turn, and forget, where there are many, those that lost their last block.

        Policies are not told: there is nothing left to protect or to bring up, and what others share of their
        prompts stays as urgent as it is. Each session is looked at, for the longest silent ones may be about
        blocks that stay.
        """
        are_many = len(self._sessions) >= self._core.options.many_sessions
        silent_since = self._core.now - SILENT_S
        for _ in range(min(NUM_REVIEWED, len(self._to_review))):
            session = self._to_review.popleft()
            if self._sessions.get(session.id) is not session:
                continue  # it has ended
            if are_many and session.last_active <= silent_since and self._is_spent(session):
                self._remove(session)
            else:
                self._to_review.append(session)

    def _is_spent(self, session: SessionEntry) -> bool:
        last = next(reversed(session.blocks), None)
        if session.urgency is Urgency.DECODING:
            return False
        return last is None or self._core.catalog.row_of(last) < 0

    def _remove(self, session: SessionEntry) -> None:
        del self._sessions[session.id]
        del session.order[session.id]
        self._shares.give(session.tenant, 1)

    def _add(self, session_id: str, client: int) -> SessionEntry:
        """Add a session, after forgetting one if its tenant's share is used up."""
        tenant, tab, _ = session_id.partition("\t")
        session = SessionEntry(session_id, self._next_number, client, tenant=tenant if tab else "")
        self._next_number += 1
        session.order = order = self._orders.setdefault(session.tenant, OrderedDict())
        options = self._core.options
        self._shares.resize(options.max_sessions, options.num_tenants)
        if not self._shares.may_take(session.tenant, 1):
            self._forget_one(order or max(self._orders.values(), key=len))
        self._review()
        self._to_review.append(session)
        self._shares.add(session.tenant, 1)
        self._sessions[session_id] = order[session_id] = session
        return session

    def _forget_one(self, order: OrderedDict[str, SessionEntry]) -> None:
        """End the longest silent of these sessions, one that is not decoding if there is any."""
        silent = next((s for s in order.values() if s.urgency is not Urgency.DECODING), None)
        self.end(silent or next(iter(order.values())))
