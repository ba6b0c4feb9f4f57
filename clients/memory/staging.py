"""The client's own staging extent: where the bytes of a put wait for the daemon to copy them.

A first-fit list of free spans. At any time a handful of pieces and the runtime's own staging buffers are
taken, so a list beats every cleverer allocator; a ring was rejected because a long-lived staging buffer would
stop it from turning.
"""

import threading

import numpy as np

from ...v1.arguments import whole
from ..errors import Overloaded
from .buffers import address_of
from .extents import U8

ALIGN_BYTES = 4096


class StagingArea:
    """Books of the staging extent `memory`. Thread-safe."""

    def __init__(self, memory: U8) -> None:
        self.memory = memory
        self.address = address_of(memory)
        self._free: list[tuple[int, int]] = [(0, len(memory))]  # (offset, bytes), ascending, never adjacent
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def capacity_bytes(self) -> int:
        """Size of the extent."""
        return len(self.memory)

    def take(self, num_bytes: int) -> int | None:
        """Take a span of `num_bytes`; return its offset, None when no free span is long enough."""
        wanted = max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        with self._lock:
            for i, (offset, length) in enumerate(self._free):
                if length >= wanted:
                    rest = [(offset + wanted, length - wanted)] if length > wanted else []
                    self._free[i : i + 1] = rest
                    self._taken[offset] = wanted
                    return offset
        return None

    def give(self, offset: int) -> None:
        """Give back the span that `take` returned."""
        with self._lock:
            length = self._taken.pop(offset)
            merged: list[tuple[int, int]] = []
            for start, size in sorted([*self._free, (offset, length)]):
                if merged and sum(merged[-1]) == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((start, size))
            self._free = merged

    def offset_of(self, address: int, num_bytes: int) -> int | None:
        """Return the offset of memory that lies inside the extent, None for memory elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset <= len(self.memory) - num_bytes else None

    def check_integrity(self) -> list[str]:
        """Audit: free and taken spans tile the extent."""
        problems = []
        end = 0
        with self._lock:
            for offset, length in sorted([*self._free, *self._taken.items()]):
                if offset != end:
                    problems.append(f"staging: span at {offset}, expected at {end}")
                end = offset + length
        if end != len(self.memory):
            problems.append(f"staging: spans end at {end}, the extent at {len(self.memory)}")
        return problems


class StagingBuffer:
    """Memory of the staging extent that the runtime fills itself; a put from it copies nothing here.

    `array` is a writable uint8 array. Release it (or leave its `with`) when the last put from it has
    returned. After a reconnect it is ordinary memory: puts from it still work, with one copy.
    """

    def __init__(self, num_bytes: int, area: StagingArea | None) -> None:
        """Take `num_bytes` from `area`; ordinary memory when there is none. Raises Overloaded."""
        num_bytes = whole("num_bytes", num_bytes)
        self._area = area
        self._offset: int | None = None
        if area is None:
            try:
                self.array = np.zeros(num_bytes, np.uint8)
            except MemoryError:
                words = f"no {num_bytes} bytes of memory; ask for less"
                raise Overloaded(words, reason="STAGING_FULL") from None
            return
        self._offset = area.take(num_bytes)
        if self._offset is None:
            raise Overloaded(
                f"no {num_bytes} bytes free in the staging extent of {area.capacity_bytes}; "
                "release a staging buffer, or raise Limits.staging_bytes",
                reason="STAGING_FULL",
            )
        self.array = area.memory[self._offset : self._offset + num_bytes]

    def __len__(self) -> int:
        return len(self.array)

    def release(self) -> None:
        """Give the memory back. Idempotent; `array` must not be used afterwards."""
        if self._area is not None and self._offset is not None:
            self._area.give(self._offset)
        self._offset = None
        self.array = np.empty(0, np.uint8)

    def __enter__(self) -> "StagingBuffer":
        return self

    def __exit__(self, *problem: object) -> None:
        self.release()
