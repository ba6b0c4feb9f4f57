"""DeviceExponents: fragments of the codec `exponents`, decoded where they arrive.

The link is the narrowest part of the way to hbm, so a third less on it is a third more of it; the device
decodes at a rate that does not show beside that. What must hold is the contract of the codec on the host: the
same bytes, bit for bit, and the same refusal of records that nothing encodes to (exponent_kernels.py and its
test). Never ran on a GPU.
"""

from ...codecs.base import Codec, Shape
from ...codecs.exact.exponents import Layout
from ..device.contract import Device
from ..device.launching import Launch
from .exponent_kernels import NAMES
from .records import MAX_FRAGMENTS, MAX_RAW_BYTES, Array, CallLimits, Columns, KernelPlan, RecordDecoder

_BLOCK_VALUES, _LANES = 512, 64
_MAX_BLOCKS = MAX_RAW_BYTES // (2 * _BLOCK_VALUES)


class DeviceExponents(RecordDecoder):
    """Decodes records of the codec `exponents`."""

    def __init__(self, device: Device, launch: Launch) -> None:
        scratch = {"ends": 4 * MAX_FRAGMENTS, "counts": 4 * _MAX_BLOCKS, "offsets": 4 * _MAX_BLOCKS}
        super().__init__(device, launch, {"rooms": 8 * MAX_FRAGMENTS}, scratch)

    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of `shape`."""
        if not codec.accepts(shape):
            return CallLimits(0, 0)
        layout = Layout(shape)
        num_blocks = layout.num_parts * layout.num_packed // _BLOCK_VALUES
        least_bytes = layout.exceptions_at + layout.tail_bytes
        return CallLimits(least_bytes, min(MAX_FRAGMENTS, _MAX_BLOCKS // max(1, num_blocks)))

    def _kernels(self, codec: Codec, shape: Shape, columns: Columns, rooms: Array) -> KernelPlan:
        columns["rooms"], count, layout = rooms, len(rooms), Layout(shape)
        num_values = shape.num_values // layout.num_parts
        num_blocks = layout.num_packed // _BLOCK_VALUES
        num_parts = count * layout.num_parts
        sizes = (count, layout.num_parts, num_values, num_blocks)
        count_blocks, find_ends, decode, copy_tail = NAMES
        return (*sizes, layout.blocks_at, layout.exceptions_at), (
            (count_blocks, num_parts * num_blocks, ("stored", "counts")),
            (find_ends, count, ("stored", "rooms", "counts", "offsets", "ends", "status")),
            (decode, num_parts * num_blocks * _LANES, ("stored", "raw", "offsets", "status")),
            (copy_tail, num_parts * (num_values - layout.num_packed), ("stored", "raw", "ends", "status")),
        )
