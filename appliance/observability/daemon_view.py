"""DaemonView: everything that snapshot, metrics and readiness read, in one place.

Reads the planner, the mover, the event log and the clients, and keeps what none of them keeps: telemetry,
call times, samples. What shows the daemon's state gets this and nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...policies.registry import PolicyChoice
from ...tiers.base import DISK_CAUSES, Cause
from ...tiers.block import Tier
from ...tiers.codecs.records import CodecStatistics
from ...tiers.cold.engine import ColdStore
from ..core.worth import day_bill
from ..counters import of_prefix
from ..event_log import EventLog
from ..fleet.fleet import Fleet
from ..histogram import Histogram
from ..scrubber import TierScrubs
from ..security.key_rotation import KeyRotation
from ..server.cache_service import CacheService
from ..server.ports import ReloadStatus
from ..transfer.lanes import EdgeStatistics
from ..transfer.object_edge import ObjectEdge
from .census import Census
from .health import Health, health_checks
from .sampler import INTERVAL_S, Sample, Sampler
from .telemetry import Telemetry

#: What became of a bundle that was to be stored in the source, and its counter in the story.
EXPORT_OUTCOMES = {
    "stored": "bundles_exported",
    "shared_already": "bundles_shared_already",
    "failed": "exports_failed",
    **{
        word: f"exports_{word}"
        for word in ("over_budget", "not_in_memory", "not_worth", "too_large", "dropped", "no_key")
    },
}
READY, STALLED, DRAINING, FAILED = "serving", "stalled", "draining", "failed"


class DaemonView:
    """What can be read of a daemon. Owned by the event loop.

    `choice`, `counters` and `reloads` are the daemon's: its policies, its counters, and how its policy
    changed.
    """

    def __init__(
        self,
        service: CacheService,
        events: EventLog,
        choice: Callable[[], PolicyChoice],
        counters: Callable[[], Counter[str]],
        reloads: Callable[[], ReloadStatus],
    ) -> None:
        self.service = service
        self.appliance = service.appliance
        self.planner = service.planner
        self.clock = service.appliance.clock
        self.events = events
        self.epoch = service.facts.epoch
        self.started_at = self.clock()
        self.reloads = reloads
        self.counters = counters
        self.call_latencies = service.call_latencies
        self.loop_late = Histogram()
        self.telemetry = Telemetry(self.planner)
        self.census = Census(self.planner.catalog, self.planner.rooms, self.clock)
        self.sampler = Sampler(self._look, self.planner.core.ladder.tiers)
        self.health = Health()
        #: Called with the state after it has changed, a second late at most.
        self.state_listeners: list[Callable[[str], None]] = []
        self.rotation: KeyRotation | None = None  # while something is encrypted
        self.scrubs: Mapping[Tier, TierScrubs] = {}
        self.source: ObjectEdge | None = None
        self.fleet: Fleet | None = None
        self.tls_ends: dict[str, float] = {}  # seconds since 1970, by key of access.tls
        self._told = READY
        self._choice = choice
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.appliance.observers.append(self.telemetry.stepped)

    def open(self) -> None:
        """Begin to take samples."""
        self.sampler.sample()
        self.check_health()
        self._due_at = self.clock() + INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._on_timer)

    def _on_timer(self) -> None:
        self.loop_late.observe(max(0.0, self.clock() - self._due_at))
        self.open()

    def check_health(self) -> None:
        """Check that everything makes progress; call the state listeners when the state has changed."""
        now = self.clock()
        self.health.look(health_checks(self.appliance, now), now)
        if (state := self.state()) != self._told:
            self._told = state
            for tell in self.state_listeners:
                tell(state)

    def close(self) -> None:
        """Stop sampling. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def uptime_s(self) -> float:
        """Return seconds since the daemon began."""
        return self.clock() - self.started_at

    def state(self) -> str:
        """Return `serving`, `stalled`, `draining` or `failed`."""
        if self.appliance.failed.done():
            return FAILED
        if self.service.draining:
            return DRAINING
        return STALLED if self.health.stalled else READY

    def writes(self) -> dict[str, Any] | None:
        """Return what was written to the cold store and what is missing there; None without one.

        Keys are the names of WriteStatus.
        """
        planner = self.planner
        if planner.core.ladder.log_tier not in planner.rooms:
            return None
        budget, now = planner.write_budget, self.clock()
        num_blocks, num_bytes = self.census.only_in_memory()
        return {
            "mode": planner.core.options.write,
            "written_bytes": budget.written(now),
            "daily_bytes": budget.daily_bytes,
            "left_bytes": budget.left_bytes(now) or 0,
            "is_overdrawn": budget.is_overdrawn(now),
            "num_blocks_only_in_memory": num_blocks,
            "only_in_memory_bytes": num_bytes,
        }

    def hosts(self) -> list[dict[str, Any]]:
        """Return the fields of HostStatus for each other host; nothing without `peers`."""
        return self.fleet.rows() if self.fleet is not None else []

    def directory_status(self) -> dict[str, Any] | None:
        """Return the fields of DirectoryStatus; None without a directory."""
        return self.fleet.directory_status() if self.fleet is not None else None

    def source_status(self) -> dict[str, Any] | None:
        """Return what is known of the object store and its use; None without one.

        Keys are the names of SourceStatus.
        """
        if self.source is None:
            return None
        status, story = self.source.status(), self.planner.story.counters
        options, budget = self.planner.core.options, self.planner.exports.budget
        fetches = of_prefix(self.source.counters, "fetches_")
        return {
            "address": status.address,
            "is_open": status.is_open,
            "problem": status.problem,
            "num_in_flight": status.num_in_flight,
            "max_in_flight": status.max_in_flight,
            "share": options.share,
            "requests": [
                {"operation": operation, "outcome": outcome, "num": number}
                for (operation, outcome), number in sorted(status.usage.requests().items())
            ],
            **status.usage.bytes(),
            "fetches": {**fetches, "not_worth": story.get("fetches_not_worth_it", 0)},
            "num_blocks_fetched": self.source.counters["blocks_fetched"],
            "exports": {outcome: story.get(name, 0) for outcome, name in EXPORT_OUTCOMES.items()},
            "exported_day_bytes": budget.written(self.clock()),
            "daily_bytes": budget.daily_bytes,
            "day_dollars": day_bill(options.prices, status.usage.last_day()),
        }

    def edges(self) -> Sequence[EdgeStatistics]:
        """Return what each edge did."""
        return self.appliance.mover.statistics()

    def tenants(self) -> frozenset[str]:
        """Return the domains of the tenants that the policy names."""
        return self.appliance.mover.shares.named

    def nvme_failures(self) -> dict[Cause, int]:
        """Return how often a record of the cold store was not read or written, by cause.

        The causes of a failing disk are always there, because an alert looks at how they grow."""
        engine = self.appliance.engines.get(self.planner.core.ladder.log_tier)
        if not isinstance(engine, ColdStore):
            return {}
        return dict.fromkeys(DISK_CAUSES, 0) | engine.statistics().failures

    def codecs(self) -> list[CodecStatistics]:
        """Return what each codec of the cold store did."""
        engine = self.appliance.engines.get(self.planner.core.ladder.log_tier)
        return engine.codecs.statistics() if isinstance(engine, ColdStore) else []

    def policy_names(self) -> dict[str, Any]:
        """Return which policies run on each tier."""
        choice = self._choice()
        tiers = [tier for tier in self.planner.rooms if tier < self.planner.core.ladder.log_tier]
        return {
            "eviction": {tier.label: choice.eviction for tier in tiers},
            "admission": {tier.label: choice.admission for tier in self.planner.rooms},
            "prefetch": choice.prefetch or None,
        }

    def _look(self) -> Sample:
        total, core = self.telemetry.total, self.planner.core
        return Sample(
            self.uptime_s(),
            total.num_asked,
            tuple(total.found),
            total.num_missed,
            total.num_declined,
            sum(self.events.num_removed.values()),
            {tier: core.transitions.resident_bytes[tier] for tier in self.planner.rooms},
            {f"{edge.source}>{edge.target}": edge.num_bytes for edge in self.edges()},
        )
