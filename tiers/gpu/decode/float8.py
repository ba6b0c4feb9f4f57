"""DeviceFloat8: fragments of the codec `float8`, decoded where they arrive.

What DeviceExponents is for bfloat16, on the same terms. Never ran on a GPU.
"""

from ...codecs.base import Codec, Shape
from ...codecs.exact.float8 import UNIT, Float8Layout
from ..device.contract import Device
from ..device.launching import Launch
from .float8_kernels import NAMES, NUM_LEVELS
from .records import MAX_FRAGMENTS, MAX_RAW_BYTES, Array, CallLimits, Columns, KernelPlan, RecordDecoder

_MAX_BLOCKS = MAX_RAW_BYTES // (8 * UNIT)  # twice as many as blocks that are full
_COUNT_BYTES = 4 * (NUM_LEVELS + 1)


class DeviceFloat8(RecordDecoder):
    """Decodes records of the codec `float8`."""

    def __init__(self, device: Device, launch: Launch) -> None:
        scratch = {"counts": _COUNT_BYTES * _MAX_BLOCKS, "flags": 4 * _MAX_BLOCKS}
        super().__init__(device, launch, {"rooms": 8 * MAX_FRAGMENTS}, scratch)

    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of `shape`."""
        if not codec.accepts(shape):
            return CallLimits(0, 0)
        layout = Float8Layout(shape)
        num_blocks = layout.num_parts * layout.num_blocks
        return CallLimits(layout.least_bytes, min(MAX_FRAGMENTS, _MAX_BLOCKS // max(1, num_blocks)))

    def _kernels(self, codec: Codec, shape: Shape, columns: Columns, rooms: Array) -> KernelPlan:
        columns["rooms"], count, layout = rooms, len(rooms), Float8Layout(shape)
        num_parts, num_values = count * layout.num_parts, shape.num_values // layout.num_parts
        sizes = (count, layout.num_parts, num_values, layout.num_units, layout.num_blocks)
        places = (layout.mantissa, layout.ends_at, layout.units_at, layout.lists_at)
        check, judge, decode, copy_tail = NAMES
        return (*sizes, *places), (
            (check, num_parts * layout.num_blocks, ("stored", "rooms", "counts", "flags")),
            (judge, count, ("stored", "flags", "status")),
            (decode, num_parts * layout.num_units * (UNIT // 8), ("stored", "raw", "counts", "status")),
            (copy_tail, num_parts * (num_values - layout.num_units * UNIT), ("stored", "raw", "status")),
        )
