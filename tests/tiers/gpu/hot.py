"""A warm tier, a device's hbm above it and the copiers between them, on a fake device whose time a test
drives."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvtier.tiers.base import CopyItem, CopyOutcome
from kvtier.tiers.block import FragmentLabel
from kvtier.tiers.gpu.copier import DeviceCopier
from kvtier.tiers.gpu.device.pinned import Pinned
from kvtier.tiers.gpu.hbm import HbmEngine
from kvtier.tiers.memory.engine import ExtentEngine
from kvtier.tiers.memory.index import Indexes
from kvtier.tiers.memory.slots import SlotPool
from kvtier.tiers.payload import checksum
from tests.fakes.gpu.device import FakeDevice
from tests.tiers.helpers import make_label, make_payload

EXTENT_BYTES = 2 << 20
LENGTH = 64 << 10


class Inline(Executor):
    """Runs what is submitted at once, in this thread: the only lateness is the device's."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Hot:
    """Both tiers and both directions. Close it with `close`; `down` verifies checksums when `verifies`."""

    def __init__(self, device: FakeDevice, *, num_extents: int = 2, verifies: bool = True) -> None:
        self.device = device
        self.warm_room, self.hot_room = (
            SlotPool(num_extents, EXTENT_BYTES),
            SlotPool(num_extents, EXTENT_BYTES),
        )
        self.indexes = Indexes(1024, epoch=1)
        self.warm = ExtentEngine(self.warm_room, self.indexes)
        self.hot = HbmEngine(device, self.hot_room)
        self.pinned = Pinned(device, self.warm, self.warm_room)
        self.up = DeviceCopier(self.hot, self.pinned, self.hot, Inline())
        hashers = Inline() if verifies else None
        self.down = DeviceCopier(self.hot, self.hot, self.pinned, Inline(), hashers=hashers)
        self.across = DeviceCopier(self.hot, self.hot, self.hot, Inline())
        self.hot.before_close.append(self.pinned.close)

    def put(self, number: int, length: int = LENGTH) -> tuple[int, FragmentLabel]:
        """Store fragment `number` in dram; return its place and label."""
        payload = make_payload(number, length)
        label = replace(make_label(number, length), checksum=checksum(payload))
        place = self.warm_place(length)
        self.warm.write(place, label, payload)
        self.warm.publish_run([place], [label])
        return place, label

    def warm_place(self, length: int = LENGTH) -> int:
        """Reserve a slot in dram."""
        place = self.warm_room.reserve(0, length)
        assert place is not None
        return place

    def hot_place(self, length: int = LENGTH) -> int:
        """Reserve a slot in hbm."""
        place = self.hot_room.reserve(0, length)
        assert place is not None
        return place

    def promoted(self, number: int, length: int = LENGTH) -> tuple[int, FragmentLabel]:
        """Store fragment `number` in hbm only; return its place and label."""
        source, label = self.put(number, length)
        target = self.hot_place(length)
        outcomes = self.copy(self.up, [CopyItem(source, target, label)])
        assert outcomes == [CopyOutcome(None, label.checksum)]
        self.hot.publish_run([target], [label])
        self.drop_warm(source, length)
        return target, label

    def drop_warm(self, place: int, length: int = LENGTH) -> None:
        """Retract and release a slot of dram."""
        self.warm.retract(place)
        self.warm_room.release(place, length)

    def peek(self, place: int) -> bytes:
        """Return what is in a slot of hbm now."""
        return self.device.peek(int(self.hot.addresses_of([place])[0]), LENGTH)

    def copy(self, copier: DeviceCopier, items: Sequence[CopyItem]) -> list[CopyOutcome]:
        """Copy, let the device's time pass, return the outcomes."""
        future = copier.start(items)
        self.device.run()
        return future.result(0)

    def problems(self) -> list[str]:
        """Audit everything."""
        parts = (self.warm, self.hot, self.warm_room, self.hot_room, self.indexes, self.device)
        return [problem for part in parts for problem in part.check_integrity()]

    def close(self) -> None:
        """In the daemon's order: hbm first, then dram."""
        self.hot.close()
        self.warm.close()
        self.indexes.close()


@contextmanager
def opened(seed: int = 0, **options: Any) -> Iterator[Hot]:
    """Give both tiers; audit them at the end, and that the device has got everything back."""
    device = FakeDevice(seed=seed)
    hot = Hot(device, **options)
    try:
        yield hot
        assert hot.problems() == []
    finally:
        device.run()  # where a test failed half-way: else closing would wait for what nobody drives
        hot.close()
    assert not hot.device.left_behind
