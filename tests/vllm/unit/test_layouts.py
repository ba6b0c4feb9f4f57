"""Every kind of cache that vLLM makes, saved by one rank and loaded by another into other blocks: over a fake
GPU, whose daemon copies, and over host memory."""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.clients import Client
from kvtier.clients.errors import InvalidRequest, PreconditionFailed
from kvtier.clients.options import Timeout
from kvtier.clients.vllm.counters import Counters
from kvtier.clients.vllm.groups import why_not_shared
from kvtier.clients.vllm.identity import identity_of
from kvtier.clients.vllm.options import Options
from kvtier.clients.vllm.plan import Ack, Load, Part, Save, StepPlan
from kvtier.clients.vllm.worker.pages import LayerView, PagedGroup
from kvtier.clients.vllm.worker.side import WorkerSide
from kvtier.clients.vllm.worker.transfers import DevicePages, transfers_of
from tests.fakes.gpu.device import FakeDevice

from ...e2e.direct_device import FakeExporter
from ...e2e.direct_scene import WAIT_S, Served, names
from ...waiting import until
from .layouts import LAYOUTS, NUM_BLOCKS, NUM_LAYERS, Layout

PACKED = b"".join(names("layouts", 4))
FROM, INTO = [5, 2, 11, 7], [1, 4, 0, 9]


class Rank:
    """A worker with a cache of this layout, on a fake GPU of its own or in host memory."""

    def __init__(self, served: Served, layout: Layout, seed: int, *, is_on_device: bool) -> None:
        self.device = FakeDevice(is_live=True, capacity_bytes=64 << 20)
        exporter = FakeExporter(self.device)
        self.memory = exporter.tensor(layout.num_bytes)
        self.memory[:] = np.random.default_rng(seed).integers(0, 256, layout.num_bytes, np.uint8)
        self.views = layout.views(self.memory)
        self.layout = layout
        views = [view_of(layout, view) for view in self.views]
        group = PagedGroup(views, NUM_BLOCKS)
        assert group.layer_bytes == layout.layer_bytes
        heads = (layout.num_heads, layout.head_size, layout.dtype)
        identity = identity_of(
            *(bytes(32), NUM_LAYERS, group.layer_bytes, layout.block_tokens, heads, "as it lies", "", "", 1),
            num_runs=len(group.runs),
        )
        stream = self.device.take_stream()
        self.stream = stream
        pages = DevicePages([group], exporter, self.mark) if is_on_device else None
        if pages is not None:
            pages.check([identity])
        timeout = Timeout(call_s=WAIT_S, connect_s=WAIT_S, grace_s=0.1)
        self.side = WorkerSide(
            Options(target=served.target, load_timeout_s=WAIT_S, save_timeout_s=WAIT_S),
            [group],
            transfers_of(lambda _: Client(served.target, timeout=timeout), [identity], [group], pages),
            Counters(),
        )

    def mark(self, event: Any) -> None:
        self.stream.record(event)

    def blocks(self, ids: list[int]) -> list[bytes]:
        """The bytes of blocks of the engine, all layers."""
        parts = self.layout.kernel_blocks
        return [b"".join(view[i * parts : (i + 1) * parts].tobytes() for view in self.views) for i in ids]

    def close(self) -> None:
        self.side.close()
        self.device.shut_down()
        assert self.device.check_integrity() == []


def view_of(layout: Layout, view: np.ndarray[Any, np.dtype[np.uint8]]) -> LayerView:
    """Return what LayerView reads off the engine's tensor, whose elements have `item_bytes`."""
    shape = (*view.shape[:3], view.shape[3] // layout.item_bytes)
    strides = (*view.strides[:3], layout.item_bytes)
    return LayerView(int(view.ctypes.data), shape, strides, layout.item_bytes)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    device = FakeDevice(is_live=True, num_streams=64, seed=1)
    with Served(tmp_path, device=device) as running:
        yield running
        running.assert_at_rest()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("transfer", ["device", "host"])
def test_what_one_rank_saves_another_loads(served: Served, name: str, transfer: str) -> None:
    layout = LAYOUTS[name]
    one = Rank(served, layout, 1, is_on_device=transfer == "device")
    two = Rank(served, layout, 2, is_on_device=transfer == "device")
    wanted = two.memory.copy()
    acks: dict[int, Ack] = {}
    one.side.start_saves(StepPlan(saves=[Save(1, 0, "s", b"", PACKED, FROM)]))
    until(lambda: acks.update(one.side.take_acks().by_job) or acks)
    assert acks[1] == Ack(1, 4)
    two.side.start_loads(StepPlan(loads=[Load("r", "s", parts=[Part(0, PACKED, 0, INTO)])]))
    over: dict[str, set[str]] = {}
    until(lambda: over.update(zip(("done", "failed"), two.side.take_loaded(), strict=True)) or over["done"])
    assert over == {"done": {"r"}, "failed": set()}
    assert two.blocks(INTO) == one.blocks(FROM)
    parts = layout.kernel_blocks
    for mine, theirs in zip(layout.views(wanted), one.views, strict=True):
        for into, source in zip(INTO, FROM, strict=True):
            mine[into * parts : (into + 1) * parts] = theirs[source * parts : (source + 1) * parts]
    assert (two.memory == wanted).all(), "padding and other blocks are as they were"
    if transfer == "device":
        assert served.count("direct_put_blocks") == served.count("direct_get_blocks") == 4
    for rank in (one, two):
        rank.close()


def test_blocks_that_are_no_whole_number_of_kernel_blocks_are_refused() -> None:
    view = LayerView(1 << 20, (3 * NUM_BLOCKS + 1, 2, 16, 64), (4096, 2048, 128, 2), 2)
    with pytest.raises(PreconditionFailed, match=f"{3 * NUM_BLOCKS + 1} blocks, the engine manages"):
        PagedGroup([view], NUM_BLOCKS)


def test_blocks_in_runs_that_nothing_describes_are_refused_with_what_to_change() -> None:
    uneven = LayerView(1 << 20, (NUM_BLOCKS, 2, 2, 64), (1 << 16, 4096, 256, 1), 1)  # four runs, two strides
    group = PagedGroup([uneven], NUM_BLOCKS)
    identity = identity_of(
        *(bytes(32), 1, group.layer_bytes, 16, (2, 32, "uint8"), "as it lies", "", "", 1),
        num_runs=len(group.runs),
    )
    with pytest.raises(InvalidRequest, match="VLLM_KV_CACHE_LAYOUT to LBNHC"):
        group.described(identity.geometry)


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_memory_of_sleep_mode_is_refused_with_the_flag(option: str) -> None:
    """It is mapped page by page and moves; a handle of it does not exist."""
    model = SimpleNamespace(enable_sleep_mode=False, enable_cumem_allocator=False)
    assert why_not_shared(SimpleNamespace(model_config=model)) == ""
    setattr(model, option, True)
    assert f"--{option.replace('_', '-')}" in why_not_shared(SimpleNamespace(model_config=model))


def test_the_memory_of_a_view_is_the_tensors() -> None:
    memory = np.arange(LAYOUTS["fp8"].num_bytes, dtype=np.uint8)
    first = LAYOUTS["fp8"].views(memory)[0]
    assert ctypes.string_at(first.ctypes.data, 8) == memory[:8].tobytes()
