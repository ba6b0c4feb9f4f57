"""The multi-process server's plug-in L2 adapter: LMCache's L2AdapterInterface over kvtier.

LMCache submits tasks from two controller threads, polls three event descriptors, and collects results. Here a
task is a line in one of three queues, each with a thread and a client: stores, lookups, loads, so that no
prefill waits behind a store, and no lookup behind copies. Queues are bounded: a task that finds its queue
full ends at once, as a failed store or a miss, because it holds LMCache's memory while it waits.

What a load behind others will read is promoted meanwhile, so that the device works while the one before
copies. "Lookup and lock" only looks up: LMCache loads what was found at once, or not at all, and a promotion
would save no time. A lease per key until LMCache's unlock was rejected: LMCache forgets locks of requests
that die, and a load that finds a chunk gone is a miss, which the interface allows.

Chunks of one model, size and dtype share a namespace; rank, object group and salt are in their names. A
namespace for each rank was rejected: a daemon has 1,024, and LMCache's own benchmark numbers a rank per key.

kvtier bounds and evicts by itself, so this adapter reports no capacity and LMCache runs no eviction over it.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

try:
    from lmcache.lmcache_native import Bitmap
except ImportError:  # before 0.5.4
    from lmcache.native_storage_ops import Bitmap

from ..connector.guard import Guard
from ..connector.versions import check_version
from .chunks import ChunkKind, ChunkStore, chunk_name
from .options import ChunkOptions

MAX_QUEUED_TASKS = 256
MAX_GAPS = 32  # in one lookup: keys that are missing before others that are there
QUEUE_FULL = "QUEUE_FULL"  # cause of a miss: too many tasks wait
UNKNOWN_FORM = "UNKNOWN_FORM"  # cause of a miss: LMCache told no layout, and nothing like it was stored yet

Form: TypeAlias = tuple[int, str]  # of an object: bytes, first dtype
Place: TypeAlias = tuple[str, int, int]  # model name, rank, object group


class KvtierL2AdapterConfig(L2AdapterConfigBase):
    """`adapter_params` of the plug-in: target, domain, weights; all strings, all optional."""

    def __init__(self, options: ChunkOptions) -> None:
        self.options = options

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> "KvtierL2AdapterConfig":
        """Raises InvalidRequest (a ValueError) naming what is wrong."""
        return cls(ChunkOptions.of(d))

    @classmethod
    def help(cls) -> str:
        """Return what `adapter_params` may hold, for LMCache's command line."""
        return (
            "kvtier L2 adapter, adapter_params:\n"
            "- target (str): unix:///path or host:port of the daemon (optional, KVTIER_TARGET)\n"
            "- domain (str): isolation domain (optional)\n"
            "- weights (str): folder or hub name of the checkpoint (optional, found by the model's name)"
        )


