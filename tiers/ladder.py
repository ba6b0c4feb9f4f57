"""The ladder: the tiers that a daemon can have, as data. Pure.

A tier is a position in the ladder, 0 for the fastest; positions index the catalog's columns and are compared
with `<`. What a tier can do is in its `TierSpec`, and code asks the ladder for the tier with a role instead
of naming one. Which tiers a daemon has is said by its rooms: the columns of others stay empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..v1.types import TierInfo, TierKind
from .block import Tier


@dataclass(frozen=True, slots=True)
class TierSpec:
    """What one tier is and can do."""

    name: str
    kind: TierKind
    takes_puts: bool = False
    readable_in_place: bool = False  # clients on this host map it


class Ladder:
    """Tiers in order, fastest first, and the roles they have.

    Raises ValueError unless names differ, the first tier is the only device, the last one the only log of
    segments, and exactly one tier takes puts, which is memory.
    """

    def __init__(self, specs: Sequence[TierSpec]) -> None:
        kinds = [spec.kind for spec in specs]
        inner = kinds[1:-1]
        if len({spec.name for spec in specs}) < len(specs):
            raise ValueError(f"two tiers have one name: {', '.join(spec.name for spec in specs)}")
        if len(specs) < 3 or kinds[0] is not TierKind.DEVICE or kinds[-1] is not TierKind.SEGMENTS:
            raise ValueError("a ladder begins with a device, ends with a log, and has memory in between")
        if any(kind is not TierKind.MEMORY for kind in inner):
            raise ValueError("all tiers between the device and the log are of kind memory")
        takers = [number for number, spec in enumerate(specs) if spec.takes_puts]
        if len(takers) != 1 or kinds[takers[0]] is not TierKind.MEMORY:
            raise ValueError("exactly one tier of kind memory takes puts")
        self.specs = tuple(specs)
        self.tiers = tuple(Tier(number, spec.name) for number, spec in enumerate(specs))
        self.device_tier = self.tiers[0]
        self.put_tier = self.tiers[takers[0]]
        self.log_tier = self.tiers[-1]
        #: Tiers that clients on the host read in place.
        self.tiers_in_place = tuple(
            t for t, spec in zip(self.tiers, specs, strict=True) if spec.readable_in_place
        )
        #: Tiers with places in addressable memory: all but the log.
        self.memory_tiers = self.tiers[:-1]
        self.host_tiers = self.tiers[1:-1]  # of kind memory
        #: Ways down from one memory of the host to another.
        self.host_edges = frozenset((a, b) for a in self.host_tiers for b in self.host_tiers if a < b)
        #: Edges on which blocks leave a tier: from host memory also past the next one, which may be full.
        self.ways_down = {tier: tuple((tier, slower) for slower in self.below(tier)) for tier in self.tiers}
        self.ways_down[self.device_tier] = ((self.device_tier, self.put_tier),)

    @property
    def infos(self) -> tuple[TierInfo, ...]:
        """The tiers as clients are told of them."""
        return tuple(TierInfo(tier, spec.kind) for tier, spec in zip(self.tiers, self.specs, strict=True))

    def below(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers slower than `tier`, the next one first."""
        return self.tiers[tier + 1 :]

    def above(self, tier: Tier) -> tuple[Tier, ...]:
        """Return the tiers faster than `tier`, the fastest one first."""
        return self.tiers[:tier]

    def with_device(self) -> "Ladder":
        """Return the same ladder with a first tier that clients do not map: a GPU's memory."""
        return Ladder([replace(self.specs[0], readable_in_place=False), *self.specs[1:]])

    def named(self, name: str) -> Tier:
        """Return the tier of this name. Raises ValueError, with the names there are."""
        for tier, spec in zip(self.tiers, self.specs, strict=True):
            if spec.name == name:
                return tier
        raise ValueError(f"no tier {name!r}; there are {', '.join(spec.name for spec in self.specs)}")


#: The tiers of a daemon, unless its settings name others.
STANDARD = Ladder(
    (
        TierSpec("hbm", TierKind.DEVICE, readable_in_place=True),
        TierSpec("dram", TierKind.MEMORY, takes_puts=True, readable_in_place=True),
        TierSpec("nvme", TierKind.SEGMENTS),
    )
)
#: The same where hbm is a GPU's memory, which clients do not map.
ON_DEVICE = STANDARD.with_device()


def with_memory(names: Sequence[str], base: Ladder = STANDARD) -> Ladder:
    """Return `base` with further host memory above its log, in this order, which clients read in place.
    Raises ValueError for a name that is taken."""
    further = [TierSpec(name, TierKind.MEMORY, readable_in_place=True) for name in names]
    return Ladder([*base.specs[:-1], *further, base.specs[-1]]) if names else base
