"""Transform: heads in a basis in which their dims have little to do with each other, in equal steps, coded.

    values - mean -> coefficients (profile's basis) -> whole steps -> entropy coder

    | u32 words, u32 escapes, u32 states [8] | escapes i32 | words u16 |

One step for all coefficients is what costs least error for its bits; coefficients that hardly move take
hundredths of a bit. Heads of one rule share a basis: heads that repeat each other then cost little more than
one of them, which is most of what there is to gain (KVTC, arXiv 2511.01815). It is a matrix product for each
token, so this is for the coldest of what is kept; `quantised` is ten times as fast. In C
(native/_transform.c) and, the same bytes, in numpy and numba, which is what the descriptions here are of.

Keys come here after rotary embedding, because that is what runtimes hand over: undoing it needs positions
and the model's rope parameters. The basis is fitted on what comes, so it is a worse one for keys, by as much
as their angles spread; calibration measures how much that is.

Nothing is clipped: what has no symbol is an escape with its value in full, so the bound holds for all.
"""

import struct
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ....native import native
from ..base import CodecError, DoesNotFit, Exactness, loops_of
from .profile import ProfileError, Rule
from .quantised import Bytes, Words
from .transform_table import MATRIX_ERROR, UNITS_ERROR, TransformTable, in_blocks

_HEAD = struct.Struct("<10I")
_LARGEST_STEPS = 1 << 24  # of an escape
_LARGEST_UNITS = 1 << 31
_LARGEST_HALF = 65504.0  # finite float16
_MAX_ESCAPES_SHARE = 8  # of the values, one in so many
_UNEVEN = "transform: the stream does not come out even"
_NATIVE_DIMS = 16  # C takes a multiple of it


