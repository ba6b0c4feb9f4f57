"""Dirty: queues of blocks that memory has and the cold store has not, in the order of their copies down.

`puts` has what puts brought, in the order in which it came: that is nearly the order in which blocks become
victims, has parents before children, and is known without asking any policy. `lost` has blocks that are in
memory and have lost their record in the cold store (a failed copy, a reclaimed segment, a record that failed
verification). Queues are read lazily: what was evicted or copied meanwhile stays until its turn, or until the
queue is swept because it names more bytes than memory can hold. Where limits are divided among tenants each
has queues of its own, so that one that used up its share of the write budget keeps no other waiting.

Where blocks are copied only when memory fills (`is_complete` False), not all of them are needed: `lost` stays
empty, and a queue that is too long forgets its oldest. When a block is copied is decided in ahead.py."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ....policies.base import Use
from ....tiers.block import Tier, tenant_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.policy_listeners import Listener
from ..catalog.runs import column
from ..catalog.states import State

#: Entries looked at in one call.
MAX_LOOKS: Final = 256
#: Entries swept for each one that is appended to a line that is too long; and beside them.
SWEEP_FACTOR: Final = 4
SWEEP_LOOKS: Final = 32
#: Entries and rows looked at in one step of `complete`: about a millisecond.
COMPLETE_LOOKS: Final = 512


class DirtyQueue:
    """Blocks by handle, first in, first out. Holds handles of forgotten blocks, too."""

    def __init__(self, core: CoreState, is_dirty: Callable[[int], bool], queued: bytearray) -> None:
        self._core = core
        self._is_dirty = is_dirty
        self._queued = queued  # see Dirty; by row
        self._swept: deque[tuple[int, int]] = deque()  # handle, bytes; before everything in _queue
        self._queue: deque[tuple[int, int]] = deque()
        self.num_bytes = 0

    def append(self, rows: Sequence[int]) -> None:
        """Let blocks of one namespace wait."""
        catalog = self._core.catalog
        handle, block_bytes = catalog.handle, catalog.block_bytes(rows[0])
        self._queue.extend([(handle(row), block_bytes) for row in rows])
        self.num_bytes += len(rows) * block_bytes
        if self._queued:
            for row in rows:
                self._note_queued(row)

    def first(self, above_bytes: float = 0) -> int:
        """Return the dirty block that waits longest; NO_ROW: none, or none among MAX_LOOKS.
        Removes what is in front of it, as long as the queue has more than `above_bytes`, which may be below
        0: other queues have more than may stay."""
        for _ in range(MAX_LOOKS):
            if not self or self.num_bytes <= above_bytes:
                break
            row = self._dirty_row((self._swept or self._queue)[0][0])
            if row != NO_ROW:
                return row
            self.pop()
        return NO_ROW

    def pop(self) -> None:
        """Take out the first one."""
        self.num_bytes -= (self._swept or self._queue).popleft()[1]

    def __len__(self) -> int:
        return len(self._swept) + len(self._queue)

    def rows(self) -> set[int]:
        """Return the dirty blocks that wait. O(everything): for audits."""
        return {self._dirty_row(handle) for handle, _ in (*self._swept, *self._queue)} - {NO_ROW}

    def check_integrity(self) -> list[str]:
        """Audit: the bytes counted are those of the line."""
        num_bytes = sum(size for _, size in (*self._swept, *self._queue))
        return [f"dirty: {self.num_bytes} bytes, not {num_bytes}"] if num_bytes != self.num_bytes else []

    def sweep(self, num_looks: int) -> None:
        """Look at the next entries and keep those of dirty blocks, in order.
        A whole sweep leaves no more than memory holds, and `num_looks` is more than what is appended
        meanwhile: a queue stays bounded."""
        for _ in range(min(num_looks, len(self._queue))):
            entry = self._queue.popleft()
            row = self._dirty_row(entry[0])
            if row != NO_ROW:
                self._swept.append(entry)
                self._note_queued(row)
            else:
                self.num_bytes -= entry[1]
        if not self._queue:
            self._queue, self._swept = self._swept, self._queue

    def _note_queued(self, row: int) -> None:
        if row < len(self._queued):
            self._queued[row] = 1

    def _dirty_row(self, handle: int) -> int:
        row = self._core.catalog.row_of(handle)
        return row if row != NO_ROW and self._is_dirty(row) else NO_ROW


class DirtyQueues:
    """A queue for each tenant, or one for all where limits are not divided among tenants."""

    def __init__(self, core: CoreState, is_dirty: Callable[[int], bool], queued: bytearray) -> None:
        self._core = core
        self._is_dirty = is_dirty
        self._queued = queued
        self._queues: dict[str, DirtyQueue] = {}  # by tenant, the one that was served longest ago first

    def append(self, rows: Sequence[int]) -> DirtyQueue:
        """Let blocks of one namespace wait. Returns the queue in which they do."""
        tenant = ""
        if self._core.options.num_tenants:
            tenant = tenant_of(self._core.catalog.namespace_of(rows[0]).identity.domain)
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = DirtyQueue(self._core, self._is_dirty, self._queued)
        queue.append(rows)
        return queue

    def by_tenant(self) -> list[tuple[str, DirtyQueue]]:
        """Return the tenants with their queues that are not empty, the one served longest ago first."""
        for tenant in [tenant for tenant, queue in self._queues.items() if not queue]:
            del self._queues[tenant]
        return list(self._queues.items())

    def served(self, tenant: str) -> None:
        """Let the other tenants have their turns first."""
        self._queues[tenant] = self._queues.pop(tenant)

    def largest(self) -> DirtyQueue | None:
        """Return the queue with most bytes; None: all are empty."""
        return max([queue for _, queue in self.by_tenant()], key=lambda queue: queue.num_bytes, default=None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all queues."""
        return sum([queue.num_bytes for queue in self._queues.values()])

    def __len__(self) -> int:
        return sum([len(queue) for queue in self._queues.values()])

    def rows(self) -> set[int]:
        """Return the dirty blocks that wait. O(everything): for audits."""
        return set().union(*[queue.rows() for queue in self._queues.values()])

    def check_integrity(self) -> list[str]:
        """Audit all queues."""
        return [problem for queue in self._queues.values() for problem in queue.check_integrity()]


