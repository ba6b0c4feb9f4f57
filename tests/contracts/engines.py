"""The engines that the contract suite of test_engines.py runs against. Add yours to FACTORIES."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.tiers.base import Engine, Room
from kvtier.tiers.block import Tier
from kvtier.tiers.cold.engine import ColdStore
from kvtier.tiers.cold.log import SegmentLog
from kvtier.tiers.gpu.hbm import HbmEngine
from kvtier.tiers.ladder import with_memory
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool
from tests.fakes.gpu.device import FakeDevice


@dataclass
class Case:
    """An engine and its room, opened for one test."""

    engine: Engine
    room: Room
    #: Whether `read` refuses what is not published. False where clients never see the tier.
    guards_visibility: bool = True


Factory = Callable[[Path], AbstractContextManager[Case]]


def _memory(tier: Tier) -> Factory:
    @contextmanager
    def make(directory: Path) -> Iterator[Case]:
        del directory
        room = SlotPool(4, 2 << 20)
        indexes = Indexes(512, epoch=1)
        engine = ExtentEngine(room, indexes, tier=tier)
        try:
            yield Case(engine, room)
        finally:
            engine.close()
            indexes.close()

    return make


@contextmanager
def _device(directory: Path) -> Iterator[Case]:
    del directory
    room = SlotPool(4, 2 << 20)
    device = FakeDevice(is_live=True)
    engine = HbmEngine(device, room)
    try:
        yield Case(engine, room)
    finally:
        engine.close()
        assert device.check_integrity() == []
        assert device.left_behind == []


@contextmanager
def _cold(directory: Path) -> Iterator[Case]:
    store = ColdStore.open(directory / "cold", 4 << 20, 4)
    try:
        yield Case(store, SegmentLog(4, 4 << 20, store.footer_bytes), guards_visibility=False)
    finally:
        store.close()


FACTORIES: dict[str, Factory] = {
    "dram": _memory(Tier.DRAM),
    "a second memory": _memory(with_memory(["cxl"]).named("cxl")),
    "hbm in host memory": _memory(Tier.HBM),
    "hbm on a device": _device,
    "nvme": _cold,
}
