"""Where the engine's blocks lie in memory: addresses of the pieces of each block, layer by layer.

The engine gives a logical view [blocks, heads, tokens, content] per layer, in any physical order. What is
needed is for each layer the address of block b, which is base + b * stride, and the runs of bytes that the
block has there. A block is opaque: on CPU the kernel stores keys transposed in it, and quantised caches have
scales beside the values.

An attention backend may want smaller blocks than the engine manages. The view then has several kernel blocks
for each block of the engine, in a row (`group_kernel_blocks` in vllm/v1/kv_cache_interface.py).
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ....v1.types import DTYPE_BYTES, Geometry
from ...errors import InvalidRequest, PreconditionFailed
from ...memory.buffers import Pieces
from ...memory.extents import I64
from ...operations.page_layouts import TensorView


class LayerView(NamedTuple):
    """A layer's cache as the engine gives it: address, shape and strides (bytes) of [blocks, ...]."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> "LayerView":
        """Read it off a tensor."""
        size = tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride())
        return cls(tensor.data_ptr(), tuple(tensor.shape), strides, size)

    @classmethod
    def of_layer(cls, cache: Any) -> "LayerView":
        """Read a layer's cache: a tensor, or those of a recurrent state, side by side in a page."""
        return cls.of(cache) if hasattr(cache, "data_ptr") else cls.of_states(list(cache))

    @classmethod
    def of_states(cls, states: Sequence[Any]) -> "LayerView":
        """Read the parts of a recurrent state as one run of bytes a block. Raises PreconditionFailed."""
        first, end = states[0], states[0].data_ptr()
        page_bytes = first.stride(0) * first.element_size()
        for state in states:
            is_dense = state[0].is_contiguous() and state.stride(0) * state.element_size() == page_bytes
            if state.data_ptr() != end or not is_dense or len(state) != len(first):
                raise PreconditionFailed(
                    "the parts of a recurrent state do not lie side by side in its page",
                    reason="LAYOUT_MISMATCH",
                )
            end += state[0].numel() * state.element_size()
        content_bytes = end - first.data_ptr()
        return cls(first.data_ptr(), (len(first), content_bytes), (page_bytes, 1), 1)

    def grouped(self, num_blocks: int) -> "LayerView":
        """Return the view with the engine's blocks in front, kernel blocks behind them.

        Raises PreconditionFailed."""
        per_block, rest = divmod(self.shape[0], num_blocks)
        if rest or not per_block:
            raise PreconditionFailed(
                f"a layer has {self.shape[0]} blocks, the engine manages {num_blocks}",
                reason="LAYOUT_MISMATCH",
            )
        if per_block == 1:
            return self
        first = self.strides[0]
        shape, strides = (
            (num_blocks, per_block, *self.shape[1:]),
            (first * per_block, first, *self.strides[1:]),
        )
        return self._replace(shape=shape, strides=strides)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer."""
        return prod(self.shape[1:]) * self.item_bytes

    def runs(self) -> tuple[tuple[int, ...], int]:
        """Return the offsets of a block's contiguous runs from its start, and the bytes of one run."""
        axes = sorted(range(1, len(self.shape)), key=lambda axis: self.strides[axis])
        run = self.item_bytes
        while axes and (self.strides[axes[0]] == run or self.shape[axes[0]] == 1):
            run *= self.shape[axes.pop(0)]
        offsets = [0]
        for axis in reversed(axes):
            offsets = [start + i * self.strides[axis] for start in offsets for i in range(self.shape[axis])]
        return tuple(offsets), run

    @property
    def order(self) -> str:
        """The physical order of the axes inside a block, outermost first, e.g. "123"."""
        axes = sorted(range(1, len(self.shape)), key=lambda axis: -self.strides[axis])
        return "".join(map(str, axes))


class PagedGroup:
    """The layers of one KV cache group. Raises PreconditionFailed when they cannot be read as blocks."""

    def __init__(self, layers: Sequence[LayerView], num_blocks: int) -> None:
        if not layers:
            raise PreconditionFailed("a KV cache group without layers", reason="LAYOUT_MISMATCH")
        self.layers = layers = [layer.grouped(num_blocks) for layer in layers]
        first = layers[0]
        for layer in layers:
            if (layer.shape[1:], layer.strides[1:], layer.item_bytes) != (
                first.shape[1:],
                first.strides[1:],
                first.item_bytes,
            ):
                raise PreconditionFailed(
                    "the layers of one KV cache group differ in shape", reason="LAYOUT_MISMATCH"
                )
        self.runs, self.piece_bytes = first.runs()
        self.num_layers = len(layers)
        self.num_blocks = num_blocks
        self.layer_bytes = first.block_bytes
        self.order = first.order
        starts = np.array([layer.address for layer in layers], np.int64)[:, None] + np.array(
            self.runs, np.int64
        )
        self._starts: I64 = starts.reshape(-1)  # of block 0: layer after layer, run after run
        strides = np.array([layer.strides[0] for layer in layers], np.int64)
        self._strides: I64 = np.repeat(strides, len(self.runs))

    def described(self, geometry: Geometry) -> tuple[str, list[TensorView]]:
        """Return axes (operations/page_layouts.py) and one view per layer of these blocks.

        By them the daemon reaches the blocks, which are stored in the order in which they lie. Raises
        InvalidRequest."""
        planes, tokens, heads = geometry.num_planes, geometry.block_tokens, geometry.num_kv_heads
        item_bytes = DTYPE_BYTES[geometry.dtype]
        row_bytes = geometry.head_dim * item_bytes
        shape: tuple[int, ...]
        strides: tuple[int, ...]
        if len(self.runs) == 1:  # any names for its parts will do
            axes, shape = "BPNHD", (planes, tokens, heads, geometry.head_dim)
            strides = (tokens * heads * row_bytes, heads * row_bytes, row_bytes, item_bytes)
        elif self.runs == tuple(range(0, self.runs[1] * heads, self.runs[1])):
            axes, shape = "BHNC", (heads, tokens, geometry.head_dim * planes)
            strides = (self.runs[1], row_bytes * planes, item_bytes)
        else:
            raise InvalidRequest(
                f"a block lies in {len(self.runs)} runs of {self.piece_bytes} bytes in each layer, which "
                "cannot be given to another process; set VLLM_KV_CACHE_LAYOUT to LBNHC",
                reason="BAD_PAGES",
            )
        whole = (self.num_blocks, *shape)
        return axes, [TensorView(one.address, whole, (one.strides[0], *strides)) for one in self.layers]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.layer_bytes * self.num_layers

    def pieces(self, block_ids: Sequence[int], owner: Any = None) -> Pieces:
        """Return where the blocks lie. Raises ValueError for a block that does not exist."""
        ids = np.array(block_ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise ValueError(f"block ids {ids.min()} to {ids.max()}, the engine has {self.num_blocks}")
        return Pieces(self._starts + ids[:, None] * self._strides, self.piece_bytes, owner)


def device_of(kv_caches: Mapping[str, Any]) -> Any:
    """Return the device of an engine's cache, by its first layer."""
    first = next(iter(kv_caches.values()))
    return (first if hasattr(first, "device") else first[0]).device
