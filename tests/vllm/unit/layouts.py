"""vLLM 0.32's KV caches as numbers: what vllm/v1/kv_cache_interface.py makes of a spec and a KVCacheLayout.

tests/vllm/contract/test_layouts.py holds these numbers against vLLM itself."""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

ORDERS = {  # KVCacheLayout: logical axes L, B, H, N, C, outermost first
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
NUM_LAYERS, NUM_BLOCKS = 2, 12


@dataclass(frozen=True)
class Layout:
    """One group's cache. `content_bytes` of a head and state, that is of K, V and what lies beside them."""

    order: str
    dtype: str  # of the tensor, as torch names it
    num_heads: int
    head_size: int
    content_bytes: int
    head_size_v: int | None = None  # None: as head_size
    block_tokens: int = 16
    kernel_tokens: int = 0  # 0: block_tokens
    padded_bytes: int = 0  # of a page; 0: not padded
    tokens_per_state: int = 1
    cache_dtype: str = "auto"
    is_mla: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of an element of the tensor."""
        return {"bfloat16": 2}.get(self.dtype, 1)

    @property
    def kernel_blocks(self) -> int:
        """Kernel blocks of a block of the engine."""
        return self.block_tokens // (self.kernel_tokens or self.block_tokens)

    @property
    def shape_bytes(self) -> tuple[int, ...]:
        """[L, B, H, N, C], C in bytes; B counts kernel blocks."""
        states = self.block_tokens // self.kernel_blocks // self.tokens_per_state
        return NUM_LAYERS, NUM_BLOCKS * self.kernel_blocks, self.num_heads, states, self.content_bytes

    @property
    def strides(self) -> tuple[int, ...]:
        """Byte strides of `shape_bytes`."""
        order, shape, found, step = ORDERS[self.order], self.shape_bytes, [0] * 5, 1
        page_ends = max(order.index(0), order.index(1))  # behind it only H, N and C of one page
        for at in reversed(range(5)):
            if at == page_ends and self.padded_bytes:
                step = max(step, self.padded_bytes)
            found[order[at]] = step
            step *= shape[order[at]]
        return tuple(found)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        longest = max(range(5), key=lambda axis: (self.strides[axis], self.shape_bytes[axis]))
        return self.strides[longest] * self.shape_bytes[longest]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one block of the engine in one layer, without padding."""
        return prod(self.shape_bytes[2:]) * self.kernel_blocks

    def views(self, memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Return the bytes of each layer, [B, H, N, C]."""
        whole = np.lib.stride_tricks.as_strided(memory, self.shape_bytes, self.strides)
        return list(whole)


def _ordinary(order: str, dtype: str, heads: int, size: int, **more: Any) -> Layout:
    item_bytes = 2 if dtype == "bfloat16" else 1
    size_v = more.get("head_size_v", size)
    return Layout(order, dtype, heads, size, (size + size_v) * item_bytes, **more)


LAYOUTS = {
    "bf16": _ordinary("LBNHC", "bfloat16", 2, 32),
    "bf16, heads first": _ordinary("LBHNC", "bfloat16", 2, 32),
    "bf16, heads outermost": _ordinary("LHBNC", "bfloat16", 2, 32),
    "bf16, heads before layers": _ordinary("BHLNC", "bfloat16", 2, 32),
    "fp8": _ordinary("LBNHC", "uint8", 2, 32, cache_dtype="fp8"),
    "fp8_e4m3, heads first": _ordinary("LBHNC", "uint8", 2, 32, cache_dtype="fp8_e4m3"),
    "fp8_e5m2, blocks outermost": _ordinary("BLHNC", "uint8", 2, 32, cache_dtype="fp8_e5m2"),
    "fp8, heads outermost": _ordinary("LHBNC", "uint8", 3, 32, cache_dtype="fp8"),
    "float8_e4m3fn": _ordinary("LBNHC", "float8_e4m3fn", 2, 32, cache_dtype="fp8_inc"),
    # Scales, float32, behind each head's values (TritonAttentionBackend.customize_spec).
    "fp8_per_token_head": Layout("LBNHC", "uint8", 2, 32, 32 + 32 + 8, cache_dtype="fp8_per_token_head"),
    "int8_per_token_head": Layout("LBHNC", "int8", 2, 32, 32 + 32 + 8, cache_dtype="int8_per_token_head"),
    "K and V unequal": _ordinary("LBNHC", "bfloat16", 2, 48, head_size_v=32),
    "K and V unequal, heads outermost": _ordinary("LHBNC", "bfloat16", 2, 48, head_size_v=32),
    "kernel blocks": _ordinary("LBNHC", "bfloat16", 2, 32, block_tokens=64, kernel_tokens=16),
    "kernel blocks, fp8, heads first": _ordinary(
        "LBHNC", "uint8", 2, 32, block_tokens=64, kernel_tokens=32, cache_dtype="fp8"
    ),
    "mla": Layout("LBNHC", "bfloat16", 1, 576, 1152, 0, 64, is_mla=True),
    # FlashMLA sparse: 512 of fp8, 16 of scales, 128 of bfloat16 RoPE.
    "fp8_ds_mla": Layout("LBNHC", "uint8", 1, 576, 656, 0, 64, cache_dtype="fp8_ds_mla", is_mla=True),
    # DeepSeek V4: pages padded to the kernel's stride, four tokens a state.
    "fp8_ds_mla, padded, compressed": Layout(
        *("LBNHC", "uint8", 1, 512, 584, 0, 64, 0, 9792, 4), cache_dtype="fp8_ds_mla", is_mla=True
    ),
}
