"""Forks: seeds of memory alone, in which prompts of many blocks push out chains that fork.

Runs of blocks leave memory together there (run_eviction.py), up to a fork or what is read. Elsewhere nvme or
a second memory nearly always has one of the blocks, and each leaves by itself."""

from random import Random

from kvtier.tiers.block import Geometry

from .config import Config

FORKS = range(900_000, 1_000_000)


def fork(seed: int, config: Config) -> None:
    """Let a seed of FORKS have memory of up to 16 blocks and nothing else."""
    if seed not in FORKS:
        return
    rng = Random(f"forks of {seed}")
    config.hbm_extents = config.cxl_extents = config.num_segments = 0
    config.dram_extents, config.slots_per_extent = rng.choice((2, 4)), 4
    config.geometries = [Geometry(4, 1, 64, 16, "float16", layers_per_group=4)] * len(config.geometries)
    config.num_keys = rng.choice((16, 30, 60))
