"""When blocks are written to the cold store: a third of the seeds each in mode spill, idle and through.

Drawn from a source of randomness of its own, so that a seed in mode spill is the same seed as ever. Checked
from outside, beside what every seed checks:

    makes way     an idle copy begins only when nothing else is on its way to or from the device, alone
    budget        idle copies never write more than a day's worth at once and a day's worth a day after that,
                  over policy changes and restarts; those of one tenant never more than its share. What failed
                  does not count
    dirty         when everything has come to rest, nothing that could have been copied is only in memory
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from kvtier.appliance.core.catalog.states import State
from kvtier.appliance.core.events import CopyFinished, Event
from kvtier.appliance.core.instructions import Copy, FetchBundle, Instruction, Notify
from kvtier.appliance.core.options import PlannerOptions
from kvtier.appliance.core.shares import Shares
from kvtier.tiers.base import CopyItem
from kvtier.tiers.block import tenant_of
from kvtier.tiers.cold.log import SegmentLog, record_bytes

from .config import SLOT_BYTES
from .ladder import MAPPED, NVME
from .world import Violation, World

if TYPE_CHECKING:
    from .daemon import Daemon

RECORD_BYTES = record_bytes(SLOT_BYTES)
DAY_S = 86_400.0
#: Rounding of a bucket that is filled by a few bytes at a time.
SLACK_BYTES = 1.0


def draw_writes(rng: Random, options: PlannerOptions) -> PlannerOptions:
    """Draw when blocks are copied down, and how many bytes a day."""
    daily = rng.choice((None, None, 3 * RECORD_BYTES, 12 * RECORD_BYTES, 100 * RECORD_BYTES))
    return replace(options, write=rng.choice(("spill", "idle", "through")), daily_write_bytes=daily)


class Writes:
    """What the oracle knows of the cold store's writes. Outlives the daemon."""

    def __init__(self, world: World) -> None:
        self._world = world
        #: Bytes of idle copies that a bucket of one day's worth has not let out yet: of all (""), by tenant.
        self._levels: defaultdict[str, float] = defaultdict(float)
        self._idle: dict[int, Copy] = {}  # under way
        self._as_of = 0.0
        self._daily_bytes: int | None = None  # the limit in force then
        self._may_decline = False
        self._unwanted: set[tuple[int, bytes]] = set()  # what an administrator evicted from the cold store

    def before_copies(self, daemon: "Daemon", instructions: Sequence[Instruction]) -> None:
        """Look at the copies that are about to begin."""
        options = daemon.planner.core.options
        admission = daemon.planner.core.choice.admission
        self._may_decline |= admission != "all" or bool(options.quotas)
        self._drain(options.daily_write_bytes)
        others = [c for c in daemon.copies_in_flight() if NVME in (c.source, c.target)]
        for copy in instructions:
            if isinstance(copy, Notify) and (copy.tier, copy.reason) == (NVME, "administrator"):
                self._unwanted |= {(copy.namespace_id, name) for name in copy.prefix_hashes}
            if isinstance(copy, Copy):
                self._idle.pop(copy.copy, None)  # of an earlier daemon
            if isinstance(copy, FetchBundle):
                for number, _ in copy.batches:
                    self._idle.pop(number, None)
            if not isinstance(copy, Copy) or NVME not in (copy.source, copy.target):
                continue
            if copy.in_one:
                if others:
                    raise Violation("makes way", f"idle copy {copy.copy} begins beside copy {others[0].copy}")
                self._idle[copy.copy] = copy
                self._pay(daemon, copy, options)
                self._world.counts["idle_copies"] += len(copy.items)
            if copy.source is not copy.target:  # what is copied forward to make room for this one
                others.append(copy)

    def check_quiet(self, daemon: "Daemon") -> None:
        """Everything has come to rest: whatever may be in the cold store as well is there."""
        planner = daemon.planner
        log = planner.rooms.get(NVME)
        if planner.core.options.write == "spill" or not isinstance(log, SegmentLog) or self._may_decline:
            return
        is_usable = NVME not in planner.core.offline and not daemon.config.rates["no_place"]
        if not is_usable or planner.core.now < planner.refusals.ask_again_at:
            return
        host_rooms = [planner.rooms[tier] for tier in MAPPED.host_tiers if tier in planner.rooms]
        taken_bytes = sum(room.statistics().taken_bytes for room in host_rooms)
        if taken_bytes >= log.num_segments * log.segment_bytes / 2:
            return  # as much as that may be in both
        dirty: dict[int, int] = {}  # by row: the bytes of its records at most
        beyond_share: set[str] = set()  # tenants with a block that is larger than its share, forever in front
        for namespace in planner.catalog.namespaces.values():
            most_bytes = sum(map(record_bytes, namespace.fragment_bytes))
            found = [
                row
                for name, row in namespace.rows.items()
                if (namespace.id, name) not in self._unwanted and self._is_dirty(daemon, row)
            ]
            dirty |= dict.fromkeys(found, most_bytes)
            tenant = tenant_of(namespace.identity.domain)
            if found and most_bytes > _share_bytes(planner.core.options):
                beyond_share.add(tenant if planner.core.options.num_tenants else "")
        for row in list(dirty):
            tenant = tenant_of(planner.catalog.namespace_of(row).identity.domain)
            if not beyond_share.isdisjoint(("", tenant)):
                del dirty[row]
        # They are copied in their order: what there is no room for keeps smaller ones waiting.
        if dirty and log.has_free_room(max(dirty.values()), planner.core.options.min_free_segments):
            raise Violation("dirty", f"row {min(dirty)} is only in memory, and nothing is in its way")

    @staticmethod
    def _is_dirty(daemon: "Daemon", row: int) -> bool:
        catalog = daemon.planner.catalog
        if catalog.tier_of(row) is None:
            return False  # half a block: nobody can read it anyway
        return any(
            catalog.state[NVME][fragment] == State.ABSENT
            and any(catalog.state[tier][fragment] == State.RESIDENT for tier in MAPPED.memory_tiers)
            for fragment in catalog.fragments(row)
        )

    def after(self, daemon: "Daemon", event: Event) -> None:
        """A copy may have ended: what failed is given back."""
        copy = self._idle.pop(event.copy, None) if isinstance(event, CopyFinished) else None
        if copy is not None and isinstance(event, CopyFinished):
            self._drain(daemon.planner.core.options.daily_write_bytes)
            for item, outcome in zip(copy.items, event.outcomes, strict=True):
                for tenant in ("", self._tenant(daemon, item)) if outcome.cause is not None else ():
                    self._levels[tenant] = max(0.0, self._levels[tenant] - _written_bytes(item))

    def _drain(self, daily_bytes: int | None) -> None:
        """Let out what leaks until now.

        The product lets out whole bytes, so the time in which less than one leaked is still to come when the
        limit changes, also over a restart: what leaks in it at the new rate is let out here at once.
        """
        now, before = self._world.now, self._daily_bytes
        drained = (now - self._as_of) * daily_bytes / DAY_S if daily_bytes is not None else float("inf")
        if daily_bytes and before and daily_bytes > before:
            drained += daily_bytes / before
        self._daily_bytes = daily_bytes
        most = 2.0 * (daily_bytes or 0)  # under a new limit no more than a day's worth is owed
        for one, written in self._levels.items():
            self._levels[one] = min(max(0.0, written - drained), most)
        self._as_of = now

    def _pay(self, daemon: "Daemon", copy: Copy, options: PlannerOptions) -> None:
        daily_bytes = options.daily_write_bytes
        for item in copy.items:
            for tenant in ("", self._tenant(daemon, item)):
                self._levels[tenant] += _written_bytes(item)
        if daily_bytes is None:
            return
        tenant = self._tenant(daemon, copy.items[0])
        for whose, limit in ("", float(daily_bytes)), (tenant, _share_bytes(options)):
            written = self._levels[whose]
            if written > limit + SLACK_BYTES:
                raise Violation(
                    "budget", f"idle copies of {whose or 'all'} wrote {written:.0f} bytes, {limit} may be"
                )

    @staticmethod
    def _tenant(daemon: "Daemon", item: CopyItem) -> str:
        """Return the tenant of a fragment; one idle copy is of one tenant's blocks."""
        namespaces = daemon.planner.catalog.namespaces.values()
        digest = item.label.namespace_digest
        return next((tenant_of(n.identity.domain) for n in namespaces if n.identity.digest == digest), "gone")


def _written_bytes(item: CopyItem) -> int:
    return record_bytes(item.label.stored_length or item.label.raw_length)


def _share_bytes(options: PlannerOptions) -> float:
    """Return what idle copies of one tenant may write while no others have any."""
    daily_bytes, most = options.daily_write_bytes, float("inf")
    return most if daily_bytes is None else Shares(daily_bytes, options.num_tenants).largest("")
