"""The planner: events in, instructions out. The pure core of the appliance.

    instructions = planner.handle(event, now)

No clock, no await, no I/O, no randomness: the same events at the same times give the same instructions,
in the daemon, in the simulator and in replay. All state is mutated through `handle` (and `adopt`, once,
at start); `lookup` and the inspections only read.

This file says which part answers which event. The parts: `catalog` (what is stored), `residency` (the only
code that moves a fragment between states), `pressure` and `reclaim` (who leaves), `loads` and `copies`
(what is on its way), `puts` and `gets` (one request from arrival to last reply), `leases`, `pins`,
`sessions` (who holds what), `story` (what happened and why).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...policies.base import EvictionPolicy
from ...policies.lru import LruEviction
from ...tiers.base import Room
from ...tiers.block import HASH_BYTES, Tier, Urgency
from ...tiers.log import SegmentLog
from . import events as ev
from .catalog import NO_ROW, TIERS, Catalog, Namespace
from .copies import Copies
from .gets import AcquireJob, stored_prefix
from .inspection import Inspection
from .leases import Client, Leases
from .loads import Loads
from .options import PlannerOptions
from .pins import Pins
from .pressure import Pressure
from .puts import PutJob
from .reclaim import Reclaim
from .recovery import adopt
from .residency import MEMORY_TIERS, Residency
from .sessions import Sessions
from .story import Story
from .waiting import Waiting

if TYPE_CHECKING:
    from ...tiers.recovery import Recovered


class LookupResult(NamedTuple):
    """Answer to a lookup: a hint, good for this instant."""

    num_blocks: int
    tiers: bytes  # one Tier per stored block
    load_s: float


class Planner:
    """Decides everything. Single-threaded: its owner calls it from one place."""

    def __init__(
        self,
        options: PlannerOptions,
        rooms: Mapping[Tier, Room],
        *,
        eviction: Callable[[Catalog], EvictionPolicy] = LruEviction,
        readable: Sequence[Tier] = MEMORY_TIERS,
    ) -> None:
        assert Tier.DRAM in rooms, "puts land in dram"
        self.options = options
        self.rooms = rooms
        self.catalog = Catalog()
        self.story = Story(options.max_story_lines)
        policies = {tier: eviction(self.catalog) for tier in MEMORY_TIERS if tier in rooms}
        self.residency = Residency(self.catalog, rooms, policies, self.story)
        self.copies = Copies(self.residency)
        log = rooms.get(Tier.NVME)
        assert log is None or isinstance(log, SegmentLog)
        self.reclaim = Reclaim(self.residency, self.copies, log, options)
        self.pressure = Pressure(self.residency, self.copies, self.reclaim, rooms, options)
        self.loads = Loads(self.residency, self.copies, self.pressure)
        self.leases = Leases(self.residency, options)
        self.pins = Pins(self.residency, options)
        self.sessions = Sessions(self.residency, options)
        self.waiting = Waiting(options.max_waiting_puts)
        self.inspection = Inspection(self)
        self.is_draining = False
        self._readable = tuple(tier for tier in readable if tier in rooms)
        self._domains: dict[str, int] = {}
        self._by_digest: dict[bytes, Namespace] = {}
        self._acquires: dict[int, AcquireJob] = {}  # by each of its calls
        self._puts: dict[int, PutJob] = {}  # by reservation id
        self._next_reservation = 1
        self._requests: dict[int, OrderedDict[str, AcquireJob | PutJob]] = {}  # by client
        self._bandwidth: dict[tuple[Tier, Tier], tuple[float, float]] = {}
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.ClientOpened: self._client_opened,
            ev.ClientGone: self._client_gone,
            ev.NamespaceRegistered: self._namespace_registered,
            ev.AcquireRequested: self._acquire,
            ev.AcquireAbandoned: self._acquire_abandoned,
            ev.ReleaseRequested: self._release,
            ev.KeptAlive: self._kept_alive,
            ev.Touched: self._touched,
            ev.ReserveRequested: self._reserve,
            ev.CommitRequested: self._commit,
            ev.AbortRequested: self._abort,
            ev.PinRequested: self._pin,
            ev.UnpinRequested: self._unpin,
            ev.PrefetchRequested: self._prefetch,
            ev.SessionUpdated: self._session_updated,
            ev.SessionForked: self._session_forked,
            ev.SessionEnded: self._session_ended,
            ev.EvictRequested: self._evict,
            ev.CopyFinished: self._copy_finished,
            ev.SegmentFreed: self._segment_freed,
            ev.TierLost: self._tier_lost,
            ev.EdgeMeasured: self._edge_measured,
            ev.DrainStarted: self._drain_started,
            ev.Tick: self._tick,
        }

    # ------------------------------------------------------------------------------------ the wall

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take in one event; return what to do, to be executed in order."""
        residency = self.residency
        residency.now = max(residency.now, now)
        self._handlers[type(event)](event)
        self.pressure.relieve()
        self.waiting.retry()
        self._report_acquires()
        return residency.take_instructions()

    def lookup(self, namespace_id: int, prefix_hashes: Sequence[bytes]) -> LookupResult | ev.Refusal:
        """How much of a chain is stored, where, and how long loading it takes. Changes nothing."""
        namespace = self.catalog.namespaces.get(namespace_id)
        if namespace is None:
            return _unknown_namespace(namespace_id)
        find, tier_of = namespace.rows.get, self.catalog.tier_of
        hbm, dram = self.catalog.num_resident[Tier.HBM], self.catalog.num_resident[Tier.DRAM]
        num_groups = namespace.num_groups
        tiers = bytearray()
        for prefix_hash in prefix_hashes:
            row = find(prefix_hash, NO_ROW)
            if row < 0:
                break
            if hbm[row] == num_groups:
                tiers.append(Tier.HBM)
            elif dram[row] == num_groups:
                tiers.append(Tier.DRAM)
            else:
                tier = tier_of(row)
                if tier is None or tier in self.residency.offline:
                    break
                tiers.append(tier)
        return LookupResult(len(tiers), bytes(tiers), self._load_s(namespace, tiers))

    def next_deadline(self) -> float | None:
        """When a Tick is due at the latest."""
        due = [
            self.leases.next_deadline(),
            self.pins.next_deadline(),
            self.waiting.next_deadline(),
            min((job.deadline_at for job in self._puts.values()), default=None),
            self.residency.now if self.reclaim.is_busy else None,
            min((client.silent_at for client in self.leases.clients.values()), default=None),
        ]
        return min((at for at in due if at is not None), default=None)

    def adopt(self, recovered: "Recovered", now: float) -> int:
        """Take over what the cold store found at start. Once, before any event. Returns the blocks."""
        self.residency.now = now
        for identity in recovered.namespaces:
            self._namespace(identity.digest) or self._add_namespace(identity)
        return adopt(recovered, self.residency, self._by_digest)

    def statistics(self) -> dict[str, Any]:
        """Return the numbers of `kvtier status`; see inspection.py for details on one thing."""
        return self.inspection.statistics()

    def check_integrity(self) -> list[str]:
        """Audit everything. O(everything): for tests and `doctor`."""
        parts = (self.catalog, self.residency, self.leases, self.pins, self.sessions, *self.rooms.values())
        problems = [problem for part in parts for problem in part.check_integrity()]
        return problems + self.inspection.check_books()

    # ------------------------------------------------------------------------------------- clients

    def _client_opened(self, event: ev.ClientOpened) -> None:
        now = self.residency.now
        silent_at = now + event.ttl_s if event.ttl_s is not None else float("inf")
        self.leases.clients[event.client] = Client(
            event.client, event.name, event.local, event.domain, event.ttl_s, silent_at
        )
        self._requests[event.client] = OrderedDict()

    def _client_gone(self, event: ev.ClientGone) -> None:
        for job in list(self._acquires.values()):
            if job.request.client == event.client:
                self._drop_acquire(job)
        for put in list(self._puts.values()):
            if put.client.id == event.client and not put.is_committed:
                put.abort()
        if self.leases.client_gone(event.client) is not None:
            self.story.count(f"clients_gone_{event.reason}")
        self.sessions.client_gone(event.client)
        self._requests.pop(event.client, None)

    def _client(self, client_id: int) -> Client | None:
        client = self.leases.clients.get(client_id)
        if client is not None and client.ttl_s is not None:
            client.silent_at = self.residency.now + client.ttl_s
        return client

    def _earlier(self, client: int, request_id: str) -> AcquireJob | PutJob | None:
        """Return what an earlier try of the same request became (invariant 9)."""
        return self._requests[client].get(request_id) if request_id else None

    def _remember(self, client: int, request_id: str, job: AcquireJob | PutJob) -> None:
        if request_id:
            requests = self._requests[client]
            requests[request_id] = job
            if len(requests) > self.options.max_remembered_requests:
                requests.popitem(last=False)

    # ---------------------------------------------------------------------------------- namespaces

    def _namespace_registered(self, event: ev.NamespaceRegistered) -> None:
        identity = event.identity
        namespace = self._namespace(identity.digest)
        if namespace is None:
            largest = max(identity.geometry.fragment_bytes(g) for g in range(identity.geometry.num_groups))
            for tier, room in self.rooms.items():
                if not room.can_hold(largest):
                    message = (
                        f"a fragment of {largest} bytes does not fit tier {tier.label}; "
                        "lower layers_per_group or raise the tier's extent (segment) size"
                    )
                    return self._refuse(event.call, "LAYOUT_MISMATCH", message)
            if len(self.catalog.namespaces) >= self.options.max_namespaces:
                message = f"{self.options.max_namespaces} namespaces are registered; raise max_namespaces"
                return self._refuse(event.call, "TOO_MANY_NAMESPACES", message)
            namespace = self._add_namespace(identity)
            if Tier.NVME in self.rooms:
                self.residency.out.append(ev.StoreNamespace(identity))
        sizes = list(namespace.fragment_bytes)
        self._reply(event.call, ev.NamespaceResult(namespace.id, identity.digest, sizes))
        return None

    def _namespace(self, digest: bytes) -> Namespace | None:
        return self._by_digest.get(digest)

    def _add_namespace(self, identity: Any) -> Namespace:
        domain = self._domains.setdefault(identity.domain, len(self._domains))
        namespace = self.catalog.add_namespace(identity, domain)
        self._by_digest[identity.digest] = namespace
        return namespace

    def domain_name(self, number: int) -> str:
        """Return the isolation domain that a room's domain number stands for."""
        return next(name for name, domain in self._domains.items() if domain == number)

    def domain_number(self, name: str) -> int:
        """Return the number rooms know an isolation domain by."""
        return self._domains.setdefault(name, len(self._domains))

    # --------------------------------------------------------------------------------------- reads

    def _acquire(self, event: ev.AcquireRequested) -> None:
        checked = self._check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return None
        client, namespace = checked
        earlier = self._earlier(event.client, event.request_id)
        if isinstance(earlier, AcquireJob):
            if not earlier.is_done:
                self._acquires[event.call] = earlier
            return earlier.repeat_for(event.call)
        if event.ttl_s > self.options.lease_ttl_max_s:
            message = f"ask for at most {self.options.lease_ttl_max_s:g} s and keep the lease alive"
            return self._refuse(event.call, "LEASE_TTL_TOO_LARGE", message)
        if len(client.leases) >= self.options.max_leases_per_client:
            message = f"{len(client.leases)} leases held; release some"
            return self._refuse(event.call, "TOO_MANY_IN_FLIGHT", message, 0.1)
        rows = stored_prefix(self.catalog, namespace, event.prefix_hashes)
        rows = rows[: self._affordable(client, namespace, event.first_block, len(rows))]
        self._use(rows, event.client, event.session_id, event.urgency)
        if len(rows) <= event.first_block:
            tiers = bytes(self.catalog.tier_of(row) or 0 for row in rows)
            return self._reply(event.call, ev.AcquireResult(0, len(rows), [], True, 0.0, tiers))
        job = AcquireJob(
            event,
            rows,
            self.leases.grant(client, event.ttl_s),
            self.leases,
            self.loads,
            self.residency,
            self._readable,
            self._acquire_done,
        )
        self._acquires[event.call] = job
        self._remember(event.client, event.request_id, job)
        if not job.advance():
            if self.waiting.is_full:
                job.give_up()
            else:
                deadline_at = min(event.deadline_at, self.residency.now + self.options.put_wait_s)
                self.waiting.add(job, event.urgency, deadline_at)
        return None

    def _affordable(self, client: Client, namespace: Namespace, first_block: int, num_blocks: int) -> int:
        """Return how many blocks of the prefix the client's quota of held bytes allows."""
        capacity = sum(self.rooms[tier].statistics().capacity_bytes for tier in self._readable)
        quota = int(self.options.max_pinned_fraction * capacity) - client.held_bytes
        return min(num_blocks, first_block + max(0, quota) // namespace.block_bytes)

    def _acquire_done(self, job: AcquireJob) -> None:
        for call in job.calls:
            self._acquires.pop(call, None)

    def _acquire_abandoned(self, event: ev.AcquireAbandoned) -> None:
        job = self._acquires.pop(event.call, None)
        if job is not None:
            job.calls.remove(event.call)
            if not job.calls:
                self._drop_acquire(job)

    def _drop_acquire(self, job: AcquireJob) -> None:
        self._requests.get(job.request.client, OrderedDict()).pop(job.request.request_id, None)
        job.abandon()

    def _report_acquires(self) -> None:
        for job in list(dict.fromkeys(self._acquires.values())):
            job.report()

    def _release(self, event: ev.ReleaseRequested) -> None:
        client = self._client(event.client)
        owned = client.leases if client is not None else {}
        num_unknown = 0
        for lease_id in event.lease_ids:
            if lease_id not in owned or not self.leases.release(lease_id):
                num_unknown += 1
        self.story.count("releases_unknown", num_unknown)
        if event.call is not None:
            self._reply(event.call, ev.ReleaseResult(num_unknown))

    def _kept_alive(self, event: ev.KeptAlive) -> None:
        client = self._client(event.client)
        if client is None:
            expired = list(event.lease_ids)
        else:
            expired = self.leases.extend(client, list(event.lease_ids), event.ttl_s)
        if event.call is not None:
            self._reply(event.call, ev.KeepAliveResult(expired))

    def _touched(self, event: ev.Touched) -> None:
        namespace = self.catalog.namespaces.get(event.namespace_id)
        if namespace is None or self._client(event.client) is None:
            return
        rows = [row for h in event.prefix_hashes if (row := namespace.rows.get(h, NO_ROW)) != NO_ROW]
        session = self.sessions.get(event.session_id)
        self._use(rows, event.client, event.session_id, session.urgency if session else Urgency.QUEUED)

    def _use(self, rows: list[int], client: int, session_id: str, urgency: Urgency) -> None:
        """Note that a request uses these blocks."""
        if session_id:
            session = self.sessions.open(session_id, client)
            if session.urgency is not urgency:
                self.sessions.update(session, urgency, session.deadline_at)
            self.sessions.attach(session, rows)
        for row in rows:
            self.residency.touch(row, urgency)
        self.story.count("blocks_used", len(rows))

    # -------------------------------------------------------------------------------------- writes

    def _reserve(self, event: ev.ReserveRequested) -> None:
        job = self._put_job(event)
        if job is not None:
            self._answer_reserve(job, event.call)

    def _answer_reserve(self, job: PutJob, call: int) -> None:
        if job.is_decided:
            needed = job.outcomes.count(ev.PutOutcome.NEEDED)
            self._reply(call, ev.ReserveResult(job.reservation_id if needed else 0, bytes(job.outcomes)))
        else:
            job.reserve_calls.append(call)
            self._admit(job)

    def _put_job(self, event: ev.ReserveRequested) -> PutJob | None:
        """Return the job of a put, an earlier one for a retry; None when it was refused."""
        checked = self._check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return None
        client, namespace = checked
        earlier = self._earlier(event.client, event.request_id)
        if isinstance(earlier, PutJob):
            return earlier
        if self.is_draining:
            self._refuse(event.call, "DRAINING", "the appliance is shutting down; recompute", 1.0)
            return None
        if self.waiting.is_full:
            message = f"{len(self.waiting)} requests wait for room already"
            self._refuse(event.call, "TOO_MANY_IN_FLIGHT", message, 0.05)
            return None
        job = PutJob(
            event,
            client,
            namespace,
            self._next_reservation,
            self.residency,
            self.copies,
            self.pressure,
            self._put_done,
        )
        self._next_reservation += 1
        job.deadline_at = min(event.deadline_at, self.residency.now + self.options.reservation_ttl_s)
        self._puts[job.reservation_id] = job
        self._remember(event.client, event.request_id, job)
        return job

    def _admit(self, job: PutJob) -> None:
        if not job.advance():
            deadline_at = min(job.request.deadline_at, self.residency.now + self.options.put_wait_s)
            self.waiting.add(job, Urgency.QUEUED, deadline_at)

    def _commit(self, event: ev.CommitRequested) -> None:
        if event.reserve is not None:
            job = self._put_job(event.reserve)
        else:
            job = self._puts.get(event.reservation_id)
            earlier = (
                self._earlier(event.client, event.request_id) if event.client in self._requests else None
            )
            if isinstance(earlier, PutJob):
                job = earlier
            if job is None or job.client.id != event.client:
                message = "the reservation is over or another client's; reserve again"
                return self._refuse(event.call, "UNKNOWN_RESERVATION", message)
            self._remember(event.client, event.request_id, job)
        if job is None:
            return None
        if job.is_done:
            return self._reply(event.call, ev.PutResult(bytes(job.outcomes)))
        spans = self._spans_per_block(job, event)
        if spans is None:
            message = "one span of block_bytes per block that needs bytes"
            return self._refuse(event.call, "BAD_SPAN", message)
        is_new = not job.is_decided and not job.is_committed
        job.commit(event.call, spans)
        if is_new and event.reserve is not None:
            self._admit(job)
        return None

    def _spans_per_block(self, job: PutJob, event: ev.CommitRequested) -> list[tuple[int, int]] | None:
        block_bytes = self.catalog.namespaces[job.request.namespace_id].block_bytes
        if any(length != block_bytes for _, length in event.spans):
            return None
        if event.reserve is not None:
            return list(event.spans) if len(event.spans) == len(job.outcomes) else None
        spans = iter(event.spans)
        needed = [outcome == ev.PutOutcome.NEEDED for outcome in job.outcomes]
        if len(event.spans) != sum(needed):
            return None
        return [next(spans) if is_needed else (0, 0) for is_needed in needed]

    def _put_done(self, job: PutJob) -> None:
        self._puts.pop(job.reservation_id, None)
        rows = [row for row in job.rows if row != NO_ROW and self.catalog.tier_of(row) is not None]
        session_id = job.request.session_id
        if session_id and job.client.id in self.leases.clients:
            self.sessions.attach(self.sessions.open(session_id, job.client.id), rows)
        for row in rows:
            self.catalog.last_used[row] = self.residency.now

    def _abort(self, event: ev.AbortRequested) -> None:
        job = self._puts.get(event.reservation_id)
        if job is not None and job.client.id == event.client:
            job.abort()

    # ------------------------------------------------------------------------------- pins, prefetch

    def _pin(self, event: ev.PinRequested) -> None:
        checked = self._check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return None
        _, namespace = checked
        rows = stored_prefix(self.catalog, namespace, event.prefix_hashes)
        if event.ttl_s > self.options.pin_ttl_max_s:
            message = f"ask for at most {self.options.pin_ttl_max_s:g} s"
            return self._refuse(event.call, "LEASE_TTL_TOO_LARGE", message)
        if not self.pins.room_for(event.floor, len(rows) * namespace.block_bytes):
            message = (
                f"tier {event.floor.label} holds as many pinned bytes as it may; unpin or raise its capacity"
            )
            return self._refuse(event.call, "TIER_FULL", message, 1.0)
        pin = self.pins.pin(rows, event.floor, event.ttl_s)
        for row in rows:
            if not any(
                self.catalog.num_resident[t][row] == namespace.num_groups for t in TIERS[: event.floor + 1]
            ):
                self.loads.promote(row, event.floor, Urgency.QUEUED, float("inf"))
        self.loads.start(Urgency.QUEUED, float("inf"))
        return self._reply(event.call, ev.PinResult(pin.id, len(rows)))

    def _unpin(self, event: ev.UnpinRequested) -> None:
        self.pins.unpin(event.pin_id)

    def _prefetch(self, event: ev.PrefetchRequested) -> None:
        checked = self._check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return
        rows = stored_prefix(self.catalog, checked[1], event.prefix_hashes)
        target = event.target if event.target in self.rooms else Tier.DRAM
        promoted = sum(self.loads.promote(row, target, Urgency.WAITING, event.deadline_at) for row in rows)
        self.loads.start(Urgency.WAITING, event.deadline_at)
        self.story.count("blocks_prefetched", promoted)
        self._reply(event.call, ev.PrefetchResult(len(rows), promoted))

    # ------------------------------------------------------------------------------------ sessions

    def _session_updated(self, event: ev.SessionUpdated) -> None:
        session = self.sessions.open(event.session_id, event.client)
        self.sessions.update(session, event.urgency, event.deadline_at)

    def _session_forked(self, event: ev.SessionForked) -> None:
        session = self.sessions.get(event.session_id)
        count = self.sessions.fork(session, event.new_session_id, event.client) if session else 0
        self._reply(event.call, ev.CountResult(count))

    def _session_ended(self, event: ev.SessionEnded) -> None:
        session = self.sessions.get(event.session_id)
        rows = self.sessions.end(session) if session else []
        count = sum(self.pressure.archive(row) for row in rows) if event.archive else 0
        self._reply(event.call, ev.CountResult(count))

    # --------------------------------------------------------------------------------- the machine

    def _copy_finished(self, event: ev.CopyFinished) -> None:
        self.copies.finish(event.copy, event.outcomes)

    def _segment_freed(self, event: ev.SegmentFreed) -> None:
        self.reclaim.segment_freed(event.segment)

    def _tier_lost(self, event: ev.TierLost) -> None:
        offline = self.residency.offline
        (offline.add if event.offline else offline.discard)(event.tier)
        self.story.tell(
            self.residency.now,
            event.tier.label,
            "tier_offline" if event.offline else "tier_online",
            event.reason,
        )

    def _edge_measured(self, event: ev.EdgeMeasured) -> None:
        self._bandwidth[event.source, event.target] = (event.bandwidth_bytes_per_s, event.latency_s)

    def _load_s(self, namespace: Namespace, tiers: bytearray) -> float:
        """Estimate the seconds until blocks in these tiers are readable from dram."""
        num_cold = tiers.count(Tier.NVME)
        if not num_cold:
            return 0.0
        default = (self.options.default_bandwidth_bytes_per_s, self.options.default_latency_s)
        bandwidth, latency_s = self._bandwidth.get((Tier.NVME, Tier.DRAM), default)
        return latency_s + num_cold * namespace.block_bytes / bandwidth

    def _evict(self, event: ev.EvictRequested) -> None:
        if event.tier not in self.residency.evictions:
            message = "only memory tiers are evicted by hand; the cold store reclaims whole segments"
            return self._refuse(event.call, "BAD_TIER", message)
        num_blocks, freed = self.pressure.evict(event.tier, event.num_bytes)
        return self._reply(event.call, ev.EvictResult(num_blocks, freed))

    def _drain_started(self, event: ev.DrainStarted) -> None:
        self.is_draining = True
        num_blocks = self.pressure.flush()
        self._reply(event.call, ev.CountResult(num_blocks))

    def close_cold_store(self) -> list[ev.Instruction]:
        """Last step of a drain: seal what is open. Returns the instructions."""
        log = self.rooms.get(Tier.NVME)
        if not isinstance(log, SegmentLog):
            return []
        log.close_open_segment()
        return [ev.SealSegment(number) for number in log.take_segments_to_seal()]

    def _tick(self, event: ev.Tick) -> None:
        now = self.residency.now
        for client in [c for c in self.leases.clients.values() if c.silent_at <= now]:
            self._client_gone(ev.ClientGone(client.id, "silent"))
        self.leases.expire(now)
        self.pins.expire(now)
        self.sessions.expire(now)
        self.waiting.expire(now)
        for job in [job for job in self._puts.values() if job.deadline_at <= now]:
            job.abort()
            self.story.count("reservations_expired")

    # ------------------------------------------------------------------------------------- helpers

    def _check(
        self, call: int, client_id: int, namespace_id: int, prefix_hashes: Sequence[bytes]
    ) -> tuple[Client, Namespace] | None:
        """Return the client and namespace of a request, or refuse it."""
        client = self._client(client_id)
        if client is None:
            self._refuse(call, "UNKNOWN_CLIENT", "open the client (again); its time ran out or it never was")
            return None
        namespace = self.catalog.namespaces.get(namespace_id)
        if namespace is None or namespace.identity.domain != client.domain:
            refusal = _unknown_namespace(namespace_id)
            self._refuse(call, refusal.reason, refusal.message)
            return None
        if len(prefix_hashes) > self.options.max_blocks_per_request:
            limit = self.options.max_blocks_per_request
            message = f"{len(prefix_hashes)} blocks in one request; split it, limit {limit}"
            self._refuse(call, "TOO_MANY_BLOCKS", message)
            return None
        if any(len(prefix_hash) != HASH_BYTES for prefix_hash in prefix_hashes):
            self._refuse(call, "BAD_KEY", f"prefix hashes are {HASH_BYTES} bytes each")
            return None
        return client, namespace

    def _reply(self, call: int, result: ev.Result) -> None:
        self.residency.out.append(ev.Reply(call, result))

    def _refuse(self, call: int, reason: str, message: str, retry_after_s: float = 0.0) -> None:
        self.story.count(f"refused_{reason.lower()}")
        self._reply(call, ev.Refusal(reason, message, retry_after_s))


def _unknown_namespace(namespace_id: int) -> ev.Refusal:
    return ev.Refusal(
        "UNKNOWN_NAMESPACE", f"namespace {namespace_id} is not registered; register it, then retry"
    )
