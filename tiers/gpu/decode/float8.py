"""DeviceFloat8: fragments of the codec `float8`, decoded where they arrive.

What DeviceExponents is for bfloat16, on the same terms: everything is enqueued on the caller's stream and
nothing is waited for; a word per fragment says afterwards whether it was what it claimed to be. Never ran on
a GPU.
"""

from collections.abc import Sequence

import numpy as np

from ...codecs.base import Codec, Shape
from ...codecs.exact.float8 import UNIT, Float8Layout
from ..device.contract import Device, Stream
from ..device.launching import Launch
from ..device.slabs import KernelStep, Slabs, Ticket
from .exponents import MAX_FRAGMENTS, MAX_RAW_BYTES, NUM_SLABS, CallLimits, Record, columns_of
from .float8_kernels import NAMES, NUM_LEVELS

_MAX_BLOCKS = MAX_RAW_BYTES // (8 * UNIT)  # twice as many as blocks that are full
_COUNT_BYTES = 4 * (NUM_LEVELS + 1)


class DeviceFloat8:
    """Decodes records of the codec `float8` on `device`. For one thread at a time.

    `slabs` are closed when no stream works for it. Raises DeviceError when there is no memory for them."""

    def __init__(self, device: Device, launch: Launch) -> None:
        self._launch = launch
        self.slabs = Slabs(
            device,
            {**dict.fromkeys(("stored", "raw", "rooms"), 8 * MAX_FRAGMENTS), "status": 4 * MAX_FRAGMENTS},
            {"counts": _COUNT_BYTES * _MAX_BLOCKS, "flags": 4 * _MAX_BLOCKS},
            NUM_SLABS,
        )

    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of `shape`."""
        if not codec.accepts(shape):
            return CallLimits(0, 0)
        layout = Float8Layout(shape)
        num_blocks = layout.num_parts * layout.num_blocks
        return CallLimits(layout.least_bytes, min(MAX_FRAGMENTS, _MAX_BLOCKS // max(1, num_blocks)))

    def decode(self, stream: Stream, codec: Codec, shape: Shape, records: Sequence[Record]) -> Ticket | None:
        """Enqueue the decoding of `records`, within `limits`; None when all scratch is in use.

        Results: (n,) uint32, for each fragment 0, or 1 for a record that nothing encodes to, with undefined
        values. Raises DeviceError; that scratch is then not used again.
        """
        layout, count, limits = Float8Layout(shape), len(records), self.limits(codec, shape)
        assert 0 < count <= limits.max_fragments, f"{count} fragments in one call"
        num_parts, num_values = count * layout.num_parts, shape.num_values // layout.num_parts
        numbers = [
            np.int32(number)
            for number in (
                *(count, layout.num_parts, num_values, layout.num_units, layout.num_blocks),
                *(layout.mantissa, layout.ends_at, layout.units_at, layout.lists_at),
            )
        ]
        threads_and_parts = (
            (num_parts * layout.num_blocks, ("stored", "rooms", "counts", "flags")),
            (count, ("stored", "flags", "status")),
            (num_parts * layout.num_units * (UNIT // 8), ("stored", "raw", "counts", "status")),
            (num_parts * (num_values - layout.num_units * UNIT), ("stored", "raw", "status")),
        )
        steps = [
            KernelStep(name, num_threads, numbers, parts)
            for name, (num_threads, parts) in zip(NAMES, threads_and_parts, strict=True)
        ]
        columns = columns_of(records, limits.min_bytes)
        return self.slabs.call(stream, self._launch, columns, steps, ("status", np.uint32, count))
