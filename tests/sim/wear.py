"""Worn cold stores: some seeds load much, for long, from a lossy store that is smaller than dram.

Only there a record is dropped while what was decoded from it stands in memory, and that is stored again: the
one way to encode something lossily twice. Drawn from a source of randomness of its own, so that the other
seeds are the same as ever.
"""

from dataclasses import replace
from random import Random

from kvtier.tiers.codecs.base import PROFILED_ID

from .config import Config, SimCompression

#: Share of the seeds.
FRACTION = 1 / 16


def wear(seed: int, config: Config, *, is_short: bool) -> None:
    """Change what a seed drew, if it is one of these. `is_short`: somebody said how long it is."""
    rng = Random(f"wear of {seed}")
    if rng.random() >= FRACTION or not config.num_segments:
        return
    config.compression = SimCompression(PROFILED_ID, rng.choice((0.05, 0.4, 0.73)), False)
    config.num_segments = config.segment_records = 3
    config.dram_extents = config.slots_per_extent = 4
    config.hbm_extents = 0
    config.num_keys = 16
    config.options = replace(
        config.options,
        min_free_segments=1,
        max_forward_fraction=0.0,
        high_watermark=0.5,
        low_watermark=0.25,
    )
    config.weights["acquire"] *= 3
    if not is_short:
        config.num_operations = 200
