"""DeviceExponents: fragments of the codec `exponents`, decoded where they arrive.

The link is the narrowest part of the way to hbm, so a third less on it is a third more of it; the device
decodes at a rate that does not show beside that. What must hold is the contract of the codec on the host: the
same bytes, bit for bit, and the same refusal of records that nothing encodes to (exponent_kernels.py and its
test). Everything is enqueued on the caller's stream and nothing is waited for; a word per fragment says
afterwards whether it was what it claimed to be. Never ran on a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...codecs.base import Codec, Shape
from ...codecs.exact.exponents import Layout
from ..device.contract import Device, Stream
from ..device.launching import Launch
from ..device.slabs import KernelStep, Slabs, Ticket
from .exponent_kernels import NAMES

NUM_SLABS = 4
MAX_FRAGMENTS = 256  # of one call
MAX_RAW_BYTES = 64 << 20  # of one call
_BLOCK_VALUES, _LANES = 512, 64
_MAX_BLOCKS = MAX_RAW_BYTES // (2 * _BLOCK_VALUES)
_ALIGNMENT = 8


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


def columns_of(records: Sequence[Record], min_bytes: int) -> "dict[str, np.ndarray]":
    """Return what a decoder sends to the device, by the names of the parts.

    Addresses `stored` and `raw`, (n,) uint64; `rooms`, the bytes of each record beyond `min_bytes`, (n,)
    int64; `status`, zeros, (n,) uint32."""
    stored, num_bytes, raw = np.array(records, np.int64).reshape(-1, 3).T
    rooms = num_bytes - min_bytes
    assert (rooms >= 0).all(), "records that are too short are the caller's to refuse"
    assert not (stored % _ALIGNMENT).any(), "records begin at multiples of eight bytes"
    return {
        "stored": stored.view(np.uint64),
        "raw": raw.view(np.uint64),
        "rooms": rooms,
        "status": np.zeros(len(records), np.uint32),
    }


class DeviceExponents:
    """Decodes records of the codec `exponents` on `device`. For one thread at a time.

    `slabs` are closed when no stream works for it. Raises DeviceError when there is no memory for them."""

    def __init__(self, device: Device, launch: Launch) -> None:
        self._launch = launch
        self.slabs = Slabs(
            device,
            {**dict.fromkeys(("stored", "raw", "rooms"), 8 * MAX_FRAGMENTS), "status": 4 * MAX_FRAGMENTS},
            {"ends": 4 * MAX_FRAGMENTS, "counts": 4 * _MAX_BLOCKS, "offsets": 4 * _MAX_BLOCKS},
            NUM_SLABS,
        )

    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of `shape`."""
        if not codec.accepts(shape):
            return CallLimits(0, 0)
        layout = Layout(shape)
        num_blocks = layout.num_parts * layout.num_packed // _BLOCK_VALUES
        least_bytes = layout.exceptions_at + layout.tail_bytes
        return CallLimits(least_bytes, min(MAX_FRAGMENTS, _MAX_BLOCKS // max(1, num_blocks)))

    def decode(self, stream: Stream, codec: Codec, shape: Shape, records: Sequence[Record]) -> Ticket | None:
        """Enqueue the decoding of `records`, within `limits`; None when all scratch is in use.

        Results: (n,) uint32, for each fragment 0, or 1 for a record that nothing encodes to, with undefined
        values. Raises DeviceError; that scratch is then not used again.
        """
        layout, count, limits = Layout(shape), len(records), self.limits(codec, shape)
        assert 0 < count <= limits.max_fragments, f"{count} fragments in one call"
        columns = columns_of(records, limits.min_bytes)
        num_values = shape.num_values // layout.num_parts
        num_blocks = layout.num_packed // _BLOCK_VALUES
        num_parts = count * layout.num_parts
        numbers = [
            np.int32(number)
            for number in (
                *(count, layout.num_parts, num_values, num_blocks),
                *(layout.blocks_at, layout.exceptions_at),
            )
        ]
        threads_and_parts = (
            (num_parts * num_blocks, ("stored", "counts")),
            (count, ("stored", "rooms", "counts", "offsets", "ends", "status")),
            (num_parts * num_blocks * _LANES, ("stored", "raw", "offsets", "status")),
            (num_parts * (num_values - layout.num_packed), ("stored", "raw", "ends", "status")),
        )
        steps = [
            KernelStep(name, num_threads, numbers, parts)
            for name, (num_threads, parts) in zip(NAMES, threads_and_parts, strict=True)
        ]
        return self.slabs.call(stream, self._launch, columns, steps, ("status", np.uint32, count))
