"""Where a runtime's pages lie: what it registered, checked against what it can mean.

A runtime keeps K and V in *pages*: the same tokens of all layers, scattered over one tensor or over one per
layer and plane, in an order its attention kernels like. Whatever it calls that order, here it is numbers: for
every (layer, plane) the address of page 0, and three strides (page, token, head). The elements of one head of
one token are contiguous in every layout we know of (vLLM's NHD, HND and block-outermost ones, SGLang's
layer-first and page-first pools), so a row of head_dim elements is the smallest piece. Names of layouts stay
with the client (clients/operations/page_layouts.py), because only the runtime knows its tensors; a table of
names here would have to be kept in step with every release of every runtime.

Strides come from another process. They are compared as Python integers, which do not overflow, with what the
client says it has allocated, before anything is opened: a copy outside of an allocation would not fail, it
would break the device's context for all clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...block import DTYPE_BYTES, Geometry

LAYOUT = "layer,kv,token,head,dim"  # portable order of the bytes of a stored fragment
MAX_PAGES = 1 << 26
MAX_STRIDE_BYTES = 1 << 48
MAX_ALLOCATIONS = 1024
MAX_TENSORS = 4096
MAX_ROWS = 1 << 18  # pieces of one fragment, before neighbours are merged


class LayoutError(ValueError):
    """What was registered cannot be the pages of this geometry. The message names the field."""


@dataclass(frozen=True, slots=True)
class PageTensor:
    """Where some layers and planes of page 0 lie in allocation number `allocation`. Strides in bytes."""

    allocation: int
    offset: int
    first_layer: int
    num_layers: int
    layer_stride: int = 0
    first_plane: int = 0
    num_planes: int = 1
    plane_stride: int = 0


@dataclass(frozen=True, slots=True)
class PageLayout:
    """How pages lie: what all tensors share, and the tensors. Strides in bytes."""

    num_pages: int
    page_tokens: int
    page_stride: int
    token_stride: int
    head_stride: int
    tensors: tuple[PageTensor, ...]


@dataclass(frozen=True, slots=True)
class PageTable:
    """A checked layout with addresses: row (layer, plane) of `bases` is where page 0 of it begins."""

    geometry: Geometry
    layout: PageLayout
    bases: NDArray[np.int64]  # (num_layers, num_planes)

    @property
    def is_portable(self) -> bool:
        """Whether fragments have the portable order, so that other layouts can read them.

        Else their bytes are in the order of these very pages, layer after layer."""
        return self.geometry.layout == LAYOUT

    @property
    def pages_per_block(self) -> int:
        """Pages that hold the tokens of one block."""
        return self.geometry.block_tokens // self.layout.page_tokens


def row_bytes_of(geometry: Geometry) -> int:
    """Return the bytes of one head of one token in one plane."""
    return geometry.head_dim * DTYPE_BYTES[geometry.dtype]


def check_layout(layout: PageLayout, geometry: Geometry, allocation_bytes: Sequence[int]) -> None:
    """Raise LayoutError unless `layout` can be the pages of `geometry`.

    It must put every page inside its allocations, which have `allocation_bytes` bytes, each (layer, plane) in
    one place, and no element over another one of its tensor."""
    if geometry.layout != LAYOUT and geometry.block_tokens != layout.page_tokens:
        raise LayoutError(
            f"a namespace of layout {geometry.layout!r} keeps pages as they are: page_tokens must be its "
            f"block_tokens, {geometry.block_tokens}, is {layout.page_tokens}"
        )
    _check_numbers(layout, geometry, allocation_bytes)
    bounds = [
        (layout.page_stride, layout.num_pages),
        (layout.token_stride, layout.page_tokens),
        (layout.head_stride, geometry.num_kv_heads),
    ]
    row_bytes = row_bytes_of(geometry)
    seen: set[tuple[int, int]] = set()
    for number, tensor in enumerate(layout.tensors):
        where = f"tensor {number}"
        if not 0 <= tensor.allocation < len(allocation_bytes):
            raise LayoutError(f"{where}: allocation {tensor.allocation} of {len(allocation_bytes)}")
        layers = range(tensor.first_layer, tensor.first_layer + tensor.num_layers)
        planes = range(tensor.first_plane, tensor.first_plane + tensor.num_planes)
        if not layers or not planes or layers[-1] >= geometry.num_layers or planes[-1] >= geometry.num_planes:
            raise LayoutError(
                f"{where}: layers {layers.start} to {layers.stop}, planes {planes.start} to {planes.stop}; "
                f"the geometry has {geometry.num_layers} and {geometry.num_planes}"
            )
        dims = [*bounds, (tensor.layer_stride, len(layers)), (tensor.plane_stride, len(planes))]
        end = tensor.offset + row_bytes + sum(stride * (count - 1) for stride, count in dims)
        limit = allocation_bytes[tensor.allocation]
        if end > limit:
            raise LayoutError(f"{where} ends at byte {end} of its allocation, which has {limit}")
        _check_overlap(where, dims, row_bytes)
        mine = {(layer, plane) for layer in layers for plane in planes}
        if not seen.isdisjoint(mine):
            raise LayoutError(f"{where} has layers and planes that an earlier tensor has, too")
        seen |= mine
    missing = geometry.num_layers * geometry.num_planes - len(seen)
    if missing:
        raise LayoutError(f"{missing} of the geometry's (layer, plane) pairs are in no tensor")


def page_table(layout: PageLayout, geometry: Geometry, addresses: Sequence[int]) -> PageTable:
    """Return the table of a checked layout, with its allocations mapped at `addresses`."""
    bases = np.zeros((geometry.num_layers, geometry.num_planes), np.int64)
    for tensor in layout.tensors:
        start = addresses[tensor.allocation] + tensor.offset
        for layer in range(tensor.num_layers):
            for plane in range(tensor.num_planes):
                where = start + layer * tensor.layer_stride + plane * tensor.plane_stride
                bases[tensor.first_layer + layer, tensor.first_plane + plane] = where
    return PageTable(geometry, layout, bases)


def _check_numbers(layout: PageLayout, geometry: Geometry, allocation_bytes: Sequence[int]) -> None:
    if not 0 < len(allocation_bytes) <= MAX_ALLOCATIONS or not 0 < len(layout.tensors) <= MAX_TENSORS:
        raise LayoutError(
            f"{len(allocation_bytes)} allocations and {len(layout.tensors)} tensors; "
            f"1 to {MAX_ALLOCATIONS} and 1 to {MAX_TENSORS} are taken"
        )
    if not 0 < layout.num_pages <= MAX_PAGES:
        raise LayoutError(f"num_pages must be 1 to {MAX_PAGES}, is {layout.num_pages}")
    if layout.page_tokens <= 0 or geometry.block_tokens % layout.page_tokens:
        raise LayoutError(
            f"page_tokens is {layout.page_tokens}; a block of {geometry.block_tokens} tokens is no whole "
            "number of such pages"
        )
    strides = [("page_stride", layout.page_stride), ("token_stride", layout.token_stride)]
    strides.append(("head_stride", layout.head_stride))
    for tensor in layout.tensors:
        strides += [("layer_stride", tensor.layer_stride), ("plane_stride", tensor.plane_stride)]
        strides.append(("offset", tensor.offset))
    for name, stride in strides:
        if not 0 <= stride <= MAX_STRIDE_BYTES:
            raise LayoutError(f"{name} must be 0 to {MAX_STRIDE_BYTES} bytes, is {stride}")
    num_rows = (
        geometry.layers_of(0).stop * geometry.num_planes * geometry.block_tokens * geometry.num_kv_heads
    )
    if num_rows > MAX_ROWS:
        raise LayoutError(f"a fragment has {num_rows} rows, limit {MAX_ROWS}; lower layers_per_group")


def _check_overlap(where: str, dims: Sequence[tuple[int, int]], row_bytes: int) -> None:
    """Raise LayoutError unless each stride steps over everything that the smaller ones reach."""
    reach = row_bytes
    for stride, count in sorted(dim for dim in dims if dim[1] > 1):
        if stride < reach:
            raise LayoutError(
                f"{where}: a stride of {stride} bytes steps on elements that reach {reach} bytes"
            )
        reach += stride * (count - 1)
