"""A small engine with a paged cache, driven step by step as vLLM's scheduler drives a connector.

It has what the connector can get wrong: blocks with reference counts that are reused at once, a prefix
cache, sliding windows that give blocks away, chunked prefill, preemption, aborts. The content of a block is a
function of its hash, so a block that holds anything else where it must hold KV is a wrong byte, and it
is found in the step that would have used it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from kvtier.clients.memory.extents import U8
from kvtier.clients.vllm.groups import NULL_BLOCK, Group
from kvtier.clients.vllm.worker.pages import LayerView, PagedGroup

LAYERS = 4
PAGE_BYTES = 192  # of one block in one layer
HASH_TOKENS = 4


@lru_cache(maxsize=4096)
def content(name: bytes, group: int) -> U8:
    """Return the right bytes of a block, shape (layers, page bytes)."""
    seed = int.from_bytes(hashlib.sha256(name + bytes([group])).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, PAGE_BYTES), np.uint8)


def hashes_of(tokens: Sequence[int], salt: str = "") -> list[bytes]:
    """Return one chained hash per HASH_TOKENS tokens."""
    names, parent = [], salt.encode()
    for end in range(HASH_TOKENS, len(tokens) + 1, HASH_TOKENS):
        parent = hashlib.sha256(parent + repr(tokens[end - HASH_TOKENS : end]).encode()).digest()
        names.append(parent)
    return names


@dataclass(eq=False)
class Request:
    """What the connector reads of a request of the engine."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    salt: str = ""
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: Any = None
    kv_hints: Any = None
    lora_request: Any = None
    state: str = "waiting"  # waiting, loading, running
    tables: list[list[int]] = field(default_factory=list)
    max_tokens: int = 0
    _hashes: list[bytes] = field(default_factory=list)
    _hashed: int = -1

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        if self._hashed != self.num_tokens:
            self._hashes, self._hashed = hashes_of(self.tokens, self.salt), self.num_tokens
        return self._hashes


class Pool:
    """Blocks with reference counts, one pool for all groups. Implements saving.Holder."""

    def __init__(self, num_blocks: int) -> None:
        self.references = [0] * num_blocks
        self.references[NULL_BLOCK] = 1 << 30
        self.cached: dict[tuple[int, bytes], int] = {}
        self.names: dict[int, tuple[int, bytes]] = {}
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        block = self._free.pop()
        self.cached.pop(self.names.pop(block, (0, b"")), None)
        self.references[block] = 1
        return block

    def cache(self, block: int, group: int, name: bytes) -> None:
        if (group, name) not in self.cached and block not in self.names:
            self.cached[group, name] = block
            self.names[block] = (group, name)

    def has(self, name: bytes) -> bool:
        return (0, name) in self.cached

    def hold(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self.references[block] == 0:
                self._free.remove(block)
            self.references[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            self.references[block] -= 1
            assert self.references[block] >= 0, f"block {block} freed twice"
            if self.references[block] == 0:
                self._free.append(block) if block not in self.names else self._free.insert(0, block)


class PagedCache:
    """The memory: one array per group and layer, [blocks, page bytes]; groups share block numbers."""

    def __init__(self, groups: Sequence[Group], num_blocks: int) -> None:
        self.arrays = [[np.zeros((num_blocks, PAGE_BYTES), np.uint8) for _ in range(LAYERS)] for _ in groups]
        self.paged = [
            PagedGroup(
                [LayerView(a.__array_interface__["data"][0], a.shape, a.strides, 1) for a in layers],
                num_blocks,
            )
            for layers in self.arrays
        ]

    def write(self, group: int, block: int, data: U8) -> None:
        for layer, array in enumerate(self.arrays[group]):
            array[block] = data[layer]

    def is_right(self, group: int, block: int, name: bytes) -> bool:
        data = content(name, group)
        return all((array[block] == data[layer]).all() for layer, array in enumerate(self.arrays[group]))

    def scribble(self, block: int) -> None:
        """A new owner writes something else."""
        for group in range(len(self.arrays)):
            self.write(group, block, np.full((LAYERS, PAGE_BYTES), 0xAA, np.uint8))
