"""PromotionRules: whether a block may be promoted into a faster memory tier, and which way it goes up.

A fast tier is small, and most of what is loaded is read once. So a block that goes up takes room that is
free, or that of a block which was used less recently than it was itself: a scan of prompts that come once
finds no such block, and what is hot stays. And it goes up in chain order, because a get that loads the parent
from below gains nothing by the child.

*Straight* means from the cold store onto the device without a stop in the put tier: encoded bytes cross the
link and are decoded on the device. Which codecs that is quicker for is measured outside and told here; until
then none.
"""

from ....tiers.block import Tier
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.states import State
from .victims import Victims


class PromotionRules:
    """Answers of the moment; nothing is reserved. Without a device tier nothing comes straight."""

    def __init__(self, core: CoreState, residency: Residency, victims: Victims) -> None:
        self._core = core
        self._residency = residency
        self._victims = victims
        self.straight_codecs: frozenset[int] = frozenset()  # 0: what is stored as it is

    def comes_straight(self, fragment: int) -> bool:
        """Whether a fragment wanted on the device is brought there from the cold store without a stop."""
        core, catalog, ladder = self._core, self._core.catalog, self._core.ladder
        if not self.straight_codecs or ladder.device_tier not in core.rooms:
            return False
        if ladder.device_tier in core.offline or ladder.log_tier in core.offline:
            return False
        is_cold_only = (
            catalog.state[ladder.log_tier][fragment] == State.RESIDENT
            and all(catalog.state[tier][fragment] == State.ABSENT for tier in ladder.memory_tiers)
            and not catalog.num_placed[ladder.put_tier][catalog.block_of[fragment]]
        )
        return is_cold_only and catalog.encodings.codec_id(catalog.encoding[fragment]) in self.straight_codecs

    def admits(self, row: int, used_before: float, target: Tier) -> bool:
        """Return whether a block may take room in `target` now.

        `used_before`: its last use, this one left out. `target`: the device tier, or the put tier for a block
        of a slower memory."""
        core, catalog = self._core, self._core.catalog
        parent = catalog.parent[row]
        if target not in core.rooms or target in core.offline:
            return False
        faster = core.ladder.tiers[: target + 1]
        if parent != NO_ROW and not any(catalog.num_placed[tier][parent] for tier in faster):
            return False
        if catalog.num_placed[target][row]:
            return True  # the rest of it belongs there, too
        namespace = catalog.namespace_of(row)
        room = core.rooms[target].statistics()
        limit = int(core.options.high_watermark * room.capacity_bytes)
        if room.taken_bytes + namespace.block_bytes <= limit:
            return True
        victim = self._victims.choose(target, namespace.domain)
        if victim is None:
            return False
        self._residency.offer(victim.row, target)
        return catalog.last_used[victim.row] < used_before
