"""Quantised: fewer bits a value, with scales that travel along: intN for the heads of one rule.

    | scales of all tiles | codes of all tiles |      a tile is a group of tokens of one head

Keys are scaled per channel, because their outliers stay in a channel, values per token, because theirs do
not (KIVI, arXiv 2402.02750). The loops, and the arithmetic that makes every machine decode to the same bits,
are in kernels/quantised.py. Lengths follow from the shape, so there is nothing in the
bytes to be lied about; what can be wrong with them is a scale that is not finite.

Rejected: a Hadamard rotation before it (a fifth less error at four bits for models without outliers, at a
sixth of the speed; `transform` is the better rotation where one is paid for); outliers kept aside (their list
has no fixed length); scales of scales (a hundredth of a bit); fp8 with a scale a head (4 % shorter than eight
bits, five times their error).
"""

from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..base import CodecError, DoesNotFit, Exactness, loops_of
from .profile import Rule

Words: TypeAlias = NDArray[np.uint16]  # [token, head, dim] of one layer and plane, float16 or bfloat16
Bytes: TypeAlias = NDArray[np.uint8]
_ROUNDING = 2.0**-8  # of what is decoded, to 8 bits of mantissa or more; twice what it takes
_SMALLEST_SCALE = 2.0**-24  # of float16: an absolute error of half of it is always possible
#: How far the outermost codes stand inside a group's range, in half steps, by bits; see kernels/quantised.py.
#: A matter of the encoder alone.
INSETS = {2: 1.0, 3: 0.5}
_INSETS = np.array([INSETS.get(bits, 0.0) for bits in range(9)], np.float32)


class SegmentCoder(Protocol):
    """Codes the heads of one rule, and touches no others. Immutable, thread-safe.

    `words`: uint16 [token, head, dim], in one piece of memory; encoded bytes: uint8 (num_bytes,).
    """

    exactness: Exactness
    is_fixed: bool  # the length depends on the shape only

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the encoded segment, or the most it should have."""
        ...

    def encode(self, words: Words, into: Bytes) -> int:
        """Fill `into`, or its beginning, from `words` [token, head, dim]; return the bytes written.
        Raises DoesNotFit for values that are not finite, out of range, or need more bytes."""
        ...

    def decode(self, stored: Bytes, words: Words) -> None:
        """Fill the rule's heads of `words` [token, head, dim]. Raises CodecError."""
        ...


class ExactSegment:
    """Implements SegmentCoder: heads that lose nothing."""

    exactness = Exactness(True)
    is_fixed = True

    def __init__(self, rule: Rule, head_dim: int) -> None:
        self._heads = slice(rule.first_head, rule.end_head)
        self._token_bytes = 2 * rule.num_heads * head_dim

    def stored_bytes(self, num_tokens: int) -> int:
        """Return the raw size."""
        return num_tokens * self._token_bytes

    def encode(self, words: Words, into: Bytes) -> int:
        """Copy the heads of `words` [token, head, dim] to `into`; return its size."""
        into[:] = np.ascontiguousarray(words[:, self._heads]).view(np.uint8).reshape(-1)
        return into.size

    def decode(self, stored: Bytes, words: Words) -> None:
        """Copy `stored` to the heads of `words` [token, head, dim]."""
        mine = words[:, self._heads]
        mine[:] = stored.copy().view(np.uint16).reshape(mine.shape)


class _Tiles(NamedTuple):
    """How a segment lies in its bytes."""

    group_tokens: int
    num_tiles: int
    num_scales: int  # of a tile
    code_bytes: int  # of a tile

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of all tiles."""
        return 2 * self.num_tiles * self.num_scales

    @property
    def total_bytes(self) -> int:
        """Bytes of the encoded segment."""
        return self.scale_bytes + self.num_tiles * self.code_bytes


class IntSegment:
    """Implements SegmentCoder with 2 to 8 bits, linear between the least and the largest of each group."""

    is_fixed = True

    def __init__(self, rule: Rule, head_dim: int, *, is_half: bool) -> None:
        self._rule = rule
        self._dim = head_dim
        self._is_half = is_half
        self._by_channel = rule.axis == "channel"
        num_steps = (1 << rule.bits) - 1 + INSETS.get(rule.bits, 0.0)
        half_step = (1 + 2.0**-9) / num_steps  # of the largest magnitude, which spans two of it
        self.exactness = Exactness(False, half_step + _ROUNDING * (1 + 2 * half_step), _SMALLEST_SCALE)

    def _tiles(self, num_tokens: int) -> _Tiles:
        group = gcd(self._rule.group_tokens, num_tokens)  # a whole block, when the rule says 0
        num_tiles = num_tokens // group * self._rule.num_heads
        num_scales = 2 * (self._dim if self._by_channel else group)
        code_bytes = -(-group * self._dim // 8) * self._rule.bits
        return _Tiles(group, num_tiles, num_scales, code_bytes)

    def stored_bytes(self, num_tokens: int) -> int:
        """Return how long the encoded segment is."""
        return self._tiles(num_tokens).total_bytes

    def encode(self, words: Words, into: Bytes) -> int:
        """Fill `into` from `words` [token, head, dim]; see SegmentCoder."""
        total_bytes = self.stored_bytes(words.shape[0])
        IntSegments([(self, 0, 0)], words.shape[0]).encode(words[None], into[:total_bytes])
        return total_bytes

    def decode(self, stored: Bytes, words: Words) -> None:
        """Fill `words` [token, head, dim]; see SegmentCoder."""
        IntSegments([(self, 0, 0)], words.shape[0]).decode(stored, words[None])

    def table_row(self, unit: int, start: int, num_tokens: int) -> list[int]:
        """Return what the loops are told of this segment; see kernels/quantised.py."""
        rule, tiles = self._rule, self._tiles(num_tokens)
        heads = (rule.first_head, rule.end_head)
        end = start + tiles.total_bytes
        return [unit, *heads, tiles.group_tokens, rule.bits, int(self._by_channel), start, end]

    @property
    def is_half(self) -> bool:
        """Whether the values are float16."""
        return self._is_half


class IntSegments:
    """Segments that one call codes: a call costs as much as some ten kilobytes. Immutable, thread-safe.

    `placed`: coder, unit and first byte of each, in the order of their bytes, all of one profile.
    """

    def __init__(self, placed: Sequence[tuple[IntSegment, int, int]], num_tokens: int) -> None:
        rows = [coder.table_row(unit, start, num_tokens) for coder, unit, start in placed]
        for row, following in pairwise(rows):
            row[-1] = following[-2]  # zeros in between
        self._table = np.array(rows, np.int64)
        self._end = rows[-1][-1]
        self._is_half = placed[0][0].is_half

    def encode(self, units: Words, into: Bytes) -> None:
        """Encode heads of `units` [unit, token, head, dim], zeros in between.
        Raises DoesNotFit for what is not finite."""
        assert into.size >= self._end
        if not loops_of("quantised").encode_int(units, self._table, _INSETS, self._is_half, into):
            raise DoesNotFit

    def decode(self, stored: Bytes, units: Words) -> None:
        """Fill the heads of `units` [unit, token, head, dim] from what `encode` wrote. Raises CodecError."""
        if stored.size < self._end or not loops_of("quantised").decode_int(
            units, self._table, self._is_half, stored
        ):
            raise CodecError("quantised: too short, or a scale that is not finite")
