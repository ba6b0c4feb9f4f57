"""Early layers: of blocks that would leave dram, the first layer groups stay a while longer.

Prefill consumes layer 0 first. A block whose early layer groups are in dram and whose late ones are on NVMe
can be begun at once, while the late ones load behind the computation: nearly the time to first token of a
block in dram, for a fraction of the memory. So a cold block leaves in two steps: first it is *trimmed* (its
late groups go, those of the blocks above it that cost no more with them), and when trimmed blocks fill their
share of dram, the one trimmed first goes altogether.

Order within one layer group is what invariant 5 demands of whole blocks: late groups leave from the tail of a
chain to its head, and so do early ones. Only what is complete in the cold store is trimmed, so nothing can be
lost. Off by default; worth it where NVMe cannot hide its latency behind a queue of requests.

No policy knows a trimmed block as a candidate, so it has to be remembered here until it has left: also when
the option was taken back, or its record on NVMe was lost; and by isolation domain, because whoever needs
room makes it among its own blocks.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable

from ...tiers.block import Tier
from .catalog import NO_ROW
from .options import PlannerOptions
from .residency import Residency

#: Blocks trimmed in one step at least: the victim alone frees little.
MIN_STEP = 8


class EarlyLayers:
    """Trims blocks of dram, and remembers in which order."""

    def __init__(self, residency: Residency, options: PlannerOptions) -> None:
        self._residency = residency
        self.options = options
        self.capacity_bytes = residency.rooms[Tier.DRAM].statistics().capacity_bytes
        #: By domain: handle -> (number of the trim, bytes that stayed), oldest first.
        self._trimmed: defaultdict[int, OrderedDict[int, tuple[int, int]]] = defaultdict(OrderedDict)
        self._num_trims = 0
        self._kept_bytes = 0
        self._above: tuple[int, float] | None = None  # handle and price where the last step had to stop

    def num_early(self, num_groups: int) -> int:
        """Return how many of a block's layer groups stay; all of them where nothing can be trimmed."""
        share = self.options.early_layers
        return num_groups if not share else min(num_groups, max(1, math.ceil(share * num_groups)))

    @property
    def is_full(self) -> bool:
        """Whether trimmed blocks take more of dram than they may; anything, where none are to be there."""
        share = self.options.max_early_fraction if self.options.early_layers else 0.0
        return self._kept_bytes > share * self.capacity_bytes

    def __contains__(self, row: int) -> bool:
        catalog = self._residency.catalog
        return catalog.handle(row) in self._trimmed.get(catalog.namespace_of(row).domain, ())

    def trim(self, row: int, price: float, limit: int, price_of: Callable[[int], float]) -> int:
        """Let the late layer groups of a victim go, and of those above it that cost no more. Returns how many
        blocks were trimmed; 0: it has to leave altogether."""
        limit = max(limit, MIN_STEP)
        num_trimmed = self._climb(row, price, limit, price_of) if self._is_trimmable(row) else 0
        if not num_trimmed and self._above is not None:
            handle, price = self._above
            catalog = self._residency.catalog
            above = catalog.row_of(handle)
            if above != NO_ROW and catalog.namespace_of(above).domain != catalog.namespace_of(row).domain:
                return 0
            if above != NO_ROW and self._is_trimmable(above):
                num_trimmed = self._climb(above, price, limit, price_of)
            else:
                self._above = None
        return num_trimmed

    def take_oldest(self, domain: int | None) -> int:
        """Forget the block of `domain` (None: of any) that was trimmed first and is still, and may leave
        altogether; NO_ROW: none. Those before it are candidates like any other from now on."""
        residency, catalog = self._residency, self._residency.catalog
        while (trimmed := self._oldest_queue(domain)) is not None:
            handle, (_, num_bytes) = trimmed.popitem(last=False)
            self._kept_bytes -= num_bytes
            row = catalog.row_of(handle)
            if row == NO_ROW:
                continue
            is_trimmed = 0 < catalog.num_resident[Tier.DRAM][row] < catalog.namespace_of(row).num_groups
            is_spare = residency.is_below(row, Tier.DRAM) or catalog.tier_of(row) is None
            if is_trimmed and is_spare and residency.may_leave(row, Tier.DRAM):
                return row
            residency.offer(row, Tier.DRAM)
        return NO_ROW

    # ------------------------------------------------------------------------------------ internals

    def _oldest_queue(self, domain: int | None) -> OrderedDict[int, tuple[int, int]] | None:
        """Return what was trimmed of the domain, or of the domain whose first trim is the oldest."""
        if domain is not None:
            return self._trimmed.get(domain) or None
        queues = [queue for queue in self._trimmed.values() if queue]
        return min(queues, key=lambda queue: next(iter(queue.values()))[0], default=None)

    def _climb(self, row: int, price: float, limit: int, price_of: Callable[[int], float]) -> int:
        residency, catalog = self._residency, self._residency.catalog
        num_trimmed = 0
        self._above = None
        while row != NO_ROW and self._is_trimmable(row) and price_of(row) <= price:
            if num_trimmed == limit:
                self._above = (catalog.handle(row), price)
                break
            namespace = catalog.namespace_of(row)
            num_early = self.num_early(namespace.num_groups)
            residency.trim(row, Tier.DRAM, num_early)
            handle, num_bytes = catalog.handle(row), sum(namespace.fragment_bytes[:num_early])
            queue = self._trimmed[namespace.domain]
            self._kept_bytes += num_bytes - queue.pop(handle, (0, 0))[1]
            self._num_trims += 1
            queue[handle] = (self._num_trims, num_bytes)
            num_trimmed += 1
            row = catalog.parent[row]
        return num_trimmed

    def _is_trimmable(self, row: int) -> bool:
        """Whether the late groups of a block may go: complete here and in the cold store, touched and kept by
        nobody, and no child has a late group here or a place in hbm."""
        residency, catalog = self._residency, self._residency.catalog
        num_groups = catalog.namespace_of(row).num_groups
        num_early = self.num_early(num_groups)
        if num_early == num_groups or Tier.NVME in residency.offline or row in residency.floors:
            return False
        if catalog.num_keepers[row] or catalog.num_holds[Tier.DRAM][row]:
            return False
        for tier in (Tier.DRAM, Tier.NVME):
            if catalog.num_resident[tier][row] != num_groups:
                return False
        num_placed = catalog.num_children_placed
        if num_placed[Tier.HBM][row] or num_placed[Tier.DRAM][row] > 1:
            return False
        in_dram = catalog.num_placed[Tier.DRAM]
        return not num_placed[Tier.DRAM][row] or all(
            in_dram[child] <= num_early for child in catalog.children(row)
        )