class KvtierL2Adapter(L2AdapterInterface):
    """Chunks of one LMCache server in one daemon. Thread-safe; no call raises or waits for kvtier."""

    def __init__(self, config: KvtierL2AdapterConfig, l1_memory_desc: Any = None) -> None:
        import lmcache

        check_version("LMCache", lmcache.__version__)
        super().__init__()
        self.guard = Guard("kvtier.lmcache")
        self._options = config.options
        if self._options.weights:
            self._options.weights_digest("")  # says now that there are none
        self._weights: dict[str, bytes] = {}  # digest by model
        self._kinds: dict[tuple[str, int, str], ChunkKind] = {}  # by model and form
        self._forms: dict[Place, Form] = {}  # last seen
        self._lock = threading.Lock()
        self._next_task = 0
        self._stored: dict[int, L2StoreResult] = {}
        self._answers: dict[int, Bitmap] = {}
        self._store_done, self._lookup_done, self._load_done = (create_event_notifier() for _ in range(3))
        self._stores, self._lookups, self._loads = (
            _Worker(what, ChunkStore(self._options.client(what, puts=what == "stores")))
            for what in ("stores", "lookups", "loads")
        )

    # ------------------------------------------------------------------------------------- tasks

    def get_store_event_fd(self) -> int:
        """Return the descriptor that is readable when a store has ended."""
        return int(self._store_done.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that is readable when a lookup has ended."""
        return int(self._lookup_done.fileno())

    def get_load_event_fd(self) -> int:
        """Return the descriptor that is readable when a load has ended."""
        return int(self._load_done.fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Store objects. Their memory is LMCache's until the task is done."""
        task = self._number()

        def finish(result: L2StoreResult | None) -> None:
            with self._lock:
                self._stored[task] = L2StoreResult(False, 0) if result is None else result
            self._store_done.notify()

        work = lambda store: self.guard.ask("store", lambda: self._store(store, keys, objects))  # noqa: E731
        self._submit(self._stores, work, finish)
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the stores that have ended since the last call, by task."""
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Any = None) -> int:
        """Find out which keys are stored. LMCache's own check tells no layouts, before 0.5.3."""
        answer = partial(self._lookup, keys=keys, layouts=group_layout_descs)
        return self._submit_question(self._lookups, answer, len(keys), self._lookup_done)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return which keys of an ended task were found, once; None before its end."""
        with self._lock:
            return self._answers.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing was locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        """Fill objects. Their memory is LMCache's until the task is done."""
        if self._loads.is_busy:
            forms = [_form_of(one) for one in objects]  # now: they may be LMCache's again by then
            self._lookups.submit(partial(self.guard.ask, "promote", partial(self._promote, keys, forms)))
        answer = partial(self._load, keys=keys, objects=objects)
        return self._submit_question(self._loads, answer, len(keys), self._load_done)

    query_load_result = query_lookup_and_lock_result

    def delete(self, keys: list[ObjectKey]) -> None:
        """Nothing: kvtier evicts by itself."""

    def report_status(self) -> dict[str, Any]:
        """Healthy while the breaker allows calls; `misses` counts by cause what was lost since the start."""
        return {
            "is_healthy": not self.guard.breaker.is_open,
            "type": "KvtierL2Adapter",
            "target": self._options.target,
            "misses": self.guard.causes,
        }

    def close(self) -> None:
        """Finish what is queued and leave the daemon."""
        for worker in (self._stores, self._lookups, self._loads):
            worker.close()
            self.guard.give_back("close", worker.store.close)
        for notifier in (self._store_done, self._lookup_done, self._load_done):
            notifier.close()

    # --------------------------------------------------------------------------------- internals

    def _number(self) -> int:
        with self._lock:
            self._next_task += 1
            return self._next_task

    def _submit_question(
        self, worker: "_Worker", answer: Callable[[ChunkStore], list[int]], num_keys: int, done: Any
    ) -> int:
        """Queue a task that answers with one bit per key."""
        task = self._number()

        def finish(found: list[int] | None) -> None:
            bits = Bitmap(num_keys)
            bits.batched_set(found or [])
            with self._lock:
                self._answers[task] = bits
            done.notify()

        self._submit(worker, lambda store: self.guard.ask("load", lambda: answer(store)), finish)
        return task

    def _submit(
        self, worker: "_Worker", work: Callable[[ChunkStore], Any], finish: Callable[[Any], None]
    ) -> None:
        if not worker.submit(lambda: finish(work(worker.store))):
            self.guard.count(QUEUE_FULL)
            finish(None)

    def _store(self, store: ChunkStore, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> L2StoreResult:
        num_bytes, all_kept = 0, True
        for kind, members in self._by_kind(keys, [_form_of(one) for one in objects]).items():
            names = [_name(keys[member]) for member in members]
            kept = store.write(kind, names, [objects[member].byte_array for member in members])
            num_bytes += kind.chunk_bytes * sum(kept)
            all_kept &= all(kept)
            self.guard.count("NO_ROOM", kept.count(False))
        return L2StoreResult(all_kept, num_bytes)

    def _lookup(self, store: ChunkStore, keys: Sequence[ObjectKey], layouts: Any) -> list[int]:
        found = []
        forms = [self._form_of_layout(key, layouts) for key in keys]
        for kind, members in self._by_kind(keys, forms).items():
            names = [_name(keys[member]) for member in members]
            is_stored = store.which(kind, names, MAX_GAPS)
            found += [member for member, here in zip(members, is_stored, strict=True) if here]
        return found

    def _promote(self, keys: Sequence[ObjectKey], forms: Sequence[Form]) -> None:
        for kind, members in self._by_kind(keys, forms).items():
            self._lookups.store.promote(kind, [_name(keys[member]) for member in members])

    def _load(self, store: ChunkStore, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> list[int]:
        found = []
        for kind, members in self._by_kind(keys, [_form_of(one) for one in objects]).items():
            while members:  # behind one that is gone, others may be there
                names = [_name(keys[member]) for member in members]
                num_read = store.read(kind, names, [objects[member].byte_array for member in members])
                found += members[:num_read]
                members = members[num_read + 1 :]
        return found

    def _by_kind(self, keys: Sequence[ObjectKey], forms: Sequence[Form | None]) -> dict[ChunkKind, list[int]]:
        """Return which keys are of which kind; those of unknown form are of none."""
        members: dict[ChunkKind, list[int]] = {}
        for number, (key, form) in enumerate(zip(keys, forms, strict=True)):
            if form is None:
                self.guard.count(UNKNOWN_FORM)
                continue
            self._forms[_place_of(key)] = form
            kind = self._kinds.get((key.model_name, *form))
            if kind is None:
                num_bytes, dtype = form
                weights = self._weights_digest(key.model_name)
                kind = ChunkKind(key.model_name, num_bytes, 1, f"mp {dtype}", weights)
                self._kinds[key.model_name, *form] = kind
            members.setdefault(kind, []).append(number)
        return members

    def _form_of_layout(self, key: ObjectKey, layouts: Any) -> Form | None:
        """Return the form of objects under `key`: as LMCache tells, or as they were last seen.

        Before 0.5.3 it tells one layout, not one for each group."""
        layout = layouts.get(key.object_group_id) if isinstance(layouts, dict) else layouts
        if layout is None or not layout.dtypes:  # LMCache's own benchmark tells empty ones
            return self._forms.get(_place_of(key))
        parts = zip(layout.shapes, layout.dtypes, strict=True)
        return sum(shape.numel() * dtype.itemsize for shape, dtype in parts), str(layout.dtypes[0])

    def _weights_digest(self, model: str) -> bytes:
        if model not in self._weights:
            self._weights[model] = self._options.weights_digest(model)
        return self._weights[model]


class _Worker:
    """One thread, one client, one bounded queue."""

    def __init__(self, what: str, store: ChunkStore) -> None:
        self.store = store
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED_TASKS)
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{what}", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether one more task would wait."""
        return self._tasks.unfinished_tasks > 0

    def submit(self, task: Callable[[], None]) -> bool:
        """Queue a task; False when the queue is full."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Finish what is queued, then end."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            finally:
                self._tasks.task_done()


def _form_of(memory_object: Any) -> Form:
    return memory_object.get_size(), str(memory_object.get_dtype())


def _place_of(key: ObjectKey) -> Place:
    return key.model_name, key.kv_rank, key.object_group_id


def _name(key: ObjectKey) -> bytes:
    parts = (key.chunk_hash.hex(), key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    return chunk_name("@".join(str(part) for part in parts))  # none of them contains an @
