"""SGLang's device pools in host memory, and the tree's side of its direct linker.

Pools are seen through SGLang's own DevicePoolGroup, requests go through its own UnifiedCacheLinkerWrapper.
The tree is a stand-in: it hands out slots, and finds nothing by itself. What its components ask for follows
sglang/srt/mem_cache/unified_cache/components/{full,swa,mamba}.py, 0.5.23.
"""

import hashlib
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper

LAYERS, PAGE, NUM_PAGES = 4, 8, 24
WINDOW = 2  # pages
WAIT_S = 60.0


class Match(NamedTuple):
    """What the tree found by itself: nothing."""

    device_prefix_len: int = 0
    last_device_node: Any = None
    best_match_node: Any = None
    last_host_node: Any = None
    host_hit_length: int = 0
    swa_host_hit_length: int = 0
    mamba_host_hit_length: int = 0


class Key(list[str]):
    """A prompt, a word a token."""

    def maybe_to_bigram_view(self, is_eagle: bool) -> tuple["Key", None]:
        return self, None


def hashes_of(key: Any, prior: str | None = None, page_size: int = PAGE) -> list[str]:
    """Page hashes as SGLang chains them."""
    found, parent = [], bytes.fromhex(prior or "")
    for first in range(0, len(key), page_size):
        parent = hashlib.sha256(parent + "".join(key[first : first + page_size]).encode()).digest()
        found.append(parent.hex())
    return found


def pool_group(head_dim: int = 16, has_window: bool = False, has_state: bool = False) -> DevicePoolGroup:
    """Return pools of a model: K and V of each layer; with a window or states these have every other one."""

    def tensors(num: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.zeros(rows, 2, head_dim, dtype=dtype) for _ in range(num)]

    def entry(name: PoolName, layers: list[int], page: int, dtype: torch.dtype) -> DevicePoolEntry:
        num = len(layers)
        mapping: dict[int, Any] = {layer: (at, num + at) for at, layer in enumerate(layers)}
        buffers = [tensors(2 * num, NUM_PAGES * page, dtype)]
        if page == 1:  # a state: two tensors of unlike sizes a layer
            mapping = {layer: at for at, layer in enumerate(layers)}
            buffers = [tensors(num, NUM_PAGES, dtype), [torch.zeros(NUM_PAGES, 3) for _ in layers]]
        return DevicePoolEntry(
            name=name,
            indices_from_pool=name,
            device_pool=None,
            components=buffers,
            layer_mapping=mapping,
            page_size=page,
            rows_are_pages=page == 1,
        )

    every, odd = list(range(LAYERS)), list(range(1, LAYERS, 2))
    is_hybrid = has_window or has_state
    full = [layer for layer in every if layer not in odd] if is_hybrid else every
    entries = [entry(PoolName.KV, full, PAGE, torch.bfloat16)]
    if has_window:
        entries.append(entry(PoolName.SWA, odd, PAGE, torch.float16))
    if has_state:
        entries.append(entry(PoolName.MAMBA, odd, 1, torch.float32))
    return DevicePoolGroup(entries, LAYERS, PAGE)


def fill(group: DevicePoolGroup, seed: int) -> None:
    """Write something else into each tensor."""
    generator = torch.Generator().manual_seed(seed)
    for entry in group.entries:
        for buffer in entry.kv_buffer:
            buffer.copy_(torch.randn(buffer.shape, generator=generator))


def page_of(group: DevicePoolGroup, name: PoolName, number: int) -> list[torch.Tensor]:
    """Return what all tensors of a pool hold for a page."""
    entry = group.entry_map[name]
    span = slice(number * entry.page_size, (number + 1) * entry.page_size)
    return [buffer[span].clone() for buffer in entry.kv_buffer]


def slots(page_size: int, *pages: int) -> torch.Tensor:
    """Return slots of pages, as SGLang's allocators hand them out."""
    return torch.tensor([page * page_size + n for page in pages for n in range(page_size)], dtype=torch.int64)


