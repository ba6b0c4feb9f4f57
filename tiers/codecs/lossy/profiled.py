"""Profiled: one fragment, segment by segment as a profile's rules say. The only codec that may lose anything.

    segments of fixed length, each aligned to 64 bytes | u32 length of each other one | those, one by one

Both in the order of layer, plane, heads. Where rates are fixed, lengths follow from the shape and the
profile: such a segment's place is computed by writer and reader alike, cannot be lied about, and can be read
on its own. What is entropy-coded (`transform`) shares the room that is reserved for all of it: what one
segment takes more than usual, another takes less.

Unfinished blocks, the actual window of a runtime, never come here.

Nothing is ever quantised twice. Records move as they are stored, and what was loaded from one is the same
fragment, clean, with a record that is still there. Should that record be gone, the fragment has spent its
budget: it is stored exactly from then on, and the new record says so (`is_spent`). Quantising decoded
values to the same codes was tried instead: rounding to 16 bits moves one in fifty of them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...base import Buffer
from ..base import PROFILED_ID, CodecError, DoesNotFit, Exactness, Shape, words_of
from .profile import Profile, Rule
from .quantised import ExactSegment, IntSegment, IntSegments, SegmentCoder
from .transform import TransformSegment

_ALIGNMENT = 64
_MAX_SHAPES = 64


class _Segment(NamedTuple):
    """One rule's place in the fragment, and in its encoded bytes."""

    rule: Rule
    coder: SegmentCoder
    start: int
    end: int


class _Coding(Protocol):
    """Codes the segments of a run."""

    def encode(self, units: NDArray[np.uint16], into: NDArray[np.uint8]) -> None:
        """Fill `into` from heads of `units` [unit, token, head, dim]. Raises DoesNotFit."""
        ...

    def decode(self, stored: NDArray[np.uint8], units: NDArray[np.uint16]) -> None:
        """Fill heads of `units` [unit, token, head, dim] from `stored`. Raises CodecError."""
        ...


class _Alone(NamedTuple):
    """Implements _Coding for one segment."""

    coder: SegmentCoder
    unit: int  # a plane of a layer

    def encode(self, units: NDArray[np.uint16], into: NDArray[np.uint8]) -> None:
        """See _Coding.encode."""
        self.coder.encode(units[self.unit], into)

    def decode(self, stored: NDArray[np.uint8], units: NDArray[np.uint16]) -> None:
        """See _Coding.decode."""
        self.coder.decode(stored, units[self.unit])


class _Run(NamedTuple):
    """Segments, one behind the other, that one call codes."""

    coding: _Coding
    start: int
    end: int


class _Layout(NamedTuple):
    """Where everything lies in the encoded bytes of a fragment."""

    axes: tuple[int, int, int, int]  # unit, token, head, dim
    fixed: tuple[_Segment, ...]
    runs: tuple[_Run, ...]  # the same
    varying: tuple[_Segment, ...]  # without places
    lengths_at: int
    varying_at: int
    total_bytes: int  # what is reserved


