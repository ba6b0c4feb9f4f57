"""The loops of the exponent packer, compiled by numba: the only code here that looks at single values.

A bfloat16 is sign, eight bits of exponent, seven of mantissa. In keys and values nearly all exponents of
one layer lie in a window of seven neighbours, so three bits name one: 0 to 6 below `top`, or 7 for
"elsewhere", in which case the exponent follows in a list.

512 values are a block of three parts that a vector unit likes: 512 bytes of sign and mantissa, and three
planes of 64 bytes, one for each bit of the code. Bit i of byte j belongs to value 64 i + j, so that eight
loads of 64 neighbours, shifted and or-ed lane by lane, make a plane: no shuffles, and LLVM vectorises it
for whatever the processor has. The AND of the planes marks the exceptions; only they are looked at one by
one, in the order of the bits of that mask, which is the same in both directions.

Rejected: codes packed three bytes for eight values (one operation in six less, but then the exceptions have
to be searched for byte by byte, which took longer than everything else); Huffman codes (a seventh smaller
than this at a fifth of the speed: that is `planes`); torch (no operation packs bits, 40 passes over
memory).

The layout follows SplitZip (arXiv 2605.01708: fixed codes and an escape list); the bit planes are ours.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .compiling import compiled

BLOCK = 512  # values
PLANE_BYTES = BLOCK // 8
CODE_BYTES = 3 * PLANE_BYTES
BLOCK_BYTES = BLOCK + CODE_BYTES
WINDOW = 7  # neighbouring exponents that have a code
SAMPLES = 512  # values of a part that are looked at to find its window


@intrinsic
def _lowest_bit(typing_context: Any, word: Any) -> Any:
    """Position of the lowest set bit of a word that is not zero."""
    del typing_context, word
    signature = types.int64(types.uint64)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return signature, generate


@compiled
def _find_top(values: Any) -> Any:
    """Return the highest exponent of the window that most of `values` fall into."""
    counts = np.zeros(256, np.int64)
    for i in range(0, values.size, max(1, values.size // SAMPLES)):
        counts[(values[i] >> 7) & 0xFF] += 1
    most, top, inside = -1, 0, 0
    for exponent in range(256):
        inside += counts[exponent]
        if exponent >= WINDOW:
            inside -= counts[exponent - WINDOW]
        if inside > most:
            most, top = inside, exponent
    return top


@compiled
def _pack(values: Any, top: Any, blocks: Any, exceptions: Any) -> Any:
    """Pack one part; return how many exceptions there were, -1 when they do not fit."""
    num_exceptions = 0
    highest = np.uint16(top)
    for block in range(values.size // BLOCK):
        source = values[block * BLOCK : (block + 1) * BLOCK]
        target = blocks[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        codes = target[BLOCK:]
        for place in range(BLOCK):
            value = source[place]
            sign = np.uint16(value >> np.uint16(8)) & np.uint16(0x80)
            target[place] = np.uint8(sign | (value & np.uint16(0x7F)))
        for lane in range(PLANE_BYTES):
            low = middle = high = np.uint8(0)
            for bit in range(8):
                exponent = (source[bit * PLANE_BYTES + lane] >> np.uint16(7)) & np.uint16(0xFF)
                below = np.uint8(highest - exponent)  # wraps around
                code = np.uint8(7) if below > np.uint8(7) else below
                low |= np.uint8((code & np.uint8(1)) << np.uint8(bit))
                middle |= np.uint8(((code >> np.uint8(1)) & np.uint8(1)) << np.uint8(bit))
                high |= np.uint8(((code >> np.uint8(2)) & np.uint8(1)) << np.uint8(bit))
            codes[lane] = low
            codes[PLANE_BYTES + lane] = middle
            codes[2 * PLANE_BYTES + lane] = high
        words = codes.view(np.uint64)
        for word in range(8):
            mask = words[word] & words[8 + word] & words[16 + word]
            while mask != np.uint64(0):
                if num_exceptions >= exceptions.size:
                    return -1
                marked = _lowest_bit(mask)
                mask &= mask - np.uint64(1)
                exception = source[(marked & 7) * PLANE_BYTES + word * 8 + (marked >> 3)]
                exceptions[num_exceptions] = np.uint8((exception >> 7) & 0xFF)
                num_exceptions += 1
    return num_exceptions


@compiled
def _unpack(blocks: Any, top: Any, exceptions: Any, values: Any) -> Any:
    """Undo `_pack`; return how many exceptions were used, -1 when there were too few of them."""
    num_used = 0
    top = np.uint8(top)
    for block in range(values.size // BLOCK):
        target = values[block * BLOCK : (block + 1) * BLOCK]
        source = blocks[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
        codes = source[BLOCK:]
        for bit in range(8):
            shift = np.uint8(bit)
            for lane in range(PLANE_BYTES):
                code = (
                    ((codes[lane] >> shift) & np.uint8(1))
                    | (((codes[PLANE_BYTES + lane] >> shift) & np.uint8(1)) << np.uint8(1))
                    | (((codes[2 * PLANE_BYTES + lane] >> shift) & np.uint8(1)) << np.uint8(2))
                )
                exponent = np.uint8(top - np.uint8(code))
                rest = source[bit * PLANE_BYTES + lane]
                target[bit * PLANE_BYTES + lane] = (
                    (np.uint16(rest & np.uint8(0x80)) << np.uint16(8))
                    | (np.uint16(exponent) << np.uint16(7))
                    | np.uint16(rest & np.uint8(0x7F))
                )
        words = codes.view(np.uint64)
        for word in range(8):
            mask = words[word] & words[8 + word] & words[16 + word]
            while mask != np.uint64(0):
                marked = _lowest_bit(mask)
                mask &= mask - np.uint64(1)
                if num_used >= exceptions.size:
                    return -1
                place = (marked & 7) * PLANE_BYTES + word * 8 + (marked >> 3)
                known = np.uint16(exceptions[num_used]) << np.uint16(7)
                target[place] = np.uint16((target[place] & np.uint16(0x807F)) | known)
                num_used += 1
    return num_used


@compiled
def pack(parts: Any, blocks: Any, head: Any, exceptions: Any) -> Any:
    """Pack `parts`, uint16 [part, value], the values of each up to the last whole BLOCK.

    Fills `blocks` (uint8, BLOCK_BYTES for each BLOCK of each part), `head` (uint32 [part, 2]: top,
    exceptions) and `exceptions` (uint8). Returns the number of exceptions, -1 when they do not fit.
    """
    num_values = parts.shape[1] // BLOCK * BLOCK
    part_bytes = num_values // BLOCK * BLOCK_BYTES
    end = 0
    for part in range(parts.shape[0]):
        values = parts[part, :num_values]
        top = _find_top(values)
        count = _pack(values, top, blocks[part * part_bytes : (part + 1) * part_bytes], exceptions[end:])
        if count < 0:
            return -1
        head[part, 0] = top
        head[part, 1] = count
        end += count
    return end


@compiled
def unpack(parts: Any, blocks: Any, head: Any, exceptions: Any) -> Any:
    """Undo `pack`: fill `parts`. Returns -1, or the first part whose number of exceptions is not what `head`
    says. Reads nothing beyond its arrays whatever `head` says."""
    num_values = parts.shape[1] // BLOCK * BLOCK
    part_bytes = num_values // BLOCK * BLOCK_BYTES
    end = np.int64(0)
    for part in range(parts.shape[0]):
        count = np.int64(head[part, 1])
        if end + count > exceptions.size:
            return part
        mine = exceptions[end : end + count]
        packed = blocks[part * part_bytes : (part + 1) * part_bytes]
        if _unpack(packed, head[part, 0], mine, parts[part, :num_values]) != count:
            return part
        end += count
    return -1
