"""How small the pieces of a get into a runtime's pages are, and what computing its columns costs.

    python -m bench.direct

No GPU: only what the daemon itself does per get is timed, for a prefix of 4,096 tokens of Llama-3-8B. What a
device makes of these columns has to be measured on one.
"""

import time

import numpy as np

from kvtier.clients.operations.page_layouts import PagesDescription, describe
from kvtier.tiers.block import Geometry as DaemonGeometry
from kvtier.tiers.gpu.pages.layouts import LAYOUT, PageLayout, PageTensor, page_table
from kvtier.tiers.gpu.pages.pages import RegisteredPages
from kvtier.v1.types import Geometry

from .machine import describe as describe_machine
from .table import render

COMMAND = "python -m bench.direct"
NUM_PAGES, NUM_BLOCKS, ROUNDS = 1024, 256, 5
LAYERS, HEADS, TOKENS, DIM = 32, 8, 16, 128

#: name -> preset, axes of the tensors in memory, axes in the preset's order
ORDERS = {
    "NHD, K and V apart": ("vllm_flash_attention", "PBNHD"),
    "NHD, K and V side by side": ("vllm", "BNHC"),
    "HND, K and V side by side": ("vllm", "BHNC"),
    "all layers of a page together": ("vllm_cross_layer", "BLPNHD"),
}
SIZES = {"B": NUM_PAGES, "P": 2, "N": TOKENS, "H": HEADS, "D": DIM, "C": 2 * DIM, "L": LAYERS}
LOGICAL = {"vllm_flash_attention": "PBNHD", "vllm": "BHNC", "vllm_cross_layer": "BLPNHD"}


def described(preset: str, memory: str, geometry: Geometry) -> PagesDescription:
    """Return the pages of tensors that are never touched, so that they take no memory."""
    num_tensors = 1 if "L" in memory else LAYERS
    shape = [SIZES[axis] for axis in memory]
    tensors = [np.empty(shape, np.uint16) for _ in range(num_tensors)]
    order = [memory.index(axis) for axis in LOGICAL[preset]]
    return describe(preset, [tensor.transpose(order) for tensor in tensors], geometry)


def pages_of(description: PagesDescription, geometry: Geometry) -> RegisteredPages:
    """Return what the daemon makes of it."""
    d = description
    tensors = tuple(
        PageTensor(
            0,
            t.address,
            t.first_layer,
            t.num_layers,
            t.layer_stride,
            t.first_plane,
            t.num_planes,
            t.plane_stride,
        )
        for t in d.tensors
    )
    layout = PageLayout(d.num_pages, d.page_tokens, d.page_stride, d.token_stride, d.head_stride, tensors)
    g = geometry
    shape = DaemonGeometry(
        g.num_layers, g.num_kv_heads, g.head_dim, g.block_tokens, g.dtype, g.layout, g.layers_per_group
    )
    return RegisteredPages(page_table(layout, shape, [0]))


def row(name: str, layout: str, layers_per_group: int) -> tuple[str, ...]:
    """Measure one kind of pages."""
    preset, memory = ORDERS[name]
    geometry = Geometry(LAYERS, HEADS, DIM, TOKENS, "bfloat16", layout, layers_per_group)
    pages = pages_of(described(preset, memory, geometry), geometry)
    ids = np.random.default_rng(1).permutation(NUM_PAGES)[:NUM_BLOCKS].reshape(-1, 1)
    slots = np.uint64(1 << 46) + np.arange(NUM_BLOCKS, dtype=np.uint64) * np.uint64(1 << 22)
    pages.template(0)
    times = []
    for _ in range(ROUNDS):
        began_at = time.perf_counter()
        for group in range(geometry.num_groups):
            pieces = pages.scatter(group, slots, ids)
        times.append(time.perf_counter() - began_at)
    num_pieces = len(pieces.lengths) * geometry.num_groups
    kind = "portable" if layout == LAYOUT else "as they are"
    mean = int(pieces.lengths.mean())
    per_gib = sorted(times)[ROUNDS // 2] * 1e3 / (NUM_BLOCKS * geometry.block_bytes / 2**30)
    return (name, kind, str(layers_per_group or LAYERS), f"{mean:,}", f"{num_pieces:,}", f"{per_gib:.1f}")


def main() -> None:
    for name, value in describe_machine({}).items():
        print(f"{name}: {value}")
    print(f"command: {COMMAND}\n")
    rows = [row(name, layout, 1) for name in ORDERS for layout in (LAYOUT, "page order")]
    rows.append(row("all layers of a page together", LAYOUT, 0))
    head = ("pages", "fragments", "layers each", "bytes a piece", "pieces", "ms of columns per GiB")
    print(render(head, rows))


if __name__ == "__main__":
    main()
