"""HotRoom: whether a block may come to rest in hbm, and whether it gets there straight from the cold store.

hbm is small and dear, and most of what is loaded is read once. So whoever goes up takes room that nobody
fills, or that of blocks which were used less recently than the newcomer was before: a scan of prompts that
come once finds no such block, and what is hot stays. And it goes up in chain order, because a block cannot
leave before its children (I-5): one whose parent stands elsewhere would hold that parent where it is.

*Straight* means nvme to hbm without a stop in dram: encoded bytes cross the link and are decoded on the
device. Which codecs that is quicker for is measured outside and told here; until then none is.
"""

from ....tiers.block import Tier
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.states import State
from .pressure import Pressure


class HotRoom:
    """Answers of the moment; nothing is reserved. Without hbm every answer is no."""

    def __init__(self, core: CoreState, residency: Residency, pressure: Pressure) -> None:
        self._core = core
        self._residency = residency
        self._pressure = pressure
        self.straight_codecs: frozenset[int] = frozenset()  # 0: what is stored as it is

    @property
    def is_there(self) -> bool:
        """Whether there is an hbm that works."""
        return Tier.HBM in self._core.rooms and Tier.HBM not in self._core.offline

    def comes_straight(self, fragment: int) -> bool:
        """Whether a fragment that is wanted in hbm is brought there from nvme without a stop in dram."""
        if not self.straight_codecs or not self.is_there or Tier.NVME in self._core.offline:
            return False
        catalog = self._core.catalog
        is_cold_only = (
            catalog.state[Tier.NVME][fragment] == State.RESIDENT
            and catalog.state[Tier.DRAM][fragment] == catalog.state[Tier.HBM][fragment] == State.ABSENT
            and not catalog.num_placed[Tier.DRAM][catalog.block_of[fragment]]
        )
        return is_cold_only and catalog.encodings.codec_id(catalog.encoding[fragment]) in self.straight_codecs

    def admits(self, row: int, used_before: float) -> bool:
        """Whether a block last used at `used_before`, the present use left out, may take room in hbm now."""
        catalog = self._core.catalog
        parent = catalog.parent[row]
        if not self.is_there or (parent != NO_ROW and not catalog.num_placed[Tier.HBM][parent]):
            return False
        if catalog.num_placed[Tier.HBM][row]:
            return True  # the rest of it belongs there, too
        namespace = catalog.namespace_of(row)
        room = self._core.rooms[Tier.HBM].statistics()
        limit = int(self._core.options.high_watermark * room.capacity_bytes)
        if room.taken_bytes + namespace.block_bytes <= limit:
            return True
        victim = self._pressure.victims.choose(Tier.HBM, namespace.domain)
        if victim is None:
            return False
        self._residency.offer(victim.row, Tier.HBM)
        return catalog.last_used[victim.row] < used_before
