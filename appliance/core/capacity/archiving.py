"""Archiving: copies of blocks into the cold store because their session ended, an encoded fragment was too
long, or the daemon drains. Bounded per event, within the tenant's quota, the slowest memory first. Tenants
take turns, block by block, and each has a share of the places for blocks of ended sessions."""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

from ....tiers.block import Urgency, tenant_of
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..shares import Shares

#: What the copies are called in the story.
ARCHIVE = "archive"
#: Blocks looked at per event: about a millisecond.
MAX_STEPS = 64
#: Looked at in a step of a drain, beside MAX_STEPS that are copied: about a millisecond. Free rows between
#: them are passed over, up to so many for each.
STEP_BLOCKS = 128
MAX_FREE = 32
#: Blocks that wait, of all tenants; those of a drain come on top.
MAX_QUEUED = 262_144


class Archiving:
    """Queues blocks and decides their copies, through callables.

    `copy_down` returns whether there was room, `cold_spilling_bytes` what is on its way down, `admits`
    whether the tenant's quota has room."""

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        copy_down: Callable[..., bool],
        cold_spilling_bytes: Callable[..., int],
        admits: Callable[[int], bool],
    ) -> None:
        self._core = core
        self._residency = residency
        self._copy_down = copy_down
        self._spilling_bytes = cold_spilling_bytes
        self._admits = admits
        self._log_tier, self._memory_tiers = core.ladder.log_tier, core.ladder.memory_tiers
        self._turns: OrderedDict[str, deque[int]] = OrderedDict()  # handles, by tenant, the next one first
        self._queued: set[int] = set()  # the same handles
        self._shares = Shares(MAX_QUEUED, core.options.num_tenants)
        #: Drains that look at every block: the next row, blocks queued so far, and what is told at the end.
        self._walks: deque[tuple[int, int, Callable[[int], None]]] = deque()

    def __len__(self) -> int:
        return self._shares.taken

    def add(self, row: int) -> bool:
        """Queue the copy of a block into the cold store; False when it is there or cannot go."""
        if not self._is_open() or not self._has_to_go(row):
            return False
        self._append(self._new([row]), self._tenant_of(row))
        return True

    def add_ended(self, rows: Sequence[int]) -> int:
        """Queue the blocks of an ended session, if its tenant has places for them.
        Returns how many the cold store has not. Each is looked at in its turn: there may be thousands."""
        if not rows or not self._is_open():
            return 0
        catalog, tenant = self._core.catalog, self._tenant_of(rows[0])
        numbers, num_stored = catalog.namespace_id, catalog.num_resident[self._log_tier]
        num_groups = {number: one.num_groups for number, one in catalog.namespaces.items()}
        rows = [row for row in rows if num_stored[row] < num_groups[numbers[row]]]
        self._shares.resize(MAX_QUEUED, self._core.options.num_tenants)
        handles = self._new(rows)
        if not self._shares.may_take(tenant, len(handles)):
            self._core.story.count("archives_beyond_share", len(handles))
            return 0
        self._append(handles, tenant)
        return len(rows)

    def add_all(self, on_done: Callable[[int], None]) -> None:
        """Begin to queue everything that is only in memory (drain); what a step leaves over is for `run`.
        `on_done` is called once with the blocks queued."""
        self._walks.append((0, 0, on_done))
        self._walk()

    def _walk(self) -> None:
        """Look at the next STEP_BLOCKS of a drain. Puts that land meanwhile queue their own blocks."""
        row, num_queued, on_done = self._walks.popleft()
        names, num_left = self._core.catalog.prefix_hash, STEP_BLOCKS
        end = min(row + MAX_FREE * STEP_BLOCKS, len(names)) if self._is_open() else row
        while row < end and num_left:
            if names[row]:
                num_left -= 1
                num_queued += self.add(row)
            row += 1
        if row < len(names) and self._is_open():
            self._walks.append((row, num_queued, on_done))
        else:
            on_done(num_queued)

    def run(self) -> bool:
        """Decide the next copies. Returns whether some are left only because there were many."""
        if self._walks:
            self._walk()
        return self._decide() or bool(self._walks)

    def _decide(self) -> bool:
        for _ in range(min(MAX_STEPS, len(self))):
            if self._log_tier in self._core.offline:
                return False
            tenant, queue = next(iter(self._turns.items()))
            self._turns.move_to_end(tenant)
            if not self._begin(self._core.catalog.row_of(queue[0])):
                return False
            self._queued.discard(queue.popleft())
            self._shares.give(tenant, 1)
            if not queue:
                del self._turns[tenant]
        return bool(self._turns)

    def _begin(self, row: int) -> bool:
        """Decide the copies of a block, if it has to go and its tenant's quota has room. False: it waits."""
        if row == NO_ROW or not self._has_to_go(row):
            return True
        # A part of it may be in the device tier only; copies from a slower one cost the device nothing.
        for source in reversed(self._memory_tiers):
            if self._residency.is_covered(row, source, (self._log_tier,)):
                continue
            if self._spilling_bytes(source) >= self._core.options.max_spill_bytes:
                return False
            if not self._admits(row):
                return True
            if not self._copy_down(row, source, Urgency.ENDED, what=ARCHIVE):
                return False
        return True

    def _is_open(self) -> bool:
        return self._log_tier in self._core.rooms and self._log_tier not in self._core.offline

    def _has_to_go(self, row: int) -> bool:
        """Whether a block can be read, and memory has something of it that the cold store has not."""
        return self._core.catalog.tier_of(row) is not None and not all(
            self._residency.is_covered(row, tier, (self._log_tier,)) for tier in self._memory_tiers
        )

    def _tenant_of(self, row: int) -> str:
        return tenant_of(self._core.catalog.namespace_of(row).identity.domain)

    def _new(self, rows: Sequence[int]) -> list[int]:
        """Return the handles of blocks that do not wait already."""
        serial = self._core.catalog.serial
        handles = [serial[row] << 32 | row for row in rows]  # Catalog.handle of each
        return [handle for handle in handles if handle not in self._queued]

    def _append(self, handles: list[int], tenant: str) -> None:
        if handles:
            self._queued.update(handles)
            self._shares.add(tenant, len(handles))
            self._turns.setdefault(tenant, deque()).extend(handles)
