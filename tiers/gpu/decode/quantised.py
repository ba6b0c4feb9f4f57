"""DeviceQuantised: fragments of one profile, decoded where they arrive.

A profile with a rule of `transform` has lengths that depend on the data and is decoded on the host. Never ran
on a GPU.
"""

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ...codecs.base import Codec, Shape
from ...codecs.lossy.profile import Rule
from ...codecs.lossy.profiled import Profiled
from ..device.contract import Device
from ..device.launching import Launch
from .quantised_kernels import CODERS, COLUMNS, NAMES
from .records import MAX_FRAGMENTS, Array, CallLimits, Columns, KernelPlan, RecordDecoder

MAX_SEGMENTS = 4096  # of one fragment
MAX_HEADS = 1 << 16  # heads of all layers and planes of one fragment
MAX_VALUES = 1 << 31  # of one fragment


@dataclass(frozen=True, slots=True)
class _Plan:
    """Fragments of one shape: the table of segments, and which of them each head is in."""

    segments: NDArray[np.int32]  # [segment, COLUMNS]
    segment_of: NDArray[np.int32]  # [layer and plane, head]
    num_bytes: int  # that a record has at least


class DeviceQuantised(RecordDecoder):
    """Decodes records of profiles."""

    def __init__(self, device: Device, launch: Launch) -> None:
        self._plans: dict[tuple[bytes, Shape], _Plan | None] = {}
        sent = {"segments": 4 * len(COLUMNS) * MAX_SEGMENTS, "segment_of": 4 * MAX_HEADS}
        super().__init__(device, launch, sent, {})

    def limits(self, codec: Codec, shape: Shape) -> CallLimits:
        """Return what one call takes of fragments of this profile and shape."""
        plan = self._plan(codec, shape)
        return CallLimits(0, 0) if plan is None else CallLimits(plan.num_bytes, MAX_FRAGMENTS)

    def _kernels(self, codec: Codec, shape: Shape, columns: Columns, rooms: Array) -> KernelPlan:
        assert isinstance(codec, Profiled)
        plan, count = self._plan(codec, shape), len(rooms)
        assert plan is not None, "this profile is decoded on the host"
        columns |= {"segments": plan.segments, "segment_of": plan.segment_of}
        is_half = codec.profile.dtype == "float16"
        sizes = (shape.num_tokens, shape.num_heads, shape.head_dim, is_half)
        parts = ("segments", "segment_of", "stored", "raw", "status")
        return (count, plan.segment_of.shape[0], *sizes), [(NAMES[0], count * shape.num_values, parts)]

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
