"""Dirty: what puts brought into dram and nobody copied down yet, in the order in which it came.

A block that is also in a slower tier is *clean*: its room can be had at once. So once dram has passed its low
watermark, what was put is copied down in the background while it is still of use where it is, and stays until
somebody needs its room. Puts come in bursts faster than any device writes; what is dirty when one begins is
what it has to wait for.

The order of puts is nearly that in which blocks become victims, has parents before children, and is known
without asking anybody. What is in both tiers takes room twice, so the newest blocks stay dirty where the cold
store is small: at most MAX_DOUBLE of it is for what dram has, too.

Rejected: copying down who would leave next (only the ends of chains are candidates; the rest of a chain
becomes one when they have left); copying below the low watermark (a working set that fits into memory would
wear the device for nothing); letting clean blocks leave ahead of need, as it was before: a tenth of dram
stood empty, and was missed.

What leaves dram meanwhile counts until its turn: a little more is copied then, never less. A block whose copy
failed, or was reclaimed, is copied when it is a victim.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from ...tiers.block import Tier
from ...tiers.log import SegmentLog
from .catalog import NO_ROW
from .residency import Residency

#: Share of the cold store for blocks that were copied down ahead and are in dram, too.
MAX_DOUBLE: Final = 1 / 8
#: Entries looked at in one call.
MAX_LOOKS: Final = 256


class Dirty:
    """The queue. Holds nothing where there is no cold store, and elsewhere no more than fits into dram."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._queue: deque[tuple[int, int]] = deque()  # handle, bytes
        self._num_bytes = 0

    def put(self, rows: Sequence[int]) -> None:
        """Blocks of one namespace were put into dram."""
        residency = self._residency
        if not rows or Tier.NVME not in residency.rooms:
            return
        handle, block_bytes = residency.catalog.handle, residency.catalog.block_bytes(rows[0])
        self._queue.extend([(handle(row), block_bytes) for row in rows])
        self._num_bytes += len(rows) * block_bytes
        capacity_bytes = residency.rooms[Tier.DRAM].statistics().capacity_bytes
        while self._num_bytes > capacity_bytes:  # nvme took nothing for a long time
            self.pop()

    def oldest(self, low_watermark: float) -> int:
        """Return the block to be copied down next; NO_ROW: none, or none was found in so many looks."""
        if not self._queue:
            return NO_ROW
        room = self._residency.rooms[Tier.DRAM].statistics()
        if room.taken_bytes <= low_watermark * room.capacity_bytes:
            return NO_ROW
        may_be_dirty_bytes = max(0.0, room.capacity_bytes - MAX_DOUBLE * self._cold_bytes())
        for _ in range(MAX_LOOKS):
            if self._num_bytes <= may_be_dirty_bytes:
                break
            row = self._residency.catalog.row_of(self._queue[0][0])
            if row != NO_ROW and self._is_dirty(row):
                return row
            self.pop()
        return NO_ROW

    def pop(self) -> None:
        """The oldest one was seen to."""
        self._num_bytes -= self._queue.popleft()[1]

    def __len__(self) -> int:
        return len(self._queue)

    def check_integrity(self) -> list[str]:
        """Audit: the bytes counted are those of the queue."""
        num_bytes = sum(size for _, size in self._queue)
        return [f"dirty: {self._num_bytes} bytes, not {num_bytes}"] if num_bytes != self._num_bytes else []

    # ------------------------------------------------------------------------------------ internals

    def _cold_bytes(self) -> int:
        log = self._residency.rooms[Tier.NVME]
        assert isinstance(log, SegmentLog)
        return log.num_segments * log.segment_bytes

    def _is_dirty(self, row: int) -> bool:
        residency, catalog = self._residency, self._residency.catalog
        if catalog.num_placed[Tier.NVME][row] == catalog.namespace_of(row).num_groups:
            return False  # it is there, or on its way
        return not residency.is_covered(row, Tier.DRAM, (Tier.NVME,))
