"""Profiled: one fragment, segment by segment as a profile's rules say. The only codec that may lose anything.

    segment of rule 0 | segment of rule 1 | ...      in the order of layer, plane, heads; aligned to 64 bytes

Rates are fixed wherever a coder's are, so a fragment's length follows from its shape and the profile, and the
record needs no directory: where each segment lies is computed by writer and reader alike, and cannot be lied
about. Heads of one rule are contiguous, so that a shard or a layer can be read on its own.

What a profile cannot say here: "the most recent tokens stay exact". A fragment is encoded when it leaves
memory, and nobody knows then whether its conversation goes on; unfinished blocks, the actual window of a
runtime, never come here. The first tokens of a chain are known by their position: `sink_tokens`.

Nothing is ever quantised twice: records move as they are stored, and what was loaded from one is the same
fragment, clean, with a record that is still there. Should that record be gone, a spill encodes decoded
values again: same scales, nearly same codes; the bound counts from what was put then, and holds twice.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import Buffer
from .base import CodecError, DoesNotFit, Exactness, Shape
from .profile import Profile, Rule
from .quantised import ExactSegment, Fp8Segment, IntSegment, SegmentCoder

_ALIGNMENT = 64
_MAX_SHAPES = 64


class _Segment(NamedTuple):
    """One rule's place in the fragment, and in its encoded bytes."""

    rule: Rule
    coder: SegmentCoder
    start: int
    end: int


class Profiled:
    """Implements Codec for the KV of one model, by one profile."""

    codec_id = 5
    name = "profiled"

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._coders = {rule: _coder_of(rule, profile) for rule in profile.rules}
        self.exactness = loosest([coder.exactness for coder in self._coders.values()])
        self._segments = lru_cache(_MAX_SHAPES)(self._lay_out)

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
        """Return the exact length, from the rates of the rules."""
        return self._segments(shape)[-1].end

    def keeps_exact(self, first_token: int) -> bool:
        """Whether a block that begins at this token of its chain is to be stored as it is."""
        return first_token < self.profile.sink_tokens

    def exactness_of(self, layer: int, plane: int) -> Exactness:
        """Return the bound of one layer's K or V."""
        return loosest([self._coders[rule].exactness for rule in self.profile.rules_by_unit[layer, plane]])

    def encode(self, shape: Shape, payload: Buffer, into: Buffer) -> int:
        """Encode; see Codec. Raises DoesNotFit, also for values that are not finite."""
        segments = self._segments(shape)
        if segments[-1].end > len(into):
            raise DoesNotFit
        values = _values(payload, shape)
        target = np.frombuffer(into, np.uint8)
        end = 0
        for segment in segments:
            target[end : segment.start] = 0
            words = values[segment.rule.layer - shape.first_layer, segment.rule.plane]
            segment.coder.encode(words, target[segment.start : segment.end])
            end = segment.end
        return end

    def decode(self, shape: Shape, stored: Buffer, into: Buffer) -> None:
        """Decode; see Codec. Raises CodecError."""
        segments = self._segments(shape)
        if len(stored) < segments[-1].end:
            raise CodecError(f"profiled: {len(stored)} of {segments[-1].end} bytes")
        source = np.frombuffer(stored, np.uint8)
        source.flags.writeable = False  # loops are compiled for one kind of memory, not for two
        whole = np.frombuffer(into, np.uint8)
        is_aligned = whole.ctypes.data % 2 == 0
        values = (whole if is_aligned else np.empty_like(whole)).view(np.uint16).reshape(_axes(shape))
        for segment in segments:
            words = values[segment.rule.layer - shape.first_layer, segment.rule.plane]
            segment.coder.decode(source[segment.start : segment.end], words)
        if not is_aligned:
            whole[:] = values.reshape(-1).view(np.uint8)

    def _lay_out(self, shape: Shape) -> tuple[_Segment, ...]:
        if not self.accepts(shape):
            raise CodecError(f"profile {self.profile.digest.hex()[:12]} is not for fragments like {shape}")
        segments = []
        end = 0
        for layer in range(shape.first_layer, shape.first_layer + shape.num_layers):
            for plane in range(shape.num_planes):
                for rule in self.profile.rules_by_unit[layer, plane]:
                    start = -(-end // _ALIGNMENT) * _ALIGNMENT
                    coder = self._coders[rule]
                    end = start + coder.stored_bytes(shape.num_tokens)
                    segments.append(_Segment(rule, coder, start, end))
        return tuple(segments)


def loosest(bounds: list[Exactness]) -> Exactness:
    """Return a bound that holds for whatever any of `bounds` holds for."""
    return Exactness(
        all(bound.is_exact for bound in bounds),
        max(bound.max_relative for bound in bounds),
        max(bound.max_absolute for bound in bounds),
    )


def _coder_of(rule: Rule, profile: Profile) -> SegmentCoder:
    is_half = profile.dtype == "float16"
    match rule.coder:
        case "exact":
            return ExactSegment(rule, profile.head_dim)
        case "int":
            return IntSegment(rule, profile.head_dim, is_half=is_half)
        case "fp8_e4m3" | "fp8_e5m2":
            return Fp8Segment(rule, profile.head_dim, is_half=is_half)
        case "transform":
            raise CodecError("this version has no transform coder; calibrate without it")


def _axes(shape: Shape) -> tuple[int, ...]:
    return (shape.num_layers, shape.num_planes, shape.num_tokens, shape.num_heads, shape.head_dim)


def _values(payload: Buffer, shape: Shape) -> NDArray[np.uint16]:
    """Return the payload's words by their axes; copies when they lie askew."""
    array = np.frombuffer(payload, np.uint8)
    aligned = array if array.ctypes.data % 2 == 0 else array.copy()
    aligned.flags.writeable = False
    return aligned.view(np.uint16).reshape(_axes(shape))
