"""Prefetches the blocks of a conversation shortly before its next turn.

A conversation is a session, or without one a chain, known by its last block. Two sources say when it will be
back:

    it announced it     "tool call, back in 30 s": from a little before that time on, as early and as late as
                        announcements have been off so far (returns.KeptPromises)
    it is like others   life tables of returns by age (returns.ReturnTimes), one per kind of silence
                        (waiting, idle, unsaid) and last gap; when a window of at most `max_window_s` holds
                        a return with at least `min_chance`, its blocks are prefetched for that window

`min_chance` is a promise about waste: with honest tables at most 1 - min_chance of what comes up is not
used. Announced ones first, then by chance per second of memory. A conversation is looked at when it reaches
the next bin of its table, not at every tick. Rejected: a mean gap per session (most gaps are the first of
their session, and few returns come at the mean of a lognormal).

`announced` is the same without the tables, for deployments that prefetch on hints only.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ...tiers.block import Urgency
from ..base import Expected, Prefetcher, SessionChange, Surroundings, Use
from ..options import Number, read_numbers
from .habits import habits_of
from .returns import EDGES_S, NUM_BINS, ReturnTimes, bin_of

OPTIONS = {
    "min_chance": Number(0.7, 0.05, 1.0),
    "max_window_s": Number(120.0, 1.0, 86_400.0),
    "max_conversations": Number(65_536, 1, 10_000_000),
}
#: Shares of announced returns before the beginning, and after the end, of the window they are given.
TOO_EARLY, TOO_LATE = 0.1, 0.1
#: Time beside that for the copies, as a multiple of what they should take, and for the runtime to come round.
LEAD = 2.0
SLACK_S = 0.25
MIN_PAUSE_S = 1e-3  # between two looks at one conversation, whatever rounding says
UNSAID = -1


@dataclass(eq=False, slots=True)
class _Conversation:
    """One conversation: where its chain ends and how long it has been silent."""

    session: int  # 0: known by its last block only
    tail: int  # row of that
    touched_at: float
    silence: int = UNSAID  # waiting, idle, or unsaid
    last_gap: int = -1  # bin of it; -1: this is its first turn
    counted: int = 0  # bins of this silence that the tables know it outlived
    looked_at: float = math.inf  # when its next entry in the agenda is
    said_at: float = 0.0
    back_at: float = math.inf  # announced; inf: not


@dataclass(slots=True)
class _Wanted:
    """A conversation with blocks to prefetch, and why."""

    is_announced: bool
    index: float  # chance per second of memory
    until: float
    reason: str

    @property
    def rank(self) -> tuple[bool, float]:
        """Return the order of prefetching, lowest first: announced returns, then by chance."""
        return not self.is_announced, -self.index


class TurnPrefetch(Prefetcher):
    """Prefetches for the next turn. Memory is bounded by `max_conversations`; the longest silent go first."""

    name = "turns"
    learns = True

    def __init__(self, surroundings: Surroundings) -> None:
        options = read_numbers(self.name, surroundings.options, OPTIONS)
        self._facts, self._costs = surroundings.facts, surroundings.costs
        self._ladder = surroundings.ladder
        self._min_chance, self._max_window_s = options["min_chance"], options["max_window_s"]
        self._max_conversations = int(options["max_conversations"])
        self._conversations: OrderedDict[_Conversation, None] = OrderedDict()  # longest silent first
        self._by_session: dict[int, _Conversation] = {}
        self._by_tail: dict[int, dict[_Conversation, None]] = {}
        self._agenda: list[tuple[float, int, _Conversation]] = []
        self._num_entries = 0
        self._wanted: dict[_Conversation, _Wanted] = {}
        self._habits = habits_of(surroundings)

    # ------------------------------------------------------------------------------- what is heard

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Count the return of the conversation that these blocks belong to."""
        conversation = self._find(rows, use.session)
        if conversation is None:
            self._open(use.session, rows[-1], use.now)
            return
        self._came_back(conversation, use.now)
        self._touch(conversation, rows[-1], use.now)

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Extend the conversation that these blocks continue."""
        parent = self._facts.parent[rows[0]]
        conversation = self._find((parent,), use.session) or self._open(use.session, rows[-1], use.now)
        self._supersede(conversation, parent, use.now)
        self._touch(conversation, rows[-1], use.now)

    def session_changed(self, change: SessionChange) -> None:
        """Forget a session that ended; note its silence, or when it announced to be back."""
        conversation = self._by_session.get(change.session)
        if conversation is None:
            return
        if change.urgency == Urgency.ENDED:
            self._drop(conversation)
            return
        self._wanted.pop(conversation, None)
        if change.urgency >= Urgency.WAITING:
            conversation.silence = change.urgency
        if change.back_at < math.inf:
            conversation.said_at, conversation.back_at = change.now, change.back_at
            self._enter(conversation, self._window_of(conversation)[0])
        elif change.urgency < Urgency.WAITING:
            conversation.back_at = math.inf

    def forgotten(self, rows: Sequence[int]) -> None:
        """Cut conversations off before blocks that are in no tier any more."""
        gone = set(rows)
        for row in rows:
            for conversation in list(self._by_tail.get(row, ())):
                tail = row
                while tail in gone:
                    tail = self._facts.parent[tail]
                if tail < 0:
                    self._drop(conversation)
                else:
                    self._hang(conversation, tail)

    # ------------------------------------------------------------------------------- what is decided

    def due(self, now: float, num_bytes: int) -> Sequence[Expected]:
        """Return the chains to prefetch now: announced ones, then by chance per second of memory."""
        self._look(now)
        chosen = []
        for conversation in sorted(self._wanted, key=lambda one: self._wanted[one].rank):
            wanted = self._wanted.pop(conversation)
            rows = self._cold_rows(conversation) if wanted.until > now else []
            if not rows:
                continue
            if num_bytes <= 0:
                self._wanted[conversation] = wanted
                break
            chosen.append(Expected(rows, wanted.until, wanted.reason, wanted.is_announced))
            num_bytes -= len(rows) * self._facts.block_bytes(rows[0])
        return chosen

    def next_at(self) -> float | None:
        """Return when the next conversation is to be looked at; at once while some are wanted."""
        if self._wanted:
            return -math.inf
        return self._agenda[0][0] if self._agenda else None

    # ------------------------------------------------------------------------------------ internals

    def _find(self, rows: Sequence[int], session: int) -> _Conversation | None:
        if session:
            return self._by_session.get(session)
        by_tail = self._by_tail
        ends = (one for row in reversed(rows) if row in by_tail for one in by_tail[row])
        return next((one for one in ends if not one.session), None)

    def _supersede(self, conversation: _Conversation, parent: int, now: float) -> None:
        """Drop conversations that ended at `parent`; this one takes over their history, because some runtimes
        name a session anew for every request. A branch opens another conversation when it is back."""
        for former in [one for one in self._by_tail.get(parent, ()) if one is not conversation]:
            self._came_back(former, now)
            conversation.last_gap = former.last_gap
            self._drop(former)

    def _hang(self, conversation: _Conversation, tail: int | None) -> None:
        """Set the last block of a conversation; None: it has none any more."""
        here = self._by_tail.get(conversation.tail)
        if here is not None and conversation in here:
            del here[conversation]
            if not here:
                del self._by_tail[conversation.tail]
        if tail is not None:
            conversation.tail = tail
            self._by_tail.setdefault(tail, {})[conversation] = None

    def _open(self, session: int, tail: int, now: float) -> _Conversation:
        if len(self._conversations) >= self._max_conversations:
            self._drop(next(iter(self._conversations)))
        conversation = _Conversation(session, tail, now)
        self._conversations[conversation] = None
        if session:
            self._by_session[session] = conversation
        self._touch(conversation, tail, now)
        return conversation

    def _touch(self, conversation: _Conversation, tail: int, now: float) -> None:
        """Restart the silence of a conversation, behind block `tail`."""
        self._hang(conversation, tail)
        conversation.touched_at, conversation.counted = now, 0
        self._conversations.move_to_end(conversation)
        if self.learns and conversation.looked_at > now + EDGES_S[0]:
            self._enter(conversation, now + EDGES_S[0])

    def _came_back(self, conversation: _Conversation, now: float) -> None:
        self._wanted.pop(conversation, None)
        if conversation.back_at < math.inf:
            said_at = conversation.said_at
            self._habits.promises.kept(conversation.back_at - said_at, now - said_at)
            conversation.back_at = math.inf
        number = bin_of(now - conversation.touched_at)
        if number < 0:
            return  # the same turn, told in parts
        table = self._table_of(conversation)
        for outlived in range(conversation.counted, number):
            table.outlived(outlived)
        table.returned(number)
        conversation.last_gap, conversation.silence = number, UNSAID

    def _drop(self, conversation: _Conversation) -> None:
        self._conversations.pop(conversation, None)
        self._wanted.pop(conversation, None)
        self._by_session.pop(conversation.session, None)
        self._hang(conversation, None)
        conversation.looked_at = -math.inf  # what the agenda has of it is void

    def _enter(self, conversation: _Conversation, at: float) -> None:
        """Schedule the next look at a conversation, in place of the one before."""
        self._num_entries += 1
        conversation.looked_at = at
        heapq.heappush(self._agenda, (at, self._num_entries, conversation))

    def _look(self, now: float) -> None:
        """Assess the conversations that are due."""
        while self._agenda and self._agenda[0][0] <= now:
            at, _, conversation = heapq.heappop(self._agenda)
            if at == conversation.looked_at:
                conversation.looked_at = math.inf
                next_look = self._assess(conversation, now)
                if next_look < math.inf:
                    self._enter(conversation, next_look)

    def _assess(self, conversation: _Conversation, now: float) -> float:
        """Decide whether to prefetch a conversation now; return when to assess it again."""
        begin, end = self._window_of(conversation)
        if now < end:
            if now < begin:
                return begin
            gap_s = conversation.back_at - conversation.said_at
            chance = 1 - TOO_EARLY - TOO_LATE
            reason = f"said it would be back in {gap_s:.3g} s"
            self._wanted[conversation] = _Wanted(True, chance / (end - begin), end, reason)
            return end if self.learns else math.inf
        conversation.back_at = math.inf
        number = bin_of(now - conversation.touched_at)
        if not self.learns or number >= NUM_BINS:
            return math.inf
        if number >= conversation.counted:
            table = self._table_of(conversation)
            for outlived in range(conversation.counted, number):
                table.outlived(outlived)
            conversation.counted = max(0, number)
            self._consider(conversation, table, number, now)
        return max(conversation.touched_at + EDGES_S[number + 1], now + MIN_PAUSE_S)

    def _consider(self, conversation: _Conversation, table: ReturnTimes, number: int, now: float) -> None:
        self._wanted.pop(conversation, None)
        outlook = table.outlook(number, self._min_chance, self._max_window_s)
        if outlook is not None:
            until = conversation.touched_at + outlook.until_s
            reason = f"back within {until - now:.3g} s with a chance of {outlook.chance:.0%}"
            self._wanted[conversation] = _Wanted(False, outlook.chance / outlook.occupied_s, until, reason)

    def _window_of(self, conversation: _Conversation) -> tuple[float, float]:
        """Return from when to when an announced return is expected, time for the copies included."""
        if conversation.back_at == math.inf:
            return math.inf, -math.inf
        said_at, gap_s = conversation.said_at, conversation.back_at - conversation.said_at
        namespace_id = self._facts.namespace_id[conversation.tail]
        num_blocks = self._facts.position[conversation.tail] + 1
        lead_s = LEAD * self._costs.load_s(namespace_id, num_blocks, self._ladder.log_tier) + SLACK_S
        begin = said_at + gap_s * self._habits.promises.ratio_at(TOO_EARLY) - lead_s
        return begin, said_at + gap_s * self._habits.promises.ratio_at(1 - TOO_LATE) + SLACK_S

    def _cold_rows(self, conversation: _Conversation) -> list[int]:
        """Return the blocks of a chain that are below the put tier, parents first."""
        tier_of, parent, put_tier = self._facts.tier_of, self._facts.parent, self._ladder.put_tier
        rows, row = [], conversation.tail
        while row >= 0:
            tier = tier_of(row)
            if tier is not None and tier > put_tier:
                rows.append(row)
            row = parent[row]
        rows.reverse()
        return rows

    def _table_of(self, conversation: _Conversation) -> ReturnTimes:
        return self._habits.table_of(conversation.silence, conversation.last_gap)


class AnnouncedPrefetch(TurnPrefetch):
    """Prefetches for announced returns only."""

    name = "announced"
    learns = False