@dataclass
class Component:
    """One of the tree's components: what it asks of a linker for `keys`."""

    component_type: ComponentType
    name: PoolName
    tree: "Tree"
    window: int = 0  # pages; 0: all
    freed: list[torch.Tensor] = field(default_factory=list)

    def build_external_linker_transfer(self, phase: Any, node: Any, keys: Any) -> PoolTransfer:
        policy = PoolHitPolicy.TRAILING_PAGES if self.window else PoolHitPolicy.ALL_PAGES
        chosen = list(keys[-self.window :]) if self.window else list(keys)
        transfer = PoolTransfer(name=self.name, keys=chosen, hit_policy=policy)
        if phase is self.tree.load_phase:
            size = 1 if self.name is PoolName.MAMBA else PAGE
            self.tree.taken[self.name] = self.tree.take(len(chosen))
            transfer.device_indices = slots(size, *self.tree.taken[self.name])
        return transfer

    def update_external_linker_load(self, phase: Any, req: Any, full: Any, transfer: Any, length: int) -> Any:
        if phase is self.tree.abort_phase:
            self.freed.append(transfer.device_indices)
            return None
        return transfer


class Tree:
    """The tree's side: SGLang's wrapper drives the linker through it. Pages are handed out from the end."""

    page_size = PAGE
    is_swa_enabled = False

    def __init__(self, linker: Any, group: DevicePoolGroup) -> None:
        from sglang.srt.mem_cache.unified_cache import unified_cache_linker as upstream

        self.load_phase = upstream.LinkerTransferPhase.LOAD
        self.abort_phase = upstream.ExternalLinkerLoadPhase.ABORT
        kinds = {
            PoolName.KV: (ComponentType.FULL, 0),
            PoolName.SWA: (ComponentType.SWA, WINDOW),
            PoolName.MAMBA: (ComponentType.MAMBA, 1),
        }
        made = {
            kinds[name][0]: Component(kinds[name][0], name, self, kinds[name][1]) for name in group.entry_map
        }
        self.components = made
        self._components_tuple = tuple(made.values())
        self.tree_components = tuple(made)
        self.tree_core = SimpleNamespace(is_eagle=False, enable_external_cache_linker=False)
        self.tree_core.build_external_linker_offload_transfers = lambda node: self.nodes[node]
        self.tree_core.mark_external_linker_offload_pending = lambda node: None
        self.tree_core.finish_external_linker_offload = lambda nodes, lock, ok: self.stored.update(
            dict.fromkeys(nodes, ok)
        )
        self.nodes: dict[int, list[PoolTransfer]] = {}
        self.stored: dict[int, bool] = {}
        self.locked: set[int] = set()
        self.taken: dict[PoolName, range] = {}  # pages of the last load
        self._next_page = NUM_PAGES
        self.wrapper = UnifiedCacheLinkerWrapper(self, linker)

    def take(self, num: int) -> range:
        self._next_page -= num
        return range(self._next_page, self._next_page + num)

    def inc_lock_ref(self, node: int) -> Any:
        self.locked.add(node)
        return SimpleNamespace(to_dec_params=lambda: None)

    def dec_lock_ref(self, node: int, _: Any) -> None:
        self.locked.remove(node)

    def _all_reduce_attn_groups(self, *_: Any) -> None:
        """One rank."""

    def store(self, key: Key, *pages: int) -> None:
        """Offload a prompt that was computed into `pages` as one node; wait until that has ended."""
        hashes, node = hashes_of(key), len(self.nodes)
        transfers = []
        for component in self._components_tuple:
            num = component.window or len(hashes)
            size = 1 if component.name is PoolName.MAMBA else PAGE
            policy = PoolHitPolicy.TRAILING_PAGES if component.window else PoolHitPolicy.ALL_PAGES
            indices = slots(size, *pages[-num:])
            transfers.append(PoolTransfer(component.name, None, indices, hashes[-num:], policy))
        self.nodes[node] = transfers
        self.wrapper.offload_nodes([node])
        pause, ends_at = threading.Event(), time.monotonic() + WAIT_S
        while not (done := self.wrapper.num_completed_offloads()):
            assert time.monotonic() < ends_at, "the offload never ended"
            pause.wait(0.005)
        self.wrapper.commit_completed_offloads(self.wrapper.take_completed_offloads(done))

    def run(self, key: Key, rid: str = "one") -> tuple[int, list[str]]:
        """Match, load and run one request alone; return tokens found, and requests to be aborted."""
        request = SimpleNamespace(rid=rid, last_node=None, kv=None, swa_branching_seqlen=None)
        self.taken.clear()
        found = self.wrapper.match(key, request, Match())
        num, _ = self.wrapper.load_back(request)
        assert num in (0, found.host_hit_length)
        index = self.wrapper.start_layer_wise_loading()
        counter = self.wrapper.layer_done_counter
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
        return num, self.wrapper.finish_loads()
