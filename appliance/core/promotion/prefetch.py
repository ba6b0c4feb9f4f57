"""Prefetches: blocks that are brought up ahead of their use, and what became of them.

A policy (base.Prefetcher) says which blocks are expected when; a session that arrives, and a client that
asks, say so too. This module carries it out within bounds:

    never ahead of demand    nothing begins while a request waits for a load, the mover orders by urgency, and
                             a request for a block that is on its way up hastens it
    bounded                  bytes in flight, bytes not used yet, a share of the edge's bandwidth, and what
                             the account of its source and tenant allows (prefetch_account.py); what cannot
                             fit is not begun. Of memory each tenant has its share (shares.py)
    taken back               queued copies are cancelled when requests wait for room or the session ends; what
                             has not begun when its session is served is left to the request itself
    first to go              inside its window a prefetched block has a higher priority than others, after it
                             a lower one than all (`Catalog.retention`)

Every block that was begun ends as exactly one of: used (it was there), late (asked for while on its way),
wasted (it left, or its window passed, unused), cancelled (no byte was moved). Counted in blocks and bytes,
`prefetch_used` and `prefetch_used_bytes` and so on. Rejected: counting a block as used whenever that happens;
a window that never ends hides every wrong guess.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....policies.base import Expected, Use
from ....tiers.base import Cause
from ....tiers.block import Urgency, tenant_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.policy_listeners import Listener
from ..catalog.residency import Residency
from ..catalog.states import State
from ..copying.copies import Copies
from ..shares import Shares
from .loads import Loads
from .prefetch_account import PrefetchAccount

#: Unused share of the bandwidth that is saved up at most, in seconds of it.
BURST_S = 1.0
MIN_BURST_BYTES = 1 << 20  # however slow the edge is
#: Share of what may be prefetched that is left free for sessions which arrived or said when they come back:
#: what is learned of others is right less often, and sooner.
KNOWN_SHARE = 0.5
#: Between two looks at what is due, when the bounds allow more.
PAUSE_S = 1e-3
#: Beyond, accounts with nothing on its way are forgotten: clients without tenants may name ever new domains.
MAX_ACCOUNTS = 1024


@dataclass(slots=True)
class _Rest:
    """What is left of an expectation that the bounds cut."""

    blocks: list[int]  # handles, in chain order
    until: float
    reason: str
    urgency: Urgency
    source: PrefetchAccount | None


def _is_learned(rest: _Rest) -> bool:
    return rest.source is not None and rest.source.is_learned


@dataclass(slots=True)
class _Begun:
    """One block on its way up, or up and not used yet."""

    until: float
    num_bytes: int
    source: PrefetchAccount | None  # of the guess; None: a client asked
    tenant: str
    landed_bytes: int = 0


class Prefetches:
    """Implements copies.Owner, and listens to what is used and what leaves the put tier."""

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        copies: Copies,
        loads: Loads,
    ) -> None:
        self._core = core
        self._put_tier, self._log_tier = core.ladder.put_tier, core.ladder.log_tier
        self._edge = (self._log_tier, self._put_tier)
        self._residency = residency
        self._copies = copies
        self._loads = loads
        self._begun: dict[int, _Begun] = {}  # by row
        self._windows: list[tuple[float, int]] = []  # (end, handle)
        self._rests: deque[_Rest] = deque()
        self._shares = Shares(0, core.options.num_tenants)  # of what is begun
        self._accounts: dict[tuple[str, str], PrefetchAccount] = {}  # by source and tenant
        self._allowance_bytes = 0.0  # of the share of the bandwidth
        self._allowed_at = 0.0
        self._not_before = 0.0
        self._is_crowded = False
        core.listeners.join(Listener(used=self.used, left={self._put_tier: self.left}))

    @property
    def begun_bytes(self) -> int:
        """Bytes on their way up, or up and not used yet."""
        return self._shares.taken

    # ---------------------------------------------------------------------------------- what begins

    def run(self, is_crowded: bool) -> None:
        """Begin what is due, as far as the bounds allow. `is_crowded`: requests wait for room."""
        now = self._core.now
        self._is_crowded = is_crowded
        if self._core.policies.prefetcher is None and not (self._begun or self._rests or self._windows):
            return
        if self._windows and self._windows[0][0] <= now:
            self._end_windows(now)
        if is_crowded:
            if self._begun:
                self._copies.cancel(self._on_their_way(self._begun))
        elif now >= self._not_before and not self._core.urgent_bytes.get(self._edge, 0):
            due_at = self._due_at()
            if due_at is not None and due_at <= now:
                self._begin_due(now)

    def bring(
        self,
        expected: Expected,
        urgency: Urgency,
        max_bytes: float = float("inf"),
        source: PrefetchAccount | None = None,
    ) -> int:
        """Begin to bring blocks up into the put tier, parents first. Returns how many were begun.
        What `max_bytes` cuts off follows when there is room for it."""
        core = self._core
        catalog = core.catalog
        num_blocks = num_bytes = 0
        for number, row in enumerate(expected.rows):
            if catalog.tier_of(row) is None:
                break
            if num_bytes >= max_bytes:
                rest = [catalog.handle(later) for later in expected.rows[number:]]
                self._rests.append(_Rest(rest, expected.until, expected.reason, urgency, source))
                break
            coming = [f for f in catalog.fragments(row) if catalog.state[self._put_tier][f] == State.ABSENT]
            if not coming:
                continue
            if not self._loads.promote(row, self._put_tier, urgency, expected.until):
                break  # no room, and what follows is of no use without it
            coming = [f for f in coming if catalog.state[self._put_tier][f] != State.ABSENT]
            self._note(row, expected.until, sum(map(catalog.length_of, coming)), source)
            core.tell(row, "prefetch", expected.reason)
            num_blocks, num_bytes = num_blocks + 1, num_bytes + self._begun[row].num_bytes
            if catalog.num_placed[self._put_tier][row] < catalog.namespace_of(row).num_groups:
                break  # no room for all of it, and none for what follows
        self._loads.start(urgency, expected.until, self)
        self._allowance_bytes -= num_bytes
        return num_blocks

    def arrived(self, rows: Sequence[int]) -> None:
        """A session is queued: the chain that it went on with last comes up while it waits for its turn.

        `rows` are its blocks in the order in which they became its own. Not all of them: what a session
        left behind (former branches, subagents) is seldom asked for again.
        """
        catalog = self._core.catalog
        cold, row = [], rows[-1] if rows else NO_ROW
        while row != NO_ROW:
            if catalog.tier_of(row) == self._log_tier:
                cold.append(row)
            row = catalog.parent[row]
        if cold:
            cold.reverse()
            until = self._core.now + self._core.options.prefetch_window_s
            expected = Expected(cold, until, "its session arrived")
            self._guess(expected, Urgency.QUEUED, self._room_bytes(), "arrivals")

    def next_deadline(self) -> float | None:
        """When a window ends, or something is due and may begin."""
        window = self._windows[0][0] if self._windows else None
        due_at = self._due_at()
        if due_at is not None and due_at <= self._core.now:
            is_forbidden = (
                self._is_crowded or self._core.urgent_bytes.get(self._edge, 0) or not self._room_bytes()
            )
            due_at = None if is_forbidden else self._not_before  # what forbids ends with an event or a window
        return min((at for at in (window, due_at) if at is not None), default=None)

    # --------------------------------------------------------------------------------- what becomes

    def used(self, rows: Sequence[int], use: Use) -> None:
        """A request uses these blocks."""
        if self._rests:
            self._serve_rests(rows)
        awaited = self._core.catalog.awaited
        if not awaited:
            return
        for row in rows:
            if awaited.pop(row, None) is None:
                continue
            begun = self._begun.get(row)
            if begun is None:
                self._core.story.count("prefetch_used_after_window")
            else:
                self._end(row, "used" if begun.landed_bytes == begun.num_bytes else "late", begun.num_bytes)

    def left(self, rows: Sequence[int]) -> None:
        """These blocks left the put tier, or never came."""
        awaited = self._core.catalog.awaited
        if not awaited:
            return
        for row in rows:
            if awaited.pop(row, None) is not None and (begun := self._begun.get(row)) is not None:
                self._end(row, "wasted" if begun.landed_bytes else "cancelled", begun.landed_bytes)

    def give_up(self, rows: Iterable[int]) -> None:
        """Cancel what was begun for a session that has ended."""
        catalog, now = self._core.catalog, self._core.now
        rows = list(rows)
        if self._rests:
            gone = {catalog.handle(row) for row in rows}
            for rest in self._rests:
                rest.blocks = [block for block in rest.blocks if block not in gone]
        rows = [row for row in rows if row in self._begun]
        if not rows:
            return
        self._copies.cancel(self._on_their_way(rows))
        for row in rows:
            begun = self._begun[row]
            if begun.landed_bytes == begun.num_bytes:
                catalog.awaited[row] = begun.until = now
                heapq.heappush(self._windows, (now, catalog.handle(row)))

    def landed(self, fragments: Sequence[int], cause: Cause | None) -> None:
        """Count what arrived, or will not arrive, of the blocks that were begun."""
        for fragment in fragments:
            begun = self._begun.get(self._core.catalog.block_of[fragment])
            if begun is None:
                continue
            length = self._core.catalog.length_of(fragment)
            if cause is None:
                begun.landed_bytes += length
                continue
            begun.num_bytes -= length
            self._shares.give(begun.tenant, length)
            if begun.source is not None:
                begun.source.begin(-length)

    def statistics(self) -> dict[str, int]:
        """Return what is begun and not used yet."""
        return {"num_awaited": len(self._begun), "awaited_bytes": self.begun_bytes}

    def check_integrity(self) -> list[str]:
        """Audit: every block begun is awaited and in the put tier or on its way there; the books add up."""
        catalog = self._core.catalog
        counters = self._core.story.counters
        problems = []
        for row in self._begun:
            if row not in catalog.awaited or not catalog.num_placed[self._put_tier][row]:
                problems.append(f"row {row}: was prefetched, and is not awaited")
        for row in catalog.awaited:
            if not catalog.num_placed[self._put_tier][row]:
                problems.append(f"row {row}: awaited in {self._put_tier.label}, where it is not")
        if self.begun_bytes != sum(begun.num_bytes for begun in self._begun.values()):
            problems.append(
                f"prefetch: {self.begun_bytes} bytes begun are not the sum of those of the blocks"
            )
        if sum(not one.out_bytes for one in self._accounts.values()) > MAX_ACCOUNTS:
            problems.append(f"prefetch: {len(self._accounts)} accounts are kept")
        for source in self._accounts.values():
            if source.out_bytes != sum(b.num_bytes for b in self._begun.values() if b.source is source):
                problems.append(
                    f"prefetch: {source.out_bytes} bytes out are not those of the source's blocks"
                )
        ended = sum(counters.get(f"prefetch_{end}", 0) for end in ("used", "late", "wasted", "cancelled"))
        if counters.get("prefetch_begun", 0) != ended + len(self._begun):
            problems.append(f"prefetch: {counters.get('prefetch_begun', 0)} begun, {ended} ended")
        return problems

    def _due_at(self) -> float | None:
        if self._rests:
            return self._core.now
        return (
            self._core.policies.prefetcher.next_at() if self._core.policies.prefetcher is not None else None
        )

    def _begin_due(self, now: float) -> None:
        """Go on with what was cut, then begin what the prefetcher says; known arrivals before forecasts."""
        rate = self._core.options.prefetch_bandwidth_fraction * self._core.costs.bandwidth_of(self._log_tier)
        earned = (now - self._allowed_at) * rate
        self._allowance_bytes = min(self._allowance_bytes + earned, max(rate * BURST_S, MIN_BURST_BYTES))
        self._allowed_at = now
        self._go_on(now, is_learned=False)
        is_free = all(map(_is_learned, self._rests))
        if self._core.policies.prefetcher is not None and is_free and (budget := self._budget_bytes()) >= 1:
            for expected in self._core.policies.prefetcher.due(now, int(budget)):
                source = "announcements" if expected.is_announced else "forecasts"
                self._guess(expected, Urgency.WAITING, self._budget_bytes(), source)
        self._go_on(now, is_learned=True)
        wait_s = (1 - self._allowance_bytes) / rate if rate > 0 else BURST_S  # 0: no share, for now
        self._not_before = now + max(PAUSE_S, wait_s)

    def _go_on(self, now: float, *, is_learned: bool) -> None:
        """Go on with what was cut of what was learned, or of everything else."""
        rests = [rest for rest in self._rests if _is_learned(rest) == is_learned]
        self._rests = deque(rest for rest in self._rests if _is_learned(rest) != is_learned)
        for rest in rests:
            rows = self._rows_of(rest)
            if rest.until > now and rows:
                expected = Expected(rows, rest.until, rest.reason)
                self.bring(expected, rest.urgency, self._budget_bytes(), rest.source)

    def _account(self, source: str, tenant: str) -> PrefetchAccount:
        """Return the account of a source of predictions for a tenant's blocks."""
        account = self._accounts.get((source, tenant))
        if account is None:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._accounts = {key: one for key, one in self._accounts.items() if one.out_bytes}
            account = self._accounts[source, tenant] = PrefetchAccount(is_learned=source == "forecasts")
        return account

    def _tenant_of(self, row: int) -> str:
        return tenant_of(self._core.catalog.namespace_of(row).identity.domain)

    def _guess(self, expected: Expected, urgency: Urgency, max_bytes: float, source: str) -> None:
        """Begin with what was not asked for, as much of it as can fit and its source is good for."""
        if not expected.rows:
            return
        catalog, tenant = self._core.catalog, self._tenant_of(expected.rows[0])
        account = self._account(source, tenant)
        capacity = self._core.rooms[self._put_tier].statistics().capacity_bytes
        pending = sum(catalog.block_bytes(row) for rest in self._rests for row in self._rows_of(rest))
        limit_bytes = self._core.options.max_prefetched_fraction * capacity
        self._shares.resize(int(limit_bytes), self._core.options.num_tenants)
        share_bytes = limit_bytes - self.begun_bytes - pending
        if account.is_learned:
            share_bytes -= KNOWN_SHARE * limit_bytes
        room_bytes = min(share_bytes, account.room_bytes(capacity, self._core.now) - pending)
        num_fitting = num_bytes = 0
        for row in expected.rows:
            num_bytes += catalog.block_bytes(row)
            if num_bytes > room_bytes or not self._shares.may_take(tenant, num_bytes):
                break
            num_fitting += 1
        if num_fitting < len(expected.rows):
            self._core.story.count("prefetch_unfit", len(expected.rows) - num_fitting)
        if num_fitting:
            self.bring(expected._replace(rows=expected.rows[:num_fitting]), urgency, max_bytes, account)

    def _serve_rests(self, rows: Sequence[int]) -> None:
        """Drop the rest of a chain that the expected session loads itself now.
        Brought up beside that load it would come too late or twice."""
        catalog, used = self._core.catalog, set(rows)
        for rest in self._rests:
            first = catalog.row_of(rest.blocks[0]) if rest.blocks else NO_ROW
            if first != NO_ROW and (first in used or catalog.parent[first] in used):
                rest.blocks = []

    def _rows_of(self, rest: _Rest) -> list[int]:
        """Return what still exists of a rest, up to the first block that does not."""
        rows = [self._core.catalog.row_of(block) for block in rest.blocks]
        return rows[: rows.index(NO_ROW)] if NO_ROW in rows else rows

    def _budget_bytes(self) -> float:
        return max(0.0, min(self._allowance_bytes, self._room_bytes()))

    def _room_bytes(self) -> int:
        """Return how many bytes may be begun now; none without a share of the bandwidth."""
        if not self._core.options.prefetch_bandwidth_fraction:
            return 0
        in_flight = self._core.bytes_in_flight.get(self._edge, 0)
        capacity = self._core.rooms[self._put_tier].statistics().capacity_bytes
        limit = self._core.options.max_prefetched_fraction * capacity
        return max(0, int(min(self._core.options.max_prefetch_bytes - in_flight, limit - self.begun_bytes)))

    def _note(self, row: int, until: float, num_bytes: int, source: PrefetchAccount | None) -> None:
        """A block was begun, or more of one that was begun before."""
        catalog = self._core.catalog
        begun = self._begun.get(row)
        if begun is None:
            begun = self._begun[row] = _Begun(until, 0, source, self._tenant_of(row))
            self._core.story.count("prefetch_begun")
        begun.num_bytes += num_bytes
        self._shares.add(begun.tenant, num_bytes)
        if begun.source is not None:
            begun.source.begin(num_bytes)
        catalog.awaited[row] = begun.until = max(begun.until, until)
        if begun.until != float("inf"):
            heapq.heappush(self._windows, (begun.until, catalog.handle(row)))

    def _end(self, row: int, outcome: str, num_bytes: int) -> None:
        core = self._core
        begun = self._begun.pop(row)
        self._shares.give(begun.tenant, begun.num_bytes)
        if begun.source is not None:
            used_bytes = num_bytes if outcome in ("used", "late") else 0
            wasted_bytes = num_bytes if outcome == "wasted" else 0
            begun.source.end(begun.num_bytes, used_bytes, wasted_bytes, core.now)
        core.tell(row, f"prefetch_{outcome}")
        core.story.count(f"prefetch_{outcome}_bytes", num_bytes)

    def _end_windows(self, now: float) -> None:
        """Those not used by now were wrong guesses: they go first when room is needed."""
        catalog = self._core.catalog
        while self._windows and self._windows[0][0] <= now:
            row = catalog.row_of(heapq.heappop(self._windows)[1])
            begun = self._begun.get(row) if row != NO_ROW else None
            if begun is not None and begun.until <= now:
                self._end(row, "wasted", begun.num_bytes)
                self._residency.offer(row, self._put_tier)

    def _on_their_way(self, rows: Iterable[int]) -> set[int]:
        """Return the fragments of these blocks that have not landed."""
        catalog = self._core.catalog
        arriving = catalog.state[self._put_tier]
        return {f for row in rows for f in catalog.fragments(row) if arriving[f] == State.ARRIVING}
