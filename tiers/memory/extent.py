"""One memfd of slots and their headers, written by the daemon and read by others.

Made in two steps, because a gigabyte of fresh pages takes seconds and an event loop has none:
the constructor reserves addresses (microseconds) and seals; `prefault` makes the pages, from any thread,
while the extent may already be in use. The layout is that of v1/shm.py.
"""

import logging
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ...v1.shm import HUGE_PAGE_BYTES, MIN_SLOT_BYTES, SLOT_HEADER, extent_file_bytes
from ..base import Buffer
from ..block import Tier
from . import memfd
from .headers import SlotHeaders
from .keeper import Keeper, is_huge

logger = logging.getLogger(__name__)

#: Of slots, headers and what they mean. Memory of another layout is never read.
LAYOUT = 2
_STEP_BYTES = 32 << 20  # prefaulted between two looks at `stop`


@dataclass(frozen=True, slots=True)
class ExtentReport:
    """Memory that an extent got from the host, for `doctor`."""

    huge_pages: bool
    locked: bool
    numa_nodes: tuple[int, ...]
    prefaulted: bool


class SlotExtent:
    """`extent_bytes` of data, then one header per possible slot.

    `data` is a writable view of the slots; `descriptor` may be given to any client of the extent's domain.
    With a `keeper` that inherited memory of this `name`, it is that memory, with what is in it; otherwise the
    keeper gets it. Raises SharedMemoryError when the host cannot give `numa_nodes`.
    """

    def __init__(
        self,
        name: str,
        extent_bytes: int,
        *,
        huge_pages: bool = True,
        numa_nodes: Sequence[int] = (),
        keeper: Keeper | None = None,
    ) -> None:
        self.name = name
        self.extent_bytes = extent_bytes
        self.num_slots = extent_bytes // MIN_SLOT_BYTES
        self._numa_nodes = tuple(numa_nodes)
        self._locked = False
        self._prefaulted = False
        self._keeper = keeper
        inherited = keeper.take(name) if keeper is not None else None
        if inherited is not None:
            self.descriptor, self._mapping = inherited
            self._huge = is_huge(self.descriptor)
            # Its maker may have been killed between handing it over and sealing it.
            memfd.seal(self.descriptor, memfd.SEALS_READ_ONLY)
        else:
            self._make(huge_pages)
        whole = memoryview(self._mapping)
        end = extent_bytes + self.num_slots * SLOT_HEADER.itemsize
        self.data: Buffer = whole[:extent_bytes]
        self.headers = SlotHeaders(whole[extent_bytes:end], is_fresh=inherited is None)

    def _make(self, huge_pages: bool) -> None:
        """Make the memory: placed, handed to the keeper, then sealed: nothing maps it writable later."""
        num_bytes = extent_file_bytes(self.extent_bytes)
        self.descriptor, self._mapping, self._huge = _map(self.name, num_bytes, huge_pages, self._numa_nodes)
        try:
            if self._numa_nodes:
                memfd.bind(self._mapping, self._numa_nodes)
            if self._keeper is not None:
                self._keeper.keep(self.name, self.descriptor)
            memfd.seal(self.descriptor, memfd.SEALS_READ_ONLY)
        except memfd.SharedMemoryError:
            os.close(self.descriptor)
            self._mapping.close()
            raise

    def prefault(self, stop: threading.Event | None = None) -> None:
        """Make all pages, and lock them where that is allowed. Releases the GIL; idempotent.

        Returns early, with nothing locked, once `stop` is set. Raises SharedMemoryError when memory is short.
        """
        total = len(self._mapping)
        for start in range(0, total, _STEP_BYTES):
            if stop is not None and stop.is_set():
                return
            memfd.populate(self.descriptor, self._mapping, start, min(_STEP_BYTES, total - start))
        self._prefaulted = True
        self._locked = memfd.lock(self._mapping)

    def report(self) -> ExtentReport:
        """Return what the host gave: huge pages, locked memory, nodes."""
        return ExtentReport(self._huge, self._locked, self._numa_nodes, self._prefaulted)

    def forget(self) -> None:
        """Close memory that no later daemon shall have."""
        if self._keeper is not None and self.descriptor >= 0:
            self._keeper.drop(self.name)
        self.close()

    def close(self) -> None:
        """Unmap and close. Memory with a view left is freed with that view."""
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self.headers.close()
        self.data.release()
        try:
            self._mapping.close()
        except BufferError:
            logger.warning("an extent was closed while a view of it was in use; unmapped when that ends")


def name_of_tier(tier: Tier, extent_bytes: int, numa_nodes: Sequence[int]) -> str:
    """Return what the names of a tier's extents begin with; a hyphen and a number follow.
    It says what a daemon must agree with to use what is in them."""
    nodes = f"@{','.join(map(str, sorted(numa_nodes)))}" if numa_nodes else ""
    return f"kvtier-{LAYOUT}-{extent_bytes}-{tier.label}{nodes}"


def inherited_numbers(keeper: Keeper, name: str, huge: bool | None) -> list[int]:
    """Return the numbers of the extents that were inherited for the tier of this name.
    Those with pages of another kind than `huge` says, where it does, are given back."""
    names = [one for one in keeper.inherited if one.rpartition("-")[0] == name]
    others = [one for one in names if huge not in (None, is_huge(keeper.inherited[one][0]))]
    keeper.give_back(others)
    return [int(one.rpartition("-")[2]) for one in names if one not in others]


def _map(
    name: str, num_bytes: int, huge_pages: bool, numa_nodes: Sequence[int]
) -> tuple[int, mmap.mmap, bool]:
    """Return (descriptor, writable mapping, whether of huge pages)."""
    fix = "raise RLIMIT_AS and RLIMIT_NOFILE or make extents smaller"
    # Mapping reserves huge pages, so that one that succeeds here cannot fail at first touch; of the host, not
    # of the nodes it is bound to, so these are asked first.
    if huge_pages and memfd.free_huge_pages(numa_nodes) * HUGE_PAGE_BYTES >= num_bytes:
        try:
            return *memfd.create_mapped(name, num_bytes, fix, huge=True), True
        except memfd.SharedMemoryError:  # another process took them between the question and the answer
            pass
    return *memfd.create_mapped(name, num_bytes, fix), False
