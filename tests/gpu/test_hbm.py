"""The hot tier on a real GPU, through the very parts a daemon is assembled from. Skipped, with the reason,
elsewhere.

`pytest -m gpu tests/gpu tests/contracts/test_devices.py` runs everything that needs one.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvtier.appliance.gpu.hbm_tier import HotTier
from kvtier.appliance.transfer.lanes import Edge
from kvtier.tiers.base import CopyItem
from kvtier.tiers.block import FragmentLabel, Tier
from kvtier.tiers.gpu.device.contract import Device, DeviceError
from kvtier.tiers.gpu.device.cuda import CudaDevice
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tiers.payload import checksum
from tests.tiers.helpers import make_label

pytestmark = pytest.mark.gpu

EXTENT_BYTES = 64 << 20
NUM_EXTENTS = 8
WAIT_S = 60.0


@pytest.fixture
def device() -> Device:
    """The first GPU; the tier shuts it down."""
    try:
        return CudaDevice(0)
    except DeviceError as error:
        pytest.skip(str(error))


class Tiers:
    """dram above which hbm stands, both of NUM_EXTENTS extents."""

    def __init__(self, device: Device) -> None:
        self.hot_room, self.room = (SlotPool(NUM_EXTENTS, EXTENT_BYTES) for _ in range(2))
        self.indexes = Indexes(NUM_EXTENTS * 4096, epoch=1)
        self.dram = ExtentEngine(self.room, self.indexes)
        self.hot = HotTier(device, self.hot_room, self.dram, self.room)
        self.threads = ThreadPoolExecutor(4)
        self.routes = self.hot.routes(self.threads)
        self.hot.pinned.pin_all()

    def copy(self, source: Tier, target: Tier, items: list[CopyItem]) -> None:
        """Copy, in batches as the mover's are, and see every one of them land."""
        copier = self.routes[Edge(source, target)].copier
        futures = [copier.start(items[first : first + 32]) for first in range(0, len(items), 32)]
        causes = [outcome.cause for future in futures for outcome in future.result(WAIT_S)]
        assert causes == [None] * len(items)

    def close(self) -> None:
        """In the daemon's order."""
        self.hot.engine.close()
        self.hot.enqueuer.shutdown()
        self.threads.shutdown()
        self.dram.close()
        self.indexes.close()


@pytest.fixture
def tiers(device: Device) -> Iterator[Tiers]:
    opened = Tiers(device)
    yield opened
    assert opened.hot.engine.check_integrity() == []
    opened.close()


@pytest.mark.parametrize("length", [64 << 10, (64 << 10) + 16, 2 << 20, 32 << 20])
def test_every_byte_comes_back(tiers: Tiers, length: int) -> None:
    """Up, away from dram, and down into other slots; what landed is hashed there."""
    count = min(256, NUM_EXTENTS * (EXTENT_BYTES // (2 * length)))
    rng = np.random.default_rng(length)
    placed: list[tuple[int, FragmentLabel]] = []
    for number in range(count):
        payload = memoryview(rng.bytes(length))
        label = replace(make_label(number, length), checksum=checksum(payload))
        [place] = tiers.room.reserve_many(0, [length], 1)
        tiers.dram.write(place, label, payload)
        tiers.dram.publish_run([place], [label])
        placed.append((place, label))
    hot = tiers.hot_room.reserve_many(0, [length], count)
    tiers.copy(
        Tier.DRAM, Tier.HBM, [CopyItem(p, to, label) for (p, label), to in zip(placed, hot, strict=True)]
    )
    for place, (_, label) in zip(hot, placed, strict=True):
        tiers.hot.engine.publish_run([place], [label])
    for place, _ in placed:
        tiers.dram.retract(place)
        tiers.dram.view(place, length)[:] = bytes(length)
        tiers.room.release(place, length)
    back = tiers.room.reserve_many(0, [length], count)
    labels = [label for _, label in placed]
    items = [
        CopyItem(p, to, label) for p, to, label in zip(reversed(hot), back, reversed(labels), strict=True)
    ]
    tiers.copy(Tier.HBM, Tier.DRAM, items)
    for _, place, label in items:
        assert checksum(tiers.dram.view(place, length)) == label.checksum


def test_the_synchronous_way(tiers: Tiers) -> None:
    """What the edge to the cold store uses."""
    payload = memoryview(np.random.default_rng(1).bytes(9 << 20))  # more than the bounce buffer
    label = replace(make_label(1, len(payload)), checksum=checksum(payload))
    [place] = tiers.hot_room.reserve_many(0, [len(payload)], 1)
    assert tiers.hot.engine.write(place, label, payload) == label.checksum
    tiers.hot.engine.publish_run([place], [label])
    into = memoryview(bytearray(len(payload)))
    tiers.hot.engine.read(place, label, into)
    assert into == payload
