"""Pressure: makes room in a tier by evicting what a slower tier has too, and spilling what it has not.

A block that is also in a slower tier is *clean*: evicting it costs nothing but a later promotion. What was
put longest ago is copied down ahead of need (ahead.py), so that a put finds room without waiting for a
device; and it stays where it is until the tier passes its high watermark. Nothing acknowledged is dropped
while a slower tier can take it.

Every search for room is a loop over `_evict_or_spill`, of bounded length: no request waits while ten thousand
blocks are evicted. What is left over is continued at the next event, or at a Tick that `is_busy` asks for.
"""

from collections import defaultdict
from collections.abc import Callable
from enum import Enum

from ....policies.admission import AdmitAll
from ....policies.base import Newcomer, Victim
from ....tiers.block import Tier, Urgency
from ....v1.shm import slot_bytes_for
from ..catalog.catalog import NO_ROW
from ..catalog.core_state import CoreState
from ..catalog.residency import INCOMPLETE, Residency
from ..catalog.run_eviction import RunEviction
from ..catalog.states import State
from ..copying.copies import Copies, Move
from ..copying.refusals import Refusals
from ..encodings import AS_IT_IS
from .archiving import Archiving
from .cold_quota import ColdQuota
from .reclaim import Reclaim
from .victims import Victims, newcomer_of

#: What copies into a slower tier are called in the story, before the name of the tier that they come from.
SPILL, COPY_AHEAD, IDLE_COPY = "spill", "copy_ahead", "idle_copy"
MAX_STEPS = 64  # blocks evicted or spilled per event: about a millisecond


class Progress(Enum):
    """What one step towards room achieved."""

    EVICTED = "blocks were evicted"
    SPILLING = "a block is on its way down"
    NOTHING = "nothing can be done now"
    DECLINED = "the next victim is worth more than the newcomer"


