"""Streams and events of a FakeDevice: queues of work that is done later, and marks in it.

An event is two counters, how often it was recorded and up to which recording it is done, so that a wait means
the recording that was the last when the wait was enqueued, as in CUDA. An exported event keeps them in a
shared page; writing eight aligned bytes is atomic on every machine this runs on, and only the recorder
writes.
"""

import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.gpu.device.contract import CopyPieces, Event
from kvtier.tiers.memory import memfd
from kvtier.v1.shm import PAGE_BYTES

from .memory import open_handle, pack_handle
from .order import Clock

if TYPE_CHECKING:
    from .device import FakeDevice

RECORDED, DONE = 0, 1


class FakeEvent:
    """Implements `Event`. `clock` is what its last recording vouches for."""

    def __init__(self, device: "FakeDevice", descriptor: int = -1, mapping: mmap.mmap | None = None) -> None:
        self._device = device
        self.descriptor = descriptor
        self.cells: NDArray[np.uint64] = (
            np.zeros(2, np.uint64) if mapping is None else np.frombuffer(mapping, np.uint64, 2)
        )
        self.clock: Clock = {}
        self.is_pooled = mapping is None
        self.is_recycled = False
        self.is_foreign = False  # of another process

    @classmethod
    def shared(cls, device: "FakeDevice") -> "FakeEvent":
        """Make one that other processes can wait for."""
        descriptor = memfd.create("kvtier-fake-event", PAGE_BYTES)
        return cls(device, descriptor, mmap.mmap(descriptor, PAGE_BYTES))

    @classmethod
    def opened(cls, device: "FakeDevice", handle: bytes) -> "FakeEvent":
        """Return another process's event. Raises DeviceError (REFUSED)."""
        event = cls(device, *open_handle(handle))
        event.is_foreign = True
        return event

    @property
    def handle(self) -> bytes:
        """How another process finds it."""
        return pack_handle(self.descriptor, PAGE_BYTES)

    @property
    def last_recording(self) -> int:
        """How often it was recorded."""
        return int(self.cells[RECORDED])

    def has_reached(self, recording: int) -> bool:
        """Whether that recording is done. What a killed process had recorded and not done never is."""
        return int(self.cells[DONE]) >= recording

    def is_done(self) -> bool:
        """See Event.is_done."""
        return self._device.has_seen_done(self)

    def close(self) -> None:
        """Let nobody else open it. The page goes with the last stream that waits for it."""
        self.is_recycled = True
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()  # as torch does with events that are used no more


@dataclass(slots=True)
class Copying:
    """Pieces on their way; `left` are the positions still to be moved, in the order in which they will be."""

    pieces: CopyPieces
    left: list[int]


@dataclass(slots=True)
class Waiting:
    """What follows waits for a recording of an event."""

    event: FakeEvent
    recording: int


@dataclass(slots=True)
class Recording:
    """Everything before this is done: say so."""

    event: FakeEvent
    recording: int


@dataclass(slots=True)
class Calling:
    """What stands for a kernel: touches memory when the stream gets there. The audit does not know which."""

    run: Callable[[], None]


Work: TypeAlias = Copying | Waiting | Recording | Calling


@dataclass(eq=False)
class FakeStream:
    """Implements `Stream`: what it is told waits in `work` until the device does it."""

    device: "FakeDevice"
    number: int
    work: deque[Work] = field(default_factory=deque)

    def copy(self, pieces: CopyPieces) -> None:
        """See Stream.copy."""
        self.device.enqueue_copy(self, pieces)

    def wait(self, event: Event) -> None:
        """See Stream.wait."""
        self.device.enqueue_wait(self, cast(FakeEvent, event))

    def record(self, event: Event | None = None) -> Event:
        """See Stream.record."""
        return self.device.enqueue_record(self, cast("FakeEvent | None", event))

    def call(self, run: Callable[[], None]) -> None:
        """Enqueue a kernel's stand-in."""
        self.device.enqueue_call(self, run)

    @property
    def can_go_on(self) -> bool:
        """Whether there is work that waits for nobody."""
        if not self.work:
            return False
        head = self.work[0]
        return not isinstance(head, Waiting) or head.event.has_reached(head.recording)
