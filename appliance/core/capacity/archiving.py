"""Archiving: copies of blocks into the cold store because their session ended, an encoded fragment was too
long, or the daemon drains. Bounded per event, within the tenant's quota, the slowest memory first."""

from collections import deque
from collections.abc import Callable

from ....tiers.block import Urgency
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency

#: What the copies are called in the story.
ARCHIVE = "archive"
#: Blocks looked at per event: about a millisecond.
MAX_STEPS = 64


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
        self._queue: deque[int] = deque()  # handles

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, row: int) -> bool:
        """Queue the copy of a block into the cold store; False when it is there or cannot go."""
        core = self._core
        if self._log_tier not in core.rooms or self._log_tier in core.offline:
            return False
        if core.catalog.tier_of(row) is None:
            return False
        if all(self._residency.is_covered(row, tier, (self._log_tier,)) for tier in self._memory_tiers):
            return False
        handle = core.catalog.handle(row)
        if not self._queue or self._queue[-1] != handle:
            self._queue.append(handle)
        return True

    def add_all(self) -> int:
        """Queue everything that is only in memory (drain). Returns the blocks queued."""
        catalog = self._core.catalog
        rows = [row for ns in catalog.namespaces.values() for row in ns.rows.values()]
        return sum(self.add(row) for row in rows)

    def run(self) -> bool:
        """Decide the next copies. Returns whether some are left only because there were many."""
        catalog = self._core.catalog
        for _ in range(min(MAX_STEPS, len(self._queue))):
            if self._log_tier in self._core.offline:
                return False
            row = catalog.row_of(self._queue[0])
            # A part of it may be in the device tier only; copies from a slower one cost the device nothing.
            for source in reversed(self._memory_tiers) if row != NO_ROW else ():
                if self._residency.is_covered(row, source, (self._log_tier,)):
                    continue
                if self._spilling_bytes(source) >= self._core.options.max_spill_bytes:
                    return False
                if self._admits(row) and not self._copy_down(row, source, Urgency.ENDED, what=ARCHIVE):
                    return False
            self._queue.popleft()
        return bool(self._queue)
