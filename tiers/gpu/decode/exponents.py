"""DeviceExponents: encoded fragments that cross the link encoded, and are decoded where they arrive.

The link is the narrowest part of the way to hbm, so a third less on it is a third more of it; the device
decodes at a rate that does not show beside that. What must hold is the contract of the codec on the host: the
same bytes, bit for bit, and the same refusal of records that nothing encodes to. Both are one source with its
proof (exponent_kernels.py and its test).

A call enqueues everything on the caller's stream and waits for nothing: columns go to the device, a few
kernels run, and a word per fragment comes back that says whether it was what it claimed to be. The caller
asks the ticket for those words once an event behind it is done, and publishes nothing before. Scratch on the
device is a fixed number of slabs, made at start; while all are in use the answer is None, and the caller
decodes on the host, which is always possible.

That what came out is what was put, is digest.py's to say. Never ran on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...codecs.base import Shape
from ...codecs.exact.exponents import Exponents, Layout
from ..device import launching
from ..device.contract import CopyPieces, Device, DeviceError, DeviceMemory, Stream
from ..device.launching import Launch
from .exponent_kernels import NAMES, SOURCE

NUM_SLABS = 4
MAX_FRAGMENTS = 256  # of one call
MAX_RAW_BYTES = 64 << 20  # of one call
_BLOCK_VALUES, _LANES, _SAMPLES = 512, 64, 512
_ALIGNMENT = 8


class Record(NamedTuple):
    """One fragment: `num_bytes` of its record's payload at `stored`, its values at `raw`; addresses on the
    device, or of registered host memory."""

    stored: int
    num_bytes: int
    raw: int


class Ticket:
    """One call under way. Ask `results` once, when the device is known to be done with it."""

    def __init__(self, owner: "DeviceExponents", slab: "_Slab", num_fragments: int) -> None:
        self._owner = owner
        self._slab = slab
        self._num_fragments = num_fragments

    def results(self) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """Return per fragment 0 or why not (1: not of this codec and shape, 2: did not fit), and the length
        of the record that was written (when encoding). Frees the scratch."""
        count = self._num_fragments
        status, lengths = self._slab.status[:count].copy(), self._slab.lengths[:count].copy()
        self._owner.slabs.append(self._slab)
        return status, lengths


@dataclass(slots=True, eq=False)
class _Slab:
    """Scratch of one call: pinned host memory (columns, results, zeros) and where it lies on the device."""

    columns: NDArray[np.uint64]  # [stored, raw, rooms] x MAX_FRAGMENTS
    status: NDArray[np.uint32]
    lengths: NDArray[np.int64]
    host: int  # address of the columns; results and zeros follow
    device: int

    def at(self, part: str) -> int:
        """Return the device address of a part."""
        return self.device + _OFFSETS[part]


_MAX_VALUE_BLOCKS = MAX_RAW_BYTES // (2 * _BLOCK_VALUES)
_MAX_PARTS = 1 << 12
_PARTS = {  # of a slab, in this order; those before `ends` have a counterpart on the host
    "stored": 8 * MAX_FRAGMENTS,
    "raw": 8 * MAX_FRAGMENTS,
    "rooms": 8 * MAX_FRAGMENTS,
    "lengths": 8 * MAX_FRAGMENTS,
    "status": 4 * MAX_FRAGMENTS,
    "histogram": 4 * 256 * _MAX_PARTS,
    "ends": 4 * MAX_FRAGMENTS,
    "counts": 4 * _MAX_VALUE_BLOCKS,
    "offsets": 4 * _MAX_VALUE_BLOCKS,
}
_OFFSETS = {name: sum(list(_PARTS.values())[:i]) for i, name in enumerate(_PARTS)}
_ARGUMENTS = {
    "count": ("stored", "counts"),
    "find": ("stored", "rooms", "counts", "offsets", "ends", "status"),
    "decode": ("stored", "raw", "offsets", "status"),
    "tail": ("stored", "raw", "ends", "status"),
    "sample": ("raw", "histogram"),
    "top": ("stored", "histogram"),
    "pack": ("stored", "raw"),
    "place": ("stored", "rooms", "counts", "offsets", "ends", "status", "lengths"),
    "list": ("stored", "raw", "offsets", "status"),
}
_SLAB_BYTES = sum(_PARTS.values())
_HOST_BYTES = _OFFSETS["ends"]  # the histogram's counterpart is zeros


class DeviceExponents:
    """Runs the codec `exponents` on `device`. For one thread at a time. `close` when no stream works for it.

    Raises DeviceError when there is no memory for its scratch.
    """

    def __init__(self, device: Device, launch: Launch) -> None:
        self.slabs: list[_Slab] = []  # free ones
        self._device = device
        self._launch = launch
        self._codec = Exponents()
        self._memory: DeviceMemory | None = device.allocate(NUM_SLABS * _SLAB_BYTES)
        self._host = np.zeros((NUM_SLABS, _HOST_BYTES), np.uint8)
        try:
            self._address = device.register_host(self._host.data.cast("B"), is_read_only=False)
        except DeviceError:
            device.free(self._memory)
            raise
        for number in range(NUM_SLABS):
            mine, begin = self._host[number], _OFFSETS["lengths"]
            self.slabs.append(
                _Slab(
                    mine[:begin].view(np.uint64).reshape(3, MAX_FRAGMENTS),
                    mine[_OFFSETS["status"] : _OFFSETS["histogram"]].view(np.uint32),
                    mine[begin : _OFFSETS["status"]].view(np.int64),
                    self._address + number * _HOST_BYTES,
                    self._memory.address + number * _SLAB_BYTES,
                )
            )

    def max_fragments(self, shape: Shape) -> int:
        """Return how many fragments of a shape one call takes; 0: none, decode them on the host."""
        if not self._codec.accepts(shape):
            return 0
        layout = Layout(shape)
        num_blocks = layout.num_parts * layout.num_packed // _BLOCK_VALUES
        return min(MAX_FRAGMENTS, _MAX_PARTS // layout.num_parts, _MAX_VALUE_BLOCKS // max(1, num_blocks))

    def min_bytes(self, shape: Shape) -> int:
        """Return how long a record of this shape is at least."""
        layout = Layout(shape)
        return layout.exceptions_at + layout.tail_bytes

    def decode(self, stream: Stream, shape: Shape, records: Sequence[Record]) -> Ticket | None:
        """Enqueue the decoding of `records`, `max_fragments` of at least `min_bytes` each at most; None when
        all scratch is in use. `raw` of a fragment with another status than 0 is undefined. Raises
        DeviceError; the scratch of that call is then not used again, because the device may still be at
        it."""
        return self._call(stream, shape, records, ("count", "find", "decode", "tail"), is_decoding=True)

    def encode(self, stream: Stream, shape: Shape, records: Sequence[Record]) -> Ticket | None:
        """Enqueue the encoding of `raw` into `stored`, which has room for `num_bytes`; otherwise as decode.
        What is behind the length in the results is left as it was."""
        steps = ("sample", "top", "pack", "count", "place", "list", "tail")
        return self._call(stream, shape, records, steps, is_decoding=False)

    def _call(
        self, stream: Stream, shape: Shape, records: Sequence[Record], steps: Sequence[str], is_decoding: bool
    ) -> Ticket | None:
        layout, count = Layout(shape), len(records)
        columns = np.array(records, np.int64).reshape(-1, 3).T
        rooms = columns[1] - self.min_bytes(shape)
        assert 0 < count <= self.max_fragments(shape), f"{count} fragments in one call"
        assert (rooms >= 0).all(), "records that are too short are the caller's to refuse"
        assert not (columns[0] % _ALIGNMENT).any(), "records begin at multiples of eight bytes"
        if not self.slabs:
            return None
        slab = self.slabs.pop()
        slab.columns[:, :count] = columns[0], columns[2], rooms
        self._move(stream, slab, "stored", "lengths", is_up=True)
        if not is_decoding:
            self._move(stream, slab, "histogram", "ends", is_up=True)  # zeros
        num_values = shape.num_values // layout.num_parts
        num_blocks = layout.num_packed // _BLOCK_VALUES
        num_parts = count * layout.num_parts
        threads = {
            "count": num_parts * num_blocks,
            "find": count,
            "place": count,
            "top": num_parts,
            "sample": num_parts * min(layout.num_packed, _SAMPLES),
            "tail": num_parts * (num_values - layout.num_packed),
        }
        numbers = (count, layout.num_parts, num_values, num_blocks, layout.blocks_at, layout.exceptions_at)
        for step in steps:
            num_threads = threads.get(step, num_parts * num_blocks * _LANES)
            arguments: list[Any] = [np.int32(number) for number in numbers]
            arguments += [np.uint64(slab.at(part)) for part in _ARGUMENTS[step]]
            arguments += [np.int32(is_decoding)] if step == "tail" else []
            if num_threads:
                self._launch(stream, f"kvtier_exponents_{step}", num_threads, arguments)
        self._move(stream, slab, "lengths", "histogram", is_up=False)
        return Ticket(self, slab, count)

    def _move(self, stream: Stream, slab: _Slab, first: str, behind: str, *, is_up: bool) -> None:
        """Copy the parts from `first` up to `behind` between host and device."""
        begin, end = _OFFSETS[first], _OFFSETS[behind]
        ends = [slab.host + begin, slab.device + begin]
        source, target = ends if is_up else ends[::-1]
        stream.copy(
            CopyPieces(np.array([source], np.uint64), np.array([target], np.uint64), np.array([end - begin]))
        )

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        if self._memory is not None:
            self._device.unregister_host(self._address)
            self._device.free(self._memory)
            self._memory = None
            self.slabs.clear()


def load(device: Device) -> Launch | None:
    """Return what launches the kernels on `device`; None where that is not possible. Compiles them."""
    return launching.load(device, SOURCE, NAMES)
