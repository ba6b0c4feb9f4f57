"""GatherCopier: batches of puts out of a runtime's pages, on a fake device whose time a test drives."""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import pytest

from kvtier.tiers.base import Cause, CopyItem, CopyOutcome
from kvtier.tiers.block import Geometry, Tier
from kvtier.tiers.gpu.device.contract import DeviceError
from kvtier.tiers.gpu.pages.gather import GatherCopier, PageLane
from kvtier.tiers.gpu.pages.kernels import PieceCopier
from kvtier.tiers.gpu.pages.layouts import PageLayout, PageTensor, check_layout, page_table
from kvtier.tiers.gpu.pages.pages import RegisteredPages
from kvtier.tiers.payload import checksum
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.gpu.hot import Hot, Inline
from tests.tiers.helpers import make_label

GEOMETRY = Geometry(3, 2, 16, 4, "bfloat16", layers_per_group=2)  # the last layer group has one layer
LAYER_BYTES = 2 * 2 * 16 * 4 * 2
NUM_PAGES = 12
LENGTHS = (2 * LAYER_BYTES, LAYER_BYTES)


class Closed(Executor):
    """Takes nothing any more."""

    def submit(self, *_: object, **__: object) -> "Future[object]":  # type: ignore[override]
        raise RuntimeError("shut down")


@dataclass
class Scene:
    """Pages of random bytes on a device, and a tier that they are put into."""

    hot: Hot
    gather: GatherCopier
    pages: np.ndarray  # (layers, pages, bytes)
    troubles: list[DeviceError]

    def put(self, ids: Sequence[int]) -> int:
        """Open a put of the blocks in pages `ids`."""
        return self.gather.open_put(np.array(ids, np.int64)[:, None])

    def items(self, source: int, ids: Sequence[int]) -> list[tuple[CopyItem, bytes]]:
        """Return the items of a whole put, block after block, with what must land."""
        made = []
        for block, page in enumerate(ids):
            for group, length in enumerate(LENGTHS):
                offset = block * GEOMETRY.block_bytes + group * LENGTHS[0]
                item = CopyItem(
                    source + offset, self.hot.warm_place(length), make_label(1, length, group=group)
                )
                made.append((item, self.pages[group * 2 : group * 2 + 2, page].tobytes()))
        return made

    def read(self, item: CopyItem) -> bytes:
        """Return what is in a slot."""
        return bytes(self.hot.warm.view(item.target, item.label.raw_length))


def make_scene(hashers: Executor | None = None) -> Scene:
    device = FakeDevice(num_streams=8, seed=4)
    hot = Hot(device)
    pages = np.random.default_rng(5).integers(0, 256, (3, NUM_PAGES, LAYER_BYTES), np.uint8)
    memory = device.allocate(pages.nbytes)
    device.poke(memory.address, pages.tobytes())
    tensor = PageTensor(0, 0, 0, 3, NUM_PAGES * LAYER_BYTES, num_planes=2, plane_stride=LAYER_BYTES // 2)
    layout = PageLayout(NUM_PAGES, 4, LAYER_BYTES, 64, 32, (tensor,))
    check_layout(layout, GEOMETRY, [pages.nbytes])
    stream = device.take_stream()
    troubles: list[DeviceError] = []
    gather = GatherCopier(
        RegisteredPages(page_table(layout, GEOMETRY, [memory.address])),
        PageLane(device, Inline(), {Tier.DRAM: hot.pinned.addresses_of}, PieceCopier()),
        stream,
        hot.warm,
        hashers or Inline(),
        troubles.append,
    )
    return Scene(hot, gather, pages, troubles)


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = make_scene()
    yield made
    made.hot.device.run()
    made.hot.device.shut_down()


def causes(future: "Future[list[CopyOutcome]]") -> set[Cause | None]:
    return {outcome.cause for outcome in future.result(0)}


@pytest.mark.parametrize("order", ["as the planner gives them", "shuffled", "one block", "one fragment"])
def test_a_batch_of_two_puts_brings_each_fragment_its_own_bytes(scene: Scene, order: str) -> None:
    ids = [3, 0, 7, 8], [8, 1, 2]
    rows = [row for mine in ids for row in scene.items(scene.put(mine), mine)]
    if order == "shuffled":
        random.Random(3).shuffle(rows)
    rows = {"one block": rows[2:4], "one fragment": rows[5:6]}.get(order, rows)
    future = scene.gather.start([item for item, _ in rows])
    assert not future.done(), "the device has not moved a byte"
    scene.hot.device.run()
    for outcome, (item, expected) in zip(future.result(0), rows, strict=True):
        assert scene.read(item) == expected
        assert outcome == CopyOutcome(None, checksum(memoryview(expected)))


def test_a_put_that_was_closed_is_gone_and_takes_its_batch_along(scene: Scene) -> None:
    first, second = scene.put([1]), scene.put([2])
    rows = scene.items(first, [1]) + scene.items(second, [2])
    scene.gather.close_put(second)
    assert causes(scene.gather.start([item for item, _ in rows])) == {Cause.SOURCE_GONE}
    again = scene.gather.start([item for item, _ in rows[:2]])
    scene.hot.device.run()
    assert causes(again) == {None}
    scene.gather.is_closed = True
    assert causes(scene.gather.start([item for item, _ in rows[:2]])) == {Cause.SOURCE_GONE}


def test_a_lost_device_ends_its_batches_with_their_source_gone(scene: Scene) -> None:
    rows = scene.items(scene.put([1, 2]), [1, 2])
    under_way = scene.gather.start([item for item, _ in rows])
    scene.hot.device.lose("fell off the bus")
    scene.hot.device.run()
    assert causes(under_way) == {Cause.SOURCE_GONE}
    assert causes(scene.gather.start([item for item, _ in rows])) == {Cause.SOURCE_GONE}
    assert len(scene.troubles) == 2


def test_what_landed_while_the_daemon_goes_is_not_vouched_for() -> None:
    scene = make_scene(hashers=Closed())
    rows = scene.items(scene.put([1]), [1])
    future = scene.gather.start([item for item, _ in rows])
    scene.hot.device.run()
    assert causes(future) == {Cause.TIER_OFFLINE}
    scene.hot.device.shut_down()
