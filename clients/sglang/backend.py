"""KvtierStorage: SGLang's HiCacheStorage over an appliance.

SGLang calls from three threads of its own (exists, get, set), one batch at a time each, and waits; so each
has a connection, and every call a deadline. Nothing raises and nothing returns None where a list is
expected: in some revisions either ends the thread for good, and with it the storage. A page that is not
there, or not there in time, is a miss; a page that could not be stored is a False, which SGLang takes as a
miss of later requests.

Source of the interface: sglang/srt/mem_cache/hicache_storage.py, 0.5.23.
"""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from ...v1.types import NamespaceIdentity
from ..connector.chain_store import ChainStore
from ..connector.guard import Guard, harmless
from ..connector.versions import check_version
from .identity import (
    KV_POOL,
    StorageOptions,
    hash_of,
    name_of,
    namespace_of,
    run_of_server,
    since_clear,
)
from .pages import PageMemory, restorable


def _all_false(keys: Sequence[str] | None = None, *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys or ())


def _all_none(keys: Sequence[str], *_: Any, **__: Any) -> list[None]:
    return [None] * len(keys)


def _none_of(transfers: Sequence[Any], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KvtierStorage(HiCacheStorage):  # type: ignore[misc]
    """The backend. Settings: StorageOptions, under "kvtier" in the extra config."""

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Raises InvalidRequest for bad settings, an untested SGLang, or weights that are not found: mistakes
        to be seen when the backend is attached. An appliance that is not there is no mistake."""
        check_version("SGLang", version("sglang"))
        self.options = StorageOptions.from_config(storage_config.extra_config)
        self.config = storage_config
        self.guard = Guard(__name__)
        self._weights = self.options.weights_of(storage_config.model_name or "")
        self._run = run_of_server()
        self._num_clears = 0
        self._pools: dict[str, tuple[PageMemory, NamespaceIdentity]] = {}
        options = self.options
        self._probes = ChainStore.at(options, self.guard, options.lookup_timeout_s)
        self._gets = ChainStore.at(options, self.guard, options.load_timeout_s)
        self._sets = ChainStore.at(options, self.guard, options.store_timeout_s, options.staging_bytes)

    # ---------------------------------------------------------------------------------- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Learn where KV pages are. Raises when their size cannot be found out: then nothing can work."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV_POOL, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Learn where another pool's pages are (Mamba states, sliding windows, indexers ...)."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(name_of(host_pool_name), host_pool)

    # --------------------------------------------------------------------------------------- exists

    @harmless(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Whether a KV page is stored."""
        return self._num_available(KV_POOL, [key], None) == 1

    @harmless(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many KV pages are stored here or fetched from an object store, from the first on."""
        return self._num_available(KV_POOL, keys, extra_info)

    @harmless(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """Return how long a prefix all pools can restore, each by its policy, and which lengths exactly."""
        num_kv = self._num_available(KV_POOL, keys, extra_info)
        hits, lengths = restorable(
            num_kv,
            [(name_of(one.name), one.hit_policy, len(one.keys or ())) for one in pool_transfers or ()],
            lambda name: self._num_available(name, keys[:num_kv], extra_info),
            lambda name: self._present(name, keys[:num_kv]),
        )
        hits = {KV_POOL: num_kv, **hits} if num_kv else {}
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    # ------------------------------------------------------------------------------------------ get

    @harmless(_all_false)
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load KV pages into the host pool; the first False ends the hit."""
        return self._get(KV_POOL, keys, host_indices, extra_info)

    @harmless(_none_of)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Load pages of several pools."""
        return {
            one.name: self._get(name_of(one.name), one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    @harmless(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load one KV page into a flat tensor (a new one without `target_location`); None for a miss."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    @harmless(_all_none)
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Load KV pages into flat tensors; None for pages after the first miss."""
        _, identity = self._pools[KV_POOL]
        targets = target_locations or [self.mem_pool_host.get_dummy_flat_data_page() for _ in keys]
        num_pages = self._gets.load(identity, [hash_of(key) for key in keys], targets)
        return [*targets[:num_pages], *[None] * (len(keys) - num_pages)]

    # ------------------------------------------------------------------------------------------ set

    @harmless(_all_false)
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store KV pages from the host pool; True only for those that are stored."""
        return self._set(KV_POOL, keys, host_indices, extra_info)

    @harmless(_none_of)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of several pools."""
        return {
            one.name: self._set(name_of(one.name), one.keys or [], one.host_indices, extra_info)
            for one in transfers
        }

    @harmless(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store one KV page from a tensor."""
        return self.batch_set([key], [value])

    @harmless(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store KV pages from tensors; True only when all of them are stored."""
        _, identity = self._pools[KV_POOL]
        data = [value.contiguous() for value in values]
        return self._sets.store(identity, [hash_of(key) for key in keys], data).num_blocks == len(keys)

    # ---------------------------------------------------------------------------------------- admin

    @harmless(lambda *_, **__: False)
    def clear(self) -> bool:
        """Find nothing any more that was stored before. The appliance evicts it in time.

        The ranks of this server go on sharing what they share; a server started later, which may count its
        clears the same way over other weights, does not find it.
        """
        self._num_clears += 1
        for name, (memory, identity) in self._pools.items():
            self._pools[name] = (memory, since_clear(identity, self._run, self._num_clears))
        return True

    @harmless(lambda *_, **__: None)
    def close(self) -> None:
        """Close the connections."""
        for store in (self._probes, self._gets, self._sets):
            store.close()

    # ------------------------------------------------------------------------------------ internals

    def _register(self, name: str, pool: Any) -> None:
        memory = PageMemory(pool)
        identity = namespace_of(
            self.config, name, pool, memory.page_bytes, self._weights, self.options.variant
        )
        self._pools[name] = (memory, since_clear(identity, self._run, self._num_clears))

    def _num_available(self, name: str, keys: Sequence[str], extra_info: Any) -> int:
        if not keys or name not in self._pools:
            return 0
        hashes, before = [hash_of(key) for key in keys], _before(extra_info)
        return self._probes.num_available(self._pools[name][1], hashes, before)

    def _present(self, name: str, keys: Sequence[str]) -> list[bool]:
        """Return for every page whether it is stored; from the last one back, as far as MAX_GAPS reach."""
        if name not in self._pools:
            return [False] * len(keys)
        hashes = [hash_of(key) for key in reversed(keys)]
        return self._probes.which_stored(self._pools[name][1], hashes)[::-1]

    def _get(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        memory, identity = self._pools[name]
        if not memory.fits(keys, indices):
            return [False] * len(keys)
        into = memory.for_loading(indices)
        hashes, before = [hash_of(key) for key in keys], _before(extra_info)
        num_pages = self._gets.load(identity, hashes, into, before=before)
        memory.loaded(indices, into, num_pages)
        return [number < num_pages for number in range(len(keys))]

    def _set(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        memory, identity = self._pools[name]
        if not memory.fits(keys, indices):
            return [False] * len(keys)
        before = _before(extra_info)
        parent = before[-1] if before else b""
        hashes = [hash_of(key) for key in keys]
        stored = self._sets.store(identity, hashes, memory.of(indices), parent=parent)
        return [number < stored.num_blocks for number in range(len(keys))]


def _before(extra_info: Any) -> list[bytes]:
    """Return the names of the pages that a batch continues, where SGLang passes them."""
    return [hash_of(key) for key in getattr(extra_info, "prefix_keys", None) or () if key]
