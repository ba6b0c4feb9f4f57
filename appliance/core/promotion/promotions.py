"""Promotions: what is delivered on a device again and again comes to rest there.

Nothing reaches the device tier by being put: puts land in host memory. What is delivered onto the device
crosses the link each time, and for most blocks that is right: a conversation's blocks are asked for once a
turn, and the device is dear. But the beginning of many prompts is the same: a system prompt is delivered with
every request. So a block that was delivered from host memory MIN_DELIVERIES times lately goes up in the
background.

Two rules keep that safe (hot_room.py): it takes free room, or that of blocks which have not been delivered
since the newcomer was first seen, so that a set of hot blocks larger than the device does not turn over for
ever; and it goes up in chain order, parents first. What is counted is bounded (MAX_COUNTED) and forgotten
oldest first: a block that is not asked for again within as many others is no shared prefix. Rejected: the
tier's admission policy as the judge (by default it admits everybody), and promoting at the first
delivery (a scan of one-time prompts would then sweep the device).

The bytes go by the ordinary way of loads, with the urgency of nobody in particular, so that whatever somebody
waits for goes before them.
"""

from collections.abc import Sequence

from ....tiers.block import Urgency
from ..catalog.core_state import CoreState
from ..copying.copies import Copies
from .loads import Loads

MIN_DELIVERIES = 2
MAX_COUNTED = 1 << 16
MAX_CHAIN = 1024  # blocks of one delivery that are counted: shared beginnings are shorter
MAX_BYTES = 64 << 20  # under way at a time


class Counts:
    """How often blocks were used, by handle, and since when. Forgets the blocks used least recently."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, float]] = {}  # handle -> uses, time of the first one

    def add(self, handle: int, now: float) -> tuple[int, float]:
        """Count one use of a block; return how many there were, and when the first was."""
        count, first_at = self._counts.pop(handle, (0, now))
        self._counts[handle] = (count + 1, first_at)
        while len(self._counts) > MAX_COUNTED:
            del self._counts[next(iter(self._counts))]
        return count + 1, first_at

    def __len__(self) -> int:
        return len(self._counts)


class Promotions:
    """Counts deliveries on the device; promotes. Without a device tier it does nothing."""

    def __init__(self, core: CoreState, copies: Copies, loads: Loads) -> None:
        self._core = core
        self._put_tier, self._device_tier = core.ladder.put_tier, core.ladder.device_tier
        self._copies = copies
        self._loads = loads
        self._counts = Counts()

    def delivered(self, rows: Sequence[int]) -> None:
        """These blocks of one chain, its first ones first, are delivered on the device now."""
        core = self._core
        catalog = core.catalog
        if not rows or not self._loads.hot_room.is_there:
            return
        num_groups, placed = catalog.namespace_of(rows[0]).num_groups, catalog.num_placed[self._device_tier]
        counted = [(row, *self._count(row)) for row in rows[:MAX_CHAIN] if placed[row] < num_groups]
        num_under_way = self._core.bytes_in_flight.get((self._put_tier, self._device_tier), 0)
        num_left = (MAX_BYTES - num_under_way) // catalog.namespace_of(rows[0]).block_bytes
        num_promoted = 0
        for row, count, first_at in counted[: max(0, num_left)]:
            if count < MIN_DELIVERIES or not self._promote(row, first_at):
                break  # what follows is not to stand there without this one
            num_promoted += 1
        if num_promoted:
            self._loads.start(Urgency.WAITING, float("inf"))
            core.story.count("blocks_promoted_on_use", num_promoted)

    def _count(self, row: int) -> tuple[int, float]:
        """Count one delivery of a block; return how many there were, and when the first was."""
        return self._counts.add(self._core.catalog.handle(row), self._core.now)

    def _promote(self, row: int, first_at: float) -> bool:
        """Begin to bring a block up; False when that is not to be, now."""
        catalog = self._core.catalog
        if catalog.num_resident[self._put_tier][row] < catalog.namespace_of(row).num_groups:
            return False  # it is just coming up; the next delivery finds it there
        return self._loads.hot_room.admits(row, first_at, self._device_tier) and self._loads.promote(
            row, self._device_tier, Urgency.WAITING, float("inf")
        )
