"""DrainedBundles: what a drain exports, the most prefill per byte that uses have saved so far first.

Of equal worth, and so of one chain, whatever is nearer to the start goes first: without it the rest is not
found. A step looks at a bounded number of blocks, and lets as few bundles wait for their turn as one step may
begin, so that the order holds; until all blocks were looked at none does. Tenants take turns.
"""

import heapq
from collections import deque
from typing import Final

from ....tiers.block import tenant_of
from ..catalog.core_state import CoreState
from ..copying.source_index import SourceIndex
from ..options import ShareMode
from .export_queue import ExportQueue, WaitingBundle

#: Looked at in a step: about a millisecond. Free rows between them are passed over, up to so many for each.
STEP_BLOCKS = 128
MAX_FREE: Final = 32


class DrainedBundles:
    """Bundles that a drain has found in the catalog, by tenant."""

    def __init__(self, core: CoreState, index: SourceIndex) -> None:
        self._core = core
        self._index = index
        self._row: int | None = None  # the next one to look at
        self._heaps: dict[str, list[tuple[float, int, int]]] = {}  # minus its worth, position, handle
        self._turns: deque[str] = deque()  # the tenants of heaps
        self._worth: dict[int, tuple[ShareMode, float]] = {}  # by namespace; prefill per byte

    def __bool__(self) -> bool:
        return self.is_looking or bool(self._turns)

    def __len__(self) -> int:
        return sum(len(heap) for heap in self._heaps.values())

    @property
    def is_looking(self) -> bool:
        """Whether not all blocks were looked at."""
        return self._row is not None

    def begin(self) -> None:
        """Look at all blocks, from the next step on."""
        self._row = 0
        self._heaps.clear()
        self._turns.clear()
        self._worth.clear()

    def look(self) -> None:
        """Look at the next STEP_BLOCKS blocks."""
        assert self._row is not None
        catalog, row, num_left = self._core.catalog, self._row, STEP_BLOCKS
        end = min(row + MAX_FREE * STEP_BLOCKS, len(catalog.prefix_hash))
        while row < end and num_left:
            if catalog.prefix_hash[row]:
                num_left -= 1
                self._take(row)
            row += 1
        self._row = row if row < len(catalog.prefix_hash) else None

    def _take(self, row: int) -> None:
        """Note the bundle that ends with a block, if one does and it may be exported."""
        catalog = self._core.catalog
        namespace = catalog.namespace_of(row)
        size = self._index.num_blocks(namespace)
        if (catalog.position[row] + 1) % size:
            return
        if namespace.id not in self._worth:
            share = self._core.options.share_of(namespace.identity)
            seconds = self._core.costs.recompute_s(namespace.id, 0, size) / namespace.block_bytes
            self._worth[namespace.id] = share, seconds
        share, worth = self._worth[namespace.id]
        if share == "off" or (share == "worth" and not catalog.num_uses[row]):
            return
        tenant = tenant_of(namespace.identity.domain)
        heap = self._heaps.get(tenant)
        if heap is None:
            heap = self._heaps[tenant] = []
            self._turns.append(tenant)
        key = -worth * catalog.num_uses[row], catalog.position[row], catalog.handle(row)
        heapq.heappush(heap, key)

    def feed(self, queue: ExportQueue, num_bundles: int) -> None:
        """Let up to `num_bundles` of the best wait for their turn, as far as their tenants have places."""
        num_refused = 0
        while num_bundles and num_refused < len(self._turns):
            tenant = self._turns.popleft()
            heap = self._heaps[tenant]
            if queue.add_last(tenant, WaitingBundle(heap[0][2])):
                heapq.heappop(heap)
                num_bundles, num_refused = num_bundles - 1, 0
            else:
                num_refused += 1
            if heap:
                self._turns.append(tenant)
            else:
                del self._heaps[tenant]
