"""The forecast: expected uses of every block, learned from requests. Shared by all tiers.

It gets one event per request. A request that uses stored blocks is a *visit* (visits.py); the blocks it used
again and the ones it brought become stretches (stretches.py), each with a kind and features; their hazards
(hazard.py) give a price for every age (worth.py), and what they live through is learned (appraiser.py).

What is used is known before what will be put behind it, and a visit is described by both. So a use waits
(`_pending`) until the put behind it, or anything else, comes.

Hints sharpen it. Blocks of a session that ended are worth a thousandth, as far as they are not shared. An
announced return counts until it is overdue by as much again. Waiting (a tool
runs), idle (a user thinks) and the length of the answer are features, so what they mean is learned.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...tiers.block import Urgency
from ..base import BlockFacts, Newcomer, Observer, SessionChange, Surroundings, Use
from .ages import F64, Clock
from .appraiser import Appraiser
from .assigner import StretchAssigner
from .lru_fallback import LruFallback
from .stretches import I32, PRICED, UNKNOWN, UNPRICED, Stretches
from .visits import NEW, NO_PAST, TAIL, Visit

NAME = "forecast"
MAX_GHOSTS = 131_072  # about 30 MB
MAX_SESSIONS = 65_536
#: Sessions from which on two are looked at for each new one, and those without blocks or ghosts forgotten.
MANY_SESSIONS = 8_192
#: Weight of the newest answer in the running mean of their lengths.
USUAL_WEIGHT = 0.01
#: Longest answer that is accepted from a dump: no model decodes 2**30 tokens.
MAX_LOG_DECODED = 30.0


class _Pending(NamedTuple):
    """Blocks used by a request, before its put, if there is one."""

    rows: Sequence[int]
    row_set: frozenset[int]
    use: Use


class _Priced(NamedTuple):
    """The newcomer that was priced last; a put is priced again for each part of it."""

    newcomer: Newcomer
    visit: Visit
    ends: list[int]  # positions at which its parts end
    prices: list[float]  # of the parts

    def covers(self, other: Newcomer) -> bool:
        """Whether this is the same put: at the same instant, or what is left of it later. All of it later is
        another put."""
        mine = self.newcomer
        num_placed = other.position - mine.position
        if mine.session != other.session or num_placed < 0:
            return False
        if mine.now == other.now:
            return True
        rest = mine.prefix_hashes[num_placed : num_placed + 1]
        return num_placed > 0 and len(rest) > 0 and list(rest) == list(other.prefix_hashes[:1])


class Forecast(Observer):
    """Learns when blocks are used again, and prices them: expected uses per second of keeping."""

    def __init__(self, facts: BlockFacts) -> None:
        self._facts = facts
        self._clock = Clock()
        self._fallback = LruFallback()
        self._stretches = Stretches(MAX_GHOSTS)
        self._appraiser = Appraiser(self._stretches)
        self._assigner = StretchAssigner(facts, self._stretches, self._appraiser)
        self._pending: _Pending | None = None
        self._visit: Visit | None = None  # the last one, which a put may still belong to
        self._by_session: dict[int, Visit] = {}  # the last visit of each
        self._to_review: deque[int] = deque()  # sessions in it
        #: What sessions usually state when a request is over: assumed of a request until its session states
        #: it.
        self._usual_silence = 0
        self._usual_log_decoded = 0.0  # running mean of log2 of the tokens; 0: never stated
        self._priced: _Priced | None = None  # the last newcomer

    # ------------------------------------------------------------------------------- events

    def used(self, rows: Sequence[int], use: Use) -> None:
        """Keep the blocks that a request used, until its put or another event shows what it adds."""
        self._settle_pending()
        now = self._clock.begin_request(use.now)
        self._appraiser.advance(now)
        self._pending = _Pending(list(rows), frozenset(rows), use._replace(now=now))

    def stored(self, rows: Sequence[int], use: Use) -> None:
        """Put new blocks into stretches of the last request's visit, or of one that still decodes."""
        parent, prefix_hash = self._facts.parent[rows[0]], self._facts.prefix_hash
        names = [prefix_hash[row] for row in rows]
        visit = self._visit_before(parent, names, use._replace(now=self._clock.at(use.now)), names[0])
        now = self._clock.at(use.now)
        self._appraiser.advance(now)
        visit.num_blocks = max(visit.num_blocks, self._facts.position[rows[0]] + use.num_asked)
        if visit is self._visit and self._facts.position[rows[0]] >= visit.num_named:
            self._add_names(visit, names)
        if visit.used_at < now:
            self._assigner.restart_age(visit, now)
        self._assigner.store(visit, rows, names)
        visit.tip = rows[-1]
        self._priced = None
        self._appraiser.describe(visit)

    def session_changed(self, change: SessionChange) -> None:
        """Store that a session ended, fell silent, announced a return, or is back and queued.

        A session that is back needs its blocks at once, and is learned as what it was while it was away: a
        return counts for those that said "waiting", not for those that say nothing.
        """
        self._settle_pending()
        visit = self._by_session.get(change.session)
        if visit is None:
            return
        is_back = change.urgency < Urgency.WAITING
        if not is_back:
            visit.silence = change.urgency if change.urgency != Urgency.ENDED else 0
        visit.is_over = change.urgency == Urgency.ENDED
        if change.num_decoded_tokens:
            visit.num_decoded_tokens = change.num_decoded_tokens
            log_decoded = math.log2(1 + change.num_decoded_tokens)
            usual = self._usual_log_decoded
            self._usual_log_decoded = usual + USUAL_WEIGHT * (log_decoded - usual) if usual else log_decoded
        self._usual_silence = visit.silence or self._usual_silence
        visit.said_at = self._clock.at(change.now)
        visit.back_at = visit.said_at + (0.0 if is_back else change.back_at - change.now)
        self._appraiser.describe(visit)

    def forgotten(self, rows: Sequence[int]) -> None:
        """Make ghosts of blocks that are in no tier any more.

        They often make room for the put of the pending use, so that stays pending.
        """
        if self._pending is not None and not self._pending.row_set.isdisjoint(rows):
            self._settle_pending()
        self._stretches.make_ghosts(rows, self._facts.prefix_hash)

    # ------------------------------------------------------------------------------- prices

    def price(self, row: int, now: float) -> float:
        """Return the expected uses per second of keeping this block, at best.

        Takes about two microseconds, where a price `is_ready`.
        """
        of_row = self._stretches.of_row
        stretch = of_row[row] if row < len(of_row) else UNKNOWN
        if stretch == UNKNOWN:
            return self._appraiser.price_of_unknown(now - self._facts.last_used[row])
        return self._appraiser.price(stretch, self._clock.at(now))

    def end_of_same_price(self, rows: Sequence[int], first: int) -> int:
        """Return the end of the part of a chain that begins at `first` and has one price.

        It lies in one stretch, or is one block without a known past.
        """
        of_row, num_rows = self._stretches.of_row, len(rows)
        num_known, end = len(of_row), first + 1
        stretch = of_row[rows[first]] if rows[first] < num_known else UNKNOWN
        while stretch and end < num_rows and rows[end] < num_known and of_row[rows[end]] == stretch:
            end += 1
        return end

    def is_ready(self, row: int) -> bool:
        """Whether `price` only reads a price.

        Else it computes one, at twenty times the cost of one of many (`prepare`).
        """
        of_row = self._stretches.of_row
        stretch = of_row[row] if row < len(of_row) else UNKNOWN
        return self._appraiser.follows_age or self._stretches.freshness[stretch] == PRICED

    def is_described_anew(self, row: int) -> bool:
        """Whether the block's description changed since its price was computed."""
        of_row = self._stretches.of_row
        stretch = of_row[row] if row < len(of_row) else UNKNOWN
        return self._stretches.freshness[stretch] == UNPRICED

    def prepare(self, rows: I32) -> None:
        """Compute the prices of the blocks in `rows` (n,) int32 that are not ready."""
        self._appraiser.prepare(self._stretches.of(rows))

    def prices(self, rows: I32, now: float) -> F64:
        """Return the prices (n,) float64 of `rows` (n,) int32, as `price` does for one."""
        stretches = self._stretches.of(rows)
        prices = self._appraiser.prices(stretches, self._clock.at(now))
        if not stretches.all():
            unknown = (stretches == UNKNOWN).nonzero()[0]
            ages_s = now - np.asarray(self._facts.last_used)[rows[unknown]]
            prices[unknown] = self._appraiser.prices_of_unknown(ages_s)
        return prices

    def price_of_new(self, newcomer: Newcomer) -> float:
        """Return the price that the first of these new blocks will have once they are stored.

        The parts of a put have pasts of their own: a beginning that many share, a turn that was abandoned,
        new blocks. Parts before a dear one are worth as much as that, which needs them.
        """
        priced = self._priced
        if priced is None or not priced.covers(newcomer):
            priced = self._priced = self._price_parts(newcomer)
        part = bisect_right(priced.ends, newcomer.position)
        return priced.prices[min(part, len(priced.prices) - 1)]

    def _price_parts(self, newcomer: Newcomer) -> _Priced:
        position = newcomer.position
        use = Use(self._clock.at(newcomer.now), newcomer.session, newcomer.num_blocks, newcomer.urgency)
        visit = self._visit_before(newcomer.parent, newcomer.prefix_hashes, use)
        visit.num_blocks = max(visit.num_blocks, position + newcomer.num_blocks)
        stretches = self._stretches
        ends, parts = [position + newcomer.num_blocks], [(NEW, NO_PAST)]
        if newcomer.prefix_hashes:
            ends, parts = [], []
        for first, end, ghost in stretches.ghost_runs(newcomer.prefix_hashes):
            if ghost and stretches.visit[ghost] is not visit:
                past = self._assigner.past_of(ghost, visit.used_at)
                parts.append((visit.kind_of(past), past))
            else:
                is_last = end == newcomer.num_blocks
                if is_last and end - first > 1:
                    ends.append(position + end - 1)
                    parts.append((NEW, NO_PAST))
                parts.append((TAIL if is_last else NEW, NO_PAST))
            ends.append(position + end)
        prices = self._appraiser.prices_of_new(visit, parts)
        needed = np.maximum.accumulate(prices[::-1])[::-1]
        return _Priced(newcomer, visit, ends, needed.tolist())

    def declined(self, newcomer: Newcomer) -> None:
        """Make ghosts of a newcomer that was priced and declined, to notice a return."""
        priced = self._priced
        if priced is not None and priced.covers(newcomer):
            self._assigner.remember(priced.visit, newcomer.prefix_hashes)
            self._appraiser.describe(priced.visit)

    def dump(self) -> dict[str, Any]:
        """Return what was learned, not where blocks are, to be loaded after a restart."""
        return {
            "hazards": self._appraiser.dump(),
            "usual_silence": self._usual_silence,
            "usual_log_decoded": self._usual_log_decoded,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Replace what was learned by a `dump`. Raises ValueError, and changes nothing, if it is damaged."""
        try:
            silence, log_decoded = saved["usual_silence"], float(saved["usual_log_decoded"])
            hazards = saved["hazards"]
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"what was learned lacks a part: {error!r}") from error
        if silence not in (0, Urgency.WAITING, Urgency.IDLE) or not 0 <= log_decoded <= MAX_LOG_DECODED:
            raise ValueError("what was learned says impossible things of sessions; start without it")
        self._appraiser.load(hazards)
        self._usual_silence, self._usual_log_decoded = int(silence), log_decoded
        self._priced = None

    @property
    def num_stretches(self) -> int:
        """Number of stretches that have blocks or ghosts."""
        return len(self._stretches)

    def check_integrity(self) -> list[str]:
        """Return inconsistencies in words; empty when there are none."""
        return self._stretches.check_integrity()

    # ------------------------------------------------------------------------------------ internals

    def _visit_before(self, parent: int, names: Sequence[bytes], use: Use, head: bytes = b"") -> Visit:
        """Return the visit that new blocks under `parent` belong to: the last one, or a new one.

        Chains begin anew all the time. What asks for room is of this visit at the same instant only, what was
        stored also later, by its `head`: its bytes had to be copied first.
        """
        pending = self._pending
        if pending is not None and pending.rows[-1] == parent:
            self._pending = None
            return self._begin(pending.rows, pending.use, names)
        self._settle_pending()
        visit = self._visit
        if (
            visit is not None
            and visit.tip == parent
            and visit.session in (0, use.session)
            and (parent >= 0 or visit.used_at == use.now or (head and visit.head == head))
        ):
            return visit
        stretches = self._stretches
        stretch = stretches.of_row[parent] if 0 <= parent < len(stretches.of_row) else UNKNOWN
        earlier = stretches.visit[stretch] if stretch else None
        if earlier is not None and earlier.tip == parent:
            return earlier
        use = use._replace(now=self._clock.begin_request(use.now))
        return self._begin((), use, names, parent)

    def _add_names(self, visit: Visit, names: Sequence[bytes]) -> None:
        """Add the names of another call of the same put to a visit: what was known of the prompt may end only
        here, and the fallback counts what one request asked for, in however many calls."""
        last_ghost = UNKNOWN
        for number, ghost in enumerate(self._stretches.ghosts.get_all(names)):
            if ghost and self._stretches.visit[ghost] is not visit:
                visit.num_known, last_ghost = visit.num_named + number + 1, ghost
        earlier = self._stretches.visit[last_ghost]
        if earlier is not None and not visit.turn and visit.continues(earlier, visit.num_known):
            visit.follow(earlier)
        visit.num_named += len(names)
        self._fallback.asked((), names, self._stretches.num_blocks)

    def _review_sessions(self) -> None:
        """Forget, where there are many sessions, some that have neither blocks nor ghosts: nothing that they
        say later has a meaning. Of MAX_SESSIONS with blocks the one is forgotten that was looked at first."""
        for _ in range(2 if len(self._by_session) >= MANY_SESSIONS else 0):
            session = self._to_review.popleft()
            if self._by_session[session].stretches and len(self._by_session) < MAX_SESSIONS:
                self._to_review.append(session)
            else:
                del self._by_session[session]

    def _settle_pending(self) -> None:
        """Make a visit of the pending use, which no put followed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._begin(pending.rows, pending.use, ())

    def _begin(self, rows: Sequence[int], use: Use, names: Sequence[bytes], parent: int = -1) -> Visit:
        """Return a new visit of a request that used `rows` and continues with blocks of these names."""
        stretches, now = self._stretches, use.now
        tip = rows[-1] if rows else parent
        num_used = self._facts.position[tip] + 1 if tip >= 0 else 0
        num_known, last_ghost = num_used, UNKNOWN
        for number, ghost in enumerate(stretches.ghosts.get_all(names)):
            if ghost:
                num_known, last_ghost = num_used + number + 1, ghost
        num_blocks = max(num_used, use.num_asked if rows else 0, num_used + len(names))
        visit = Visit(now, use.session, tip, num_blocks, num_known, silence=self._usual_silence)
        visit.num_decoded_tokens = int(2.0**self._usual_log_decoded) - 1
        of_row = stretches.of_row
        before = last_ghost or (of_row[tip] if 0 <= tip < len(of_row) else UNKNOWN)
        earlier = stretches.visit[before]
        if earlier is not None and visit.continues(earlier, num_known):
            visit.follow(earlier)
        visit.num_named = num_used + len(names)
        if rows:
            self._assigner.use_again(visit, rows, stretches.runs(rows))
        if use.session:
            if use.session not in self._by_session:
                self._review_sessions()
                self._to_review.append(use.session)
            self._by_session[use.session] = visit
        if tip < 0 and names:
            visit.head = names[0]
        self._visit = visit
        prefix_hash = self._facts.prefix_hash
        self._fallback.asked([prefix_hash[row] for row in rows], names, stretches.num_blocks)
        self._appraiser.follows_age = not self._fallback.follows_forecast
        self._appraiser.describe(visit)
        return visit


def forecast_of(surroundings: Surroundings) -> Forecast:
    """Return the forecast that all policies of one planner share."""
    if NAME not in surroundings.shared:
        surroundings.shared[NAME] = Forecast(surroundings.facts)
    forecast: Forecast = surroundings.shared[NAME]
    return forecast
