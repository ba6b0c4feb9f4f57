"""DeviceQuantised: fragments of one profile, decoded where they arrive.

As exponents.py for the exact codec: everything is enqueued on the caller's stream, nothing is waited for,
and a word per fragment says afterwards whether its record can have been written by that profile. A profile
with a rule of `transform` has lengths that depend on the data and is decoded on the host. Never ran on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ...codecs.base import Shape
from ...codecs.lossy.profile import Rule
from ...codecs.lossy.profiled import Profiled
from ..device.contract import Device, Stream
from ..device.launching import Launch
from ..device.slabs import Slab, Slabs
from .exponents import Record
from .quantised_kernels import CODERS, COLUMNS, NAMES

NUM_SLABS = 4
MAX_FRAGMENTS = 256  # of one call
MAX_SEGMENTS = 4096  # of one fragment
MAX_HEADS = 1 << 16  # heads of all layers and planes of one fragment
MAX_VALUES = 1 << 31  # of one fragment
_ALIGNMENT = 8


class QuantisedTicket:
    """One call under way. Ask `status` once, when the device is known to be done with it."""

    def __init__(self, slabs: Slabs, slab: Slab, num_fragments: int) -> None:
        self._slabs = slabs
        self._slab = slab
        self._num_fragments = num_fragments

    def status(self) -> NDArray[np.uint32]:
        """Return (n,) uint32, for each fragment 0, or 1 for bytes that the codec does not write. Frees the
        scratch."""
        found: NDArray[np.uint32] = self._slab.column("status", np.uint32, self._num_fragments).copy()
        self._slabs.give(self._slab)
        return found


@dataclass(frozen=True, slots=True)
class _Plan:
    """Fragments of one shape: the table of segments, and which of them each head is in."""

    segments: NDArray[np.int32]  # [segment, COLUMNS]
    segment_of: NDArray[np.int32]  # [layer and plane, head]
    num_bytes: int  # that a record has at least


class DeviceQuantised:
    """Decodes records of profiles on `device`. For one thread at a time. `close` when no stream works for it.

    Raises DeviceError when there is no memory for its scratch.
    """

    def __init__(self, device: Device, launch: Launch) -> None:
        self._launch = launch
        self._plans: dict[tuple[bytes, Shape], _Plan | None] = {}
        self._slabs = Slabs(
            device,
            {
                "segments": 4 * len(COLUMNS) * MAX_SEGMENTS,
                "segment_of": 4 * MAX_HEADS,
                "stored": 8 * MAX_FRAGMENTS,
                "raw": 8 * MAX_FRAGMENTS,
                "status": 4 * MAX_FRAGMENTS,
            },
            {},
            NUM_SLABS,
        )

    def min_bytes(self, profiled: Profiled, shape: Shape) -> int | None:
        """Return how long a record of this profile and shape is at least; None: decode it on the host."""
        plan = self._plan(profiled, shape)
        return None if plan is None else plan.num_bytes

    def decode(
        self, stream: Stream, profiled: Profiled, shape: Shape, records: Sequence[Record]
    ) -> QuantisedTicket | None:
        """Enqueue the decoding of `records`, MAX_FRAGMENTS of at least `min_bytes` at most; None when all
        scratch is in use. Raises DeviceError; that scratch is then not used again."""
        plan, count = self._plan(profiled, shape), len(records)
        assert plan is not None, "this profile is decoded on the host"
        assert 0 < count <= MAX_FRAGMENTS, f"{count} fragments in one call"
        columns = np.array(records, np.int64).reshape(-1, 3).T
        assert (columns[1] >= plan.num_bytes).all(), "records that are too short are the caller's to refuse"
        assert not (columns[0] % _ALIGNMENT).any(), "records begin at multiples of eight bytes"
        slab = self._slabs.take()
        if slab is None:
            return None
        filled = {
            "segments": plan.segments,
            "segment_of": plan.segment_of,
            "stored": columns[0].astype(np.uint64),
            "raw": columns[2].astype(np.uint64),
            "status": np.zeros(count, np.uint32),
        }
        for part, values in filled.items():
            slab.column(part, values.dtype, values.size)[:] = values.ravel()
            slab.send(stream, part, values.nbytes)
        num_units = plan.segment_of.shape[0]
        is_half = profiled.profile.dtype == "float16"
        numbers = (count, num_units, shape.num_tokens, shape.num_heads, shape.head_dim, is_half)
        arguments = [*map(np.int32, numbers), *(np.uint64(slab.at(part)) for part in filled)]
        self._launch(stream, NAMES[0], count * shape.num_values, arguments)
        slab.fetch(stream, "status", 4 * count)
        return QuantisedTicket(self._slabs, slab, count)

    def close(self) -> None:
        """Give the scratch back. Idempotent."""
        self._slabs.close()

    def _plan(self, profiled: Profiled, shape: Shape) -> _Plan | None:
        key = (profiled.profile.digest, shape)
        if key not in self._plans:
            self._plans[key] = plan_of(profiled, shape)
        return self._plans[key]


def plan_of(profiled: Profiled, shape: Shape) -> _Plan | None:
    """Return where the segments of these fragments lie; None: they are not for a device."""
    placed = profiled.fixed_rates(shape) if profiled.accepts(shape) else None
    num_units = shape.num_layers * shape.num_planes
    if placed is None or len(placed) > MAX_SEGMENTS or num_units * shape.num_heads > MAX_HEADS:
        return None
    if shape.num_values >= MAX_VALUES:
        return None
    segment_of = np.zeros((num_units, shape.num_heads), np.int32)
    for number, (rule, _) in enumerate(placed):
        unit = (rule.layer - shape.first_layer) * shape.num_planes + rule.plane
        segment_of[unit, rule.first_head : rule.end_head] = number
    segments = np.array([_segment(rule, start, shape) for rule, start in placed], np.int32)
    return _Plan(segments, segment_of, profiled.stored_bound(shape))


def _segment(rule: Rule, start: int, shape: Shape) -> tuple[int, ...]:
    """Return one row of the table, by COLUMNS."""
    group = gcd(rule.group_tokens, shape.num_tokens)  # a whole block, when the rule says 0
    num_tiles = shape.num_tokens // group * rule.num_heads
    bits = rule.bits if rule.coder == "int" else 8
    by_channel = rule.coder == "int" and rule.axis == "channel"
    return (start, rule.first_head, rule.num_heads, CODERS[rule.coder], bits, by_channel, group, num_tiles)
