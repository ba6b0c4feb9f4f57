"""ReusePromotions: brings blocks that are used again in a slower memory tier up into the put tier.

Clients read such a tier in place, so nothing has to be loaded; but it is slower, and a block was demoted into
it because it was the coldest. A block that requests used MIN_USES times there goes up in the background,
under the rules of hot_room.py: into free room, or that of a block that was not used since the first of these
uses, and only after its parent. So a scan of prompts that come once moves nothing.

Rejected: promoting at the first use (a scan would exchange both tiers' contents); evicting the copy below
when it has landed above (the next demotion would copy it again, and under pressure it is evicted anyhow).
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from ....policies.base import Use
from ....tiers.block import Tier, Urgency
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.policy_listeners import Listener
from .loads import Loads
from .promotions import MAX_BYTES, MAX_CHAIN, Counts

MIN_USES: Final = 2
#: Blocks considered per event; and waiting, beyond which the oldest are dropped.
MAX_STEPS: Final = 64
MAX_WAITING: Final = 4096
#: How long a block waits for the copy that makes room for it: what is being copied is no victim meanwhile,
#: and the block would be compared with a younger one.
ROOM_S: Final = 0.05


class ReusePromotions:
    """Counts uses of blocks in memory tiers below the put tier; promotes. Without such a tier: nothing."""

    def __init__(self, core: CoreState, loads: Loads) -> None:
        self._core = core
        self._loads = loads
        ladder = core.ladder
        self._put_tier = ladder.put_tier
        self._below: list[Tier] = [
            tier for tier in ladder.memory_tiers if tier > ladder.put_tier and tier in core.rooms
        ]
        self._counts = Counts()
        self._waiting: deque[tuple[int, float]] = deque(maxlen=MAX_WAITING)  # handle, first use
        self._room_asked_at = float("-inf")
        if self._below:
            core.listeners.join(Listener(used=self._note_used))

    def run(self) -> None:
        """Begin what waits, as far as the bounds allow."""
        if not self._waiting or self._is_room_being_made():
            return
        core, catalog = self._core, self._core.catalog
        moving_bytes = sum(core.bytes_in_flight.get((tier, self._put_tier), 0) for tier in self._below)
        num_promoted = 0
        for _ in range(min(MAX_STEPS, len(self._waiting))):
            handle, first_at = self._waiting.popleft()
            row = catalog.row_of(handle)
            if row == NO_ROW or not self._is_below(row):
                continue
            moving_bytes += catalog.block_bytes(row)
            if moving_bytes > MAX_BYTES:
                self._waiting.appendleft((handle, first_at))
                break
            if self._loads.hot_room.admits(row, first_at, self._put_tier):
                if not self._loads.promote(row, self._put_tier, Urgency.WAITING, float("inf")):
                    self._waiting.appendleft((handle, first_at))  # room is being made: an event says when
                    self._room_asked_at = core.now
                    break
                num_promoted += 1
        if num_promoted:
            self._loads.start(Urgency.WAITING, float("inf"))
            core.story.count("blocks_promoted_on_use", num_promoted)

    def _note_used(self, rows: Sequence[int], use: Use) -> None:
        """Count uses. Promoting waits until the request is answered: making room could evict its blocks."""
        catalog = self._core.catalog
        for row in rows[:MAX_CHAIN]:
            if self._is_below(row):
                count, first_at = self._counts.add(catalog.handle(row), use.now)
                if count >= MIN_USES:
                    self._waiting.append((catalog.handle(row), first_at))

    def _is_room_being_made(self) -> bool:
        """Whether room was asked for a moment ago, and something is on its way out of the put tier."""
        core = self._core
        return core.now < self._room_asked_at + ROOM_S and any(
            core.bytes_in_flight.get(edge) for edge in core.ladder.ways_down[self._put_tier]
        )

    def _is_below(self, row: int) -> bool:
        """Whether a slower memory tier has a block whole, and the put tier nothing of it."""
        catalog = self._core.catalog
        if catalog.num_placed[self._put_tier][row]:
            return False
        num_groups = catalog.namespace_of(row).num_groups
        return any(catalog.num_resident[tier][row] == num_groups for tier in self._below)
