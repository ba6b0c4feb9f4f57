"""Many small copies by one kernel, where that beats a batch of copies; which is measured, not believed.

A copy engine is given each piece by the driver, which costs it a fixed time however small the piece is; a
kernel costs one launch, and then the device's own threads read pinned host memory and write pages, or the
other way round. Heads-outermost pages lie in runs of a few hundred bytes, where nothing but a kernel comes
near the link's speed; a page that is one run of 64 KiB is better left to the engines, which take no
multiprocessor from the runtime. Where the two meet depends on device, driver and Way, so `measured` times
both at start.

One warp takes one piece, 16 bytes a lane where everything is aligned so. The columns (24 bytes a piece) are
read from pinned host memory; a kernel that computes addresses from strides would save them, but would have to
know layouts, and the columns are a tenth of the smallest pieces there are.

The source is compiled for the host and run, block by block, by the tests; on a GPU it never ran.
"""

import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np

from ..device import launching
from ..device.contract import Addresses, CopyPieces, Device, DeviceError, Event, Stream
from ..device.launching import Launch
from ..device.slabs import Slabs

log = logging.getLogger(__name__)

NAME = "kvtier_copy_pieces"
SOURCE = r"""
extern "C" __global__ void kvtier_copy_pieces(
    const unsigned long long* sources, const unsigned long long* targets, const long long* lengths,
    int num_pieces)
{
    const int lane = threadIdx.x % 32;
    const long long first = (blockIdx.x * (long long)blockDim.x + threadIdx.x) / 32;
    const long long num_warps = gridDim.x * (long long)blockDim.x / 32;
    for (long long i = first; i < num_pieces; i += num_warps) {
        const char* from = (const char*)sources[i];
        char* to = (char*)targets[i];
        const long long length = lengths[i];
        const unsigned long long bits = sources[i] | targets[i] | (unsigned long long)length;
        if (bits % 16 == 0) {
            for (long long at = lane * 16LL; at < length; at += 32 * 16)
                *(uint4*)(to + at) = *(const uint4*)(from + at);
        } else if (bits % 4 == 0) {
            for (long long at = lane * 4LL; at < length; at += 32 * 4)
                *(unsigned int*)(to + at) = *(const unsigned int*)(from + at);
        } else {
            for (long long at = lane; at < length; at += 32)
                to[at] = from[at];
        }
    }
}
"""
MAX_BLOCKS = 64  # eight multiprocessors' worth of loads in flight; the rest are the runtime's
SLAB_PIECES = 1 << 16
NUM_SLABS = 4
MEASURED_BYTES = 8 << 20
MEASURED_PIECES = 4096
SIZES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10)


@dataclass(slots=True)
class _ColumnSlab:
    """Columns of one launch, which must not change before it is done."""

    columns: Addresses  # (3, SLAB_PIECES)
    address: int
    event: Event | None = None


class PieceKernel:
    """Copies pieces by the kernel. For one thread. `close` when no stream works for it any more.

    Its columns lie in a few slabs of pinned memory; while all are in use the copies go as a batch, because
    waiting is what this thread must not do. Raises DeviceError when memory cannot be pinned.
    """

    def __init__(self, device: Device, launch: Launch, slab_pieces: int = SLAB_PIECES) -> None:
        self._device = device
        self._launch = launch
        self._slab_pieces = slab_pieces
        memory = np.zeros((NUM_SLABS, 3, slab_pieces), np.uint64)
        self._address = device.register_host(memory.data.cast("B"), is_read_only=False)
        step = memory.strides[0]
        self._slabs = [_ColumnSlab(memory[i], self._address + i * step) for i in range(NUM_SLABS)]

    def copy(self, stream: Stream, pieces: CopyPieces) -> None:
        """Enqueue `pieces`, in parts as large as a slab. Raises DeviceError."""
        for start in range(0, len(pieces.lengths), self._slab_pieces):
            here = slice(start, start + self._slab_pieces)
            part = CopyPieces(pieces.sources[here], pieces.targets[here], pieces.lengths[here])
            slab = next((slab for slab in self._slabs if slab.event is None or slab.event.is_done()), None)
            if slab is None:
                stream.copy(part)
            else:
                self._copy_part(stream, part, slab)

    def _copy_part(self, stream: Stream, part: CopyPieces, slab: _ColumnSlab) -> None:
        if slab.event is None:
            slab.event = self._device.take_event()
        num_pieces = len(part.lengths)
        for row, column in enumerate(part):
            slab.columns[row, :num_pieces] = column
        column_bytes = slab.columns.strides[0]
        places = [np.uint64(slab.address + row * column_bytes) for row in range(3)]
        self._launch(stream, NAME, num_pieces * 32, [*places, np.int32(num_pieces)])
        stream.record(slab.event)

    def close(self) -> None:
        """Unpin the columns. Idempotent."""
        for slab in self._slabs:
            if slab.event is not None:
                self._device.recycle(slab.event)
                slab.event = None
        self._device.unregister_host(self._address)


