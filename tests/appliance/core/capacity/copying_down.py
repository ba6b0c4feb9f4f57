"""A rig of the planner over a cold store of ten blocks a segment, and what was copied into that."""

from typing import Any

from kvtier.appliance.core.instructions import Copy
from kvtier.tiers.block import Tier

from ..rig import GEOMETRY, RECORD_BYTES, Rig, hashes

BLOCK_BYTES = GEOMETRY.num_groups * RECORD_BYTES  # of the records of one
DAY_S = 86_400.0
TO_NVME = (Tier.DRAM, Tier.NVME)


def rig_of(write: str = "idle", dram_blocks: int = 10, num_segments: int = 8, **options: Any) -> Rig:
    """Return a rig whose segments take ten blocks."""
    return Rig(dram_blocks=dram_blocks, nvme_blocks=10, num_segments=num_segments, write=write, **options)


def land_puts(rig: Rig) -> None:
    """End the copies into dram, those that follow in further steps too, and no others."""
    while arriving := [copy for copy in rig.copies if copy.source is None]:
        rig.finish(arriving[0])
        if rig.planner.is_busy:
            rig.tick()


def copies_down(rig: Rig) -> list[Copy]:
    return [copy for copy in rig.started if (copy.source, copy.target) == TO_NVME]


def num_written(rig: Rig) -> int:
    """Return how many blocks were copied down, or tried to be."""
    return sum(len(copy.items) for copy in copies_down(rig)) // GEOMETRY.num_groups


def rest(rig: Rig, seconds: float = 1.0) -> None:
    """Let everything come to rest, and time pass."""
    rig.settle()
    rig.tick(seconds)
    rig.settle()


def where(rig: Rig, name: str, count: int) -> list[set[str]]:
    return [rig.where(block) for block in hashes(name, count)]
