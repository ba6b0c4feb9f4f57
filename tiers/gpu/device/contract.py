"""The contract of a GPU: memory, streams and events, as little of them as kvtier needs.

Everything above it (the HBM engine, its copiers, the direct path into a runtime's pages) is written against
this page, so that the same code runs on CUDA (`cuda.py`) and, in every test, on host memory with streams that
really run late (`tests/fakes/gpu`). torch's and cupy's own objects stay behind it: a tensor says what its
bytes mean, and here bytes mean nothing. An address is a plain integer, valid on the device, and transfers are
columns of integers, because a get of a long prefix is thousands of pieces and a Python object each would be
the cost.

Order is the caller's business and is never implied: two streams are ordered only by an event recorded on one
and waited for on the other. Completion is asked (`is_done`) or told (`when_done`), never waited for on the
event loop.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...base import Buffer

Addresses: TypeAlias = NDArray[np.uint64]


class DeviceFault(Enum):
    """Why a device did not do as it was told."""

    OUT_OF_MEMORY = "out_of_memory"
    LOST = "lost"  # fell off the bus, was reset, its context is broken: nothing on it works any more
    REFUSED = "refused"  # this call cannot work: a bad handle, memory that may not be registered
    OCCUPIED = "occupied"  # all streams are taken: another user must give one back
    UNAVAILABLE = "unavailable"  # no driver, no such device, library missing


class DeviceError(Exception):
    """A call on a device failed; `fault` says how far the damage goes, the message what to do."""

    def __init__(self, fault: DeviceFault, detail: str) -> None:
        super().__init__(f"{fault.value}: {detail}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`num_bytes` bytes on a device, from `address` on. Owned by the caller that allocated or opened it."""

    address: int
    num_bytes: int


class CopyPieces(NamedTuple):
    """Many small copies of one call: `lengths[i]` bytes from `sources[i]` to `targets[i]`.

    Three one-dimensional arrays of equal length, uint64, uint64 and int64. Sources and targets are addresses
    on this device, on a peer, or of registered host memory. No two targets overlap.
    """

    sources: Addresses
    targets: Addresses
    lengths: NDArray[np.int64]


def pieces_of(rows: Iterable[tuple[int, int, int]]) -> CopyPieces:
    """Return the copies of `rows`, one or more of (source, target, bytes)."""
    sources, targets, lengths = zip(*rows, strict=True)
    return CopyPieces(np.array(sources, np.uint64), np.array(targets, np.uint64), np.array(lengths, np.int64))


class Event(Protocol):
    """A point in a stream's work."""

    def is_done(self) -> bool:
        """Whether everything before the event has happened. Never blocks. Raises DeviceError (LOST)."""
        ...


class Stream(Protocol):
    """Work of a device, done in the order it was given."""

    def copy(self, pieces: CopyPieces) -> None:
        """Enqueue `pieces`. Source bytes are read when the stream gets there, not now."""
        ...

    def wait(self, event: Event) -> None:
        """Order what is enqueued from now on after `event`.

        That is, as it was recorded last, by whichever stream of this process; no effect when it never was.
        The event may be recycled or recorded again at once.

        A stream must not wait for an event of another process: where that process is killed, nothing on this
        stream ever happens again. `Device.when_done` has an end."""
        ...

    def record(self, event: Event | None = None) -> Event:
        """Return an event that is done when everything enqueued so far is.

        It is `event`, which may be recorded again and again, or one of `Device.take_event`."""
        ...


class Device(Protocol):
    """One GPU, or what stands for it. Methods may be called from any thread.

    On a lost device everything raises DeviceError (LOST), but what gives something back, which has no effect:
    exit paths stay the same, and nothing of a lost device moves a byte any more.
    """

    index: int
    name: str  # for people: "NVIDIA H200", "fake"
    uuid: str  # the same for every process of this host, whatever it numbers its devices

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Return device memory, 512-byte aligned, of an allocation of its own.
        Raises DeviceError (OUT_OF_MEMORY)."""
        ...

    def free(self, memory: DeviceMemory) -> None:
        """Give it back. The caller knows that no stream still touches it."""
        ...

    def register_host(self, buffer: Buffer, *, is_read_only: bool) -> int:
        """Pin host memory and return its address for `CopyPieces`.

        The address is valid for this device and every other that this process has opened. Registering takes
        milliseconds per gigabyte: not on the event loop. Raises DeviceError (REFUSED), saying which limit
        stands in the way.

        `is_read_only`: for memory that is mapped so, which not every device can register."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`. Idempotent."""
        ...

    def reach(self, peer: "Device") -> bool:
        """Let `CopyPieces` of this device name memory of `peer`, another device of this process.

        That is what it has allocated or will allocate. False where the hardware does not do that. Idempotent.
        A copy is this device's work, and is ordered by its events. When `peer` is lost a copy is refused; one
        under way may take this device with it."""
        ...

    def open(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Map another process's memory by its handle. Raises DeviceError (REFUSED) when it cannot be."""
        ...

    def close(self, memory: DeviceMemory) -> None:
        """Unmap what `open` mapped. The caller knows that no stream still touches it."""
        ...

    def export_event(self) -> tuple[Event, bytes]:
        """Return an event of this process and the handle by which another one waits for it."""
        ...

    def open_event(self, handle: bytes) -> Event:
        """Return another process's event. Raises DeviceError (REFUSED)."""
        ...

    def take_stream(self) -> Stream:
        """Take a stream out of the bounded pool. Raises DeviceError (OCCUPIED) when all are taken."""
        ...

    def give_stream(self, stream: Stream) -> None:
        """Put a stream back. What is enqueued on it goes on; the next user's work is ordered after that."""
        ...

    def take_event(self) -> Event:
        """Return an event of the pool, which grows. Give it back with `recycle`. Raises DeviceError.

        To be taken before copies are enqueued: a caller that finds out afterwards that it has no event cannot
        learn when they end, and must keep their memory for good."""
        ...

    def recycle(self, event: Event) -> None:
        """Put an event back into the pool. One of `export_event` or `open_event` ends with this."""
        ...

    def when_done(self, event: Event, call: Callable[[DeviceError | None], Any]) -> Callable[[], None]:
        """Call `call(None)` once `event` is done, or `call(error)` when that will never be known.

        On a thread of the device's; it must be short. An event that is recorded again meanwhile is done when
        that recording is.

        Returns what ends the wait: then `call` is called soon, with an error (REFUSED) where the event is not
        done. An event of another process may need it: it is never done when that process was killed."""
        ...

    def shut_down(self) -> None:
        """Finish what runs, call what waits for it, then free everything. Idempotent."""
        ...
