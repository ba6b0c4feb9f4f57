"""Ahead: blocks that are copied into the cold store before their room in memory is needed.

They stay where they are, too, so that they are *clean*: their room can be had at once, and they are found
again should the process die. When that happens is a setting, `write` of the cold store:

    spill      from the low watermark of memory on, so that a burst of puts finds room at once
    idle       and while the device has nothing else to do, within a budget of bytes a day
    through    and every put, as soon as it was answered

Puts come in bursts faster than any device writes; what is dirty when one begins is what it has to wait for.
What is in both tiers takes room twice. From the watermark on that is at most MAX_DOUBLE of the cold store, so
the newest blocks stay dirty where it is small; idle copies may take MAX_IDLE_DOUBLE of it: a store that is
twice as large as memory takes all. A block that lost its record while memory has it (dirty.py, `lost`) is
copied again only into room that is free: a store smaller than memory would write itself in circles.

An idle copy makes way: it begins only when nothing is on its way to or from the device, is of MAX_IDLE_BYTES
at most, is made by one thread, and while clients ask there is one every PACE_S. So a load or spill that comes
meanwhile waits for one such copy at most. Tenants take turns; one that used up its share of the budget keeps
no other waiting.

Rejected: copying down the next victim (only the ends of chains are candidates; the rest of a chain
becomes one when they have left); the dearest first (a child without its parent is of no use after a restart,
and with a budget of the size of the store nearly all is copied); letting clean blocks leave ahead of need (a
tenth of memory stands empty, and is missed); cancelling an idle copy (it is over sooner).
"""

from typing import Final

from ....tiers.block import Tier, Urgency
from ....tiers.cold.log import SegmentLog, record_bytes
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..copying.write_budget import WriteBudget
from .dirty import Dirty, DirtyQueue
from .pressure import COPY_AHEAD, IDLE_COPY, Pressure

#: Share of the cold store for blocks that were copied down from the watermark on and are in memory, too.
MAX_DOUBLE: Final = 1 / 8
#: The same for idle copies. What memory continues cannot be reclaimed, so the rest has to be for others.
MAX_IDLE_DOUBLE: Final = 1 / 2
#: Share of what may be on its way down for blocks copied before their room is needed.
AHEAD_SHARE: Final = 0.5
#: Blocks begun in one step.
MAX_STEPS: Final = 64
#: An idle copy: so many bytes and fragments at most, but one block.
MAX_IDLE_BYTES: Final = 4 << 20
MAX_IDLE_FRAGMENTS: Final = 32
#: Between two idle copies while clients ask.
PACE_S: Final = 0.01
#: Between two looks at a budget that is used up, at least.
BUDGET_PAUSE_S: Final = 0.1