class Dirty:
    """Both lines. Empty where there is no cold store."""

    def __init__(self, core: CoreState, *, is_complete: bool) -> None:
        self._core = core
        self._log_tier = core.ladder.log_tier
        self._memory_tiers = core.ladder.memory_tiers
        self.is_complete = is_complete
        #: While `complete` is carried out: by row, whether the block was seen in a queue. Else empty.
        self._queued = bytearray()
        self._num_to_sweep = 0  # entries of `puts` that were not looked at yet
        self._next_row = 0
        self.puts = DirtyQueues(core, self.is_dirty, self._queued)
        self.lost = DirtyQueues(core, self.is_dirty, self._queued)
        core.listeners.join(Listener(stored=self._put))

    def _put(self, rows: Sequence[int], use: Use) -> None:
        """Let blocks of one namespace that were put wait."""
        if self._log_tier not in self._core.rooms:
            return
        queue = self.puts.append(rows)
        self._num_to_sweep += len(rows)
        if self.is_complete:
            self._sweep(self.puts, queue, len(rows))
        else:
            rooms = self._core.rooms
            host_tiers = [tier for tier in self._core.ladder.host_tiers if tier in rooms]
            capacity_bytes = sum(rooms[tier].statistics().capacity_bytes for tier in host_tiers)
            # The cold store took nothing for a long time.
            while self.puts.num_bytes > capacity_bytes and (largest := self.puts.largest()) is not None:
                largest.pop()

    def note_lost(self, row: int) -> None:
        """A record of a block left the cold store."""
        if self.is_complete and self.is_dirty(row):
            self._sweep(self.lost, self.lost.append((row,)), 1)

    def complete(self) -> None:
        """Begin to append the dirty blocks that do not wait yet; `run` does that step by step.
        From now on all of them wait."""
        self.is_complete = True
        if self._log_tier not in self._core.rooms:
            return
        self._queued[:] = bytes(len(self._core.catalog.prefix_hash))  # by row
        self._num_to_sweep, self._next_row = len(self.puts), 0

    @property
    def is_busy(self) -> bool:
        """Whether `complete` has steps left: a Tick is due at once."""
        return bool(self._queued)

    def run(self) -> None:
        """Make one step of `complete`.
        First it sees which blocks wait already, a few entries at a time, then it appends the others, a few
        rows at a time: of these rows the ones used first, parents before their children. That is about the
        order in which they were put."""
        if not self._queued:
            return
        if self._num_to_sweep > 0:
            queues = [queue for _, queue in self.puts.by_tenant()]
            num_looks = max(1, COMPLETE_LOOKS // max(1, len(queues)))
            self._num_to_sweep -= num_looks
            for queue in queues:
                queue.sweep(num_looks)
            return
        first, catalog = self._next_row, self._core.catalog
        last = self._next_row = min(first + COMPLETE_LOOKS, len(self._queued))
        in_memory = [column(catalog.num_resident[tier])[first:last] > 0 for tier in self._memory_tiers]
        rows = [first + row for row in np.flatnonzero(np.any(in_memory, axis=0)).tolist()]
        rows = [row for row in rows if not self._queued[row] and self.is_dirty(row)]
        for row in sorted(rows, key=lambda row: (catalog.last_used[row], catalog.position[row])):
            self.puts.append((row,))
        if last == len(self._queued):
            self._queued.clear()

    def is_dirty(self, row: int) -> bool:
        """Whether memory has a fragment of a block that the cold store neither has nor is about to get."""
        catalog = self._core.catalog
        placed = catalog.num_placed[self._log_tier][row]
        if placed == catalog.namespace_of(row).num_groups:
            return False
        in_memory = False
        for tier in self._memory_tiers:
            in_memory = in_memory or catalog.num_resident[tier][row] > 0
        if not placed or not in_memory:
            return in_memory
        return any(
            catalog.state[self._log_tier][fragment] == State.ABSENT
            and any(catalog.state[tier][fragment] == State.RESIDENT for tier in self._memory_tiers)
            for fragment in catalog.fragments(row)
        )

    def source_of(self, row: int) -> Tier:
        """Return the tier to copy a dirty block from: the slowest that has a part of what is missing.
        A copy from host memory costs the device nothing."""
        states, missing = self._core.catalog.state, State.ABSENT
        fragments = self._core.catalog.fragments(row)
        fastest, *slower = self._memory_tiers
        for tier in reversed(slower):
            for fragment in fragments:
                is_missing = states[self._log_tier][fragment] == missing
                if is_missing and states[tier][fragment] == State.RESIDENT:
                    return tier
        return fastest

    def __len__(self) -> int:
        return len(self.puts) + len(self.lost)

    def check_integrity(self) -> list[str]:
        """Audit both lines."""
        return [*self.puts.check_integrity(), *self.lost.check_integrity()]

    def _sweep(self, queues: DirtyQueues, queue: DirtyQueue, num_new: int) -> None:
        rooms = self._core.rooms
        memory_bytes = sum(rooms[t].statistics().capacity_bytes for t in self._memory_tiers if t in rooms)
        if queues.num_bytes > memory_bytes:
            queue.sweep(SWEEP_FACTOR * num_new + SWEEP_LOOKS)
