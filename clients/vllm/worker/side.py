"""The worker's half of the connector: one in every rank. It moves bytes, on threads of its own.

    loads   copied from the appliance's shared memory straight into the paged cache; those that are still
            on their way up from nvme by a thread of their own, as they arrive
    saves   copied from the paged cache straight into staging memory, in the order of their planning, by
            one thread: a block's parent is stored before it

The engine's thread only hands over and collects. Every call to the daemon has a time limit, so every load and
every save ends, and is reported as over: the engine waits for that report only.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from ....v1.types import PutOutcome
from ...connector.breaker import Breaker
from ...errors import KvtierError
from ...options import Limits, Timeout, plugin_connect_s
from ...sync import Client
from ..counters import Counters
from ..options import Options
from ..plan import Ack, Acks, Again, Load, Part, Save, StepPlan
from .pages import PagedGroup
from .threads import run_aside
from .transfers import LOAD_STAGING_BYTES, Fetch, Store, Transfer

R = TypeVar("R")
HASH_BYTES = 32
AGAIN = {PutOutcome.NO_ROOM: Again.REST, PutOutcome.PARENT_MISSING: Again.ALL}
SILENT_TIMEOUT_S = 0.5  # while the daemon does not answer: shared memory may still do
#: Of one commit: one call for most prompts, and still in the processor's cache when the daemon reads it.
SAVE_PIECE_BYTES = 16 << 20
MAX_BLOCKS = 4096  # in one call, as the daemon allows by default


class WorkerSide:
    """Loads and saves of one rank.

    `make_transfer(staging_bytes)` makes what moves bytes for one thread: on the engine's thread, nothing is
    sent. `groups[i]` is KV cache group i."""

    def __init__(
        self,
        options: Options,
        groups: Sequence[PagedGroup],
        make_transfer: Callable[[int], Transfer],
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        run: Callable[[str, Callable[[], None], bool], threading.Thread] = run_aside,
    ) -> None:
        self.breaker = Breaker(clock=clock)
        self._options = options
        self._groups = list(groups)
        self._counters = counters
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._acks = Acks()
        self._loads: queue.SimpleQueue[tuple[Load, str, int] | None] = queue.SimpleQueue()
        self._arriving_loads: queue.SimpleQueue[tuple[Load, str, int] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Save, str, int, float] | None] = queue.SimpleQueue()
        self._save_transfer = make_transfer(options.staging_bytes)
        self._threads = [run("kvtier-save", self._serve_saves, True)]
        loading = [self._loads] * options.num_load_threads
        if options.max_arriving_loads:  # these wait for the disk, and would hold up those from memory
            loading.append(self._arriving_loads)
        self._load_transfers = [make_transfer(LOAD_STAGING_BYTES) for _ in loading]
        for i, (source, transfer) in enumerate(zip(loading, self._load_transfers, strict=True)):
            self._threads.append(run(f"kvtier-load-{i}", partial(self._serve_loads, source, transfer), False))

    # ---------------------------------------------------------------------- the engine's thread

    def start_loads(self, plan: StepPlan) -> None:
        """Start the loads of a step."""
        if not plan.loads:
            return
        (mark,) = {transfer.mark() for transfer in self._load_transfers}  # always together: one number
        for load in plan.loads:
            waits_apart = load.is_arriving and self._options.max_arriving_loads
            (self._arriving_loads if waits_apart else self._loads).put((load, plan.salt, mark))

    def start_saves(self, plan: StepPlan, step_s: float = 0.0) -> None:
        """Start the saves of a step; its blocks are complete. `step_s` is what computing it took."""
        if not plan.saves:
            return
        mark = self._save_transfer.mark()
        for save in plan.saves:
            self._saves.put((save, plan.salt, mark, save.prefill_share * step_s))

    def fail_loads(self, plan: StepPlan) -> None:
        """Report the loads of a step as over and failed, without trying."""
        with self._lock:
            self._finished |= {load.request_id for load in plan.loads}
            self._failed |= {load.request_id for load in plan.loads}

    def drop_saves(self, plan: StepPlan) -> None:
        """Report the saves of a step as over, nothing stored, without trying."""
        with self._lock:
            for save in plan.saves:
                self._acks.by_job[save.job] = Ack(1, 0)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Return the requests with loads that ended since the last call, and those that failed."""
        num = self._options.num_load_threads
        for source, transfers in (
            (self._loads, self._load_transfers[:num]),
            (self._arriving_loads, self._load_transfers[num:]),
        ):
            self.fail_loads(StepPlan(loads=[load for load, *_ in _behind_doubt(source, transfers)]))
        with self._lock:
            finished, self._finished = self._finished, set()
            failed, self._failed = self._failed, set()
        return finished, failed

    def take_acks(self) -> Acks:
        """Return the saves that are over since the last call."""
        queued = _behind_doubt(self._saves, [self._save_transfer])
        self.drop_saves(StepPlan(saves=[save for save, *_ in queued]))
        with self._lock:
            acks, self._acks = self._acks, Acks()
        return acks

    def close(self) -> None:
        """End the threads; waits a second for each at most."""
        for _ in range(self._options.num_load_threads):
            self._loads.put(None)
        self._arriving_loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join(1.0)

    # ------------------------------------------------------------------------------------- loads

    def _serve_loads(
        self, source: "queue.SimpleQueue[tuple[Load, str, int] | None]", transfer: Transfer
    ) -> None:
        self._connect(transfer)
        while (item := source.get()) is not None:
            load, salt, mark = item
            started_at = time.monotonic()
            is_right = False
            try:
                is_right = self._load_all(transfer, load, salt, mark)
            except Exception as problem:  # whatever it is, the engine waits for the word "over"
                self._failed_call(problem)
            self._counters.add("loads")
            self._counters.add("load_seconds", time.monotonic() - started_at)
            with self._lock:
                self._finished.add(load.request_id)
                if not is_right:
                    self._failed.add(load.request_id)
                    self._counters.add("load_failures")
        transfer.close()

    def _load_all(self, transfer: Transfer, load: Load, salt: str, mark: int) -> bool:
        """Whether all blocks came; a load without any is one that failed on its way here."""
        return bool(load.parts) and all(self._load(transfer, load, part, salt, mark) for part in load.parts)

    def _load(self, transfer: Transfer, load: Load, part: Part, salt: str, mark: int) -> bool:
        """Copy one group's blocks; whether all of them came, proven right."""
        group = self._groups[part.group]
        namespace = transfer.namespace(part.group, salt, load.adapter)
        num_named = len(part.hashes) // HASH_BYTES
        timeout_s = self._options.load_timeout_s if self.breaker.allows() else SILENT_TIMEOUT_S
        if load.expected is not None and self.breaker.allows():
            timeout_s = self._options.handover_wait_s
        first_call = part.first_block // MAX_BLOCKS * MAX_BLOCKS
        done = part.first_block
        for start in range(first_call, num_named, MAX_BLOCKS):
            end = min(start + MAX_BLOCKS, num_named)
            ids = part.block_ids[done - part.first_block : end - part.first_block]
            hashes = part.hashes[start * HASH_BYTES : end * HASH_BYTES]
            first = done - start
            expected = load.expected if not start else None  # a host is told names from a chain's start
            fetch = Fetch(part.group, namespace, hashes, ids, first, load.session, timeout_s, expected)
            got = transfer.get(fetch, mark)
            if got.was_asked:
                self.breaker.succeeded()
            if got.num_loaded < len(ids):
                return False
            self._counters.add("load_blocks", len(ids))
            self._counters.add("load_bytes", len(ids) * group.block_bytes)
            done = end
        return True

    # ------------------------------------------------------------------------------------- saves

    def _serve_saves(self) -> None:
        transfer = self._save_transfer
        self._connect(transfer)
        while (item := self._saves.get()) is not None:
            save, salt, mark, prefill_s = item
            started_at = time.monotonic()
            ack = Ack(1, 0)
            if self.breaker.allows():
                try:
                    ack = self._save(transfer, save, salt, mark, prefill_s)
                    self.breaker.succeeded()
                except Exception as problem:  # whatever it is, the blocks must be given back
                    self._failed_call(problem)
                    self._counters.add("save_failures")
            else:
                self._counters.add("saves_skipped_breaker", len(save.block_ids))
            self._counters.add("saves")
            self._counters.add("save_seconds", time.monotonic() - started_at)
            with self._lock:
                self._acks.by_job[save.job] = ack
        transfer.close()

    def _save(self, transfer: Transfer, save: Save, salt: str, mark: int, prefill_s: float) -> Ack:
        """Store blocks; return how many from the start are stored, and what to try again."""
        group = self._groups[save.group]
        report = transfer.put(
            Store(
                save.group,
                transfer.namespace(save.group, salt, save.adapter),
                save.hashes,
                save.block_ids,
                save.parent,
                save.session,
                self._options.save_timeout_s,
                prefill_s if self._options.report_prefill else 0.0,
                save.retention,
            ),
            mark,
        )
        self._counters.add("save_blocks", len(save.block_ids))
        self._counters.add("save_bytes", len(save.block_ids) * group.block_bytes)
        self._counters.add("save_blocks_stored", report.num_stored)
        self._counters.add("save_blocks_deduplicated", report.num_deduplicated)
        self._counters.add("save_blocks_refused", report.num_refused)
        for number, outcome in enumerate(report.outcomes):
            if not outcome.is_kept:
                return Ack(1, number, AGAIN.get(outcome, Again.NOTHING))
        return Ack(1, len(report.outcomes))

    def _connect(self, transfer: Transfer) -> None:
        """Connect before the first request needs it; an appliance that is not there yet is found later."""
        try:
            transfer.connect()
        except Exception as problem:
            self._failed_call(problem)

    def _failed_call(self, problem: Exception) -> None:
        if not isinstance(problem, KvtierError):
            self._counters.add("hook_errors")
        if self.breaker.failed(problem):
            self._counters.add("breaker_openings")


def _behind_doubt(source: "queue.SimpleQueue[R | None]", transfers: Sequence[Transfer]) -> Iterator[R]:
    """Take from a queue what no thread may ever serve: all wait for the daemon to let go of pages."""
    while all(transfer.is_in_doubt for transfer in transfers):
        try:
            item = source.get_nowait()
        except queue.Empty:
            return
        if item is None:  # the last word to a thread
            source.put(None)
            return
        yield item


def client_of(options: Options, name: str, staging_bytes: int) -> Client:
    """Make a client for a thread of a worker."""
    timeout_s = max(options.load_timeout_s, options.save_timeout_s)
    timeout = Timeout(call_s=timeout_s, connect_s=plugin_connect_s(timeout_s), grace_s=0.5)
    limits = Limits(staging_bytes=staging_bytes, piece_bytes=SAVE_PIECE_BYTES)
    return Client(options.target, name=name, domain=options.domain, timeout=timeout, limits=limits)
