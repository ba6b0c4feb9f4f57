"""Paged tensors of every preset as ndarrays, in random physical order, and what is in them by plain
indexing."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.clients.operations.page_layouts import PRESETS, PagesDescription
from kvtier.tiers.block import Geometry as TierGeometry
from kvtier.tiers.gpu.pages.layouts import PageLayout, PageTensor
from kvtier.v1.types import Geometry

FLAT_PRESETS = {name for name, axes in PRESETS.items() if "T" in axes}
ONE_PLANE = {"vllm_mla", "sglang_mla"}
NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass
class Paged:
    """Tensors of one preset over one slab of memory. `slab` is what would be one allocation."""

    preset: str
    geometry: Geometry
    page_tokens: int
    num_pages: int
    slab: NDArray[np.uint8]
    tensors: list[NDArray[Any]]

    def read(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Return [block, layer, plane, token, head, dim] of blocks whose pages are rows of `ids`."""
        g = self.geometry
        found = np.stack(
            [self._page(int(page)) for page in ids.ravel()]
        )  # page, layer, plane, token, head, dim
        shape = (*ids.shape, *found.shape[1:])
        blocks = np.moveaxis(found.reshape(shape), 1, 3)  # block, layer, plane, page, token, head, dim
        return blocks.reshape(
            len(ids), g.num_layers, g.num_planes, g.block_tokens, g.num_kv_heads, g.head_dim
        )

    def _page(self, page: int) -> NDArray[Any]:
        """Return [layer, plane, token, head, dim] of one page, element by element from the preset's axes."""
        g, axes = self.geometry, PRESETS[self.preset]
        out = np.zeros((g.num_layers, g.num_planes, self.page_tokens, g.num_kv_heads, g.head_dim), self.dtype)
        for layer, plane, token, head in np.ndindex(out.shape[:4]):
            tensor = self._tensor(axes, layer, plane)
            where = {"B": page, "N": token, "T": page * self.page_tokens + token, "H": head, "P": plane}
            where["L"] = layer
            index = tuple(where.get(axis, slice(None)) for axis in axes)
            row = tensor[index]
            out[layer, plane, token, head] = row[plane * g.head_dim :][: g.head_dim] if "C" in axes else row
        return out

    def _tensor(self, axes: str, layer: int, plane: int) -> NDArray[Any]:
        number = 0 if "L" in axes else layer
        if not {"P", "C"} & set(axes):
            number += plane * (1 if "L" in axes else self.geometry.num_layers)
        return self.tensors[number]

    @property
    def dtype(self) -> Any:
        return self.tensors[0].dtype


def make(rng: random.Random, preset: str, geometry: Geometry, page_tokens: int, num_pages: int) -> Paged:
    """Return tensors of random bytes, each with its axes in a random order of memory (the row stays last),
    one after another in one slab, or, where there is one per layer, interleaved page by page."""
    axes = PRESETS[preset]
    g = geometry
    sizes = {
        "B": num_pages,
        "N": page_tokens,
        "T": num_pages * page_tokens + page_tokens,
        "H": g.num_kv_heads,
    }
    sizes |= {"D": g.head_dim, "C": g.head_dim * g.num_planes, "P": g.num_planes, "L": g.num_layers}
    num_tensors = (1 if "L" in axes else g.num_layers) * (1 if {"P", "C"} & set(axes) else g.num_planes)
    item = NUMPY[{"float32": 4, "float16": 2, "bfloat16": 2}.get(g.dtype, 1)]
    outer = [*axes[:-1], "+"]  # "+": the tensors themselves
    if preset in FLAT_PRESETS:
        outer = [axis for axis in outer if axis != "T"]
    rng.shuffle(outer)
    if preset in FLAT_PRESETS:
        outer.insert(0, "T") if rng.random() < 0.5 else outer.insert(1, "T")
    sizes["+"] = num_tensors
    order = [*outer, axes[-1]]
    shape = [sizes[axis] for axis in order]
    slab = np.frombuffer(rng.randbytes(int(np.prod(shape)) * np.dtype(item).itemsize), np.uint8).copy()
    whole = slab.view(item).reshape(shape)
    first = np.moveaxis(whole, order.index("+"), 0)
    rest = [axis for axis in order if axis != "+"]
    tensors = [first[i].transpose([rest.index(axis) for axis in axes]) for i in range(num_tensors)]
    return Paged(preset, g, page_tokens, num_pages, slab, tensors)


def layout_of(description: PagesDescription, base: int) -> PageLayout:
    """Return what the daemon makes of a description whose tensors lie in one allocation at `base`."""
    tensors = tuple(
        PageTensor(
            0,
            placed.address - base,
            placed.first_layer,
            placed.num_layers,
            placed.layer_stride,
            placed.first_plane,
            placed.num_planes,
            placed.plane_stride,
        )
        for placed in description.tensors
    )
    d = description
    return PageLayout(d.num_pages, d.page_tokens, d.page_stride, d.token_stride, d.head_stride, tensors)


def tier_geometry(g: Geometry) -> TierGeometry:
    """The same geometry as the daemon's word."""
    return TierGeometry(
        g.num_layers,
        g.num_kv_heads,
        g.head_dim,
        g.block_tokens,
        g.dtype,
        g.layout,
        g.layers_per_group,
        g.num_planes,
    )
