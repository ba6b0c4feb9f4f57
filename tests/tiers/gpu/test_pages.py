"""Fragments and pages against numpy: every preset, every physical order, random geometries."""

import ctypes
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvtier.clients.errors import InvalidRequest
from kvtier.clients.operations.page_layouts import PRESETS, describe
from kvtier.tiers.gpu.device.contract import CopyPieces
from kvtier.tiers.gpu.pages import layouts
from kvtier.tiers.gpu.pages.layouts import LayoutError, PageLayout, PageTensor, check_layout, page_table
from kvtier.tiers.gpu.pages.pages import PageIdError, RegisteredPages
from kvtier.v1.types import Geometry

from . import paged

NUM_PAGES = 9


def geometry_of(rng: random.Random, preset: str, page_tokens: int) -> Geometry:
    is_flat_head = "H" not in PRESETS[preset] or preset in paged.ONE_PLANE
    return Geometry(
        num_layers=rng.randrange(2, 6),
        num_kv_heads=1 if is_flat_head else rng.randrange(1, 4),
        head_dim=rng.choice((1, 3, 8)),
        block_tokens=page_tokens * rng.choice((1, 1, 2, 3)),
        dtype=rng.choice(("float32", "bfloat16", "int8")),
        layers_per_group=rng.choice((0, 1, 1, 2)),
        num_planes=1 if preset in paged.ONE_PLANE else 2,
    )


def run(pieces: CopyPieces) -> None:
    """Copy as a stream would."""
    for source, target, length in zip(*(column.tolist() for column in pieces), strict=True):
        ctypes.memmove(target, source, length)


def pages_of(held: paged.Paged) -> RegisteredPages:
    """Register as the daemon does; the numbers are checked."""
    geometry = paged.tier_geometry(held.geometry)
    description = describe(held.preset, held.tensors, held.geometry, held.page_tokens)
    assert description.num_pages >= held.num_pages
    base = int(held.slab.ctypes.data)
    layout = paged.layout_of(description, base)
    check_layout(layout, geometry, [held.slab.nbytes])
    return RegisteredPages(page_table(layout, geometry, [base]))


