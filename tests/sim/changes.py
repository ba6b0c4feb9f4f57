"""Policy changes in the middle of everything: other limits, other policies, tiers that grow and shrink.

Drawn from a source of randomness of their own, so that a seed without changes is the same seed as ever.
"""

from dataclasses import replace
from random import Random

from kvtier.appliance.core import events as ev
from kvtier.tiers.block import Tier

from .config import Config, draw
from .daemon import Daemon
from .ladder import CXL, DRAM, HBM, NVME
from .world import World
from .writing import draw_writes

#: Share of the seeds in which somebody changes the policy, and how often at most.
CHANGING_FRACTION = 0.5
MAX_CHANGES = 6


class Changes:
    """What an administrator does to one world."""

    def __init__(self, world: World, config: Config) -> None:
        self._world = world
        self._config = config
        self._rng = Random(f"changes of {world.seed}")
        self._writes = Random(f"writes that change of {world.seed}")
        self.num_left = 0
        if self._rng.random() < CHANGING_FRACTION:
            self.num_left = self._rng.randint(1, MAX_CHANGES)

    def is_due(self, num_operations_left: int) -> bool:
        """Whether the policy changes before the next operation."""
        return self.num_left > 0 and self._rng.random() * (num_operations_left + 1) < self.num_left

    def apply(self, daemon: Daemon) -> None:
        """Change something. The config says from now on what a restarted daemon would have."""
        self.num_left -= 1
        config, rng = self._config, self._rng
        drawn = draw(Random(rng.randrange(1 << 30)), config.verify, 1)
        options, policies = config.options, config.policies
        if rng.random() < 0.6:
            options = replace(
                drawn.options,
                # Clients and oracle know one number for the whole run.
                max_waiting_puts=options.max_waiting_puts,
                max_sessions=options.max_sessions,
                num_tenants=options.num_tenants,
                max_remembered_requests=options.max_remembered_requests,
                min_free_segments=1,
                write=options.write,
                daily_write_bytes=options.daily_write_bytes,
            )
        if self._writes.random() < 0.5:
            options = draw_writes(self._writes, options)
        if rng.random() < 0.6:
            policies = drawn.policies
        sizes: dict[Tier, int] = {}
        if rng.random() < 0.7:
            sizes[DRAM] = config.dram_extents = rng.choice((1, 2, 3, 4))
        if config.hbm_extents and rng.random() < 0.5:
            sizes[HBM] = config.hbm_extents = rng.choice((1, 2, 3))
        if config.cxl_extents and rng.random() < 0.5:
            sizes[CXL] = config.cxl_extents = rng.choice((1, 2, 4))
        if config.num_segments and rng.random() < 0.6:
            sizes[NVME] = config.num_segments = rng.choice((3, 4, 8))
            daemon.cold.resize(config.num_segments)
        if rng.random() < 0.5:
            config.compression = drawn.compression
            daemon.step(ev.CompressionChosen(config.compression))
        change = ev.PolicyChanged(options, policies, sizes)
        problems = daemon.planner.changes.objections(change)
        assert not [p for p in problems if "pinned" not in p], problems
        if problems:  # refused whole, as the daemon would
            for tier in sizes:
                self._restore(daemon, tier)
            return
        config.options, config.policies = options, policies
        self._world.counts["policy_changed"] += 1
        daemon.step(change)

    def _restore(self, daemon: Daemon, tier: Tier) -> None:
        count = daemon.planner.changes.num_units(tier)
        if tier is DRAM:
            self._config.dram_extents = count
        elif tier is HBM:
            self._config.hbm_extents = count
        elif tier is CXL:
            self._config.cxl_extents = count
        else:
            self._config.num_segments = count
            daemon.cold.resize(count)
