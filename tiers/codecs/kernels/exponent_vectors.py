"""One block of the exponent packer as LLVM's vectors, exceptions included, without a branch in it.

What costs time in a block are its exceptions, a few per cent of the values in places that no branch predictor
guesses: taken one by one they cost more than all the rest. Here they are compressed and expanded, 64 bytes at
a time, by the mask that the planes' AND is. The list's order is that of the mask's bits, in which the eight
neighbours of a lane come first, so the exponents of a block are transposed before (eight rows of 64 to 64 of
eight: three rounds of perfect shuffles; one instruction a shuffle). That makes a block of 1,024 bytes some
170 instructions, and the packer as fast as memory.

Compressing bytes takes x86's AVX-512 VBMI2 (Ice Lake, Zen 4 and later). Whether the processor has it is asked
when the code is generated; where it has not, these functions answer NOT_DONE and nothing else, LLVM removes
the call, and the loops in exponents.py do the same work at a third of the speed. They also do the last few
blocks of a list, where 64 bytes at a time would be too much.

Rejected: the same with scatters and gathers of single exceptions (no faster than branches); numba's own
vectoriser (it finds the planes, but nothing for the exceptions); C (there is no compiler where kvtier is
installed); stores past the cache (what is written is read next, by the device or the reader); asking
for lines ahead when unpacking, too (one or two per cent; a tenth when packing).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector_ir import (
    BIT,
    BYTE,
    WORD16,
    WORD32,
    WORD64,
    address_in,
    all_lanes,
    in_every_lane,
    instruction,
    load,
    masked,
    prefetch,
    shifted,
    shuffle,
    store,
)

NOT_DONE = -1  # nothing was written that counts
_LANES = 64
_ROWS = 8  # a block is as many rows of 64 values
_REST_BYTES = _LANES * _ROWS  # sign and mantissa of each value, before the planes
_BLOCKS_AHEAD = 4

_BYTES = ir.VectorType(BYTE, _LANES)
_VALUES = ir.VectorType(WORD16, _LANES)
_MASK = ir.VectorType(BIT, _LANES)


def _has_byte_compression(context: Any) -> bool:
    """Whether code is generated for a processor that compresses bytes."""
    return "+avx512vbmi2" in context.codegen().magic_tuple()[2].split(",")


def _prefetch_block(builder: Any, address: Any, block_bytes: int, is_write: bool) -> None:
    """Ask for the lines of a block that will be next soon: what finds neighbours by itself stops at the end
    of a page."""
    first = _BLOCKS_AHEAD * block_bytes
    for offset in range(first, first + block_bytes, 64):
        prefetch(builder, address, offset, is_write=is_write)


_LOWER_HALVES = [place for lane in range(32) for place in (lane, _LANES + lane)]
_UPPER_HALVES = [32 + place for place in _LOWER_HALVES]
_EVEN, _ODD = list(range(0, 2 * _LANES, 2)), list(range(1, 2 * _LANES, 2))


def _by_lane(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose: byte `lane` of row i becomes byte 8 * lane + i of all."""
    for _ in range(3):
        pairs = [(rows[i], rows[i + 4]) for i in range(4)]
        rows = [shuffle(builder, *pair, half) for pair in pairs for half in (_LOWER_HALVES, _UPPER_HALVES)]
    return rows


def _by_row(builder: Any, lanes: list[Any]) -> list[Any]:
    """Undo `_by_lane`."""
    for _ in range(3):
        pairs = [(lanes[2 * i], lanes[2 * i + 1]) for i in range(4)]
        lanes = [shuffle(builder, *pair, half) for half in (_EVEN, _ODD) for pair in pairs]
    return lanes


class _Marks:
    """The exceptions of a block: eight masks, and how many stand before each in the list."""

    def __init__(self, builder: Any, planes: list[Any]) -> None:
        marked = builder.and_(builder.and_(planes[0], planes[1]), planes[2])
        words = builder.bitcast(marked, ir.VectorType(WORD64, _ROWS))
        self.masks = []
        self.before = [ir.Constant(WORD64, 0)]
        for row in range(_ROWS):
            word = builder.extract_element(words, ir.Constant(WORD32, row))
            self.masks.append(builder.bitcast(word, _MASK))
            self.before.append(builder.add(self.before[-1], builder.ctpop(word)))
        self.count = self.before[-1]

    def fit(self, builder: Any, room: Any) -> Any:
        """Whether as many bytes may be touched, 64 at a time."""
        return builder.icmp_signed("<=", builder.add(self.count, ir.Constant(WORD64, _LANES)), room)

    def move(self, builder: Any, name: str, row: int, value: Any) -> Any:
        """Compress or expand the bytes of one mask."""
        arguments = [value, all_lanes(_BYTES, 0), self.masks[row]]
        return instruction(builder, f"x86.avx512.mask.{name}.v64i8", _BYTES, arguments)

    def pointer(self, builder: Any, exceptions: Any, row: int) -> Any:
        """Where the exceptions of one mask stand in the list."""
        return builder.bitcast(builder.gep(exceptions, [self.before[row]]), ir.PointerType(_BYTES))


class _Arguments:
    """Addresses and numbers of a call of either function."""

    def __init__(self, context: Any, builder: Any, kinds: Any, values: Any) -> None:
        def address(array: int, at: int) -> Any:
            return address_in(context, builder, kinds[array], values[array], values[at])

        self.source = address(0, 1)
        self.target = address(2, 3)
        self.exceptions = address(4, 5)
        size = context.make_array(kinds[4])(context, builder, values[4]).nitems
        self.room = builder.sub(size, values[5])
        self.top = values[6]


