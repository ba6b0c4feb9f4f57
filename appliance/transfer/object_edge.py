"""ObjectEdge: carries out what the planner asks of an object store, in threads.

The event loop only queues and settles. Searches and fetches alternate, exports come behind them; searches and
exports take half of the threads each at most, and of each kind tenants take turns. Every instruction ends as
instructions.py says, also when the store hangs: a request is bounded by LIMITS, and a fetch looks at its
deadline between chunks. Its places are not free until its thread is done with them, so they are given back
one idle limit later, at most.

A store that fails MAX_FAILURES times in a row is not asked any more (the planner hears SourceChanged), but
for a look at its bucket, ever more rarely, until that succeeds. The same look comes first at a start, which
therefore never waits for a store. Where nothing can be stored (it is full, or there is a right to read only)
only exports pause. One that says that it is busy gets half as many requests at a time.

With keys of a fleet they are listed every LOOK_S, so that a host that is not asked anything forgets the keys
of erased tenants, too. While a tenant is being erased nothing of it is exported.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from ...sources.objects.fleet_keys import LOOK_S, FleetKeys, erase_tenant
from ...sources.objects.keys import Epochs
from ...sources.objects.layout import BundleError
from ...sources.objects.problems import OF_EXPORTS, OF_ONE_OBJECT, StoreError, StoreProblem
from ...sources.objects.store import ObjectStore, StoreLimits
from ...sources.objects.usage import StoreUsage
from ...tiers.base import Cause, CopyError, CopyOutcome, Engine
from ...tiers.block import Tier, tenant_of
from ...tiers.encryption.envelope import Envelopes
from ...v1.threads import lower_thread_priority
from ..core.events import CopyFinished, Event, ExportFinished, SourceChanged, SourceSearched
from ..core.instructions import ExportBundle, FetchBundle, SearchBundles
from ..core.turns import TenantTurns
from ..histogram import Histogram
from .bundles import BundleTransfer, ChainFound, ExportCodecs, FleetEncryption, Stop, cause_of

log = logging.getLogger(__name__)

LIMITS: Final = StoreLimits(connect_s=1.0, idle_s=2.0, request_s=15.0, num_retries=1, retry_s=2.0)
MAX_IN_FLIGHT: Final = 8
MAX_FAILURES: Final = 3
RETRY_S, MAX_RETRY_S = 1.0, 60.0  # between looks at a store that failed
EPOCH_DAYS: Final = 1  # what `kvtier objects` takes for granted, too
#: Of a fetch that was begun; other words of Cause come as they happen.
FETCH_OUTCOMES: Final = ("arrived", "wrong_checksum", "wrong_identity")
#: What an instruction is called in metrics.
KINDS: Final[dict[type[Any], str]] = {SearchBundles: "search", FetchBundle: "fetch", ExportBundle: "export"}

Work: TypeAlias = SearchBundles | FetchBundle | ExportBundle


@dataclass(frozen=True, slots=True)
class SourceStatus:
    """How a source does, for status and metrics."""

    address: str
    is_open: bool
    problem: str  # why it is not open, or takes nothing; empty: it was not tried yet, or all is well
    num_in_flight: int
    max_in_flight: int
    usage: StoreUsage
    seconds: Mapping[str, Histogram]  # by KINDS, from the start of an instruction in its thread to its end


class ObjectEdge:
    """Executes SearchBundles, FetchBundle and ExportBundle over one store. Owned by the event loop.

    `open_store` blocks; `engines` are those of the memory tiers; `deliver` gets the events, on the loop.
    With `keys` what is stored is encrypted.
    """

    def __init__(
        self,
        address: str,
        open_store: Callable[[], ObjectStore],
        engines: Mapping[Tier, Engine],
        deliver: Callable[[Event], None],
        *,
        clock: Callable[[], float],
        now_s: Callable[[], float] = time.time,
        keys: FleetKeys | None = None,
    ) -> None:
        self.keys = keys
        self.codecs: ExportCodecs | None = None  # what encodes exports, read when the store is opened
        self._encryption: FleetEncryption | None = None
        if keys is not None:
            self._encryption = FleetEncryption(keys, envelopes := Envelopes(keys))
            keys.on_forgotten = envelopes.forget
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._open_store = open_store
        self._engines = engines
        self._deliver = deliver
        self._clock = clock
        self._now_s = now_s
        # Behind what wakes up, at the same share: these and the client library's own, which they start.
        behind = partial(lower_thread_priority, "kvtier-object", 0)
        self._pool = ThreadPoolExecutor(MAX_IN_FLIGHT + 2, "kvtier-object", initializer=behind)
        self._transfer: BundleTransfer | None = None
        self._store: ObjectStore | None = None
        self._queues: dict[type[Work], TenantTurns[Work]] = {kind: TenantTurns() for kind in KINDS}
        self._order: tuple[type[Work], ...] = (SearchBundles, FetchBundle, ExportBundle)
        self._running: Counter[type] = Counter()
        self._barred: set[str] = set()  # tenants that are being erased
        self._exporting: Counter[str] = Counter()  # by tenant, in threads
        self._export_ended = asyncio.Event()
        self._limit = MAX_IN_FLIGHT
        self._is_open = self._is_stopping = False
        self._problem = ""
        self._num_failures = 0
        self._retry_s = RETRY_S
        self._export_at, self._export_retry_s = 0.0, RETRY_S  # not before; see _pause_exports
        self._timer: asyncio.TimerHandle | None = None
        self._key_timer: asyncio.TimerHandle | None = None
        self._seconds = {kind: Histogram() for kind in KINDS.values()}
        self.counters: Counter[str] = Counter({f"fetches_{outcome}": 0 for outcome in FETCH_OUTCOMES})

    def start(self) -> None:
        """Look whether the store is there; the planner hears of it when it is."""
        if not self._is_stopping:
            self._submit(self._look, self._looked)

    def execute(self, work: Work) -> None:
        """Queue an instruction, or end it at once while the store is not asked."""
        if self._is_stopping:
            return
        is_paused = isinstance(work, ExportBundle) and self._clock() < self._export_at
        if not self._is_open or is_paused or self._is_barred(work):
            self._fail(work, Cause.SOURCE_GONE)
            return
        self._queues[type(work)].add(_tenant(work), work)
        self._fill()

    def status(self) -> SourceStatus:
        """Return how the source does."""
        return SourceStatus(
            self._address,
            self._is_open,
            self._problem,
            sum(self._running.values()),
            self._limit,
            StoreUsage() if self._store is None else self._store.usage,
            self._seconds,
        )

    async def export_ended(self) -> None:
        """Wait until an export ends."""
        self._export_ended.clear()
        await self._export_ended.wait()

    async def stop(self) -> None:
        """Wait for the threads, which read and store no more; what is queued does not begin. Idempotent."""
        self._is_stopping = True
        for timer in (self._timer, self._key_timer):
            if timer is not None:
                timer.cancel()
        if self._store is not None:
            self._store.abandon()
        await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)

    # ------------------------------------------------------------------------------- keys, erasing

    def tend_keys(self) -> None:
        """List the tenants' keys now and then from now on, and wrap anew what another master key wraps."""
        if self.keys is None or self._is_stopping:
            return
        if self._key_timer is not None:
            self._key_timer.cancel()
        self._key_timer = self._loop.call_later(LOOK_S, self.tend_keys)
        if self._is_open:
            self._submit(self._tend, self._tended)

    def _tend(self) -> int:
        """Blocks."""
        assert self.keys is not None
        self.keys.refresh(LOOK_S / 2)
        return self.keys.wrap_anew()

    def _tended(self, future: "Future[int]") -> None:
        failure = future.exception()
        if isinstance(failure, StoreError):
            return log.warning("object store %s: its keys were not listed: %s", self._address, failure)
        if future.result():
            log.info("object store %s: %d data keys wrapped anew", self._address, future.result())
        assert self.keys is not None
        if self.keys.num_foreign > self.counters["foreign_keys"]:
            log.warning("object store: %d tenant keys of other master keys ignored", self.keys.num_foreign)
        self.counters["foreign_keys"] = self.keys.num_foreign

    def bar(self, tenant: str) -> None:
        """Let nothing of a tenant be exported until `admit`."""
        self._barred.add(tenant)
        if self.keys is not None:
            self.keys.bar(tenant)
        for work in self._queues[ExportBundle].take(self._is_barred):
            self._fail(work, Cause.SOURCE_GONE)

    async def erase(self, tenant: str) -> int:
        """Destroy the key of a tenant that is barred, then delete its bundles; return how many there were.
        No export of it is under way afterwards. Raises StoreError; the key may be destroyed then."""
        if self._is_stopping:
            raise StoreError(StoreProblem.UNREACHABLE, "this daemon is ending; erase at the next one")
        try:
            return await self._loop.run_in_executor(self._pool, lambda: erase_tenant(self._opened(), tenant))
        finally:
            while self._exporting[tenant]:
                await self.export_ended()

    def admit(self, tenant: str) -> None:
        """Let a tenant be exported again, under another key."""
        self._barred.discard(tenant)
        if self.keys is not None:
            self.keys.admit(tenant)

    def _is_barred(self, work: Work) -> bool:
        return isinstance(work, ExportBundle) and _tenant(work) in self._barred

    # ------------------------------------------------------------------------------------ one look

    def _opened(self) -> ObjectStore:
        """Blocks: return the store, opened. Raises StoreError."""
        if self._store is None:
            self._store = self._open_store()
        return self._store

    def _look(self) -> BundleTransfer:
        """Blocks: open the store, unless it is, list its bucket, and open its keys. Raises StoreError."""
        store = self._opened()
        store.check_bucket()
        if self.keys is not None:
            self.keys.open(store)
        return BundleTransfer(
            store,
            self._engines,
            Epochs(EPOCH_DAYS, is_endless=store.evicts),
            self._now_s,
            self._check,
            self._encryption,
            self.codecs,
        )

    def _looked(self, future: "Future[Any]") -> None:
        failure = future.exception()
        if failure is None:
            log.info("object store %s: in use", self._address)
            self._transfer, self._is_open, self._problem = future.result(), True, ""
            self._num_failures, self._retry_s = 0, RETRY_S
            self._deliver(SourceChanged(True))
            self.tend_keys()
            return
        if not isinstance(failure, StoreError):
            raise failure
        if self._problem != str(failure):  # said once, not with every look
            self._problem = str(failure)
            log.error("object store %s is not used: %s", self._address, self._problem)
        self._again()

    def _again(self) -> None:
        if not self._is_stopping:
            self._timer = self._loop.call_later(self._retry_s, self.start)
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _close(self, problem: str) -> None:
        """Ask the store nothing more until a look succeeds."""
        self._is_open, self._problem = False, problem
        self.counters["outages"] += 1
        log.error("object store %s is not used for now: %s", self._address, problem)
        self._deliver(SourceChanged(False))
        self._export_ended.set()  # a drain waits no longer for exports that are to be tried again
        self._fail_queued(*KINDS)
        self._again()

    def _pause_exports(self, problem: str) -> None:
        """Store nothing for a while, which doubles until something was stored."""
        if self._clock() < self._export_at:  # one of those that were under way
            return
        if self._problem != problem:
            log.error("object store %s: nothing is stored for now: %s", self._address, problem)
        self._problem = problem
        self._export_at = self._clock() + self._export_retry_s
        self._export_retry_s = min(2 * self._export_retry_s, MAX_RETRY_S)
        self._fail_queued(ExportBundle)

    def _fail_queued(self, *kinds: type[Work]) -> None:
        for kind in kinds:
            while queue := self._queues[kind]:
                self._fail(queue.pop()[1], Cause.SOURCE_GONE)

    # ------------------------------------------------------------------------------------- threads

    def _check(self, deadline_at: float) -> None:
        if self._is_stopping or self._clock() >= deadline_at:
            raise Stop

    def _fill(self) -> None:
        """Start queued work while there may be more in flight."""
        while self._is_open and sum(self._running.values()) < self._limit:
            kind = next((kind for kind in self._order if self._may_begin(kind)), None)
            if kind is None:
                return
            tenant, work = self._queues[kind].pop()
            self._running[kind] += 1
            if kind is ExportBundle:
                self._exporting[tenant] += 1
            else:
                self._order = (FetchBundle if kind is SearchBundles else SearchBundles, kind, ExportBundle)
            self._submit(partial(self._run, work), partial(self._ran, work, self._clock()))

    def _may_begin(self, kind: type[Work]) -> bool:
        is_bounded = kind is not FetchBundle and self._running[kind] >= max(1, self._limit // 2)
        return len(self._queues[kind]) > 0 and not is_bounded

    def _submit(self, task: Callable[[], Any], then: Callable[["Future[Any]"], None]) -> None:
        def on_loop(future: "Future[Any]") -> None:
            if not self._is_stopping:
                then(future)

        def ended(future: "Future[Any]") -> None:
            if not (future.cancelled() or self._is_stopping):
                self._loop.call_soon_threadsafe(on_loop, future)

        self._pool.submit(task).add_done_callback(ended)

    def _run(self, work: Work) -> "ChainFound | tuple[int, float] | _Fetched":
        """In a thread: carry out an instruction. Raises StoreError, CopyError and BundleError."""
        transfer = self._transfer
        assert transfer is not None
        if isinstance(work, SearchBundles):
            return transfer.search(work)
        if isinstance(work, ExportBundle):
            return transfer.export(work), transfer.read_s(work) if work.is_trial else 0.0
        return _fetch(transfer, work, self._land)

    def _land(self, copy: int, outcomes: list[CopyOutcome]) -> None:
        """In a thread: a batch landed; tell the planner of it."""
        if not self._is_stopping:
            self._loop.call_soon_threadsafe(self._deliver, CopyFinished(copy, outcomes))

    def _ran(self, work: Work, began_at: float, future: "Future[Any]") -> None:
        """On the loop: settle an instruction, and take in what its end says about the store."""
        self._seconds[KINDS[type(work)]].observe(max(0.0, self._clock() - began_at))
        self._running[type(work)] -= 1
        if isinstance(work, ExportBundle):
            self._exporting[_tenant(work)] -= 1
            self._export_ended.set()
        failure = future.exception()
        result = None if failure is not None else future.result()
        if isinstance(result, _Fetched):
            failure = result.failure
        self._settle(work, result, failure)
        if failure is not None and not isinstance(failure, StoreError | CopyError | BundleError | Stop):
            self._fill()
            raise failure  # a defect
        if isinstance(failure, StoreError) and failure.problem not in OF_ONE_OBJECT:
            self.counters[f"failed_{failure.problem.name.lower()}"] += 1
            if isinstance(work, ExportBundle) and failure.problem in OF_EXPORTS:
                self._pause_exports(str(failure))
                return self._fill()
            self._num_failures += 1
            if failure.problem is StoreProblem.BUSY:
                self._limit = max(1, self._limit // 2)
            elif self._is_open and self._num_failures >= MAX_FAILURES:
                self._close(str(failure))
        else:
            self._num_failures = 0
            self._limit = min(MAX_IN_FLIGHT, self._limit + 1)
        self._fill()

    def _settle(self, work: Work, result: Any, failure: BaseException | None) -> None:
        """Tell the planner how an instruction ended, and count it."""
        if isinstance(result, _Fetched):
            assert isinstance(work, FetchBundle)
            self.counters["bytes_received"] += result.num_bytes
            cause = result.cause if failure is None else cause_of(failure)
            self.counters[f"fetches_{'arrived' if cause is None else cause.value}"] += 1
            if cause is None:
                blocks = {item.source for _, items in work.batches for item in items}
                self.counters["blocks_fetched"] += len(blocks)
            if failure is not None:
                self._fail_batches(work, result.open_copies, cause_of(failure))
        elif failure is not None:
            self._fail(work, cause_of(failure))
        elif isinstance(work, SearchBundles):
            self._deliver(SourceSearched(work.search, *result))
        elif isinstance(work, ExportBundle):
            sent_bytes, read_s = result
            self.counters["bytes_sent"] += sent_bytes
            if sent_bytes and self._export_retry_s > RETRY_S:
                self._export_retry_s, self._problem = RETRY_S, ""
            self._deliver(ExportFinished(work.export, True, sent_bytes, read_s))

    def _fail(self, work: Work, cause: Cause) -> None:
        """End an instruction that was not carried out."""
        if isinstance(work, SearchBundles):
            self._deliver(SourceSearched(work.search, 0, -1, is_answered=False))
        elif isinstance(work, ExportBundle):
            self._export_ended.set()
            self._deliver(ExportFinished(work.export, False, has_key=cause is not Cause.NO_KEY))
        else:
            self._fail_batches(work, {copy for copy, _ in work.batches}, cause)

    def _fail_batches(self, fetch: FetchBundle, copies: set[int], cause: Cause) -> None:
        for copy, items in fetch.batches:
            if copy in copies:
                self._deliver(CopyFinished(copy, [CopyOutcome(cause)] * len(items)))


@dataclass(slots=True)
class _Fetched:
    """How a fetch ended, and which of its batches have no outcome yet."""

    open_copies: set[int]
    num_bytes: int = 0
    cause: Cause | None = None  # of the last fragment that was read and is not what it should be
    failure: Exception | None = None


def _fetch(
    transfer: BundleTransfer, work: FetchBundle, land: Callable[[int, list[CopyOutcome]], None]
) -> _Fetched:
    fetched = _Fetched({copy for copy, _ in work.batches})

    def landed(copy: int, outcomes: list[CopyOutcome]) -> None:
        fetched.open_copies.discard(copy)
        fetched.cause = next((one.cause for one in outcomes if one.cause is not None), fetched.cause)
        land(copy, outcomes)

    try:
        fetched.num_bytes = transfer.fetch(work, landed)
    except Exception as failure:
        fetched.failure = failure
    return fetched


def _tenant(work: Work) -> str:
    identity = work.identity if isinstance(work, SearchBundles) else work.bundle.identity
    return tenant_of(identity.domain)
