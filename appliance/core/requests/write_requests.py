"""Requests that write: reserve, commit, abort."""

from collections.abc import Callable, Sequence
from operator import itemgetter

from ....tiers.block import Urgency, tenant_of
from ..capacity.pressure import Pressure
from ..catalog.catalog import NO_ROW, NamespaceEntry
from ..catalog.core_state import CoreState
from ..catalog.residency import Residency
from ..catalog.runs import refresh_run
from ..copying.copies import Copies
from ..events import AbortRequested, AcquireRequested, CommitRequested, ReserveRequested
from ..instructions import BundleBlocks
from ..results import PutOutcome, PutResult, ReserveResult
from ..secret_ids import SecretIds
from .fetch_job import FetchJob
from .leases import ClientEntry
from .put_job import STORED, Put, PutJob
from .request_registry import RequestRegistry
from .usage import Usage
from .waiting import READS_FIRST_S, Waiting

_LENGTH = itemgetter(1)  # of a span
MAX_UNTOLD = 16  # blocks of puts that were answered, and that sessions and policies have not heard of


class WriteRequests:
    """Answers the requests that write blocks."""

    def __init__(
        self,
        core: CoreState,
        requests: RequestRegistry,
        residency: Residency,
        copies: Copies,
        pressure: Pressure,
        waiting: Waiting,
        usage: Usage,
    ) -> None:
        self._core = core
        self._requests = requests
        self._residency = residency
        self._copies = copies
        self._pressure = pressure
        self._waiting = waiting
        self._usage = usage
        self._jobs: dict[int, PutJob] = {}  # unfinished puts, by reservation
        #: Unfinished fetches, of which there may be hundreds: no step may look at all of them.
        self._fetching: dict[int, FetchJob] = {}
        self._answered: list[PutJob] = []  # finished ones: answered, but sessions and policies were not told
        self._num_rows_behind = 0  # of these
        self._ids = SecretIds(core.secret, "reservation")
        self._num_untold = 0  # puts in one step, ever: they have negative numbers, which callers are not told
        self.is_closed = False  # draining: nothing new

    def reserve(self, event: ReserveRequested) -> None:
        """First half of a put."""
        job = self._job(event, True)
        if job is None:
            return
        if job.is_decided:
            needed = job.outcomes.count(PutOutcome.NEEDED)
            result = ReserveResult(job.told_id if needed else 0, bytes(job.outcomes))
            self._requests.reply(event.call, result)
        else:
            is_new = not job.reserve_calls
            job.reserve_calls.append(event.call)
            if is_new:
                self._admit(job)

    def commit(self, event: CommitRequested) -> None:
        """Second half of a put, or both."""
        request = event.reserve
        if request is not None and not self._fits(event, request, len(request.prefix_hashes)):
            return self._refuse_spans(event.call)
        job = self._job(request, False) if request is not None else self._reserved(event)
        if job is None:
            return None
        if job.is_done:
            return self._requests.reply(event.call, PutResult(bytes(job.outcomes)))
        if request is not None:
            is_new = not job.is_decided and not job.is_committed
            job.commit(event.call, event.spans)
            if is_new:
                self._admit(job)
            return None
        num_needed = job.outcomes.count(PutOutcome.NEEDED)
        if not job.is_decided or not self._fits(event, job.request, num_needed):
            return self._refuse_spans(event.call)
        spans = iter(event.spans)
        outcomes = bytes(job.outcomes)
        return job.commit(
            event.call, [next(spans) if outcome == PutOutcome.NEEDED else (0, 0) for outcome in outcomes]
        )

    def _fits(self, event: CommitRequested, request: ReserveRequested, num_spans: int) -> bool:
        """Whether there is one span of one block's size per block that needs bytes."""
        namespaces = self._core.catalog.namespaces
        if request.namespace_id not in namespaces:
            return True  # refused for that, with better words
        block_bytes = namespaces[request.namespace_id].block_bytes
        return len(event.spans) == num_spans and set(map(_LENGTH, event.spans)) <= {block_bytes}

    def _refuse_spans(self, call: int) -> None:
        message = "give one span of block_bytes per block that needs bytes"
        self._requests.refuse(call, "BAD_SPAN", message)

    def abort(self, event: AbortRequested) -> None:
        """Give a reservation back."""
        job = self._jobs.get(event.reservation_id)
        if job is not None and job.client.id == event.client:
            job.abort()

    def namespaces(self) -> set[int]:
        """Return the namespaces of unfinished puts."""
        jobs = (*self._jobs.values(), *self._fetching.values(), *self._answered)
        return {job.namespace.id for job in jobs}

    def client_gone(self, client_id: int) -> None:
        """Give back what a client reserved and never committed."""
        for job in list(self._jobs.values()):
            if job.client.id == client_id and not job.is_committed:
                job.abort()

    def expire(self, now: float) -> None:
        """Give back reservations past their deadline."""
        for job in [job for job in self._jobs.values() if job.deadline_at <= now]:
            job.abort()
            self._core.story.count("reservations_expired")

    def conclude(self) -> None:
        """Tell sessions and policies of the puts that were answered, and free what these kept."""
        while self._answered:
            job = self._answered.pop(0)
            self._tell(job)  # its rows are still kept, so they are still these blocks
            job.let_go()
        self._num_rows_behind = 0

    @property
    def is_behind(self) -> bool:
        """Whether `conclude` has much to tell."""
        return self._num_rows_behind > MAX_UNTOLD

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        return min((job.deadline_at for job in self._jobs.values()), default=None)

    def _job(self, event: ReserveRequested, is_told: bool) -> PutJob | None:
        """Return the job of a put, an earlier one for a retry; None when it was refused.
        `is_told`: the caller gets its number."""
        requests = self._requests
        earlier = requests.earlier(event.client, event.request_id)
        if isinstance(earlier, PutJob):  # whatever the limits are by now: its bytes may be being copied
            requests.client(event.client)  # is alive
            return earlier
        checked = requests.check(event.call, event.client, event.namespace_id, event.prefix_hashes)
        if checked is None:
            return None
        if self.is_closed:
            requests.refuse(event.call, "DRAINING", "the appliance is shutting down; recompute", 1.0)
            return None
        client, namespace = checked
        if len(self._waiting) and self._waiting.is_full(tenant := tenant_of(client.domain)):
            message = f"max_waiting_puts: {self._waiting.held(tenant)} of the tenant wait for room already"
            requests.refuse(event.call, "TOO_MANY_IN_FLIGHT", message, 0.05)
            return None
        if is_told:
            number = self._ids.draw(self._jobs)
        else:
            self._num_untold += 1
            number = -self._num_untold
        session = self._usage.session_number(event.session_id)
        put = Put(event, client, namespace, session, number)
        job = PutJob(self._core, self._residency, self._copies, self._pressure, put, self._done)
        job.deadline_at = min(event.deadline_at, self._core.now + self._core.options.reservation_ttl_s)
        self._jobs[number] = job
        requests.remember(event.client, event.request_id, job)
        if event.prefill_s and job.first_position is not None:
            num_blocks = len(event.prefix_hashes)
            self._core.costs.prefilled(namespace.id, job.first_position, num_blocks, event.prefill_s)
        return job

    def urgency_of(self, event: AcquireRequested) -> Urgency:
        """Return how soon what is fetched for an acquire is needed: a hand-over is decoded at once."""
        return Urgency.DECODING if event.expected is not None else self._usage.urgency_of(event)

    def fetch(
        self,
        request: ReserveRequested,
        client: ClientEntry,
        namespace: NamespaceEntry,
        bundle: BundleBlocks,
        chain: Sequence[bytes],
        on_ended: Callable[[PutJob], None],
    ) -> FetchJob:
        """Return a new put of the last blocks of a bundle, which the source holds. It has not begun.
        `chain`: these blocks, and all that are asked for behind them.
        `on_ended` is called when it has ended, before sessions and policies are told."""
        self._num_untold += 1
        session = self._usage.session_number(request.session_id)
        put = Put(request, client, namespace, session, -self._num_untold)

        def done(job: PutJob) -> None:
            on_ended(job)
            self._done(job)

        job = FetchJob(self._core, self._residency, self._copies, self._pressure, put, done, bundle)
        job.chain = chain
        self._fetching[-self._num_untold] = job
        return job

    def _reserved(self, event: CommitRequested) -> PutJob | None:
        """Return the job of the reservation that is committed; None when it was refused."""
        earlier = self._requests.earlier(event.client, event.request_id)
        job = earlier if isinstance(earlier, PutJob) else self._jobs.get(event.reservation_id)
        if job is None or job.client.id != event.client:
            message = "the reservation is over or another client's; reserve again"
            self._requests.refuse(event.call, "UNKNOWN_RESERVATION", message)
            return None
        self._requests.remember(event.client, event.request_id, job)
        return job

    def _admit(self, job: PutJob) -> None:
        if not job.advance():
            deadline_at = min(job.request.deadline_at, self._core.now + self._core.options.put_wait_s)
            tenant = tenant_of(job.client.domain)
            self._waiting.add(job, Urgency.QUEUED, deadline_at, tenant, behind_s=READS_FIRST_S)

    def _done(self, job: PutJob) -> None:
        self._jobs.pop(job.reservation_id, None)
        self._fetching.pop(job.reservation_id, None)
        self._answered.append(job)
        self._num_rows_behind += len(job.rows)

    def _tell(self, job: PutJob) -> None:
        rows = job.rows if NO_ROW not in job.rows else [row for row in job.rows if row != NO_ROW]
        refresh_run(self._core, rows)
        self._usage.retain(rows, job.request.retention)
        readable = new = rows
        if job.outcomes.count(STORED) < len(rows):
            outcomes = zip(job.rows, job.outcomes, strict=False)
            new = [row for row, outcome in outcomes if outcome == PutOutcome.STORED]
            readable = self._readable(rows, job.namespace.num_groups)
        session_id = job.request.session_id if self._requests.is_open(job.client) else ""
        self._usage.stored(readable, new, session_id, job.client.id, len(job.rows))
        if self.is_closed:  # the drain had queued what only memory held before these were there
            for row in rows:
                self._pressure.archiving.add(row)

    def _readable(self, rows: list[int], num_groups: int) -> list[int]:
        catalog = self._core.catalog
        in_put_tier = catalog.num_resident[self._core.ladder.put_tier]
        return [row for row in rows if in_put_tier[row] == num_groups or catalog.tier_of(row) is not None]