class Pressure:
    """Makes room in memory tiers: decides which blocks are evicted or spilled, and when."""

    def __init__(
        self,
        core: CoreState,
        residency: Residency,
        copies: Copies,
        reclaim: Reclaim,
        refusals: Refusals,
    ) -> None:
        self._core = core
        self._ladder, self._log_tier = core.ladder, core.ladder.log_tier
        self._host_edges, self._ways_down = core.ladder.host_edges, core.ladder.ways_down
        self._residency = residency
        self._copies = copies
        self.reclaim = reclaim
        self.refusals = refusals
        self._run_eviction = RunEviction(core, residency)
        below = core.ladder.below
        self._below = {tier: [t for t in below(tier) if t in core.rooms] for tier in core.ladder.tiers}
        self.victims = Victims(core, residency)
        self.cold_quota = ColdQuota(core, residency)
        self.archiving = Archiving(
            core, residency, self.copy_down, self.cold_spilling_bytes, self.cold_quota.admits
        )
        #: Moves of spills that are decided but not started, by (source, target, urgency).
        self._spills: defaultdict[tuple[Tier, Tier, Urgency], list[Move]] = defaultdict(list)
        self._spilled_bytes: defaultdict[Tier, int] = defaultdict(int)  # of them, by source
        #: By tier and domain: handle of the next victim, which waits for spills to end.
        self._next_to_spill: dict[tuple[Tier, int | None], int] = {}
        #: Tiers and handles of victims that could neither be evicted nor spilled while the store pauses.
        self._passed_over: list[tuple[Tier, int]] = []
        #: Whether work was left over only because there was much of it.
        self.is_busy = False

    def place_for(self, tier: Tier, domain: int, num_bytes: int) -> int | None:
        """Reserve a place, evicting clean blocks and queueing spills as needed; None: not yet.

        After None the caller must wait: room appears when a spill finishes or a hold ends.
        """
        room = self._core.rooms[tier]
        place = room.reserve(domain, num_bytes)
        if place is not None:
            return place
        places: list[int] = []  # a list: mypyc takes a variable that is assigned in a closure for None here

        def is_reserved() -> bool:
            found = room.reserve(domain, num_bytes)
            if found is not None:
                places.append(found)
            return found is not None

        self._step_until(is_reserved, tier, domain)
        self.start_spills()
        return places[0] if places else None

    def make_room(
        self, tier: Tier, domain: int, num_blocks: int, newcomer: Callable[[int], Newcomer]
    ) -> Progress:
        """Evict or spill about `num_blocks` blocks of a tier for a newcomer of `domain`, at most MAX_STEPS.

        `newcomer(n)` describes it without its first n blocks; it is called when the admission policy asks.
        Returns DECLINED as soon as the tier's admission says that the newcomer is not worth the next
        victim: then what was evicted before made room for as much of it as is worth it.
        """
        step, num_freed = Progress.NOTHING, 0
        wanted = min(num_blocks, MAX_STEPS)
        admission = self._core.policies.admissions[tier]

        def is_admitted(victim: Victim) -> bool:
            return admission.admits(newcomer(num_freed), victim)

        asked = None if type(admission) is AdmitAll else is_admitted  # a class derived from it may decline
        while num_freed < wanted:
            step, num_run = self._evict_or_spill(tier, wanted - num_freed, domain, asked)
            if step in (Progress.NOTHING, Progress.DECLINED):
                break
            num_freed += num_run
        self._run_eviction.flush()
        self.start_spills()
        return step

    def shed(self, tier: Tier, num_bytes: int) -> bool:
        """Evict or spill at least `num_bytes` of a tier, at most MAX_STEPS blocks at once.
        Returns whether that is under way or done; False: no block can be evicted now."""
        limit_bytes = self._core.rooms[tier].statistics().taken_bytes - num_bytes
        step = self._lower_to(limit_bytes, tier)
        self.start_spills()
        return step is not Progress.NOTHING or self.spilling_bytes(tier) > 0

    def relieve(self) -> None:
        """Bring every memory tier to its high watermark. `carry_on` must follow."""
        self.is_busy = False
        if len(self._core.rooms) == 1:  # nothing has anywhere to go
            return
        self.cold_quota.begin_step()
        if self._passed_over and not self.refusals.is_pausing:
            self._offer_again()
        for tier in self._ladder.memory_tiers:
            # Without a slower tier blocks are evicted when their room is needed, not before.
            if tier in self._core.rooms and self._lower(tier) is not None:
                capacity_bytes = self._core.rooms[tier].statistics().capacity_bytes
                self._lower_to(self._core.options.high_watermark * capacity_bytes, tier)

    def carry_on(self) -> None:
        """Keep cold segments free, demote what was archived, start the spills that were decided."""
        if len(self._core.rooms) == 1:
            return
        self.reclaim.keep_free_segments()
        if self.archiving.run():
            self.is_busy = True
        self.start_spills()

    # ------------------------------------------------------------------------- for what is copied ahead

    def may_spill(self, tier: Tier) -> bool:
        """Whether there is a slower tier that works and takes something now."""
        return self._lower(tier) is not None

    def spilling_bytes(self, tier: Tier) -> int:
        """Return the bytes that are on their way out of a tier, or are about to be."""
        num_bytes = self._spilled_bytes[tier]
        if self._lower(tier) is not None:
            in_flight = self._core.bytes_in_flight
            for edge in self._ways_down[tier]:
                num_bytes += in_flight.get(edge, 0)
        return num_bytes

    def cold_spilling_bytes(self, *sources: Tier) -> int:
        """Return the bytes on their way from `sources` into the cold store, or about to be.

        From all host memory when none is given."""
        in_flight, log_tier = self._core.bytes_in_flight, self._log_tier
        return sum(
            in_flight.get((tier, log_tier), 0) + self._spilled_bytes[tier]
            for tier in sources or self._ladder.host_tiers
        )

    def copy_down(self, row: int, source: Tier, urgency: Urgency, *, what: str) -> bool:
        """Decide the copies of what `source` has of a block and the cold store has not.
        `what` names them in the story, COPY_AHEAD or IDLE_COPY. False: there is no room for any of it."""
        return self._spill(row, source, self._log_tier, urgency, archives=True, what=what)

    def is_cold_edge_busy(self) -> bool:
        """Whether anything is on its way to or from the cold store, or waits for that."""
        in_flight, log_tier = self._core.bytes_in_flight, self._log_tier
        return any(num_bytes and log_tier in edge for edge, num_bytes in in_flight.items())

    @property
    def has_spills(self) -> bool:
        """Whether copies were decided that are not started."""
        return any(self._spilled_bytes.values())

    def _lower(self, tier: Tier) -> Tier | None:
        """Return the next slower tier that works and takes copies, None when there is none."""
        for slower in self._below[tier]:
            takes_copies = slower != self._log_tier or not self.refusals.is_pausing
            if takes_copies and slower not in self._core.offline:
                return slower
        return None

    def _lower_to(self, limit_bytes: float, tier: Tier) -> Progress:
        """Evict or spill until no more than `limit_bytes` of a tier are taken and stay."""
        room = self._core.rooms[tier]

        def is_low() -> bool:
            return room.statistics().taken_bytes - self.spilling_bytes(tier) <= limit_bytes

        return Progress.EVICTED if is_low() else self._step_until(is_low, tier, None)

    def _step_until(self, is_enough: Callable[[], bool], tier: Tier, domain: int | None) -> Progress:
        """Evict or spill, block by block, until `is_enough`; what MAX_STEPS leave over is for the next event.

        Returns what the last step achieved."""
        for _ in range(MAX_STEPS):
            step, _ = self._evict_or_spill(tier, 1, domain)
            self._run_eviction.flush()
            if step is Progress.NOTHING or is_enough():
                return step
        self.is_busy = True
        return step

    def _offer_again(self) -> None:
        passed_over, self._passed_over = self._passed_over, []
        for tier, handle in passed_over:
            if (row := self._core.catalog.row_of(handle)) != NO_ROW:
                self._residency.offer(row, tier)

    def _evict_or_spill(
        self,
        tier: Tier,
        max_blocks: int,
        domain: int | None,
        is_admitted: Callable[[Victim], bool] | None = None,
    ) -> tuple[Progress, int]:
        """Make one step towards room for `domain` (None: for all): evict a run of clean blocks, or decide a
        spill. `is_admitted`: whether a newcomer may take the place of a victim; None: it may.

        Returns what was achieved, and by how many blocks.
        """
        core = self._core
        residency = self._residency
        policy = core.policies.evictions[tier]
        lower = self._lower(tier)
        if self._waits_for_spills(tier, lower, domain):
            return Progress.NOTHING, 0
        while (victim := self.victims.choose(tier, domain)) is not None:
            row = victim.row
            if not residency.is_candidate(row, tier):
                continue  # in use again; it is offered anew when that ends
            # With a slower tier below nothing is lost by admitting: the victim is only demoted.
            if is_admitted is not None and lower is None and not is_admitted(victim):
                policy.offer((row,), core.now)
                return Progress.DECLINED, 0
            reason = self._reason_to_evict(row, tier, lower)
            if reason and residency.may_leave(row, tier):
                return Progress.EVICTED, self._run_eviction.take(victim, tier, reason, max_blocks, policy)
            if lower is None:  # continued elsewhere, or pinned
                if self._evict_end(row, tier, reason):
                    return Progress.EVICTED, 1
                if self.refusals.is_pausing:
                    self._passed_over.append((tier, core.catalog.handle(row)))
                continue
            self._run_eviction.flush()
            step = self._send_down(victim, tier, lower)
            if step is Progress.NOTHING:
                if self.spilling_bytes(tier) >= core.options.max_spill_bytes:
                    self._next_to_spill[tier, domain] = core.catalog.handle(row)
                policy.offer((row,), core.now)
            return step, int(step is not Progress.NOTHING)
        return Progress.NOTHING, 0

    def _send_down(self, victim: Victim, tier: Tier, lower: Tier) -> Progress:
        """Decide the copy of a victim into `lower`, or evict it where that does not admit it or cannot take
        it. Between memories of the host a full tier is passed over."""
        row, residency = victim.row, self._residency
        if residency.may_leave(row, tier) and not self.is_worth_keeping(row, lower):
            residency.evict(row, tier, f"not worth {lower.label}", victim)
            return Progress.EVICTED
        if self.spilling_bytes(tier) < self._core.options.max_spill_bytes:
            if lower == self._log_tier and not self.cold_quota.admits(row):
                if self._evict_if_free(victim, tier, self.cold_quota.reason):
                    return Progress.EVICTED
            elif self._spill(row, tier, target=lower, archives=False):
                return Progress.SPILLING
        if (tier, lower) not in self._host_edges:
            return Progress.NOTHING
        if residency.is_below(row, tier) and self._evict_if_free(victim, tier, "coldest"):
            return Progress.EVICTED  # `lower` has no room; a slower tier has the block
        further = self._lower(lower)
        if further is not None:  # past it, unless room appears there
            return Progress.NOTHING if self.spilling_bytes(lower) else self._send_down(victim, tier, further)
        reason = f"coldest, no room in {lower.label}"
        is_evicted = not self.spilling_bytes(tier) and (
            self._evict_if_free(victim, tier, reason) or self._evict_end(row, tier, reason)
        )
        return Progress.EVICTED if is_evicted else Progress.NOTHING

    def _evict_if_free(self, victim: Victim, tier: Tier, reason: str) -> bool:
        """Evict a victim unless something protects it. Returns whether it was evicted."""
        may_leave = self._residency.may_leave(victim.row, tier)
        if may_leave:
            self._residency.evict(victim.row, tier, reason, victim)
        return may_leave

    def _evict_end(self, row: int, tier: Tier, reason: str) -> bool:
        """Evict, from everywhere, the end of a chain that continues a victim: only that keeps it, and it is
        offered again. What continues a block was used no later. False: there is none, or it stays, as it does
        where the cold store refuses, and is not full."""
        core, residency, end = self._core, self._residency, row
        while core.catalog.first_child[end] != NO_ROW:
            end = core.catalog.first_child[end]
        tiers = [one for one in self._ladder.tiers if core.catalog.num_placed[one][end]]
        refusals = self.refusals
        stays = end == row or (refusals.is_pausing and not (refusals.is_full or refusals.is_stopped))
        if stays or end in core.pin_floors or not all(residency.may_leave(end, one) for one in tiers):
            return False
        for one in tiers:
            residency.evict(end, one, reason)
        core.policies.evictions[tier].offer((row,), core.now)
        return True

    def _has_way(self, row: int, tier: Tier, lower: Tier) -> bool:
        """Whether another memory of the host has room for a block below its high watermark, or gets it now:
        above it the block could be the first one to leave again, and be copied for ever."""
        if (tier, lower) not in self._host_edges:
            return True  # the copy looks for it
        room, namespace = self._core.rooms[lower], self._core.catalog.namespace_of(row)
        num_bytes = sum(map(slot_bytes_for, namespace.fragment_bytes))
        limit_bytes = self._core.options.high_watermark * room.statistics().capacity_bytes - num_bytes
        if limit_bytes >= 0 and room.statistics().taken_bytes > limit_bytes:
            self._lower_to(limit_bytes, lower)
        return room.statistics().taken_bytes <= limit_bytes

    def _waits_for_spills(self, tier: Tier, lower: Tier | None, domain: int | None) -> bool:
        """Whether the last victim still has to be spilled first, and as much is being spilled as may be.

        No other victim is looked for until a spill ends: it would be found, and put back, at every event, and
        where the cold store cannot keep up every event asks."""
        if (handle := self._next_to_spill.get((tier, domain))) is None:
            return False
        row = self._core.catalog.row_of(handle)
        is_waiting = (
            lower is not None
            and self.spilling_bytes(tier) >= self._core.options.max_spill_bytes
            and row != NO_ROW
            and self._residency.is_candidate(row, tier)
            and not self._is_clean(row, tier, lower)
        )
        if not is_waiting:
            del self._next_to_spill[tier, domain]
        return is_waiting

    def is_worth_keeping(self, row: int, lower: Tier) -> bool:
        """Whether the slower tier admits a block that would be gone otherwise."""
        admission = self._core.policies.admissions[lower]
        return type(admission) is AdmitAll or admission.admits(newcomer_of(self._core, row), None)

    def _reason_to_evict(self, row: int, tier: Tier, lower: Tier | None) -> str:
        """Return why a block may be evicted at once; empty when it must be spilled first."""
        if self._core.catalog.tier_of(row) is None:
            return INCOMPLETE
        if lower is None:
            if self.refusals.is_pausing:
                return f"coldest, {self._log_tier.label} takes nothing"
            return "coldest, no slower tier"
        return "coldest" if self._is_clean(row, tier, lower) else ""

    def _is_clean(self, row: int, tier: Tier, lower: Tier) -> bool:
        """Whether a block can be evicted from `tier` without a copy. Between two memories of the host a copy
        is cheap and saves a load, so there it is made although the cold store has the block."""
        if (tier, lower) in self._host_edges:
            return self._residency.is_covered(row, tier, (lower,))
        return self._residency.is_below(row, tier)

    def _spill(
        self,
        row: int,
        tier: Tier,
        target: Tier,
        urgency: Urgency = Urgency.IDLE,
        *,
        archives: bool,
        what: str = SPILL,
    ) -> bool:
        """Decide the copy of a block into a slower tier. `archives`: also of what another one has. False:
        there is no room there."""
        core = self._core
        residency = self._residency
        core.transitions.keep(row)  # the segment that makes room for one half of it may hold the other half
        has_way = self._has_way(row, tier, target)
        has_moves = has_way and self._decide_moves(row, tier, target, urgency, archives=archives)
        residency.unkeep(row)
        if has_moves:
            core.tell(row, f"{what}_{tier.label}")
        return has_moves

    def _decide_moves(self, row: int, tier: Tier, lower: Tier, urgency: Urgency, *, archives: bool) -> bool:
        """Reserve places for what `lower` has not of a block. Whether there was room for any of it."""
        core = self._core
        residency = self._residency
        catalog = core.catalog
        namespace = catalog.namespace_of(row)
        has_moves = False
        skips_stored = not archives and (tier, lower) not in self._host_edges
        for fragment, length in zip(catalog.fragments(row), namespace.fragment_bytes, strict=True):
            is_here = catalog.state[tier][fragment] == State.RESIDENT
            if not is_here or catalog.state[lower][fragment] != State.ABSENT:
                continue
            if skips_stored and residency.is_fragment_below(fragment, tier):
                continue
            encoding = AS_IT_IS
            if lower == self._log_tier:
                encoding = catalog.choose_encoding(fragment, namespace)
                stored_bytes = catalog.encodings.stored_bytes(encoding, length)
                place = self.reclaim.place_for(namespace.domain, stored_bytes)
            else:
                place = self.place_for(lower, namespace.domain, length)
            if place is None:
                break
            residency.arrive(fragment, lower, place, encoding)
            core.transitions.hold(fragment, tier)  # until the copy is started and holds it itself
            # Looked up each time: making room in a memory tier below may have started what was decided.
            self._spills[tier, lower, urgency].append(Move(fragment, catalog.place[tier][fragment], place))
            has_moves = True
            self._spilled_bytes[tier] += length
        return has_moves

    def start_spills(self, *, in_one: bool = False) -> None:
        """Start what was decided, in large copies; `in_one`: each by one thread."""
        if not self._spilled_bytes:
            return
        spills, self._spills = self._spills, defaultdict(list)
        self._spilled_bytes.clear()
        for (source, target, urgency), moves in spills.items():
            self._copies.spill(source, target, moves, urgency, in_one=in_one)
            for move in moves:
                self._residency.drop(move.fragment, source)