class TransformSegment:
    """Implements SegmentCoder; the only one with a length that depends on the data."""

    is_fixed = False

    def __init__(self, rule: Rule, head_dim: int, *, is_half: bool, table: bytes) -> None:
        """Raises ProfileError when the table is not one of as many dims."""
        self._rule = rule
        self._is_half = is_half
        self._table = TransformTable.from_bytes(table)
        num_dims = rule.num_heads * head_dim
        if self._table.num_dims != num_dims:
            raise ProfileError(f"a table of {self._table.num_dims} dims for {num_dims}; fit it again")
        self._step = np.float32(rule.step)
        self._scale = self._step / np.float32(1 << self._table.shift)
        self._first_dim = rule.first_head * head_dim
        self._is_for_native = num_dims % _NATIVE_DIMS == 0
        off = 0.5 + UNITS_ERROR + MATRIX_ERROR  # of a coefficient, in steps
        moved = self._table.worst_gain * float(self._step) * off
        self.exactness = Exactness(False, 2.0**-7, moved * (1 + 2.0**-8) + 2.0**-24)

    @cached_property
    def _near(self) -> NDArray[np.int16]:
        """The forward matrix as C reads it."""
        return in_blocks(self._table.forward.near)

    @cached_property
    def _inverse(self) -> NDArray[np.int16]:
        """The inverse as C reads it."""
        return in_blocks(self._table.inverse)

    def _place(self, words: Words) -> tuple[int, int, bool]:
        """Return the first dim of a token, a token's dims, and the dtype, as C reads them."""
        return self._first_dim, words.shape[1] * words.shape[2], self._is_half

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the room to reserve."""
        num_values = num_tokens * self._table.num_dims
        return _HEAD.size + int(num_values * self._rule.reserve_bits / 8)

    def encode(self, words: Words, into: Bytes) -> int:
        """Fill the beginning of `into` from `words` [token, head, dim]; see SegmentCoder."""
        table = self._table
        forward = table.forward
        scale = np.float32(2.0**forward.unit_bits) / self._step
        if native is not None and self._is_for_native:
            tables = (self._near, table.mean, table.classes, table.coded_symbols)
            sums = (scale, forward.shift, forward.far_shift, forward.limit)
            length: int = native.encode_transform(
                words, *tables, into, forward.far, *self._place(words), *sums
            )
            if length < 0:
                raise DoesNotFit
            return length
        values = np.empty((words.shape[0], table.num_dims), np.float32)
        loops_of("floats").widen_heads(words, self._rule.first_head, self._is_half, values)
        if self._is_half and np.abs(values).max() > _LARGEST_HALF:
            raise DoesNotFit  # `widen_heads` makes a number of what is none
        with np.errstate(all="ignore"):
            units = np.rint((values - table.mean) * scale)
        largest = np.abs(units).max(axis=1)
        if not largest.max() < _LARGEST_UNITS:  # not a number is not less, either
            raise DoesNotFit
        is_far = (largest >= 1 << 15) | (np.square(units, dtype=np.float64).sum(axis=1) > forward.limit)
        sums = (units @ forward.near.astype(np.float64)).astype(np.int64)  # exact where it is taken
        steps = (sums + (1 << forward.shift - 1)) >> forward.shift
        far_sums = units[is_far].astype(np.int64) @ forward.far.astype(np.int64)
        steps[is_far] = (far_sums + (1 << forward.far_shift - 1)) >> forward.far_shift
        if np.abs(steps).max() >= _LARGEST_STEPS:
            raise DoesNotFit
        states = np.empty(8, np.uint32)
        stream = np.empty(max(0, into.size - _HEAD.size) // 2, np.uint16)
        escapes = np.empty(steps.size // _MAX_ESCAPES_SHARE + 1, np.int32)
        num_words, num_escapes = loops_of("rans").encode(
            steps.astype(np.int32), table.classes, table.frequencies, table.starts, states, stream, escapes
        )
        escapes_end = _HEAD.size + 4 * num_escapes
        length = escapes_end + 2 * num_words
        if num_words < 0 or length > into.size:
            raise DoesNotFit
        head = _HEAD.pack(num_words, num_escapes, *states.tolist())
        into[: _HEAD.size] = np.frombuffer(head, np.uint8)
        into[_HEAD.size : escapes_end] = escapes[escapes.size - num_escapes :].view(np.uint8)
        into[escapes_end:length] = stream[stream.size - num_words :].view(np.uint8)
        return int(length)

    def decode(self, stored: Bytes, words: Words) -> None:
        """Fill `words` [token, head, dim]; see SegmentCoder."""
        table = self._table
        if stored.size < _HEAD.size:
            raise CodecError("transform: too short")
        num_words, num_escapes, *first_states = _HEAD.unpack(stored[: _HEAD.size].tobytes())
        escapes_end = _HEAD.size + 4 * num_escapes
        end = escapes_end + 2 * num_words
        if end > stored.size:
            raise CodecError("transform: lengths beyond the end")
        escapes = stored[_HEAD.size : escapes_end].copy().view(np.int32)
        if escapes.size and np.abs(escapes.astype(np.int64)).max() >= _LARGEST_STEPS:
            raise CodecError("transform: an escape out of range")
        if native is not None and self._is_for_native:
            tables = (self._inverse, table.mean, table.classes, table.slots)
            place = self._place(words)
            if not native.decode_transform(words, *tables, stored[8:end], num_escapes, *place, self._scale):
                raise CodecError(_UNEVEN)
            return
        stream = stored[escapes_end:end].copy().view(np.uint16)
        steps = np.empty((words.shape[0], table.num_dims), np.float32)
        is_far = np.empty(words.shape[0], np.bool_)
        states = np.array(first_states, np.uint32)
        if not loops_of("rans").decode(
            stream,
            states,
            escapes,
            table.classes,
            table.symbols,
            table.frequencies,
            table.starts,
            steps,
            is_far,
        ):
            raise CodecError(_UNEVEN)
        loops_of("floats").narrow_heads(
            self._values(steps, is_far), self._rule.first_head, self._is_half, words
        )

    def _values(self, steps: NDArray[np.float32], is_far: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the values of whole steps [token, coefficient]: the same bits wherever this is done."""
        table = self._table
        sums = steps @ table.decoding  # exact: sums of these integers stay below 2^24
        if is_far.any():
            sums[is_far] = steps[is_far].astype(np.float64) @ table.inverse.astype(np.float64)
        sums *= self._scale
        sums += table.mean
        return sums