def _signature(source: Any, target: Any, exceptions: Any) -> Any:
    at = types.intp
    return types.intp(source, at, target, at, exceptions, at, types.uint8)


def _emit_pack(builder: Any, to: _Arguments) -> Any:
    tops = in_every_lane(builder, to.top, _BYTES)
    exponents: list[Any] = []
    planes = [all_lanes(_BYTES, 0)] * 3
    for row in range(_ROWS):
        values = load(builder, _VALUES, to.source, 2 * _LANES * row)
        sign = masked(builder, shifted(builder, values, -8), 0x80)
        rest = builder.or_(sign, masked(builder, values, 0x7F))
        store(builder, builder.trunc(rest, _BYTES), to.target, _LANES * row)
        exponents.append(builder.trunc(shifted(builder, values, -7), _BYTES))
        below = builder.sub(tops, exponents[row])  # wraps around
        is_in_window = builder.icmp_unsigned("<", below, all_lanes(_BYTES, 7))
        code = builder.select(is_in_window, below, all_lanes(_BYTES, 7))
        for i in range(3):
            mine = masked(builder, shifted(builder, code, row - i), 1 << row)
            planes[i] = builder.or_(planes[i], mine)
    for i in range(3):
        store(builder, planes[i], to.target, _REST_BYTES + _LANES * i)
    marks = _Marks(builder, planes)
    fits = marks.fit(builder, to.room)
    with builder.if_then(fits, likely=True):
        _prefetch_block(builder, to.source, 2 * _REST_BYTES, is_write=False)
        _prefetch_block(builder, to.target, _REST_BYTES + 3 * _LANES, is_write=True)
        for row, bytes_in_order in enumerate(_by_lane(builder, exponents)):
            compressed = marks.move(builder, "compress", row, bytes_in_order)
            builder.store(compressed, marks.pointer(builder, to.exceptions, row), align=1)
    return builder.select(fits, marks.count, ir.Constant(WORD64, NOT_DONE))


def _emit_unpack(builder: Any, to: _Arguments) -> Any:
    planes = [load(builder, _BYTES, to.source, _REST_BYTES + _LANES * i) for i in range(3)]
    marks = _Marks(builder, planes)
    fits = marks.fit(builder, to.room)
    with builder.if_then(fits, likely=True):
        tops = in_every_lane(builder, to.top, _BYTES)
        _prefetch_block(builder, to.source, _REST_BYTES + 3 * _LANES, is_write=False)
        _prefetch_block(builder, to.target, 2 * _REST_BYTES, is_write=True)
        expanded = []
        for row in range(_ROWS):
            listed = builder.load(marks.pointer(builder, to.exceptions, row), align=1, typ=_BYTES)
            expanded.append(marks.move(builder, "expand", row, listed))
        for row, listed in enumerate(_by_row(builder, expanded)):
            code = all_lanes(_BYTES, 0)
            for i in range(3):
                bit = masked(builder, shifted(builder, planes[i], i - row), 1 << i)
                code = builder.or_(code, bit)
            is_listed = builder.icmp_unsigned("==", code, all_lanes(_BYTES, 7))
            exponent = builder.select(is_listed, listed, builder.sub(tops, code))
            rest = load(builder, _BYTES, to.source, _LANES * row)
            high = builder.or_(masked(builder, rest, 0x80), shifted(builder, exponent, -1))
            low = builder.or_(shifted(builder, exponent, 7), masked(builder, rest, 0x7F))
            values = shuffle(builder, low, high, [p for lane in range(_LANES) for p in (lane, _LANES + lane)])
            store(builder, values, to.target, 2 * _LANES * row)
    return builder.select(fits, marks.count, ir.Constant(WORD64, NOT_DONE))


@intrinsic
def pack_block(
    typing_context: Any,
    values: Any,
    values_at: Any,
    blocks: Any,
    blocks_at: Any,
    exceptions: Any,
    exceptions_at: Any,
    top: Any,
) -> Any:
    """Pack a block; return the number of its exceptions, or NOT_DONE.
    The 512 `values` (uint16 [value]) at byte `values_at` go into `blocks` (uint8) at `blocks_at`, and its
    exceptions into theirs, behind which up to 64 bytes are overwritten but none beyond the array. The places
    of the block are not checked."""
    del typing_context, values_at, blocks_at, exceptions_at, top

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not _has_byte_compression(context):
            return ir.Constant(WORD64, NOT_DONE)
        return _emit_pack(builder, _Arguments(context, builder, signature.args, arguments))

    return _signature(values, blocks, exceptions), generate


@intrinsic
def unpack_block(
    typing_context: Any,
    blocks: Any,
    blocks_at: Any,
    values: Any,
    values_at: Any,
    exceptions: Any,
    exceptions_at: Any,
    top: Any,
) -> Any:
    """Undo `pack_block`; return how many exceptions were used, or NOT_DONE when the list may be too short.
    Reads nothing beyond the list."""
    del typing_context, blocks_at, values_at, exceptions_at, top

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not _has_byte_compression(context):
            return ir.Constant(WORD64, NOT_DONE)
        return _emit_unpack(builder, _Arguments(context, builder, signature.args, arguments))

    return _signature(blocks, values, exceptions), generate
