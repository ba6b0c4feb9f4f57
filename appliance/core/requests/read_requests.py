"""Requests that read: acquire, release, keep-alive, touch."""

from collections.abc import Sequence
from itertools import pairwise

from ....policies.costs import Advice
from ....tiers.block import Tier, tenant_of
from ..catalog.catalog import Catalog, NamespaceEntry
from ..catalog.core_state import CoreState
from ..events import AcquireAbandoned, AcquireRequested, KeptAlive, ReleaseRequested, Touched
from ..promotion.loads import Loads
from ..promotion.promotions import Promotions
from ..results import AcquireResult, CountResult, KeepAliveResult, ReadyFragments
from .acquire_job import AcquireJob, Found, stored_prefix
from .expectations import Expectations
from .fetches import Fetches
from .leases import ClientEntry
from .request_registry import RequestRegistry
from .usage import Usage
from .waiting import Waiting

_SILENT = ("UNKNOWN_CLIENT", "it was silent for too long; open it again")


class ReadRequests:
    """Answers the requests that read blocks."""

    def __init__(
        self,
        core: CoreState,
        requests: RequestRegistry,
        loads: Loads,
        promotions: Promotions,
        waiting: Waiting,
        usage: Usage,
        fetches: Fetches,
    ) -> None:
        self._core = core
        self._requests = requests
        self._residency = loads.residency
        self._leases = requests.leases
        self._loads = loads
        self._promotions = promotions
        self._waiting = waiting
        self._usage = usage
        self._fetches = fetches
        self.expectations = Expectations(core, fetches)
        fetches.resume = self.acquire
        self.expectations.proceed = self._proceed
        #: Tiers that a delivery onto the device reads: a slower memory tier is not pinned for it.
        down_to_put_tier = core.ladder.tiers[: core.ladder.put_tier + 1]
        self._memories = [tier for tier in down_to_put_tier if tier in core.rooms]
        self._jobs: dict[int, AcquireJob] = {}  # unfinished acquires, by each of their calls

    def acquire(self, event: AcquireRequested, until: float | None = None) -> None:
        """Look up and pin; AcquireJob does the rest. `until`: of one that waited for the source."""
        requests = self._requests
        checked = requests.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return
        client, namespace = checked
        earlier = requests.earlier(event.client, event.request_id)
        if isinstance(earlier, AcquireJob):
            self._repeat(earlier, event.call)
        elif event.ttl_s > self._core.options.lease_ttl_max_s:
            message = f"ask for at most {self._core.options.lease_ttl_max_s:g} s and keep the lease alive"
            requests.refuse(event.call, "LEASE_TTL_TOO_LARGE", message)
        elif len(client.leases) >= self._core.options.max_leases_per_client:
            message = f"{len(client.leases)} leases held; release some"
            requests.refuse(event.call, "TOO_MANY_IN_FLIGHT", message, 0.1)
        else:
            self._begin(event, client, namespace, until)

    def _repeat(self, job: AcquireJob, call: int) -> None:
        job.repeat_for(call)
        if call in job.calls:
            self._jobs[call] = job

    def _begin(
        self, event: AcquireRequested, client: ClientEntry, namespace: NamespaceEntry, until: float | None
    ) -> None:
        requests, catalog, num_asked = self._requests, self._core.catalog, len(event.prefix_hashes)
        rows = stored_prefix(self._core, namespace, event.prefix_hashes)
        num_here = num_stored = len(rows)
        # What stands before first_block was read without asking, and reported as touched.
        readable = self._memories if event.on_device else self._core.shared
        if event.expected is not None and num_stored < num_asked:  # its source is asked, and no other
            rows = self._fetches.prefix(namespace, event.prefix_hashes)
            num_stored = len(rows)
        elif self._fetches.is_open and num_stored < num_asked and not event.is_local:
            event = self._usage.note_urgency(event)
            may_hold = self._affordable(client, namespace, event.first_block, num_asked, readable)
            if self._fetches.begin(event, client, namespace, may_hold, until):
                return None
            rows = self._fetches.prefix(namespace, event.prefix_hashes)
            num_stored = len(rows)
        affordable = self._affordable(client, namespace, event.first_block, num_asked, readable)
        rows = rows[:affordable]
        chain = rows[event.first_block : num_here]
        used_before = catalog.last_used[chain[0]] if chain else 0.0
        urgency = self._usage.used(
            chain, event.client, event.session_id, event.urgency, num_asked, event.deadline_at
        )
        self._usage.retain(rows[:num_here], event.retention)
        advice = self._advice(event, namespace, rows)
        rows = rows[: advice.num_blocks]
        wait_s, names = 0.0, event.prefix_hashes[:affordable]
        if event.expected is not None and len(rows) == num_stored:
            names = names[: event.expected.num_blocks]
            wait_s = self.expectations.wait_s(event, namespace, num_stored)
        expected = names[num_stored:] if wait_s else ()
        if len(rows) <= event.first_block and not expected:
            tiers = bytes(catalog.tier_of(row) or 0 for row in rows)
            prices = (num_stored, advice.reason, advice.load_s, advice.recompute_s)
            return requests.reply(
                event.call, AcquireResult(0, len(rows), ReadyFragments(), True, 0.0, tiers, *prices)
            )
        lease = self._leases.grant(client, event.ttl_s)
        found = Found(rows, num_stored, advice, lease, urgency, readable, used_before, expected)
        job = AcquireJob(self._core, self._residency, self._leases, self._loads, event, found, self._done)
        self._jobs[event.call] = job
        requests.remember(event.client, event.request_id, job)
        if expected:
            self.expectations.add(job, client, namespace, names, wait_s)
        self._proceed(job)
        if event.on_device:
            self._promotions.delivered(rows[event.first_block :])
        return None

    def _proceed(self, job: AcquireJob) -> None:
        """Hold or bring up what is there; what has no room yet waits in the queue."""
        if not job.advance():
            tenant = tenant_of(job.lease.client.domain)
            if self._waiting.is_full(tenant):
                job.give_up()
            else:
                deadline_at = min(job.request.deadline_at, self._core.now + self._core.options.put_wait_s)
                self._waiting.add(job, job.urgency, deadline_at, tenant)

    def _advice(self, event: AcquireRequested, namespace: NamespaceEntry, rows: list[int]) -> Advice:
        """Say how many of the stored blocks are worth loading: all, unless it is certain that they are not
        and the caller did not insist."""
        tier_of = self._core.catalog.tier_of
        tiers = bytes([tier_of(row) or 0 for row in rows])
        advice = self._core.costs.advise(namespace.id, tiers, event.first_block, self._core.now)
        if event.load_anyway or not advice.is_certain or not advice.reason:
            return advice._replace(num_blocks=len(rows), reason="")
        self._core.story.count("blocks_not_worth_loading", len(rows) - advice.num_blocks)
        return advice

    def _affordable(
        self,
        client: ClientEntry,
        namespace: NamespaceEntry,
        first_block: int,
        num_blocks: int,
        readable: Sequence[Tier],
    ) -> int:
        """Return how many blocks of the prefix the client's quota of held bytes allows."""
        rooms = self._core.rooms
        capacity = sum(rooms[tier].statistics().capacity_bytes for tier in readable)
        quota = int(self._core.options.max_pinned_fraction * capacity)
        quota -= client.held_bytes + client.promised_bytes
        of_tenant = self._requests.quotas.pinnable_bytes(client)
        if of_tenant is not None and of_tenant < quota:
            quota = of_tenant
        return min(num_blocks, first_block + max(0, quota) // namespace.block_bytes)

    def _done(self, job: AcquireJob) -> None:
        self.expectations.ended(job)
        for call in job.calls:
            self._jobs.pop(call, None)

    def abandon(self, event: AcquireAbandoned) -> None:
        """One caller of an acquire no longer listens; without callers its lease ends."""
        job = self._jobs.pop(event.call, None)
        if job is None:
            self._fetches.abandon(event.call)
        else:
            job.calls.remove(event.call)
            if not job.calls:
                self._drop(job)

    def _drop(self, job: AcquireJob) -> None:
        self._requests.forget_request(job.request.client, job.request.request_id)
        job.abandon()

    def report(self) -> None:
        """Tell the callers of unfinished acquires what became readable."""
        if self._jobs:
            self.expectations.run()
            for job in list(dict.fromkeys(self._jobs.values())):
                job.report()

    def expire(self, now: float) -> None:
        """Answer requests that wait for a load past its deadline with what has arrived."""
        self._fetches.expire(now)
        self.expectations.expire(now)
        for job in list(dict.fromkeys(self._jobs.values())):
            if job.request.deadline_at <= now:
                job.give_up()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        due = min((job.request.deadline_at for job in self._jobs.values()), default=None)
        waiting = (due, self._fetches.next_deadline(), self.expectations.next_deadline())
        return min((at for at in waiting if at is not None), default=None)

    def namespaces(self) -> set[int]:
        """Return the namespaces of unfinished acquires."""
        return {job.request.namespace_id for job in self._jobs.values()} | self._fetches.namespaces()

    def client_gone(self, client_id: int) -> None:
        """End the acquires of a client that is gone."""
        for call in self._fetches.take_calls_of(client_id):
            self._requests.refuse(call, *_SILENT)
        for job in list(dict.fromkeys(self._jobs.values())):
            if job.request.client == client_id:
                for call in job.calls:  # a client that was only silent may still be listening
                    self._requests.refuse(call, *_SILENT)
                self._drop(job)

    def release(self, event: ReleaseRequested) -> None:
        """End leases of this client; those of others and unknown ones are counted only."""
        client = self._requests.client(event.client)
        owned = client.leases if client is not None else {}
        num_unknown = 0
        for lease_id in event.lease_ids:
            if lease_id not in owned or not self._leases.release(lease_id):
                num_unknown += 1
        if num_unknown:
            self._core.story.count("releases_unknown", num_unknown)
        if event.call is not None:
            self._requests.reply(event.call, CountResult(num_unknown))

    def keep_alive(self, event: KeptAlive) -> None:
        """Extend leases."""
        client = self._requests.client(event.client)
        if client is None:
            expired = list(event.lease_ids)
        else:
            expired = self._leases.extend(client, list(event.lease_ids), event.ttl_s)
        if event.call is not None:
            self._requests.reply(event.call, KeepAliveResult(expired))

    def touched(self, event: Touched) -> None:
        """Count blocks read one-sidedly as used."""
        namespace = self._core.catalog.namespaces.get(event.namespace_id)
        client = self._requests.client(event.client)
        if namespace is None or client is None or namespace.identity.domain != client.domain:
            return
        namespace.used_at = self._core.now
        rows = [row for row in namespace.rows.find(event.prefix_hashes) if row >= 0]
        for chain in _chains(self._core.catalog, rows):
            self._usage.used(chain, event.client, event.session_id, None, len(chain))


def _chains(catalog: Catalog, rows: list[int]) -> list[list[int]]:
    """Cut rows where one does not continue the row before it: clients report several gets at once."""
    parent = catalog.parent
    if [parent[row] for row in rows[1:]] == rows[:-1]:
        return [rows] if rows else []
    cuts = [index for index in range(1, len(rows)) if parent[rows[index]] != rows[index - 1]]
    return [rows[first:last] for first, last in pairwise([0, *cuts, len(rows)])]
