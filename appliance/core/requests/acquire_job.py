"""Acquire: look up and pin in one step, promote what is cold, report fragments as they arrive.

    lookup the prefix -> hold what is in memory -> bring up the rest, layer order -> reply as it lands
    -> last reply: how many blocks are readable

Blocks that are expected (expectations.py) count as part of the prefix from the first reply on; `extend`
brings them when they are stored or on their way. A fragment that cannot be brought up shortens the prefix; it
is never an error for the caller.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ....policies.costs import Advice
from ....tiers.base import Cause
from ....tiers.block import Tier, Urgency
from ....v1.shm import extent_of
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.runs import unkeep_run
from ..catalog.states import State
from ..events import AcquireRequested
from ..instructions import Reply
from ..promotion.loads import Loads
from ..results import AcquireResult, ReadyFragments
from .leases import LeaseEntry, LeaseTable


class Found(NamedTuple):
    """What an acquire found when it arrived, and what was granted."""

    rows: Sequence[int]  # of the blocks that may be read
    num_stored: int  # blocks, also those that are not worth loading or beyond a quota
    advice: Advice
    lease: LeaseEntry
    urgency: Urgency
    readable: Sequence[Tier]  # tiers that the client reads in place, the fastest first
    used_before: float  # when the blocks were used last, this time left out
    expected: Sequence[bytes] = ()  # names of the blocks behind `rows` that are waited for


class AcquireJob:
    """One acquire from request to last reply. Implements waiting.Job."""

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        leases: LeaseTable,
        loads: Loads,
        request: AcquireRequested,
        found: Found,
        on_done: Callable[["AcquireJob"], None],
    ) -> None:
        rows, advice, lease = found.rows, found.advice, found.lease
        self.request = request
        self.urgency = found.urgency
        self.calls = [request.call]
        self.lease = lease
        self.is_done = False
        self.wants_turn = False
        put_tier = core.ladder.put_tier  # of what is on its way from the source
        self.tiers = bytes(
            [put_tier if (tier := core.catalog.tier_of(row)) is None else tier for row in rows]
            + [put_tier] * len(found.expected)
        )
        self._prices = (found.num_stored, advice.reason, advice.load_s, advice.recompute_s)
        self._rows = list(rows)
        self._expected = found.expected
        self._num_known = len(rows)  # rows that were there when it began
        self._leases = leases
        self._loads = loads
        self._core = core
        self._device_tier, self._put_tier = core.ladder.device_tier, core.ladder.put_tier
        self._residency = residency
        self._readable = found.readable
        self._used_before = found.used_before
        self._on_done = on_done
        self._limit = len(rows) + len(found.expected)  # blocks that can still become readable
        self._next = (request.first_block, 0)  # block and group to look at next
        self._pending: dict[int, tuple[int, int]] = {}  # fragment -> (block, group), on its way up
        self._ready = ReadyFragments(core.ladder.tiers)  # not reported yet
        self._all_ready = ReadyFragments(core.ladder.tiers)
        self._has_replied = False
        self._promised_bytes = 0  # of what the client will hold when all has arrived
        self._promise()
        core.transitions.keep_run(rows)

    def advance(self) -> bool:
        """Hold or bring up as much as there is room for; True when nothing more needs room."""
        catalog = self._core.catalog
        if not self._has_lease:
            self._shorten(0)
        block, group = self._next
        while block < min(self._limit, len(self._rows)):
            row = self._rows[block]
            fragments = catalog.fragments(row)
            if group == 0 and (tier := self._tier_of_all(row, len(fragments))) is not None:
                self._hold_block(row, fragments, tier, block)
                block += 1
                continue
            while group < len(fragments):
                if not self._take(fragments[group], block, group):
                    if self._limit > block:
                        self._next = (block, group)
                        self._start_loads()
                        return False
                    break
                group += 1
            block, group = block + 1, 0
        self._next = (block, 0)
        self._start_loads()
        return True

    @property
    def num_awaited(self) -> int:
        """Blocks that are expected and neither stored nor on their way."""
        return 0 if self.is_done else max(0, self._limit - len(self._rows))

    @property
    def is_level(self) -> bool:
        """Whether everything that is there was taken, so that `extend` may bring more."""
        return self._next[0] >= len(self._rows)

    def awaited_names(self) -> Iterator[bytes]:
        """Return the names of the `num_awaited` blocks, one by one: mostly the first is missing."""
        start = len(self._rows) - self._num_known
        return map(self._expected.__getitem__, range(start, start + self.num_awaited))

    def extend(self, rows: Sequence[int]) -> None:
        """Take the next expected blocks: they are stored or on their way from the source."""
        self._core.transitions.keep_run(rows)
        self._rows += rows

    def expect_no_more(self) -> None:
        """Settle for the blocks that are stored, or on their way."""
        self._shorten(len(self._rows))

    def give_up(self) -> None:
        """The deadline passed: keep the blocks that are complete, leave the rest."""
        waiting_for = [block for block, _ in self._pending.values()]
        self._shorten(min([self._next[0], *waiting_for, self._limit]))
        self.report()

    def abandon(self) -> None:
        """End the lease: the client does not listen any more."""
        self._finish()
        self._leases.release(self.lease.id)

    def report(self) -> None:
        """Tell the caller what became readable since the last report."""
        if self.is_done:
            return
        if not self._has_lease:
            self._shorten(0)
        last = not self._pending and self._next[0] >= self._limit
        if not (self._ready or last or not self._has_replied):
            return
        first = not self._has_replied
        for call in self.calls:
            tiers = self.tiers[: self._limit] if first else b""
            self._reply(call, self._ready, last, tiers)
        self._all_ready.extend(self._ready)
        self._ready = ReadyFragments(self._core.ladder.tiers)
        self._has_replied = True
        if last:
            self._finish()

    def repeat_for(self, call: int) -> None:
        """Answer a retry of the same request like the first try.
        With nothing when its lease is over, for the places it named may be others' by now, or when what it
        named was condemned since."""
        if not self._has_lease or not self._is_intact():
            self._core.outbox.emit(Reply(call, AcquireResult(0, 0, ReadyFragments(), True, 0.0)))
            return
        self._reply(call, self._all_ready.copy(), self.is_done, self.tiers[: self._limit])
        if not self.is_done:
            self.calls.append(call)

    def _is_intact(self) -> bool:
        """Whether everything that was reported may still be read by a new reader."""
        catalog = self._core.catalog
        return all(
            catalog.state[r.tier][catalog.first_fragment[self._rows[r.block]] + r.group] == State.RESIDENT
            for r in self._all_ready
        )

    @property
    def _has_lease(self) -> bool:
        """Whether the lease still stands: its client may release it, or its deadline end it, any time."""
        return self._leases.get(self.lease.id) is self.lease

    def _take(self, fragment: int, block: int, group: int) -> bool:
        """Hold one fragment, or see that it comes; False when there is no room yet or it is gone (then
        the prefix was shortened)."""
        catalog = self._core.catalog
        for tier in self._readable:
            if catalog.state[tier][fragment] == State.RESIDENT:
                self._hold(fragment, tier, block, group)
                return True
        for target in self._targets(fragment, block):
            if self._loads.bring(fragment, target, partial(self._arrived, target)):
                break
        else:
            if not self._may_come(fragment):
                self._shorten(block)
            return False
        self._pending[fragment] = (block, group)
        return True

    def _targets(self, fragment: int, block: int) -> list[Tier]:
        """Return the tiers into which a fragment may be brought for this reader, the better one first."""
        catalog = self._core.catalog
        if not self._may_come(fragment):
            return []
        put_tier, device_tier = self._put_tier, self._device_tier
        if catalog.state[put_tier][fragment] == State.ARRIVING or device_tier not in self._readable:
            return [put_tier]
        if catalog.state[device_tier][fragment] == State.ARRIVING:
            return [device_tier]
        if not self.request.on_device or not self._loads.rules.comes_straight(fragment):
            return [put_tier]
        is_admitted = self._loads.rules.admits(self._rows[block], self._used_before, device_tier)
        return [device_tier, put_tier] if is_admitted else [put_tier]

    def _may_come(self, fragment: int) -> bool:
        """Whether a fragment is on its way into a tier that is read here, or is where it can be had."""
        state = self._core.catalog.state
        if any(state[tier][fragment] == State.ARRIVING for tier in self._readable):
            return True
        return state[self._put_tier][fragment] == State.ABSENT and (
            self._loads.source_of(fragment, self._put_tier) is not None
        )

    def _hold(self, fragment: int, tier: Tier, block: int, group: int) -> None:
        catalog = self._core.catalog
        self._leases.hold(self.lease, fragment, tier)
        place, length = catalog.place[tier][fragment], catalog.length_of(fragment)
        self._ready.add(block, group, tier, place, length)
        self._set_promised(self._promised_bytes - length)

    def _tier_of_all(self, row: int, num_groups: int) -> Tier | None:
        """Return the tier that all fragments of a block are read from, one by one; None if it is not one."""
        for tier in self._readable:
            num_resident = self._core.catalog.num_resident[tier][row]
            if num_resident:
                return tier if num_resident == num_groups else None
        return None

    def _hold_block(self, row: int, fragments: range, tier: Tier, block: int) -> None:
        """`_hold` for all fragments of a block."""
        namespace = self._core.catalog.namespace_of(row)
        self._leases.hold_block(self.lease, row, fragments, tier)
        places = self._core.catalog.place[tier][fragments.start : fragments.stop]
        self._ready.add_block(block, tier, places, array("q", namespace.fragment_bytes))
        self._set_promised(self._promised_bytes - namespace.block_bytes)

    def _arrived(self, tier: Tier, fragment: int, cause: Cause | None) -> None:
        where = self._pending.pop(fragment, None)
        if self.is_done or where is None or where[0] >= self._limit or not self._has_lease:
            return
        if cause is None:
            self._hold(fragment, tier, *where)
        else:
            self._shorten(where[0])

    def _shorten(self, num_blocks: int) -> None:
        """Only the first `num_blocks` blocks can become readable: let go of what is behind them.

        What was reported already stays held until the lease ends: its client may be reading it.
        """
        self._limit = min(self._limit, num_blocks)
        self._pending = {f: where for f, where in self._pending.items() if where[0] < self._limit}
        first_fragment = self._core.catalog.first_fragment
        gone = {
            (first_fragment[self._rows[r.block]] + r.group, r.tier)
            for r in self._ready
            if r.block >= self._limit
        }
        self._ready = self._ready.before(self._limit)
        if gone:
            held = self.lease.held
            self.lease.held = [pair for pair in held if pair not in gone]
            self._leases.let_go(self.lease, [pair for pair in held if pair in gone])
        self._promise()

    def _promise(self) -> None:
        """Count what this request may still bring, so that others' are not granted the same room."""
        if self.is_done:
            return
        catalog = self._core.catalog
        num_blocks = max(0, self._limit - self.request.first_block)
        block_bytes = catalog.namespaces[self.request.namespace_id].block_bytes
        ready_bytes = sum(found.bytes_before(self._limit) for found in (self._all_ready, self._ready))
        self._set_promised(num_blocks * block_bytes - ready_bytes)

    def _set_promised(self, num_bytes: int) -> None:
        self.lease.client.promised_bytes += num_bytes - self._promised_bytes
        self._promised_bytes = num_bytes

    def _start_loads(self) -> None:
        self._loads.start(self.urgency, self.request.deadline_at)

    def _reply(self, call: int, ready: ReadyFragments, last: bool, tiers: bytes) -> None:
        ttl_s = max(0.0, self.lease.deadline_at - self._core.now)
        result = AcquireResult(self.lease.id, self._limit, ready, last, ttl_s)
        if tiers:
            result.tiers, result.arriving = tiers, self._arriving()
            result.num_stored, result.reason, result.load_s, result.recompute_s = self._prices
        self._core.outbox.emit(Reply(call, result))

    def _arriving(self) -> list[tuple[Tier, int]]:
        """Return the extents that what is on its way up will be in."""
        state, place = self._core.catalog.state, self._core.catalog.place
        return [
            (tier, extent)
            for tier in self._readable
            for extent in sorted(
                {extent_of(place[tier][f]) for f in self._pending if state[tier][f] == State.ARRIVING}
            )
        ]

    def _finish(self) -> None:
        if not self.is_done:
            self.is_done = True
            self._set_promised(0)
            unkeep_run(self._residency, self._rows[::-1])
            if self._limit <= self.request.first_block and not self._all_ready:
                self._leases.release(self.lease.id)  # nothing was reported: no client will release it
            self._on_done(self)


def stored_prefix(core: CoreState, namespace: NamespaceEntry, prefix_hashes: Sequence[bytes]) -> list[int]:
    """Return the rows of the longest prefix that is readable now."""
    rows = []
    for row in namespace.rows.find(prefix_hashes):
        if row == NO_ROW or core.readable_from(row) is None:
            break
        rows.append(row)
    return rows
