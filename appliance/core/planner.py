"""The planner: events in, instructions out. The pure core of the appliance.

    instructions = planner.handle(event, now)

No clock, no await, no I/O, no randomness: the same events at the same times give the same instructions,
in the daemon, in the simulator and in replay. All state is mutated through `handle` (and `adopt`, once,
at start); `lookup` and the inspections only read.

This file says which part answers which event. What all parts work on is `core` (core_state.py): options,
catalog, rooms, policies in force, time, outbox, log. The parts: `residency` (moves fragments between states,
by transitions.py), `pressure`, `reclaim` (eviction), `loads` and `copies` (what is on its way), `requests`,
`reads`, `writes`, `placing`; `leases`, `pins`, `sessions` (what protects blocks), `story` (what happened).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...policies.base import Future
from ...policies.learned import pack, unpack
from ...policies.registry import PolicyChoice
from ...tiers.base import Room
from ...tiers.block import NamespaceIdentity, Tier, Urgency
from ...tiers.ladder import STANDARD, Ladder
from . import events as ev
from .capacity.ahead import Ahead
from .capacity.dirty import Dirty
from .capacity.exports import Exports
from .capacity.pressure import Pressure
from .capacity.reclaim import Reclaim
from .capacity.resizing import Resizing
from .catalog.catalog import NO_ROW
from .catalog.catalog_audit import check_books, check_catalog
from .catalog.core_state import CoreState
from .catalog.recovery import adopt
from .catalog.residency import Residency
from .catalog.runs import column
from .changes import Changes
from .copying.copies import Copies
from .copying.refusals import Refusals
from .copying.source_index import SourceIndex
from .copying.write_budget import WriteBudget
from .inspection import Inspection
from .instructions import Instruction, SealSegment
from .options import PlannerOptions
from .promotion.loads import Loads
from .promotion.prefetch import Prefetches
from .promotion.promotions import Promotions
from .requests.damage import Damage
from .requests.erasing import Erasing
from .requests.evicting import Evicting
from .requests.fetches import Fetches
from .requests.found_memory import FoundMemory
from .requests.leases import LeaseTable
from .requests.lookups import LookupResult, Lookups
from .requests.pins import Pins
from .requests.placement_requests import PlacementRequests
from .requests.quotas import Quotas
from .requests.read_requests import ReadRequests
from .requests.request_registry import RequestRegistry
from .requests.retention import RetentionHints
from .requests.sessions import Sessions
from .requests.usage import Usage
from .requests.waiting import Waiting
from .requests.write_requests import WriteRequests
from .results import CountResult, Refusal

if TYPE_CHECKING:
    from ...tiers.cold.recovery import RecoveredStore


MAX_PUT_OFF = 16  # events of puts that are answered before anything follows from them: 0.3 ms
_OF_PUTS = (ev.CommitRequested, ev.CopyFinished)


class Planner:
    """Decides everything. Single-threaded: its owner calls it from one place."""

    def __init__(
        self,
        options: PlannerOptions,
        rooms: Mapping[Tier, Room],
        *,
        policies: PolicyChoice | None = None,
        ladder: Ladder = STANDARD,
        future: Future | None = None,
        secret: bytes = b"",
        on_policy_failed: Callable[[str, str], None] = lambda words, instead: None,
    ) -> None:
        """The arguments are those of `CoreState`. Raises ValueError for a wrong choice of policies."""
        core = self.core = CoreState(
            options,
            rooms,
            choice=policies or PolicyChoice(),
            future=future,
            secret=secret,
            ladder=ladder,
            on_policy_failed=on_policy_failed,
        )
        self.rooms, self.catalog, self.story, self.costs = rooms, core.catalog, core.story, core.costs
        self.dirty = Dirty(core, is_complete=options.write != "spill")
        self.write_budget = WriteBudget(options.daily_write_bytes, options.num_tenants)
        self.refusals = Refusals(core)
        residency = self.residency = Residency(core, self.dirty.note_lost)
        self.copies = Copies(core, residency, self.refusals, self.write_budget)
        self.reclaim = Reclaim(core, residency, self.copies, self.refusals)
        self.pressure = Pressure(core, residency, self.copies, self.reclaim, self.refusals)
        self.ahead = Ahead(core, self.pressure, self.dirty, self.write_budget)
        self.loads = Loads(core, residency, self.copies, self.pressure)
        self.prefetching = Prefetches(core, residency, self.copies, self.loads)
        self.promotions = Promotions(core, self.loads)
        self.retention = RetentionHints(core, residency)
        self.leases = LeaseTable(core, residency)
        self.pins = Pins(core, residency)
        self.sessions = Sessions(core, residency)
        self.waiting = Waiting(core)
        self.source_index = SourceIndex(core)
        self.exports = Exports(core, residency, self.source_index)
        self.quotas = Quotas(core, self.leases, self.pins)
        self.requests = RequestRegistry(core, self.leases, self.quotas)
        self._answer_requests()
        self.resizing = Resizing(core, residency, self.copies, self.pressure)
        self.damage = Damage(core, self.requests, residency)
        self.erasing = Erasing(core, self.requests, residency, self.copies)
        self.found_memory = FoundMemory(core, residency, self.dirty.note_lost)
        self.evicting = Evicting(core, self.requests, residency, self.pressure, self.reclaim)
        self.inspection = Inspection(
            core, self.copies, self.leases, self.pins, self.sessions, self.prefetching, self.waiting
        )
        parts = (self.quotas, self.requests, self.ahead, self.exports, self.fetches.searches)
        listeners = [part.options_changed for part in parts]
        self.changes = Changes(core, residency, self.pressure.victims, self.resizing, self.pins, listeners)
        self.requests.namespaces_in_use = self._namespaces_in_use
        self._handlers = self._handler_table()
        self._due_after: type | None = None  # class of an event of which only `answer` was asked yet
        self._num_put_off = 0  # events before it, too

    def _answer_requests(self) -> None:
        """Make the parts that answer requests."""
        core, requests, residency, waiting = self.core, self.requests, self.residency, self.waiting
        usage = Usage(core, self.sessions, self.retention)
        self.writes = WriteRequests(core, requests, residency, self.copies, self.pressure, waiting, usage)
        self.fetches = Fetches(core, self.source_index, self.writes)
        self.lookups = Lookups(core, self.fetches)
        self.reads = ReadRequests(core, requests, self.loads, self.promotions, waiting, usage, self.fetches)
        self.placing = PlacementRequests(core, requests, self.loads, self.pins, self.prefetching)

    def _handler_table(self) -> dict[type, Callable[[Any], object]]:
        """Say which part answers which event."""
        return {
            ev.ClientOpened: self.requests.open_client,
            ev.ClientGone: self._client_gone,
            ev.NamespaceRegistered: self.requests.register,
            ev.ExtentFound: self.found_memory.take,
            ev.FoundVerified: self.found_memory.verified,
            ev.ViewsEnded: self.found_memory.views_ended,
            ev.AcquireRequested: self.reads.acquire,
            ev.AcquireAbandoned: self.reads.abandon,
            ev.ReleaseRequested: self.reads.release,
            ev.KeptAlive: self.reads.keep_alive,
            ev.Touched: self.reads.touched,
            ev.PrefetchRequested: self.placing.prefetch,
            ev.PinRequested: self.placing.pin,
            ev.UnpinRequested: lambda event: self.pins.unpin(event.pin_id),
            ev.ReserveRequested: self.writes.reserve,
            ev.CommitRequested: self.writes.commit,
            ev.AbortRequested: self.writes.abort,
            ev.SessionUpdated: self._session_updated,
            ev.SessionForked: self._session_forked,
            ev.SessionEnded: self._session_ended,
            ev.EvictRequested: self.evicting.begin,
            ev.TenantErased: self.erasing.begin,
            ev.CopyFinished: self._copy_finished,
            ev.SourceChanged: self._source_changed,
            ev.LookedUp: self.fetches.looked_up,
            ev.SourceSearched: self.fetches.searched,
            ev.BlocksTold: self.reads.expectations.told,
            ev.ExportFinished: self.exports.finished,
            ev.FragmentsDamaged: self.damage.condemn,
            ev.SegmentFreed: lambda event: self.reclaim.segment_freed(event.segment),
            ev.TierLost: self._tier_lost,
            ev.EdgeMeasured: self._edge_measured,
            ev.ColdEdgeOpened: self._cold_edge_opened,
            ev.PolicyChanged: self.changes.apply,
            ev.CompressionChosen: lambda event: self.requests.compress(event.compression),
            ev.DrainStarted: self._drain_started,
            ev.Tick: self._tick,
        }

    # ------------------------------------------------------------------------------- events in

    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        """Take in one event; return what to do, to be executed in order."""
        self._answer(event, now)
        self._follow_up()
        return self.core.outbox.take()

    def answer(self, event: ev.Event, now: float) -> list[Instruction]:
        """Do the first half of `handle`: what callers wait for.
        For a shell that sends answers before it asks for the second half, `follow_up`, which otherwise comes
        with the next event: a get is answered when its load landed, before evictions and policies. Of small
        puts one behind the other several may be answered first (`may_put_off`)."""
        self._answer(event, now)
        return self.core.outbox.take()

    def follow_up(self) -> list[Instruction]:
        """Do the second half of `handle`, unless it was done already. Returns the instructions."""
        self._follow_up()
        return self.core.outbox.take()

    def _answer(self, event: ev.Event, now: float) -> None:
        kind = type(event)
        if kind in _OF_PUTS and self._due_after in _OF_PUTS and self.may_put_off:
            self._num_put_off += 1
        else:
            self._follow_up()
        self.core.now = max(self.core.now, now)
        self._due_after = kind
        self._handlers[kind](event)

    @property
    def may_put_off(self) -> bool:
        """Whether what follows from puts may wait until more of them were answered."""
        return self._num_put_off < MAX_PUT_OFF and not (self.writes.is_behind or len(self.waiting))

    def _follow_up(self) -> None:
        """Do what follows from the last event, in this order; nothing when that was done."""
        after, self._due_after = self._due_after, None
        if after is None:
            return
        self._num_put_off = 0
        self.writes.conclude()
        self.pressure.relieve()
        self.ahead.spill()
        self.pressure.carry_on()
        if self.resizing.is_active:
            self.resizing.run()
        for administration in (self.erasing, self.evicting, self.sessions, self.dirty, self.fetches):
            administration.run()
        is_crowded = len(self.waiting) > 0
        if is_crowded:
            self.waiting.retry(after is ev.Tick)
            self.writes.conclude()
            is_crowded = len(self.waiting) > 0
        if not is_crowded:
            self.promotions.run()
        self.prefetching.run(is_crowded)
        self.ahead.idle()
        self.exports.run()
        self.reads.report()

    def lookup(self, namespace_id: int, prefix_hashes: Sequence[bytes]) -> LookupResult | Refusal:
        """How much of a chain is stored, where, and how long loading it takes. Changes nothing."""
        return self.lookups.lookup(namespace_id, prefix_hashes)

    @property
    def is_busy(self) -> bool:
        """Whether work was left over only because there was much of it: a Tick is due at once."""
        return (  # not any() of a tuple: it is asked after every step
            self.reclaim.is_busy
            or self.pressure.is_busy
            or self.resizing.is_busy
            or self.erasing.is_busy
            or self.evicting.is_busy
            or (self.sessions.is_busy or self.fetches.is_busy or self.reads.expectations.is_busy)
            or (self.dirty.is_busy or self.exports.is_busy or self.waiting.wants_turn)
        )

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        due = [
            self.leases.next_deadline(),
            self.pins.next_deadline(),
            self.retention.next_deadline(),
            self.prefetching.next_deadline(),
            self.waiting.next_deadline(),
            self.reads.next_deadline(),
            self.writes.next_deadline(),
            self.reclaim.next_deadline(),
            self.resizing.next_deadline(),
            self.evicting.next_deadline(),
            self.ahead.next_deadline(),
            self.exports.next_deadline(),
            self.core.now if self.is_busy else None,
            min((client.silent_at for client in self.leases.clients.values()), default=None),
        ]
        return min((at for at in due if at is not None), default=None)

    def adopt(self, recovered: "RecoveredStore", now: float) -> int:
        """Take over what the cold store found at start. Once, before any event. Returns the blocks."""
        self.core.now = now
        known = set(self.catalog.namespaces)
        namespaces = [self.requests.add_namespace(identity) for identity in recovered.namespaces]
        adopt(recovered, namespaces, self.core)
        for namespace in self.requests.unused(one for one in namespaces if one.id not in known):
            self.requests.forget(namespace)
        self.pressure.cold_quota.enforce()
        return self.catalog.num_blocks

    def name_namespaces(self, identities: Mapping[int, NamespaceIdentity]) -> None:
        """Give namespaces the ids that slots in memory know them by. Before anything else.

        One that was forgotten and registered again has its later id: nothing was stored under the former."""
        self.requests.former_ids.update(identities)
        last = {identity.digest: number for number, identity in identities.items()}
        for number, identity in identities.items():
            if number == last[identity.digest]:
                self.requests.add_namespace(identity, number)
        self.found_memory.awaited.update(identities)

    def identities(self) -> dict[int, NamespaceIdentity]:
        """Return the namespaces that there are, by id."""
        return {number: one.identity for number, one in self.catalog.namespaces.items()}

    def _namespaces_in_use(self) -> frozenset[int]:
        """Return the namespaces that unfinished work names, which may have no blocks."""
        parts = (self.reads, self.writes, self.evicting, self.erasing, self.found_memory)
        return frozenset(number for part in parts for number in part.namespaces())

    def learned(self) -> bytes:
        """Return what the policies learned, to be kept over a restart; empty when none of them learns."""
        return pack(self.core.policies.shared, self.core.absent_learners)

    def recall(self, data: bytes) -> dict[str, str]:
        """Take over what `learned` returned before. At start, before `adopt`. Never raises.

        What makes no sense here is ignored and counted; returns why, by the name of the learner.
        """
        ignored = unpack(data, self.core.policies.shared, self.core.absent_learners)
        if ignored:
            self.story.count("learned_ignored", len(ignored))
        return ignored

    def domain_number(self, name: str) -> int:
        """Return the number that rooms and indexes know an isolation domain by."""
        return self.requests.domain_number(name)

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of `kvtier status`; see inspection.py for details on one thing."""
        return self.inspection.statistics()

    def check_integrity(self) -> list[str]:
        """Audit everything. O(everything): for tests and `doctor`."""
        checks = [
            self.leases.check_integrity,
            self.pins.check_integrity,
            self.quotas.check_integrity,
            self.sessions.check_integrity,
            self.retention.check_integrity,
            self.prefetching.check_integrity,
            self.resizing.check_integrity,
            self.dirty.check_integrity,
            self.exports.check_integrity,
            self.fetches.check_integrity,
            *(room.check_integrity for room in self.rooms.values()),
        ]
        problems = check_catalog(self.catalog) + check_books(self.core, self.copies.forward_targets())
        return problems + [problem for check in checks for problem in check()]

    # ---------------------------------------------------------------------------- clients, sessions

    def _client_gone(self, event: ev.ClientGone) -> None:
        self.reads.client_gone(event.client)
        self.writes.client_gone(event.client)
        if self.leases.client_gone(event.client) is not None:
            self.story.count(f"clients_gone_{event.reason}")
        self.sessions.client_gone(event.client)
        self.requests.forget_client(event.client)

    def _session_updated(self, event: ev.SessionUpdated) -> None:
        session = self.sessions.claim(event.session_id, event.client)
        was_away = session.urgency >= Urgency.WAITING
        self.sessions.update(
            session, event.urgency, event.deadline_at, event.back_at, event.num_decoded_tokens
        )
        if was_away and event.urgency in (Urgency.QUEUED, Urgency.PREFILL):
            self.prefetching.arrived(self.sessions.rows(session))

    def _session_forked(self, event: ev.SessionForked) -> None:
        session = self.sessions.get(event.session_id)
        count = self.sessions.fork(session, event.new_session_id, event.client) if session else 0
        self.requests.reply(event.call, CountResult(count))

    def _session_ended(self, event: ev.SessionEnded) -> None:
        session, num_decoded = self.sessions.get(event.session_id), event.num_decoded_tokens
        self.prefetching.give_up(rows := self.sessions.end(session, num_decoded) if session else [])
        count = self.pressure.archiving.add_ended(rows) if event.archive else 0
        self.requests.reply(event.call, CountResult(count))

    # --------------------------------------------------------------------------------- the machine

    def _copy_finished(self, event: ev.CopyFinished) -> None:
        self.copies.finish(event.copy, event.outcomes)
        for handle in self.copies.take_unfit():
            row = self.catalog.row_of(handle)
            if row != NO_ROW:
                self.pressure.archiving.add(row)

    def _source_changed(self, event: ev.SourceChanged) -> None:
        self.fetches.changed(event)
        self.exports.changed(event)

    def _tier_lost(self, event: ev.TierLost) -> None:
        if event.is_read_on:
            self.refusals.is_stopped = event.offline
            return
        offline = self.core.offline
        (offline.add if event.offline else offline.discard)(event.tier)
        verb = "tier_offline" if event.offline else "tier_online"
        self.story.tell(self.core.now, event.tier.label, verb, event.reason)
        if event.offline and event.tier != self.core.ladder.log_tier:  # memory does not come back
            for row in column(self.catalog.num_placed[event.tier]).nonzero()[0].tolist():
                if self.catalog.prefix_hash[row]:  # not, when it went with its last child
                    for fragment in self.catalog.fragments(row):
                        self.residency.condemn(fragment, event.tier, "tier lost")

    def _edge_measured(self, event: ev.EdgeMeasured) -> None:
        put_tier = self.core.ladder.put_tier
        if event.target == put_tier and event.source != put_tier:
            now = self.core.now
            self.costs.measured(event.source, event.bandwidth_bytes_per_s, event.latency_s, now)

    def _cold_edge_opened(self, event: ev.ColdEdgeOpened) -> None:
        self.loads.rules.straight_codecs = event.codecs

    def _drain_started(self, event: ev.DrainStarted) -> None:
        self.writes.is_closed = True
        self.exports.drain()
        self.pressure.archiving.add_all(
            lambda num_blocks: self.requests.reply(event.call, CountResult(num_blocks))
        )

    def close_cold_store(self) -> list[Instruction]:
        """Last step of a drain: seal what is open. Returns the instructions."""
        if (log := self.core.log) is None:
            return []
        log.close_open_segments()
        return [SealSegment(number) for number in log.take_segments_to_seal()]

    def _tick(self, event: ev.Tick) -> None:
        now = self.core.now
        for client in [c for c in self.leases.clients.values() if c.silent_at <= now]:
            self._client_gone(ev.ClientGone(client.id, "silent"))
        self.leases.expire(now)
        self.pins.expire(now)
        self.retention.expire(now)
        self.sessions.expire(now)
        self.waiting.expire(now)
        self.reads.expire(now)
        self.writes.expire(now)