class Way(Enum):
    """Between which memories a copy goes.

    Each has a crossover of its own: across the link a batch of small pieces hides behind the link's speed,
    within the device nothing does."""

    UP = "pinned to device"
    DOWN = "device to pinned"
    WITHIN = "device to device"


class PieceCopier:
    """Copies pieces the quicker way: by the kernel below `kernel_below_bytes[way]` each, else as a batch."""

    def __init__(
        self, kernel: PieceKernel | None = None, kernel_below_bytes: Mapping[Way, int] | None = None
    ) -> None:
        self.kernel = kernel
        self.kernel_below_bytes = dict(kernel_below_bytes or {})

    def copy(self, stream: Stream, pieces: CopyPieces, way: Way) -> None:
        """Enqueue `pieces`, which all go one way, on `stream`. Raises DeviceError."""
        num_pieces = len(pieces.lengths)
        below_bytes = self.kernel_below_bytes.get(way, 0)
        is_small = num_pieces and int(pieces.lengths.sum()) < below_bytes * num_pieces
        if self.kernel is not None and is_small:
            self.kernel.copy(stream, pieces)
        else:
            stream.copy(pieces)

    def close(self) -> None:
        """Give back what the kernel holds. Idempotent."""
        if self.kernel is not None:
            self.kernel.close()
            self.kernel = None


def crossover(
    batch_s: Callable[[int], float], kernel_s: Callable[[int], float], sizes: Sequence[int] = SIZES
) -> int:
    """Return the size of pieces, in bytes, from which on a batch is at least as quick as the kernel.

    0 when it always is, and twice the largest of `sizes` when it never is. `batch_s(size)` and
    `kernel_s(size)` time the same bytes in pieces of that size; each is asked three times and its median
    counts, because the first launch compiles and a busy link has outliers.
    """

    def median(time_s: Callable[[int], float], size: int) -> float:
        return statistics.median(time_s(size) for _ in range(3))

    slower = [size for size in sizes if median(kernel_s, size) < median(batch_s, size)]
    return 2 * max(slower) if slower else 0


def measured(device: Device, launch: Launch | None) -> PieceCopier:
    """Return the copier for `device`, batch and kernel timed on each Way; batches only where that fails.

    Takes a part of a second, without waiting for anything but the device."""
    if launch is None:
        return PieceCopier()
    kernel = None
    try:
        kernel = PieceKernel(device, launch)
        limits = _measure(device, kernel)
    except DeviceError as problem:
        log.warning("small pieces are copied without a kernel: %s", problem)
        if kernel is not None:
            kernel.close()
        return PieceCopier()
    words = ", ".join(f"{way.value} below {limit} bytes" for way, limit in limits.items())
    log.info("device %d: pieces are copied by the kernel %s", device.index, words)
    return PieceCopier(kernel, limits)


def _measure(device: Device, kernel: PieceKernel) -> dict[Way, int]:
    """Return the crossover of each way on this device. Raises DeviceError."""
    with ExitStack() as undo:
        slabs = Slabs(device, {"copied": MEASURED_BYTES}, {"within": MEASURED_BYTES}, 1)
        undo.callback(slabs.close)
        slab = slabs.take()
        assert slab is not None
        stream = device.take_stream()
        undo.callback(device.give_stream, stream)
        event = device.take_event()
        undo.callback(device.recycle, event)
        ends = {
            Way.UP: (slab.host, slab.device),
            Way.DOWN: (slab.device, slab.host),
            Way.WITHIN: (slab.device, slab.device + MEASURED_BYTES),
        }
        return {
            way: crossover(
                partial(time_s, stream, event, stream.copy, source, target),
                partial(time_s, stream, event, partial(kernel.copy, stream), source, target),
            )
            for way, (source, target) in ends.items()
        }


def time_s(
    stream: Stream, event: Event, copy: Callable[[CopyPieces], None], source: int, target: int, size: int
) -> float:
    """Return the seconds that `copy` takes on `stream`, for pieces of `size` bytes.

    There are MEASURED_BYTES or MEASURED_PIECES of them. Raises DeviceError."""
    num_pieces = min(MEASURED_PIECES, MEASURED_BYTES // size)
    offsets = np.arange(num_pieces, dtype=np.uint64) * np.uint64(size)
    pieces = CopyPieces(
        np.uint64(source) + offsets, np.uint64(target) + offsets, np.full(num_pieces, size, np.int64)
    )
    began_at = time.perf_counter()
    copy(pieces)
    stream.record(event)
    while not event.is_done():  # milliseconds, on a thread of its own
        continue
    return time.perf_counter() - began_at


def load(device: Device) -> Launch | None:
    """Compile the kernel; return what launches it on `device`, or None where that is not possible.

    The reason is in the log. Never ran on a GPU."""
    is_cuda = hasattr(device, "enter")
    return launching.load(device, SOURCE, (NAME,), MAX_BLOCKS) if is_cuda else None