class Profiled:
    """Implements Codec for the KV of one model, by one profile."""

    codec_id = PROFILED_ID
    name = "profiled"
    library = "numba"

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        is_half = profile.dtype == "float16"
        self._coders = {
            rule: coder_of(rule, profile.head_dim, is_half=is_half, tables=profile.tables)
            for rule in profile.rules
        }
        self.exactness = loosest([coder.exactness for coder in self._coders.values()])
        self._layout = lru_cache(_MAX_SHAPES)(self._lay_out)

    def parameters(self) -> bytes:
        """Return the profile's digest."""
        return self.profile.digest

    def accepts(self, shape: Shape) -> bool:
        """Whether these are layers of the profile's model, with its heads and dtype."""
        return (
            self.profile.geometry()
            == {
                "num_layers": self.profile.num_layers,
                "num_kv_heads": shape.num_heads,
                "head_dim": shape.head_dim,
                "num_planes": shape.num_planes,
                "dtype": shape.dtype,
            }
            and shape.first_layer + shape.num_layers <= self.profile.num_layers
        )

    def stored_bound(self, shape: Shape) -> int:
        """Return the length: exact where the rules have fixed rates, else with what they reserve."""
        return self._layout(shape).total_bytes

    def exactness_of(self, layer: int, plane: int) -> Exactness:
        """Return the bound of one layer's K or V."""
        return loosest([self._coders[rule].exactness for rule in self.profile.rules_by_unit[layer, plane]])

    def fixed_rates(self, shape: Shape) -> list[tuple[Rule, int]] | None:
        """Return the rules of these layers, each with the offset of its bytes, for decoding on a device.
        None when a length depends on the data."""
        layout = self._layout(shape)
        return None if layout.varying else [(segment.rule, segment.start) for segment in layout.fixed]

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit, also for values that are not finite."""
        layout = self._layout(shape)
        if layout.varying_at > len(into):
            raise DoesNotFit
        units = words_of(payload).reshape(layout.axes)
        target = np.frombuffer(into, np.uint8)
        end = 0
        for run in layout.runs:
            if end < run.start:
                target[end : run.start] = 0
            end = run.end
            run.coding.encode(units, target[run.start : end])
        return _encode_varying(layout, units, target, end, shape) if layout.varying else end

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        layout = self._layout(shape)
        if len(stored) < layout.varying_at:
            raise CodecError(f"profiled: {len(stored)} of {layout.varying_at} bytes")
        source = np.frombuffer(stored, np.uint8)
        source.flags.writeable = False  # loops are compiled for one kind of memory, not for two
        whole = np.frombuffer(into, np.uint16)
        words = whole if whole.flags.aligned else np.empty(whole.size, np.uint16)
        units = words.reshape(layout.axes)
        for run in layout.runs:
            run.coding.decode(source[run.start : run.end], units)
        if layout.varying:
            _decode_varying(layout, source, units, shape)
        if words is not whole:
            whole[:] = words

    def _lay_out(self, shape: Shape) -> _Layout:
        if not self.accepts(shape):
            raise CodecError(f"profile {self.profile.digest.hex()[:12]} is not for fragments like {shape}")
        fixed: list[_Segment] = []
        varying: list[_Segment] = []
        end = num_reserved = 0
        for layer in range(shape.first_layer, shape.first_layer + shape.num_layers):
            for plane in range(shape.num_planes):
                for rule in self.profile.rules_by_unit[layer, plane]:
                    coder = self._coders[rule]
                    length = coder.stored_bytes(shape.num_tokens)
                    if coder.is_fixed:
                        start = -(-end // _ALIGNMENT) * _ALIGNMENT
                        end = start + length
                        fixed.append(_Segment(rule, coder, start, end))
                    else:
                        num_reserved += length
                        varying.append(_Segment(rule, coder, 0, 0))
        lengths_at = -(-end // 4) * 4 if varying else end
        varying_at = lengths_at + 4 * len(varying)
        total_bytes = varying_at + num_reserved
        axes = (shape.num_layers * shape.num_planes, shape.num_tokens, shape.num_heads, shape.head_dim)
        runs = _runs(fixed, shape)
        return _Layout(axes, tuple(fixed), runs, tuple(varying), lengths_at, varying_at, total_bytes)


def loosest(bounds: list[Exactness]) -> Exactness:
    """Return a bound that holds for whatever any of `bounds` holds for."""
    return Exactness(
        all(bound.is_exact for bound in bounds),
        max(bound.max_relative for bound in bounds),
        max(bound.max_absolute for bound in bounds),
    )


def coder_of(rule: Rule, head_dim: int, *, is_half: bool, tables: Sequence[bytes] = ()) -> SegmentCoder:
    """Return what writes the heads of one rule. Raises ProfileError for a table that is not its."""
    match rule.coder:
        case "exact":
            return ExactSegment(rule, head_dim)
        case "int":
            return IntSegment(rule, head_dim, is_half=is_half)
        case "transform":
            return TransformSegment(rule, head_dim, is_half=is_half, table=tables[rule.table])


def _encode_varying(
    layout: _Layout, units: NDArray[np.uint16], target: NDArray[np.uint8], fixed_end: int, shape: Shape
) -> int:
    """Write what has no fixed length behind what has; return where it ends. Raises DoesNotFit."""
    target[fixed_end : layout.lengths_at] = 0
    lengths = np.zeros(len(layout.varying), np.uint32)
    end = layout.varying_at
    for i, segment in enumerate(layout.varying):
        lengths[i] = segment.coder.encode(units[_unit(segment, shape)], target[end:])
        end += int(lengths[i])
    target[layout.lengths_at : layout.varying_at] = lengths.view(np.uint8)
    return end


def _decode_varying(
    layout: _Layout, source: NDArray[np.uint8], units: NDArray[np.uint16], shape: Shape
) -> None:
    """Undo `_encode_varying`. Raises CodecError."""
    lengths = source[layout.lengths_at : layout.varying_at].copy().view(np.uint32)
    start = layout.varying_at
    for segment, length in zip(layout.varying, lengths.tolist(), strict=True):
        if start + length > source.size:
            raise CodecError("profiled: lengths beyond the end")
        segment.coder.decode(source[start : start + length], units[_unit(segment, shape)])
        start += length


def _runs(fixed: list[_Segment], shape: Shape) -> tuple[_Run, ...]:
    """Return the segments, neighbours together that one call may code."""
    runs: list[list[_Segment]] = []
    for segment in fixed:
        if runs and isinstance(segment.coder, IntSegment) and isinstance(runs[-1][-1].coder, IntSegment):
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return tuple(_Run(_coding(run, shape), run[0].start, run[-1].end) for run in runs)


def _coding(run: list[_Segment], shape: Shape) -> _Coding:
    """Return what codes a run: one segment of any kind, or neighbours of intN."""
    placed = [
        (segment.coder, _unit(segment, shape), segment.start - run[0].start)
        for segment in run
        if isinstance(segment.coder, IntSegment)
    ]
    return IntSegments(placed, shape.num_tokens) if placed else _Alone(run[0].coder, _unit(run[0], shape))


def _unit(segment: _Segment, shape: Shape) -> int:
    return (segment.rule.layer - shape.first_layer) * shape.num_planes + segment.rule.plane
