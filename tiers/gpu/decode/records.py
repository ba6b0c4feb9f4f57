"""RecordDecoder: fragments decoded where they arrive; what the decoders of a device have in common.

Everything is enqueued on the caller's stream and nothing is waited for; a word per fragment says afterwards
whether it was what it claimed to be. Never ran on a GPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...codecs.base import Codec, Shape
from ..device.contract import Device, Stream
from ..device.launching import Launch
from ..device.slabs import KernelStep, Slabs, Ticket

NUM_SLABS = 4
MAX_FRAGMENTS = 256  # of one call
MAX_RAW_BYTES = 64 << 20  # of one call
_ALIGNMENT = 8

Array: TypeAlias = NDArray[Any]
#: What is sent to the device for a call, by the names of the parts.
Columns: TypeAlias = dict[str, Array]
#: Numbers that all kernels of a call get, and of each its name, threads, and the parts that it gets.
KernelPlan: TypeAlias = tuple[Sequence[int], Sequence[tuple[str, int, Sequence[str]]]]


class Record(NamedTuple):
    """One fragment: where its record's payload lies, its length in bytes, and where its values go.

    `stored` and `raw` are addresses on the device, or of registered host memory."""

    stored: int
    num_bytes: int
    raw: int


class CallLimits(NamedTuple):
    """What a decoder takes of one codec and shape."""

    min_bytes: int  # of a record
    max_fragments: int  # of one call; 0: they are decoded on the host


class RecordDecoder(ABC):
    """Decodes records of one codec on `device`. For one thread at a time.

    `sent` and `scratch`: bytes of further parts of a slab, by name. `slabs` are closed when no stream works
    for it. Raises DeviceError when there is no memory for them."""

    def __init__(
        self, device: Device, launch: Launch, sent: Mapping[str, int], scratch: Mapping[str, int]
    ) -> None:
        self._launch = launch
        columns = {"stored": 8 * MAX_FRAGMENTS, "raw": 8 * MAX_FRAGMENTS, "status": 4 * MAX_FRAGMENTS}
        self.slabs = Slabs(device, {**columns, **sent}, scratch, NUM_SLABS)

    @abstractmethod
    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of this codec and `shape`."""

    @abstractmethod
    def _kernels(self, codec: Codec, shape: Shape, columns: Columns, rooms: Array) -> KernelPlan:
        """Return the kernels of a call, and add to `columns` what else is sent for it.

        `rooms`: the bytes of each record beyond the least, (n,) int64."""

    def decode(self, stream: Stream, codec: Codec, shape: Shape, records: Sequence[Record]) -> Ticket | None:
        """Enqueue the decoding of `records`, within `limits`; None when all scratch is in use.

        Results: (n,) uint32, for each fragment 0, or 1 for a record that nothing encodes to, with undefined
        values. Raises DeviceError; that scratch is then not used again.
        """
        count, limits = len(records), self.limits(codec, shape)
        assert 0 < count <= limits.max_fragments, f"{count} fragments in one call"
        stored, num_bytes, raw = np.array(records, np.int64).reshape(-1, 3).T
        rooms = num_bytes - limits.min_bytes
        assert (rooms >= 0).all(), "records that are too short are the caller's to refuse"
        assert not (stored % _ALIGNMENT).any(), "records begin at multiples of eight bytes"
        columns: Columns = {"stored": stored.view(np.uint64), "raw": raw.view(np.uint64)}
        columns["status"] = np.zeros(count, np.uint32)
        values, kernels = self._kernels(codec, shape, columns, rooms)
        numbers = [np.int32(value) for value in values]
        steps = [KernelStep(name, threads, numbers, parts) for name, threads, parts in kernels]
        return self.slabs.call(stream, self._launch, columns, steps, ("status", np.uint32, count))
