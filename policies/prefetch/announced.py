"""Prefetches the blocks of a session shortly before it announced to be back ("tool call, back in 30 s").

The window is from a little before the announced time to a little after it, as early and as late as
announcements have been off so far (promises.KeptPromises); the copies should be done when it begins. Sessions
with the shortest windows come first.

Rejected: life tables of returns, which guessed when sessions without an announcement are back. On the public
traces they added nothing to announcements, and alone they were a little worse than nothing (commit 254a4c9,
docs/benchmarks/policies.md).
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...tiers.block import Urgency
from ..base import Expected, Prefetcher, SessionChange, Surroundings, Use
from ..options import read_numbers
from .promises import promises_of

#: Sessions that are known; beyond it the one that was used the longest ago is forgotten.
MAX_SESSIONS = 65_536
#: Shares of announced returns before the beginning, and after the end, of the window they are given.
TOO_EARLY, TOO_LATE = 0.1, 0.1
#: Time beside that for the copies, as a multiple of what they should take, and for the runtime to come round.
LEAD = 2.0
SLACK_S = 0.25


@dataclass(eq=False, slots=True)
class _Announcer:
    """One session: where its chain ends, and when it announced to be back."""

    session: int
    tail: int  # row of its last block
    said_at: float = 0.0
    back_at: float = math.inf  # inf: not announced
    looked_at: float = math.inf  # when its next entry in the agenda is


class AnnouncedPrefetch(Prefetcher):
    """Prefetches for announced returns."""

    name = "announced"

    def __init__(self, surroundings: Surroundings) -> None:
        read_numbers(self.name, surroundings.options, {})
        self._facts, self._costs = surroundings.facts, surroundings.costs
        self._ladder = surroundings.ladder
        self._sessions: OrderedDict[int, _Announcer] = OrderedDict()  # used the longest ago first
        self._by_tail: dict[int, dict[_Announcer, None]] = {}
        self._agenda: list[tuple[float, int, _Announcer]] = []
        self._num_entries = 0
        self._wanted: dict[_Announcer, tuple[float, float]] = {}  # window of each, in seconds of the clock
        self._promises = promises_of(surroundings)

    # ------------------------------------------------------------------------------- events

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Count the return of a session."""
        if use.session:
            self._come_back(self._touch(use.session, rows[-1]), use.now)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Extend the chain of a session; drop others that ended where these blocks begin.

        Some runtimes name a session anew for every request. A branch is another session when it is back.
        """
        for former in list(self._by_tail.get(self._facts.parent[rows[0]], ())):
            if former.session != use.session:
                self._come_back(former, use.now)
                self._drop(former)
        if use.session:
            self._touch(use.session, rows[-1])

    def session_changed(self, change: SessionChange) -> None:
        """Forget a session that ended; note when it announced to be back."""
        session = self._sessions.get(change.session)
        if session is None:
            return
        if change.urgency == Urgency.ENDED:
            self._drop(session)
            return
        self._wanted.pop(session, None)
        if change.back_at < math.inf:
            session.said_at, session.back_at = change.now, change.back_at
            self._enter(session, self._window_of(session)[0])
        elif change.urgency < Urgency.WAITING:
            session.back_at = math.inf

    def forgotten(self, rows: Sequence[int]) -> None:
        """Cut sessions off before blocks that are in no tier any more."""
        gone = set(rows)
        for row in rows:
            for session in list(self._by_tail.get(row, ())):
                tail = row
                while tail in gone:
                    tail = self._facts.parent[tail]
                if tail < 0:
                    self._drop(session)
                else:
                    self._hang(session, tail)

    # ------------------------------------------------------------------------------- decisions

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        """Return the chains to prefetch now, those of the shortest windows first."""
        self._look(now)
        chosen = []
        for session in sorted(self._wanted, key=self._window_s):
            begin, until = self._wanted.pop(session)
            rows = self._cold_rows(session) if until > now else []
            if not rows:
                continue
            if num_bytes <= 0:
                self._wanted[session] = begin, until
                break
            reason = f"said it would be back in {session.back_at - session.said_at:.3g} s"
            chosen.append(Expected(rows, until, reason, is_announced=True))
            num_bytes -= len(rows) * self._facts.block_bytes(rows[0])
        return chosen

    def next_at(self) -> float | None:
        """Return when the next window begins; at once while some are wanted."""
        if self._wanted:
            return -math.inf
        return self._agenda[0][0] if self._agenda else None

    # ------------------------------------------------------------------------------------ internals

    def _touch(self, number: int, tail: int) -> _Announcer:
        """Set the last block of a session, a new one if need be; return the session."""
        session = self._sessions.get(number)
        if session is None:
            if len(self._sessions) >= MAX_SESSIONS:
                self._drop(next(iter(self._sessions.values())))
            session = self._sessions[number] = _Announcer(number, tail)
        self._hang(session, tail)
        self._sessions.move_to_end(number)
        return session

    def _come_back(self, session: _Announcer, now: float) -> None:
        self._wanted.pop(session, None)
        if session.back_at < math.inf:
            self._promises.kept(session.back_at - session.said_at, now - session.said_at)
            session.back_at = math.inf

    def _hang(self, session: _Announcer, tail: int | None) -> None:
        """Set the last block of a session; None: it has none any more."""
        here = self._by_tail.get(session.tail)
        if here is not None and session in here:
            del here[session]
            if not here:
                del self._by_tail[session.tail]
        if tail is not None:
            session.tail = tail
            self._by_tail.setdefault(tail, {})[session] = None

    def _drop(self, session: _Announcer) -> None:
        self._sessions.pop(session.session, None)
        self._wanted.pop(session, None)
        self._hang(session, None)
        session.looked_at = -math.inf  # what the agenda has of it is void

    def _enter(self, session: _Announcer, at: float) -> None:
        """Schedule the next look at a session, in place of the one before."""
        self._num_entries += 1
        session.looked_at = at
        heapq.heappush(self._agenda, (at, self._num_entries, session))

    def _look(self, now: float) -> None:
        """Add the sessions with a window that has begun to those that are wanted."""
        while self._agenda and self._agenda[0][0] <= now:
            at, _, session = heapq.heappop(self._agenda)
            if at != session.looked_at:
                continue
            session.looked_at = math.inf
            begin, end = self._window_of(session)
            if now >= end:
                session.back_at = math.inf
            elif now < begin:  # copies became quicker, or announcements better, since it was scheduled
                self._enter(session, begin)
            else:
                self._wanted[session] = begin, end

    def _window_s(self, session: _Announcer) -> float:
        begin, end = self._wanted[session]
        return end - begin

    def _window_of(self, session: _Announcer) -> tuple[float, float]:
        """Return from when to when an announced return is expected, time for the copies included."""
        if session.back_at == math.inf:
            return math.inf, -math.inf
        said_at, gap_s = session.said_at, session.back_at - session.said_at
        namespace_id = self._facts.namespace_id[session.tail]
        num_blocks = self._facts.position[session.tail] + 1
        lead_s = LEAD * self._costs.load_s(namespace_id, num_blocks, self._ladder.log_tier) + SLACK_S
        begin = said_at + gap_s * self._promises.ratio_at(TOO_EARLY) - lead_s
        return begin, said_at + gap_s * self._promises.ratio_at(1 - TOO_LATE) + SLACK_S

    def _cold_rows(self, session: _Announcer) -> list[int]:
        """Return the blocks of a chain that are below the put tier, parents first."""
        tier_of, parent, put_tier = self._facts.tier_of, self._facts.parent, self._ladder.put_tier
        rows, row = [], session.tail
        while row >= 0:
            tier = tier_of(row)
            if tier is not None and tier > put_tier:
                rows.append(row)
            row = parent[row]
        rows.reverse()
        return rows
