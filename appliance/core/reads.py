"""Requests that read: acquire, release, keep-alive, touch, prefetch, pin."""

from collections.abc import Sequence
from itertools import pairwise

from ...policies.base import Expected, Use
from ...policies.costs import Advice, CostModel
from ...tiers.block import NO_SESSION, Tier, Urgency
from .catalog import NO_ROW, TIERS, Catalog, Namespace
from .desk import Desk
from .events import (
    AcquireAbandoned,
    AcquireRequested,
    KeptAlive,
    PinRequested,
    PrefetchRequested,
    ReleaseRequested,
    Touched,
)
from .gets import AcquireJob, stored_prefix
from .leases import Client, Leases
from .loads import Loads
from .pins import Pins
from .prefetch import Prefetching
from .promotions import Promotions
from .residency import Residency
from .results import (
    AcquireResult,
    KeepAliveResult,
    PinResult,
    PrefetchResult,
    ReadyFragments,
    ReleaseResult,
)
from .retention import Retention
from .rules import MEMORY_TIERS
from .runs import touch_run
from .sessions import Sessions
from .waiting import Waiting


class Reads:
    """Answers the requests of those who read."""

    def __init__(
        self,
        desk: Desk,
        residency: Residency,
        leases: Leases,
        loads: Loads,
        pins: Pins,
        sessions: Sessions,
        waiting: Waiting,
        costs: CostModel,
        prefetching: Prefetching,
        retention: Retention,
        promotions: Promotions,
        shared: Sequence[Tier],
    ) -> None:
        self._desk = desk
        self._residency = residency
        self._leases = leases
        self._loads = loads
        self._pins = pins
        self._sessions = sessions
        self._waiting = waiting
        self._costs = costs
        self._prefetching = prefetching
        self._retention = retention
        self._promotions = promotions
        self._shared = shared  # tiers that every client on this host reads in place
        self._memories = [tier for tier in MEMORY_TIERS if tier in residency.rooms]
        self._jobs: dict[int, AcquireJob] = {}  # unfinished acquires, by each of their calls

    def acquire(self, event: AcquireRequested) -> None:
        """Look up and pin; AcquireJob does the rest."""
        desk = self._desk
        checked = desk.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return
        client, namespace = checked
        earlier = desk.earlier(event.client, event.request_id)
        if isinstance(earlier, AcquireJob):
            self._repeat(earlier, event.call)
        elif event.ttl_s > desk.options.lease_ttl_max_s:
            message = f"ask for at most {desk.options.lease_ttl_max_s:g} s and keep the lease alive"
            desk.refuse(event.call, "LEASE_TTL_TOO_LARGE", message)
        elif len(client.leases) >= desk.options.max_leases_per_client:
            message = f"{len(client.leases)} leases held; release some"
            desk.refuse(event.call, "TOO_MANY_IN_FLIGHT", message, 0.1)
        else:
            self._begin(event, client, namespace)

    def _repeat(self, job: AcquireJob, call: int) -> None:
        job.repeat_for(call)
        if call in job.calls:
            self._jobs[call] = job

    def _begin(self, event: AcquireRequested, client: Client, namespace: Namespace) -> None:
        desk, catalog = self._desk, self._residency.catalog
        rows = stored_prefix(catalog, namespace, event.prefix_hashes)
        num_stored = len(rows)
        # What stands before first_block was read without asking, and reported as touched.
        readable = self._memories if event.on_device else self._shared
        rows = rows[: self._affordable(client, namespace, event.first_block, len(rows), readable)]
        chain, num_asked = rows[event.first_block :], len(event.prefix_hashes)
        used_before = catalog.last_used[chain[0]] if chain else 0.0
        urgency = self._use(
            chain, event.client, event.session_id, event.urgency, num_asked, event.deadline_at
        )
        self._retention.apply(rows, event.retention)
        advice = self._advice(event, namespace, rows)
        rows = rows[: advice.num_blocks]
        if len(rows) <= event.first_block:
            tiers = bytes(catalog.tier_of(row) or 0 for row in rows)
            prices = (num_stored, advice.reason, advice.load_s, advice.recompute_s)
            return desk.reply(
                event.call, AcquireResult(0, len(rows), ReadyFragments(), True, 0.0, tiers, *prices)
            )
        lease = self._leases.grant(client, event.ttl_s)
        job = AcquireJob(
            event,
            urgency,
            rows,
            num_stored,
            advice,
            lease,
            self._leases,
            self._loads,
            self._residency,
            readable,
            used_before,
            self._done,
        )
        self._jobs[event.call] = job
        desk.remember(event.client, event.request_id, job)
        is_begun = job.advance()
        if event.on_device:
            self._promotions.delivered(rows[event.first_block :])
        if not is_begun:
            if self._waiting.is_full:
                job.give_up()
            else:
                deadline_at = min(event.deadline_at, self._residency.now + desk.options.put_wait_s)
                self._waiting.add(job, urgency, deadline_at)
        return None

    def _advice(self, event: AcquireRequested, namespace: Namespace, rows: list[int]) -> Advice:
        """Say how many of the stored blocks are worth loading: all, unless it is certain that they are not
        and the caller did not insist."""
        tier_of = self._residency.catalog.tier_of
        tiers = bytes([tier_of(row) or 0 for row in rows])
        advice = self._costs.advise(namespace.id, tiers, event.first_block, self._residency.now)
        if event.load_anyway or not advice.is_certain or not advice.reason:
            return advice._replace(num_blocks=len(rows), reason="")
        self._residency.story.count("blocks_not_worth_loading", len(rows) - advice.num_blocks)
        return advice

    def _affordable(
        self,
        client: Client,
        namespace: Namespace,
        first_block: int,
        num_blocks: int,
        readable: Sequence[Tier],
    ) -> int:
        """Return how many blocks of the prefix the client's quota of held bytes allows."""
        rooms = self._residency.rooms
        capacity = sum(rooms[tier].statistics().capacity_bytes for tier in readable)
        quota = int(self._desk.options.max_pinned_fraction * capacity)
        quota -= client.held_bytes + client.promised_bytes
        of_tenant = self._desk.quotas.pinnable_bytes(client, self._leases, self._pins)
        if of_tenant is not None and of_tenant < quota:
            quota = of_tenant
        return min(num_blocks, first_block + max(0, quota) // namespace.block_bytes)

    def _use(
        self,
        rows: list[int],
        client: int,
        session_id: str,
        urgency: Urgency | None,
        num_asked: int,
        deadline_at: float = float("inf"),
    ) -> Urgency:
        """Note that a request uses these blocks; returns the urgency that applies."""
        residency = self._residency
        session = self._sessions.open(session_id, client) if session_id else None
        if session is not None:
            if urgency is not None:
                self._sessions.update(session, urgency, session.deadline_at)
            self._sessions.attach(session, rows)
            urgency = session.urgency
        applies = urgency if urgency is not None else Urgency.QUEUED
        number = session.number if session is not None else 0
        residency.audience.used(rows, Use(residency.now, number, num_asked, applies, deadline_at))
        touch_run(residency, rows, NO_SESSION if session is None else session.urgency)
        residency.story.count("blocks_used", len(rows))
        return applies

    def _done(self, job: AcquireJob) -> None:
        for call in job.calls:
            self._jobs.pop(call, None)

    def abandon(self, event: AcquireAbandoned) -> None:
        """One caller of an acquire no longer listens; without callers its lease ends."""
        job = self._jobs.pop(event.call, None)
        if job is not None:
            job.calls.remove(event.call)
            if not job.calls:
                self._drop(job)

    def _drop(self, job: AcquireJob) -> None:
        self._desk.forget_request(job.request.client, job.request.request_id)
        job.abandon()

    def report(self) -> None:
        """Tell the callers of unfinished acquires what became readable."""
        if self._jobs:
            for job in list(dict.fromkeys(self._jobs.values())):
                job.report()

    def expire(self, now: float) -> None:
        """Whoever waits for a load past its deadline gets what has arrived."""
        for job in list(dict.fromkeys(self._jobs.values())):
            if job.request.deadline_at <= now:
                job.give_up()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((job.request.deadline_at for job in self._jobs.values()), default=None)

    def client_gone(self, client_id: int) -> None:
        """End the acquires of a client that is gone."""
        for job in list(dict.fromkeys(self._jobs.values())):
            if job.request.client == client_id:
                for call in job.calls:  # a client that was only silent may still be listening
                    self._desk.refuse(call, "UNKNOWN_CLIENT", "it was silent for too long; open it again")
                self._drop(job)

    def release(self, event: ReleaseRequested) -> None:
        """End leases of this client; those of others and unknown ones are counted only."""
        client = self._desk.client(event.client)
        owned = client.leases if client is not None else {}
        num_unknown = 0
        for lease_id in event.lease_ids:
            if lease_id not in owned or not self._leases.release(lease_id):
                num_unknown += 1
        if num_unknown:
            self._residency.story.count("releases_unknown", num_unknown)
        if event.call is not None:
            self._desk.reply(event.call, ReleaseResult(num_unknown))

    def keep_alive(self, event: KeptAlive) -> None:
        """Extend leases."""
        client = self._desk.client(event.client)
        if client is None:
            expired = list(event.lease_ids)
        else:
            expired = self._leases.extend(client, list(event.lease_ids), event.ttl_s)
        if event.call is not None:
            self._desk.reply(event.call, KeepAliveResult(expired))

    def touched(self, event: Touched) -> None:
        """Count blocks read one-sidedly as used."""
        namespace = self._residency.catalog.namespaces.get(event.namespace_id)
        client = self._desk.client(event.client)
        if namespace is None or client is None or namespace.identity.domain != client.domain:
            return
        shards = namespace.rows.shards
        rows = [row for h in event.prefix_hashes if (row := shards[h[0]].get(h, NO_ROW)) >= 0]
        for chain in _chains(self._residency.catalog, rows):
            self._use(chain, event.client, event.session_id, None, len(chain))

    def prefetch(self, event: PrefetchRequested) -> None:
        """Promote a stored prefix for nobody in particular."""
        checked = self._desk.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return
        rows = stored_prefix(self._residency.catalog, checked[1], event.prefix_hashes)
        if event.target is Tier.HBM and Tier.HBM in self._residency.rooms:
            promoted = sum(
                self._loads.promote(row, Tier.HBM, Urgency.WAITING, event.deadline_at) for row in rows
            )
            self._loads.start(Urgency.WAITING, event.deadline_at)
        else:
            window_s = self._desk.options.prefetch_window_s
            latest = event.deadline_at if event.deadline_at < float("inf") else self._residency.now
            expected = Expected(rows, latest + window_s, "a client asked")
            promoted = self._prefetching.bring(expected, Urgency.WAITING)
        self._residency.story.count("blocks_prefetched", promoted)
        self._desk.reply(event.call, PrefetchResult(len(rows), promoted))

    def pin(self, event: PinRequested) -> None:
        """Keep a stored prefix at or above a floor tier."""
        desk = self._desk
        checked = desk.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return None
        namespace = checked[1]
        if event.ttl_s > desk.options.pin_ttl_max_s:
            message = f"ask for at most {desk.options.pin_ttl_max_s:g} s"
            return desk.refuse(event.call, "LEASE_TTL_TOO_LARGE", message)
        catalog = self._residency.catalog
        rows = stored_prefix(catalog, namespace, event.prefix_hashes)
        pinnable_bytes = self._desk.quotas.pinnable_bytes(checked[0], self._leases, self._pins)
        if pinnable_bytes is not None and len(rows) * namespace.block_bytes > pinnable_bytes:
            message = f"the tenant may pin {pinnable_bytes} bytes more; unpin or release some"
            return desk.refuse(event.call, "QUOTA_EXCEEDED", message, 1.0)
        if not self._pins.room_for(event.floor, len(rows) * namespace.block_bytes):
            message = f"tier {event.floor.label} holds as many pinned bytes as it may; unpin or enlarge it"
            return desk.refuse(event.call, "TIER_FULL", message, 1.0)
        pin = self._pins.pin(rows, event.floor, event.ttl_s)
        at_floor = TIERS[: event.floor + 1]
        for row in rows:
            if not any(catalog.num_resident[tier][row] == namespace.num_groups for tier in at_floor):
                self._loads.promote(row, event.floor, Urgency.QUEUED, float("inf"))
        self._loads.start(Urgency.QUEUED, float("inf"))
        return desk.reply(event.call, PinResult(pin.id, len(rows)))


def _chains(catalog: Catalog, rows: list[int]) -> list[list[int]]:
    """Cut rows where one does not continue the row before it: clients report several gets at once."""
    parent = catalog.parent
    if [parent[row] for row in rows[1:]] == rows[:-1]:
        return [rows] if rows else []
    cuts = [index for index in range(1, len(rows)) if parent[rows[index]] != rows[index - 1]]
    return [rows[first:last] for first, last in pairwise([0, *cuts, len(rows)])]
