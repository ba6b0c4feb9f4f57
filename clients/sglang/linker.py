"""KvtierLinker: SGLang's direct linker, pages between its device pools and an appliance, layer by layer.

There is no host pool: a prompt's pages are leased when the scheduler takes it, and copied through a few
megabytes of staging while its forward runs, which waits for one layer at a time. They are read under that
very lease: a second one might be refused, by a quota or an open breaker. What a pool's bytes mean is SGLang's
business (layered.py).

SGLang gives a prompt that it has begun to load no second chance: what does not arrive makes the scheduler
abort that batch's requests. So a load is only queued when every page of it is pinned, and looked up is only
what this host has. With several ranks all of them have to say the same, so there a rank that cannot pin
says yes, too, and its batch fails. Loads have a breaker of their own, which late stores do not open.

Two threads, which take turns at nothing: one loads and one stores, each with connections of its own.
Batches are pinned over two connections in turn: while leases of one are read it belongs to the loader.
The interface: sglang/srt/mem_cache/unified_cache/unified_cache_linker.py, 0.5.23.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker
from sglang.srt.runtime_context import get_model, get_parallel
from sglang.srt.utils import get_device_module

from ...v1.types import NamespaceIdentity
from ..connector.chain_store import ChainStore
from ..connector.guard import Guard, harmless
from ..connector.plugin_options import bad_option, check_choice, options_from
from ..connector.versions import check_version
from ..errors import KvtierError, NotFound
from ..sync.handles import Lease
from .delivery import LOAD_FAILED, LayerDelivery, Staging
from .identity import StorageOptions, hash_of, name_of, namespace_of, run_of_server, since_clear
from .layered import LayeredPages
from .pages import restorable

FRAGMENT_BYTES = 512 << 10  # of a page, at most: what is waited for before its layers can be used
MAX_PARENTS = 1 << 18  # pages of which the one before is remembered
NOT_PINNED = "NOT_PINNED"  # cause of a miss: found by a lookup, then gone, or beyond a quota


@dataclass(frozen=True, slots=True)
class LinkerOptions(StorageOptions):
    """What `linker_extra_config` may say."""

    name: str = "sglang-linker"
    on_reset: str = "forget"  # after the engine's cache was reset (weights updated?)

    def __post_init__(self) -> None:
        StorageOptions.__post_init__(self)  # super() does not know a dataclass with slots
        check_choice("on_reset", self.on_reset, ("forget", "keep"))


@dataclass(slots=True)
class _Part:
    """Pages of one pool that a request loads."""

    name: Any
    hashes: list[bytes]
    indices: Any
    store: ChainStore  # that pins them
    leases: list[Lease]  # one after another; empty when not all of it could be pinned


class KvtierLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """The linker. Settings: LinkerOptions."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises InvalidRequest for bad settings, an untested SGLang, or weights that are not found, and
        ValueError for pools that SGLang cannot link."""
        check_version("SGLang", version("sglang"))
        self.options = options_from(LinkerOptions, extra_config or {}, "the kvtier linker")
        self.forward_stream = forward_stream
        self.pool_group = resolve_hybrid_device_pool_group(
            kvcache=params.token_to_kv_pool_allocator.get_kvcache(),
            page_size=params.page_size,
            params=params,
            components=components,
        )
        self.pools = self.pool_group.entry_map
        self.guard = Guard(__name__)
        self._pages = {name: LayeredPages(entry) for name, entry in self.pools.items()}
        self._config, is_owner = _topology(params, self.pool_group.rank_replicated)
        self._stores_pages = is_owner
        self._weights = self.options.weights_of(get_model().model_path)
        self._run, self._num_resets = run_of_server(), 0
        self._identities = self._named()
        self.layer_done_counter = LayerWiseLoadCounter(self.pool_group.num_layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        options = self.options
        self._probes = ChainStore.at(options, self.guard, options.lookup_timeout_s)
        self._loads_guard = Guard(__name__)
        self._loads = [ChainStore.at(options, self._loads_guard, options.load_timeout_s) for _ in range(2)]
        self._sets = ChainStore.at(options, self.guard, options.store_timeout_s, options.staging_bytes)
        self._parents: OrderedDict[str, str] = OrderedDict()
        self._queued: dict[str, list[_Part]] = {}
        self._results: SimpleQueue[bool] = SimpleQueue()
        device = next(iter(self._pages.values())).device
        staging_bytes = max(options.staging_bytes, *(pages.page_bytes for pages in self._pages.values()))
        self._load_staging = Staging(device, staging_bytes)
        self._save_staging = Staging(device, staging_bytes)
        self._loader, self._saver = (
            ThreadPoolExecutor(1, f"kvtier-link-{what}") for what in ("load", "save")
        )

    # --------------------------------------------------------------------------------------- lookup

    @harmless(lambda *_, **__: [])
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the prefixes, in pages, that every pool can restore from this host."""
        pools = self.pool_group.resolve_transfers(transfers)
        keys = next((list(one.keys) for one in transfers if one.name == PoolName.KV), [])
        if not pools or not keys:
            return []
        self._remember(keys)
        hashes = [hash_of(key) for key in keys]
        chains = [one.name for one in pools if one.hit_policy == PoolHitPolicy.ALL_PAGES]
        num_pages = len(keys)
        for name in chains:
            num_pages = min(num_pages, self._probes.num_stored(self._identities[name], hashes) or 0)

        def present(name: str) -> list[bool]:
            return self._probes.which_stored(self._identities[name], hashes[:num_pages][::-1])[::-1]

        windows = [(one.name, one.hit_policy, len(one.keys or ())) for one in pools if one.name not in chains]
        return restorable(num_pages, windows, lambda _: num_pages, present)[1]

    # ----------------------------------------------------------------------------------------- load

    @harmless(lambda *_, **__: False)
    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Pin a request's pages; False when it has to be computed."""
        pools = self.pool_group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        store = self._loads[0]
        parts = [
            _Part(one.name, [hash_of(key) for key in one.keys], one.host_indices, store, []) for one in pools
        ]
        for part in parts:
            part.leases = store.pin(self._identities[part.name], part.hashes)
        num_lost = sum(not part.leases for part in parts)
        self.guard.count(NOT_PINNED, num_lost)
        if not parts or (num_lost and self._config.tp_size == 1):
            self._give_back(parts)
            return False
        self._queued[rid] = parts
        return True

    @harmless(lambda *_, **__: False)
    def cancel_queued_load(self, rid: str) -> bool:
        """Give up a load that has not started; False when there is none."""
        parts = self._queued.pop(rid, None)
        self._give_back(parts or [])
        return parts is not None

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; return its number, -1 for nothing."""
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        self._loads.reverse()  # the next batch is pinned by the other one, while this one is read
        index: int = self.layer_done_counter.update_producer()
        parts = [part for parts in queued.values() for part in parts]
        written = get_device_module().Event()
        written.record()  # the pages were another request's until now
        self._loader.submit(lambda: self._load(index, parts, written))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait for a load; True when all of it has landed."""
        return bool(self.layer_done_counter.finish(counter_index))

    def _load(self, index: int, parts: Sequence[_Part], written: Any) -> None:
        """Load a batch, and report how that ended when nothing of it is pinned any more."""
        counter = self.layer_done_counter
        try:
            try:
                self._deliver(index, parts, written)
            finally:
                self._give_back(parts)
            counter.complete(index, self.pool_group.num_layers - 1)
        except Exception as problem:
            self.guard.count(LOAD_FAILED)
            if not isinstance(problem, KvtierError):
                self.guard.defect("load")
            counter.fail(index, problem)

    def _deliver(self, index: int, parts: Sequence[_Part], written: Any) -> None:
        """Copy everything into the device; report all layers but the last as they are there.

        Raises NotFound when something did not come, and what else client and device raise."""
        written.synchronize()
        loads = []
        for part in parts:
            fragment_bytes = self._identities[part.name].geometry.fragment_bytes[0]
            loads.append(LayerDelivery(self._pages[part.name], part.indices, part.leases, fragment_bytes))
        for layer in range(self.pool_group.num_layers):
            if layer:
                self.layer_done_counter.complete(index, layer - 1)
            for load in loads:
                load.until(layer, self._load_staging)
        if not all(lease.still_valid() for part in parts for lease in part.leases):
            raise NotFound("what was loaded is no longer what was pinned", reason=LOAD_FAILED)

    def _give_back(self, parts: Sequence[_Part]) -> None:
        for part in parts:
            part.store.give_back(part.leases)

    # -------------------------------------------------------------------------------------- offload

    @harmless(lambda *_, **__: False)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Queue pages to be stored; False for nothing. One of the ranks with the same pages does it."""
        pools = self.pool_group.resolve_transfers(transfers, allow_partial=True)
        if not pools:
            return False
        if not self._stores_pages:
            self._results.put(True)
            return True
        identities, ready = self._identities, self.record_offload_ready()

        def run() -> None:
            is_stored = False
            try:
                for event in ready:
                    event.synchronize()
                is_stored = all(self._store(identities[one.name], one, session_id or "") for one in pools)
            except Exception:
                self.guard.defect("offload")
            self._results.put(is_stored)

        self._saver.submit(run)
        return True

    def _store(self, identity: NamespaceIdentity, transfer: Any, session: str) -> bool:
        """Store pages of one pool that are not stored yet; return whether all of them are now."""
        pages, keys = self._pages[transfer.name], list(transfer.keys)
        hashes = [hash_of(key) for key in keys]
        numbers = pages.numbers(transfer.host_indices)
        known = self._sets.num_stored(identity, hashes)
        if known is None:
            return False
        before = self._parents.get(keys[0], "") if transfer.hit_policy == PoolHitPolicy.ALL_PAGES else ""
        parent = hashes[known - 1] if known else hash_of(before) if before else b""
        most = self._save_staging.num_bytes // pages.page_bytes
        for first in range(known, len(keys), most):
            part = slice(first, first + most)
            data = self._save_staging.read(pages, numbers[part])
            stored = self._sets.store(identity, hashes[part], list(data), parent=parent, session=session)
            if stored.num_blocks < len(data):
                return False
            parent = hashes[part][-1]
        return True

    def num_completed_offloads(self) -> int:
        """Return how many offloads have ended and were not asked for."""
        return self._results.qsize()

    def pop_completed_offload(self) -> bool:
        """Return whether the oldest of them was stored. Raises queue.Empty when there is none."""
        return self._results.get_nowait()

    # ---------------------------------------------------------------------------------------- admin

    def reset(self) -> None:
        """Wait for everything under way; then find nothing that was stored before, unless `on_reset` keep."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for thread in (self._loader, self._saver):
            thread.submit(int).result()  # after all that was given before
        self._results = SimpleQueue()
        self.layer_done_counter.reset()
        if self.options.on_reset == "forget":
            self._num_resets += 1
            self._identities = self._named()

    def close(self) -> None:
        """Wait for everything under way, end the threads, close the connections."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for thread in (self._loader, self._saver):
            thread.shutdown()
        for store in (self._probes, *self._loads, self._sets):
            store.close()

    @property
    def causes(self) -> dict[str, int]:
        """How often something was lost, by cause."""
        return dict(Counter(self.guard.causes) + Counter(self._loads_guard.causes))

    # ------------------------------------------------------------------------------------ internals

    def _named(self) -> dict[Any, NamespaceIdentity]:
        """Return the namespace of each pool."""
        return {
            name: since_clear(
                namespace_of(
                    self._config,
                    name_of(name),
                    pages,
                    pages.page_bytes,
                    self._weights,
                    self.options.variant,
                    FRAGMENT_BYTES,
                ),
                self._run,
                self._num_resets,
            )
            for name, pages in self._pages.items()
        }

    def _remember(self, keys: Sequence[str]) -> None:
        """Note what each page continues: an offload names a piece of a chain, and not what is before it."""
        for before, key in pairwise(keys):
            self._parents[key] = before
        while len(self._parents) > MAX_PARENTS:
            self._parents.popitem(last=False)


def _topology(params: Any, is_replicated: bool) -> tuple[HiCacheStorageConfig, bool]:
    """Return what of this rank the names of pages depend on, and whether it is the one that stores them.

    Raises InvalidRequest for ranks that each hold or compute a part of a context."""
    for kind, num_ranks in (("DCP", get_parallel().attn_dcp_size), ("CP", params.attn_cp_size)):
        if num_ranks > 1:
            raise bad_option(
                f"the linker does not serve contexts cut over ranks ({kind}); use HiCache's storage backend"
            )
    rank, size = 0, int(get_parallel().tp_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        rank, size = torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)
    config = HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=size,
        pp_rank=params.pp_rank,
        pp_size=params.pp_size,
        attn_cp_rank=params.attn_cp_rank,
        attn_cp_size=params.attn_cp_size,
        is_mla_model=is_replicated,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name=get_model().model_path,
    )
    return config, not is_replicated or rank == 0
