"""Sessions: which blocks each holds, and how soon they are needed.

A session holds blocks by handle, so that a forgotten block leaves no dangling reference and needs no
search. Decoding is the one urgency that is a promise: while it lasts, the blocks of the session are
kept (invariant 4). Every other urgency is a hint for the policies.

What a change means for many blocks or many sessions is done in steps of bounded size (`run`). Only that the
blocks of a decoding session are kept is done at once, for at most MAX_BLOCKS of them.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ....policies.base import SessionChange
from ....tiers.block import Urgency
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.runs import unkeep_run
from ..shares import Shares

NO_CLIENT = 0  # numbers of clients start at 1
MIN_TIDY = 1024
NUM_REVIEWED = 4  # sessions, for each new one: more than one, so that ended ones do not gather
#: Blocks that one session holds at most. Of more the newest three quarters stay: what they continue is kept
#: for having children, and what is no part of their chains was left behind.
MAX_BLOCKS = 16_384
#: Blocks looked at in one step, about a millisecond; more where so many wait that they would take up memory.
STEP_BLOCKS = 1024
MAX_STEPS_WAITING = 64
#: What a session costs in a step without its blocks, in blocks.
SESSION_COST = 16
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
    num_counted: int = 0  # blocks in its tenant's share
    #: Rows it protects: those of its blocks while it is decoding, afterwards those not let go of yet.
    kept_rows: list[int] = field(default_factory=list)
    #: With so many blocks those that are forgotten meanwhile are looked for.
    tidy_at: int = MIN_TIDY
    tenant: str = ""
    order: "OrderedDict[str, SessionEntry]" = field(default_factory=OrderedDict)  # that it is in


class Sessions:
    """All sessions, bounded in number and in blocks.

    Beyond a bound the longest silent one of the same tenant is forgotten, one that is decoding last. Its
    blocks stay.

    The inner name of a tenant's session begins with the tenant and a tab (security/callers.py).
    """

    def __init__(self, core: CoreState, residency: Residency) -> None:
        self._core = core
        self._residency = residency

        self._sessions: dict[str, SessionEntry] = {}
        #: By tenant and whether they are decoding, longest silent first; one that ceased to be decoding for
        #: its silence is last. A plain dict finds its first entry behind the holes of what moved.
        self._orders: dict[tuple[str, bool], OrderedDict[str, SessionEntry]] = {}
        self._of_client: dict[int, dict[int, SessionEntry]] = {}  # by number
        self._shares = Shares(core.options.max_sessions, core.options.num_tenants)
        self._blocks = Shares(core.options.max_session_blocks, core.options.num_tenants)
        # Left for later steps:
        self._crowded: dict[str, None] = {}  # tenants with more blocks in sessions than their share
        self._orphans: dict[int, dict[int, SessionEntry]] = {}  # by client that is gone
        #: By number: a session, and the handles of its blocks that its urgency was not noted for yet.
        self._changed: dict[int, tuple[SessionEntry, list[int]]] = {}
        self._released: dict[int, SessionEntry] = {}  # by number: no longer decoding, with kept rows
        self._num_left = 0  # handles and rows in these two
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
        if self._orphans:
            self._let_go(session)
        if session.client == NO_CLIENT:
            self._give(session, client)
        session.last_active = self._core.now
        session.order.move_to_end(session_id)  # most recently active last
        return session

    def claim(self, session_id: str, client: int) -> SessionEntry:
        """Return the session, which belongs to `client` from now on."""
        session = self.open(session_id, client)
        if session.client != client:
            self._take(session)
            self._give(session, client)
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
        self._note_urgency(session)
        if urgency is Urgency.DECODING:
            rows = self.rows(session)
            if self._released.pop(session.number, None) is not None:
                self._num_left -= len(session.kept_rows)
                still_kept = set(session.kept_rows)
                rows = [row for row in rows if row not in still_kept]
            core.transitions.keep_run(rows)
            session.kept_rows += rows
            self._enter_order(session)
        elif was_decoding:
            self._enter_order(session)
            if len(session.kept_rows) <= STEP_BLOCKS:
                self._unkeep(session, len(session.kept_rows))
            else:
                self._released[session.number] = session
                self._num_left += len(session.kept_rows)

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
            self._tidy(session)
        if len(session.blocks) != session.num_counted:
            self._count(session)

    def fork(self, session: SessionEntry, new_id: str, client: int) -> int:
        """A new session holds the blocks of another one. Returns how many there are."""
        rows = self.rows(session)
        fork = self.open(new_id, client)
        if fork.blocks or fork.urgency is Urgency.DECODING:
            self.attach(fork, rows)
        else:  # the same handles: a copy costs a hundredth
            fork.blocks, fork.tidy_at = session.blocks.copy(), session.tidy_at
            self._count(fork)
        return len(rows)

    def end(self, session: SessionEntry, num_decoded_tokens: int = 0) -> list[int]:
        """Forget a session; returns the rows it held."""
        self.update(session, Urgency.ENDED, float("inf"), num_decoded_tokens=num_decoded_tokens)
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
            self._count(session)
        return rows

    def client_gone(self, client: int) -> None:
        """The client of these sessions died: in the next steps each of them becomes idle."""
        orphans = self._of_client.pop(client, None)
        if orphans:
            self._orphans[client] = orphans

    @property
    def is_busy(self) -> bool:
        """Whether a step is left only because there was much to do: a Tick is due at once."""
        return bool(self._changed or self._released or self._orphans or self._crowded)

    def run(self) -> None:
        """Do one step of what was left for later."""
        if not self.is_busy:
            return
        left = max(STEP_BLOCKS, self._num_left // MAX_STEPS_WAITING)
        while left > 0 and self._released:
            session = next(iter(self._released.values()))
            num_done = self._unkeep(session, left)
            left, self._num_left = left - num_done, self._num_left - num_done
            if not session.kept_rows:
                del self._released[session.number]
        while left > 0 and self._orphans:
            session = next(iter(next(iter(self._orphans.values())).values()))
            left -= SESSION_COST + min(STEP_BLOCKS, len(session.blocks))
            self._let_go(session)
        while left > 0 and self._crowded:
            left -= SESSION_COST + self._make_less_crowded(next(iter(self._crowded)))
        while left > 0 and self._changed:
            session, handles = next(iter(self._changed.values()))
            part = handles[-left:]
            left, self._num_left = left - len(part), self._num_left - len(part)
            del handles[-len(part) :]
            self._set_urgency(part, session.urgency)
            if not handles:
                del self._changed[session.number]

    def expire(self, now: float) -> None:
        """Turn sessions idle that were silent too long, a step of them; the rest at the next tick.
        Looks at the longest silent ones only, and not before another one can be due: tens of thousands may be
        idle for days."""
        if now - self._idle_until < self._core.options.session_idle_s:
            return
        idle_until, silent = now, []
        for order in self._orders.values():
            for session in order.values():
                if now - session.last_active < self._core.options.session_idle_s:
                    idle_until = min(idle_until, session.last_active)
                    break
                if session.urgency < Urgency.IDLE:
                    silent.append(session)
        left = STEP_BLOCKS
        for session in silent:
            if left <= 0:
                return
            left -= SESSION_COST + min(STEP_BLOCKS, len(session.blocks))
            self.update(session, Urgency.IDLE, float("inf"))
        self._idle_until = idle_until

    def check_integrity(self) -> list[str]:
        """Audit: a decoding session keeps each of its living blocks, any other keeps none."""
        problems = []
        for session in self._sessions.values():
            expected = len(self.rows(session)) if session.urgency is Urgency.DECODING else 0
            if session.number not in self._released and len(session.kept_rows) != expected:
                problems.append(f"session {session.id}: keeps {len(session.kept_rows)}, expected {expected}")
            if session.order is not self._order_of(session) or session.id not in session.order:
                problems.append(f"session {session.id}: in a wrong order")
        for session in self._sessions.values():
            owned = (self._of_client, self._orphans)
            if session.client and not any(session.number in one.get(session.client, ()) for one in owned):
                problems.append(f"session {session.id}: not among those of client {session.client}")
        num_left = sum(len(handles) for _, handles in self._changed.values())
        num_left += sum(len(session.kept_rows) for session in self._released.values())
        if num_left != self._num_left:
            problems.append(f"sessions: {num_left} blocks are left for later steps, counted {self._num_left}")
        if self._blocks.taken != sum(len(session.blocks) for session in self._sessions.values()):
            problems.append(f"sessions: {self._blocks.taken} blocks are counted that they do not hold")
        return problems

    def _unkeep(self, session: SessionEntry, count: int) -> int:
        """Let go of the last `count` rows that a session protects. Returns how many there were."""
        rows = session.kept_rows[-count:] if count else []
        if rows:
            del session.kept_rows[-len(rows) :]
            unkeep_run(self._residency, rows)
        return len(rows)

    def _note_urgency(self, session: SessionEntry) -> None:
        """Note a session's urgency at its blocks: now, or in later steps where there are many."""
        _, handles = self._changed.pop(session.number, (session, []))
        self._num_left -= len(handles)
        if len(session.blocks) <= STEP_BLOCKS:
            self._set_urgency(session.blocks, session.urgency)
        else:
            self._changed[session.number] = session, list(session.blocks)
            self._num_left += len(session.blocks)

    def _set_urgency(self, handles: Iterable[int], urgency: Urgency) -> None:
        serial, urgencies = self._core.catalog.serial, self._core.catalog.urgency
        for handle in handles:
            row = handle & 0xFFFF_FFFF
            if serial[row] == handle >> 32:  # otherwise the block is forgotten
                urgencies[row] = urgency

    def _tidy(self, session: SessionEntry) -> None:
        """Forget which blocks a session held that are gone, and the oldest where it has too many."""
        rows = self.rows(session)
        num_kept = MAX_BLOCKS * 3 // 4
        if len(rows) > num_kept:
            rows = rows[-num_kept:]
            session.blocks = dict.fromkeys(islice(session.blocks, len(session.blocks) - len(rows), None))
            if session.kept_rows:
                newest = set(rows)
                old = [row for row in session.kept_rows if row not in newest]
                session.kept_rows = [row for row in session.kept_rows if row in newest]
                if session.number in self._released:
                    self._num_left -= len(old)
                unkeep_run(self._residency, old)
        session.tidy_at = min(MAX_BLOCKS, max(MIN_TIDY, 2 * len(rows)))

    def _count(self, session: SessionEntry) -> None:
        """Count the blocks of a session in its tenant's share; beyond it sessions are forgotten in `run`."""
        number = len(session.blocks) - session.num_counted
        session.num_counted += number
        self._blocks.add(session.tenant, number)
        if number > 0 and self._blocks.lacking(session.tenant, 0):
            self._crowded[session.tenant] = None

    def _make_less_crowded(self, tenant: str) -> int:
        """Forget the longest silent session of a tenant that has more blocks than its share. Returns the
        blocks that had to be looked at."""
        order = self._orders.get((tenant, False)) or self._orders.get((tenant, True))
        if not order or not self._blocks.lacking(tenant, 0):
            del self._crowded[tenant]
            return 0
        session = next(iter(order.values()))
        self.end(session)
        return min(STEP_BLOCKS, len(session.blocks))

    def _order_of(self, session: SessionEntry) -> OrderedDict[str, SessionEntry]:
        is_decoding = session.urgency is Urgency.DECODING
        return self._orders.setdefault((session.tenant, is_decoding), OrderedDict())

    def _enter_order(self, session: SessionEntry) -> None:
        """Move a session that began or ceased to be decoding behind those that are, or are not."""
        del session.order[session.id]
        session.order = self._order_of(session)
        session.order[session.id] = session

    def _give(self, session: SessionEntry, client: int) -> None:
        session.client = client
        self._of_client.setdefault(client, {})[session.number] = session

    def _take(self, session: SessionEntry) -> None:
        """Take a session from its client, which may be gone."""
        for owned in (self._of_client, self._orphans):
            sessions = owned.get(session.client, {})
            if sessions.pop(session.number, None) is not None and not sessions:
                del owned[session.client]
        session.client = NO_CLIENT

    def _let_go(self, session: SessionEntry) -> None:
        """Turn a session idle if its client is gone."""
        if session.number in self._orphans.get(session.client, ()):
            self._take(session)
            self.update(session, Urgency.IDLE, float("inf"))

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
        self._take(session)
        self._shares.give(session.tenant, 1)
        self._blocks.give(session.tenant, session.num_counted)
        session.num_counted = 0

    def _add(self, session_id: str, client: int) -> SessionEntry:
        """Add a session, after forgetting one if its tenant's share is used up."""
        tenant, tab, _ = session_id.partition("\t")
        session = SessionEntry(session_id, self._next_number, NO_CLIENT, tenant=tenant if tab else "")
        self._next_number += 1
        options = self._core.options
        self._shares.resize(options.max_sessions, options.num_tenants)
        self._blocks.resize(options.max_session_blocks, options.num_tenants)
        if not self._shares.may_take(session.tenant, 1):
            self._forget_one(session.tenant)
        self._review()
        self._to_review.append(session)
        self._shares.add(session.tenant, 1)
        session.order = self._order_of(session)
        self._sessions[session_id] = session.order[session_id] = session
        self._give(session, client)
        return session

    def _forget_one(self, tenant: str) -> None:
        """End the longest silent session of a tenant, one that is not decoding if there is any; where it has
        none, one of the tenant with the most."""
        orders = self._orders
        order = orders.get((tenant, False)) or orders.get((tenant, True))
        if not order:
            of_most, _ = max(orders, key=lambda key: len(orders[key]))
            order = orders.get((of_most, False)) or orders[of_most, True]
        self.end(next(iter(order.values())))