def draw_ids(rng: random.Random, pages: RegisteredPages, num_blocks: int) -> Any:
    ids = rng.sample(range(NUM_PAGES), num_blocks * pages.table.pages_per_block)
    packed = np.array(ids, "<u4").tobytes()
    return pages.ids(packed, num_blocks, is_target=True)


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_gathered_is_what_indexing_finds_and_scattering_undoes_it(preset: str) -> None:
    for seed in range(40):
        rng = random.Random(f"{preset}/{seed}")
        page_tokens = rng.choice((1, 2, 4))
        geometry = geometry_of(rng, preset, page_tokens)
        held = paged.make(rng, preset, geometry, page_tokens, NUM_PAGES)
        pages = pages_of(held)
        ids = draw_ids(rng, pages, rng.randrange(1, NUM_PAGES // pages.table.pages_per_block + 1))
        expected = held.read(ids)
        before = held.slab.copy()
        fragments = []
        for group in range(geometry.num_groups):
            size = geometry.fragment_bytes[group]
            parts = np.zeros((len(ids), size), np.uint8)
            starts = parts.ctypes.data + np.arange(len(ids), dtype=np.uint64) * np.uint64(size)
            run(pages.gather(group, starts, ids))
            first = group * (geometry.layers_per_group or geometry.num_layers)
            wanted = expected[:, first : first + pages.table.geometry.layers_of(group).__len__()]
            assert parts.tobytes() == np.ascontiguousarray(wanted).tobytes(), f"seed {seed}, group {group}"
            fragments.append((group, starts, parts))
        assert (held.slab == before).all()
        held.slab[:] = 0xA5
        for group, starts, _ in fragments:
            run(pages.scatter(group, starts, ids))
        assert (held.read(ids) == expected).all(), f"seed {seed}"
        # Nothing else was touched: writing the blocks' bytes away leaves what was there.
        for group, starts, parts in fragments:
            parts[:] = 0xA5
            run(pages.scatter(group, starts, ids))
        assert (held.slab == 0xA5).all(), f"seed {seed}: a scatter left its pages"


def pieces_of(pieces: CopyPieces) -> set[tuple[int, int]]:
    """Return source and target of every byte: what a copy means, whatever was merged and in which order."""
    columns = (column.tolist() for column in pieces)
    return {(s + i, t + i) for s, t, n in zip(*columns, strict=True) for i in range(n)}


@pytest.mark.parametrize("preset", PRESETS)
def test_fragments_of_many_layer_groups_are_copied_as_one_group_after_the_other(preset: str) -> None:
    has_uneven = False
    for seed in range(20):
        rng = random.Random(f"mixed/{preset}/{seed}")
        page_tokens = rng.choice((1, 2))
        geometry = geometry_of(rng, preset, page_tokens)
        pages = pages_of(paged.make(rng, preset, geometry, page_tokens, NUM_PAGES))
        ids = draw_ids(rng, pages, NUM_PAGES // pages.table.pages_per_block)
        rows = [(block, group) for block in range(len(ids)) for group in range(geometry.num_groups)]
        chosen = rng.sample(rows, rng.randrange(1, len(rows) + 1)) if seed % 3 else rows
        blocks, groups = np.array(chosen).T
        starts = np.uint64(1 << 30) + np.arange(len(chosen), dtype=np.uint64) * np.uint64(1 << 20)
        expected: set[tuple[int, int]] = set()
        for group in range(geometry.num_groups):
            of = np.flatnonzero(groups == group)
            expected |= pieces_of(pages.gather(group, starts[of], ids[blocks[of]]))
        found = pages.gather(groups, starts, ids[blocks])
        assert pieces_of(found) == expected, f"seed {seed}"
        there = pages.scatter(groups, starts, ids[blocks])
        assert {(target, source) for source, target in pieces_of(there)} == expected, f"seed {seed}"
        has_uneven |= len({len(pages.template(group).lengths) for group in range(geometry.num_groups)}) > 1
    assert has_uneven or preset == "sglang_mla"  # pages of one piece


def test_pages_that_are_kept_as_they_are_need_no_permutation() -> None:
    """A layout of its own: a page's layer is one run, whatever the order inside, and comes back as it was."""
    rng = random.Random(7)
    geometry = Geometry(3, 2, 8, 4, "bfloat16", layout="vllm HND", layers_per_group=1)
    slab = np.frombuffer(rng.randbytes(3 * NUM_PAGES * 4 * 2 * 16 * 2), np.uint8).copy()
    whole = slab.view(np.uint16).reshape(3, NUM_PAGES, 2, 4, 16)  # layer, page, head, token, K and V
    held = paged.Paged("vllm", geometry, 4, NUM_PAGES, slab, list(whole))
    pages = pages_of(held)
    ids = draw_ids(rng, pages, 3)
    parts = np.zeros((3, geometry.fragment_bytes[1]), np.uint8)
    starts = parts.ctypes.data + np.arange(3, dtype=np.uint64) * np.uint64(parts.shape[1])
    pieces = pages.gather(1, starts, ids)
    assert pieces.lengths.tolist() == [parts.shape[1]] * 3
    run(pieces)
    assert parts.tobytes() == whole[1][ids[:, 0]].tobytes()
    permuted = replace(geometry, layout=layouts.LAYOUT)
    assert len(pages_of(replace(held, geometry=permuted)).template(1).lengths) == 2 * 4 * 2


def test_neighbours_are_one_copy() -> None:
    """Where all layers of a page are one run and fragments follow each other, a whole get is one piece."""
    geometry = Geometry(4, 2, 8, 4, "float16")
    slab = np.zeros(NUM_PAGES * geometry.block_bytes, np.uint8)
    tensor = slab.view(np.uint16).reshape(NUM_PAGES, 4, 2, 4, 2, 8)
    held = paged.Paged("vllm_cross_layer", geometry, 4, NUM_PAGES, slab, [tensor])
    pages = pages_of(held)
    assert pages.template(0).lengths.tolist() == [geometry.block_bytes]
    starts = np.uint64(1 << 20) + np.arange(3, dtype=np.uint64) * np.uint64(geometry.block_bytes)
    ids = np.array([[3], [4], [5]])
    assert pages.scatter(0, starts, ids).lengths.tolist() == [3 * geometry.block_bytes]
    assert pages.scatter(0, starts, ids[::-1]).lengths.tolist() == [geometry.block_bytes] * 3
    assert len(pages.scatter(0, starts[:0], ids[:0]).lengths) == 0


# ------------------------------------------------------------------------------------------ hostile input

GEOMETRY = paged.tier_geometry(Geometry(2, 2, 8, 4, "float16"))  # rows of 16 bytes, 256 a page and layer
TENSOR = PageTensor(0, 0, 0, 2, 1 << 12, 0, 2, 128)
LAYOUT = PageLayout(16, 4, 256, 32, 16, (TENSOR,))
SIZE = [(1 << 12) + 16 * 256]


def test_the_layout_that_the_hostile_ones_are_made_of_is_fine() -> None:
    check_layout(LAYOUT, GEOMETRY, SIZE)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_pages": 17}, "ends at byte"),
        ({"num_pages": 0}, "num_pages"),
        ({"num_pages": 1 << 40}, "num_pages"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 3}, "page_tokens"),
        ({"page_stride": 1 << 62}, "page_stride"),
        ({"page_stride": (1 << 64) - 256}, "page_stride"),  # -256 to who computes with 64 bits
        ({"page_stride": (1 << 48)}, "ends at byte"),
        ({"page_stride": 255}, "steps on"),
        ({"page_stride": 0}, "steps on"),
        ({"token_stride": 16}, "steps on"),
        ({"head_stride": 8}, "steps on"),
        ({"head_stride": -16}, "head_stride"),
        ({"tensors": ()}, "0 tensors"),
        ({"tensors": (replace(TENSOR, offset=1),)}, "ends at byte"),
        ({"tensors": (replace(TENSOR, offset=(1 << 64) - 8),)}, "offset"),
        ({"tensors": (replace(TENSOR, allocation=1),)}, "allocation 1"),
        ({"tensors": (replace(TENSOR, num_layers=3),)}, "layers 0 to 3"),
        ({"tensors": (replace(TENSOR, num_layers=0),)}, "layers 0 to 0"),
        ({"tensors": (replace(TENSOR, num_layers=1),)}, "in no tensor"),
        ({"tensors": (replace(TENSOR, first_plane=1),)}, "planes 1 to 3"),
        ({"tensors": (replace(TENSOR, layer_stride=64),)}, "steps on"),
        ({"tensors": (TENSOR, TENSOR)}, "earlier tensor"),
        ({"tensors": (TENSOR,) * 5000}, "5000 tensors"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_field(change: dict[str, Any], word: str) -> None:
    with pytest.raises(LayoutError, match=word):
        check_layout(replace(LAYOUT, **change), GEOMETRY, SIZE)


def test_allocations_and_geometries_are_checked_too() -> None:
    with pytest.raises(LayoutError, match="0 allocations"):
        check_layout(LAYOUT, GEOMETRY, [])
    with pytest.raises(LayoutError, match="keeps pages as they are"):
        check_layout(replace(LAYOUT, page_tokens=2), replace(GEOMETRY, layout="vllm HND"), SIZE)
    with pytest.raises(LayoutError, match="lower layers_per_group"):
        check_layout(LAYOUT, replace(GEOMETRY, num_kv_heads=1 << 20), SIZE)


def test_page_ids_are_checked() -> None:
    pages = RegisteredPages(page_table(LAYOUT, GEOMETRY, [1 << 30]))
    with pytest.raises(PageIdError, match="page 16 of 16"):
        pages.ids(np.array([16], "<u4").tobytes(), 1, is_target=False)
    with pytest.raises(PageIdError, match="7 bytes"):
        pages.ids(b"\0" * 7, 1, is_target=False)
    twice = np.array([3, 3], "<u4").tobytes()
    with pytest.raises(PageIdError, match="twice"):
        pages.ids(twice, 2, is_target=True)
    assert pages.ids(twice, 2, is_target=False).tolist() == [[3], [3]]


@pytest.mark.parametrize(
    ("preset", "shape", "word"),
    [
        ("vllm", (9, 2, 4), "3 axes"),
        ("vllm", (9, 3, 4, 16), "axis H"),
        ("vllm", (9, 2, 4, 8), "axis C"),
        ("nonsense", (9, 2, 4, 16), "unknown layout"),
        ("vllm_mla", (9, 4, 8), "2 heads"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(preset: str, shape: tuple[int, ...], word: str) -> None:
    geometry = Geometry(2, 2, 8, 4, "float16")
    with pytest.raises(InvalidRequest, match=word):
        describe(preset, [np.zeros(shape, np.uint16)] * 2, geometry)


def test_tensors_must_agree_in_number_and_strides() -> None:
    geometry = Geometry(2, 2, 8, 4, "float16")
    tensor = np.zeros((9, 2, 4, 16), np.uint16)
    with pytest.raises(InvalidRequest, match="3 tensors"):
        describe("vllm", [tensor] * 3, geometry)
    other = np.zeros((9, 4, 2, 16), np.uint16).swapaxes(1, 2)
    with pytest.raises(InvalidRequest, match="differ"):
        describe("vllm", [tensor, other], geometry)
    with pytest.raises(InvalidRequest, match="bytes apart"):
        describe("vllm", [tensor[..., ::-1]] * 2, geometry)