class Ahead:
    """Decides what is copied down ahead; `Pressure` makes the copies."""

    def __init__(self, core: CoreState, pressure: Pressure, dirty: Dirty, budget: WriteBudget) -> None:
        self._core = core
        self._log_tier = core.ladder.log_tier
        self._host_tiers = [tier for tier in core.ladder.host_tiers if tier in core.rooms]
        self._pressure = pressure
        self.dirty = dirty
        self.budget = budget
        self._began_at = float("-inf")  # the last idle copy
        self._due_at: float | None = None  # when there may be another, if only time is missing for it

    def options_changed(self) -> None:
        """Let other options be in force."""
        options = self._core.options
        self.budget.limit(options.daily_write_bytes, self._core.now, options.num_tenants)
        if options.write == "spill":
            self.dirty.is_complete = False
        elif not self.dirty.is_complete:
            self.dirty.complete()

    def next_deadline(self) -> float | None:
        """When an idle copy is due."""
        return self._due_at

    def spill(self) -> None:
        """Copy down what was put longest ago, as much as the watermark or the setting asks for."""
        pressure, puts = self._pressure, self.dirty.puts
        if not pressure.may_spill(self._host_tiers[-1]):
            return
        is_through = self._core.options.write == "through"
        max_spilling_bytes = AHEAD_SHARE * self._core.options.max_spill_bytes
        capacity_bytes = sum(self._core.rooms[tier].statistics().capacity_bytes for tier in self._host_tiers)
        low_bytes = self._core.options.low_watermark * capacity_bytes
        may_be_dirty_bytes = max(0.0, capacity_bytes - MAX_DOUBLE * self._cold_bytes())
        num_steps = 0
        while pressure.cold_spilling_bytes() < max_spilling_bytes and (queue := puts.largest()) is not None:
            if not is_through and not self._is_due(low_bytes, may_be_dirty_bytes):
                return
            if num_steps == MAX_STEPS:
                pressure.is_busy = True
                return
            num_steps += 1
            of_others = puts.num_bytes - queue.num_bytes
            row = queue.first(0 if is_through else may_be_dirty_bytes - of_others)
            if row == NO_ROW:
                pressure.is_busy = pressure.is_busy or (is_through and len(puts) > 0)
                return
            must_displace = is_through and not self._is_due(low_bytes, may_be_dirty_bytes)
            if must_displace and not self._has_room(row, displaces=True):
                return
            is_admitted = pressure.is_worth_keeping(row, self._log_tier) and pressure.cold_quota.admits(row)
            if is_admitted:
                urgency = Urgency.IDLE if is_through else Urgency.ENDED
                while self.dirty.is_dirty(row):
                    if not pressure.copy_down(row, self.dirty.source_of(row), urgency, what=COPY_AHEAD):
                        return  # no room
                    if not self.dirty.is_complete:
                        break  # what is left of it is copied when it is a victim
            queue.pop()

    def idle(self) -> None:
        """Begin an idle copy, if one may begin now."""
        self._due_at = None
        pressure, now = self._pressure, self._core.now
        mode = self._core.options.write
        if self._core.log is None or self._log_tier in self._core.offline:
            return
        if mode == "spill" or not self.dirty:
            return
        if pressure.refusals.is_pausing:
            if not (pressure.refusals.is_full or pressure.refusals.is_stopped):  # which end with an event
                self._due_at = pressure.refusals.ask_again_at
            return
        if now < pressure.refusals.idle_again_at:
            self._due_at = pressure.refusals.idle_again_at
            return
        if pressure.is_cold_edge_busy():
            return  # its end is an event
        if now < self._began_at + PACE_S and now < self._core.asked_at + PACE_S:
            self._due_at = self._began_at + PACE_S
            return
        for queues in (self.dirty.lost, self.dirty.puts) if mode == "idle" else (self.dirty.lost,):
            for tenant, queue in queues.by_tenant():
                if self._begin(queue, tenant, is_again=queues is self.dirty.lost):
                    queues.served(tenant)
                    return

    def _begin(self, line: DirtyQueue, tenant: str, *, is_again: bool) -> bool:
        """Begin one idle copy of the first blocks of a tenant's queue. Whether there is one."""
        catalog, pressure = self._core.catalog, self._pressure
        num_bytes = num_fragments = 0
        kind: tuple[int, Tier] | None = None  # domain and source of the blocks: one thread copies them
        for _ in range(MAX_STEPS):
            row = line.first()
            if row == NO_ROW:
                self._look_again(line)
                break
            namespace, source = catalog.namespace_of(row), self.dirty.source_of(row)
            if kind is not None and (
                num_fragments + namespace.num_groups > MAX_IDLE_FRAGMENTS
                or num_bytes + namespace.block_bytes > MAX_IDLE_BYTES
                or kind != (namespace.domain, source)
            ):
                break
            wanted_bytes = num_bytes + _record_bytes(namespace.fragment_bytes)
            is_bounded = self._may_be_double() and self._has_room(row, displaces=not is_again)
            if not is_bounded or not self._is_paid(wanted_bytes, tenant, is_first=not num_bytes):
                if is_again and not num_bytes:
                    pressure.reclaim.free_dead_segments()  # of failed copies; that displaces nothing
                break
            if pressure.cold_quota.has_room(row) and pressure.is_worth_keeping(row, self._log_tier):
                pressure.copy_down(row, source, Urgency.ENDED, what=IDLE_COPY)
                if self.dirty.is_dirty(row):  # no room for all of it, or the rest is in another tier
                    break
                num_bytes = wanted_bytes
                num_fragments += namespace.num_groups
                kind = namespace.domain, source
            line.pop()
        else:
            self._look_again(line)
        is_begun = pressure.has_spills
        pressure.start_spills(in_one=True)
        if is_begun:
            self._began_at, self._due_at = self._core.now, None
        return is_begun

    def _look_again(self, line: DirtyQueue) -> None:
        """Blocks that are not to be copied were taken out of a line, and there are more behind them."""
        self._pressure.is_busy = self._pressure.is_busy or len(line) > 0

    def _is_due(self, low_bytes: float, may_be_dirty_bytes: float) -> bool:
        """Whether memory is above its low watermark, and the cold store has room for blocks in both."""
        return self.dirty.puts.num_bytes > may_be_dirty_bytes and self._taken_bytes() > low_bytes

    def _taken_bytes(self) -> int:
        """Return the bytes taken in the host's memory tiers together."""
        return sum([self._core.rooms[tier].statistics().taken_bytes for tier in self._host_tiers])

    def _has_room(self, row: int, *, displaces: bool) -> bool:
        """Whether a block that could stay dirty may take room in the cold store: what is free, or, if it
        `displaces` others, what reclaiming wins."""
        fragment_bytes = self._core.catalog.namespace_of(row).fragment_bytes
        if self._log.has_free_room(_record_bytes(fragment_bytes), self._core.options.min_free_segments):
            return True
        return displaces and not self._pressure.reclaim.is_in_vain

    def _may_be_double(self) -> bool:
        """Whether more blocks may be in memory and, by idle copies, in the cold store."""
        double_bytes = self._taken_bytes() - self.dirty.puts.num_bytes
        return double_bytes < MAX_IDLE_DOUBLE * self._cold_bytes()

    def _is_paid(self, num_bytes: int, tenant: str, *, is_first: bool) -> bool:
        """Whether the budget allows for a copy of so many bytes of a tenant. If not, and that is its first
        block, there is another look when it may."""
        now = self._core.now
        if self.budget.allows(num_bytes, now, tenant):
            return True
        allowed_at = self.budget.allowed_at(num_bytes, now, tenant)
        if is_first and allowed_at < float("inf"):
            look_at = max(allowed_at, now + BUDGET_PAUSE_S)
            self._due_at = look_at if self._due_at is None else min(self._due_at, look_at)
        return False

    @property
    def _log(self) -> SegmentLog:
        log = self._core.rooms[self._log_tier]
        assert isinstance(log, SegmentLog)
        return log

    def _cold_bytes(self) -> int:
        return self._log.num_segments * self._log.segment_bytes


def _record_bytes(fragment_bytes: tuple[int, ...]) -> int:
    """Return the bytes that the records of a block take at most."""
    return sum(map(record_bytes, fragment_bytes))
