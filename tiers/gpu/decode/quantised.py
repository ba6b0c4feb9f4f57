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

from ...codecs.base import Codec, Shape
from ...codecs.lossy.profile import Rule
from ...codecs.lossy.profiled import Profiled
from ..device.contract import Device, Stream
from ..device.launching import Launch
from ..device.slabs import KernelStep, Slabs, Ticket
from .exponents import CallLimits, Record, columns_of
from .quantised_kernels import CODERS, COLUMNS, NAMES

NUM_SLABS = 4
MAX_FRAGMENTS = 256  # of one call
MAX_SEGMENTS = 4096  # of one fragment
MAX_HEADS = 1 << 16  # heads of all layers and planes of one fragment
MAX_VALUES = 1 << 31  # of one fragment


@dataclass(frozen=True, slots=True)
class _Plan:
    """Fragments of one shape: the table of segments, and which of them each head is in."""

    segments: NDArray[np.int32]  # [segment, COLUMNS]
    segment_of: NDArray[np.int32]  # [layer and plane, head]
    num_bytes: int  # that a record has at least


class DeviceQuantised:
    """Decodes records of profiles on `device`. For one thread at a time.

    `slabs` are closed when no stream works for it. Raises DeviceError when there is no memory for them."""

    def __init__(self, device: Device, launch: Launch) -> None:
        self._launch = launch
        self._plans: dict[tuple[bytes, Shape], _Plan | None] = {}
        self.slabs = Slabs(
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

    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of this profile and shape."""
        plan = self._plan(codec, shape)
        return CallLimits(0, 0) if plan is None else CallLimits(plan.num_bytes, MAX_FRAGMENTS)

    def decode(self, stream: Stream, codec: Codec, shape: Shape, records: Sequence[Record]) -> Ticket | None:
        """Enqueue the decoding of `records`, within `limits`; None when all scratch is in use.

        Results: (n,) uint32, for each fragment 0, or 1 for bytes that the codec does not write. Raises
        DeviceError; that scratch is then not used again.
        """
        assert isinstance(codec, Profiled)
        plan, count = self._plan(codec, shape), len(records)
        assert plan is not None, "this profile is decoded on the host"
        assert 0 < count <= MAX_FRAGMENTS, f"{count} fragments in one call"
        columns = columns_of(records, plan.num_bytes)
        del columns["rooms"]
        columns |= {"segments": plan.segments, "segment_of": plan.segment_of}
        is_half = codec.profile.dtype == "float16"
        sizes = (shape.num_tokens, shape.num_heads, shape.head_dim, is_half)
        numbers = [np.int32(number) for number in (count, plan.segment_of.shape[0], *sizes)]
        parts = ("segments", "segment_of", "stored", "raw", "status")
        step = KernelStep(NAMES[0], count * shape.num_values, numbers, parts)
        return self.slabs.call(stream, self._launch, columns, [step], ("status", np.uint32, count))

    def _plan(self, codec: Codec, shape: Shape) -> _Plan | None:
        assert isinstance(codec, Profiled)
        key = (codec.profile.digest, shape)
        if key not in self._plans:
            self._plans[key] = _plan_of(codec, shape)
        return self._plans[key]


def _plan_of(profiled: Profiled, shape: Shape) -> _Plan | None:
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
    by_channel = rule.coder == "int" and rule.axis == "channel"
    kind = (CODERS[rule.coder], rule.bits, by_channel)
    return (start, rule.first_head, rule.num_heads, *kind, group, num_tiles)
