"""Where the engine's blocks lie in host memory: addresses of the pieces of each block, layer by layer.

The engine gives a logical view [blocks, heads, tokens, content] per layer, in any physical order. What is
needed is for each layer the address of block b, which is base + b * stride, and the runs of bytes that the
block has there. A block is opaque: on CPU the kernel stores keys transposed in it.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..buffers import Pieces
from ..errors import PreconditionFailed
from ..extents import I64


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
        first = layers[0]
        for layer in layers:
            if layer.shape[0] < num_blocks:
                raise PreconditionFailed(
                    f"a layer has {layer.shape[0]} blocks, the engine manages {num_blocks}",
                    reason="LAYOUT_MISMATCH",
                )
            if (layer.shape[1:], layer.strides[1:], layer.item_bytes) != (
                first.shape[1:],
                first.strides[1:],
                first.item_bytes,
            ):
                raise PreconditionFailed(
                    "the layers of one KV cache group differ in shape", reason="LAYOUT_MISMATCH"
                )
        offsets, self.piece_bytes = first.runs()
        self.num_layers = len(layers)
        self.num_blocks = num_blocks
        self.layer_bytes = first.block_bytes
        self.order = first.order
        starts = np.array([layer.address for layer in layers], np.int64)[:, None] + np.array(
            offsets, np.int64
        )
        self._starts: I64 = starts.reshape(-1)  # of block 0: layer after layer, run after run
        strides = np.array([layer.strides[0] for layer in layers], np.int64)
        self._strides: I64 = np.repeat(strides, len(offsets))

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
