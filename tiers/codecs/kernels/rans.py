"""Entropy coding with static tables: range asymmetric numeral systems, eight states in turn.

A symbol's table is that of its column: columns with values that spread alike share one. The states take
turns, symbol by symbol, so that a processor has eight multiplications under way instead of one; the words
they give off share one stream, which is written backwards and read forwards.

Source: Duda, arXiv 1311.2540; the interleaving is Giesen's, arXiv 1402.3392. Rejected: Huffman codes, which
cannot spend less than a bit on the many columns that are nearly always zero; adaptive tables, which are
slower than all the rest of the transform.
"""

from typing import Any

import numpy as np

from .compiling import compiled

PRECISION = 12  # bits of a frequency
NUM_STATES = 8  # a power of two
LOWEST = 1 << 16  # a state after coding
ESCAPE = 0  # the symbol of what has none; the others are values + OFFSET
OFFSET = 128
NO_ROOM = -1


@compiled
def encode(
    values: Any, classes: Any, frequencies: Any, starts: Any, states: Any, words: Any, escapes: Any
) -> Any:
    """Encode `values` (int32 [row, column]) by the tables of `classes`.
    Those are rows of `frequencies` and `starts`, both [class, symbol], by column.

    Fills `states` (uint32 [NUM_STATES]), the end of `words` (uint16) and the end of `escapes` (int32);
    returns (words, escapes) used, NO_ROOM for the first when they are too few.
    """
    num_rows, num_columns = values.shape
    states[:] = LOWEST
    first_word, first_escape = words.size, escapes.size
    index = num_rows * num_columns
    for row in range(num_rows - 1, -1, -1):
        for column in range(num_columns - 1, -1, -1):
            index -= 1
            kind = classes[column]
            value = values[row, column]
            symbol = value + OFFSET if -OFFSET < value < OFFSET else ESCAPE
            if frequencies[kind, symbol] == 0:
                symbol = ESCAPE
            if symbol == ESCAPE:
                if first_escape == 0:
                    return NO_ROOM, 0
                first_escape -= 1
                escapes[first_escape] = value
            frequency = np.uint64(frequencies[kind, symbol])
            state = np.uint64(states[index & (NUM_STATES - 1)])
            if state >= frequency << np.uint64(32 - PRECISION):
                if first_word == 0:
                    return NO_ROOM, 0
                first_word -= 1
                words[first_word] = np.uint16(state & np.uint64(0xFFFF))
                state >>= np.uint64(16)
            quotient = state // frequency
            rest = state - quotient * frequency
            state = (quotient << np.uint64(PRECISION)) + rest + np.uint64(starts[kind, symbol])
            states[index & (NUM_STATES - 1)] = np.uint32(state)
    return words.size - first_word, escapes.size - first_escape


@compiled
def decode(
    words: Any,
    states: Any,
    escapes: Any,
    classes: Any,
    symbols: Any,
    frequencies: Any,
    starts: Any,
    values: Any,
    has_escape: Any,
) -> Any:
    """Undo `encode`: fill `values` (float32 [row, column]) and `has_escape` (bool [row]).
    `symbols` (uint8 [class, 2^PRECISION]) names the symbol of every slot. Returns whether words, states and
    escapes came out even; reads nothing beyond them whatever they are. Changes `states`."""
    num_rows, num_columns = values.shape
    next_word, next_escape, index = 0, 0, 0
    mask = np.uint32((1 << PRECISION) - 1)
    for row in range(num_rows):
        has_escape[row] = False
        for column in range(num_columns):
            kind = classes[column]
            state = states[index & (NUM_STATES - 1)]
            slot = state & mask
            symbol = symbols[kind, slot]
            if symbol == ESCAPE:
                if next_escape >= escapes.size:
                    return False
                values[row, column] = escapes[next_escape]
                next_escape += 1
                has_escape[row] = True
            else:
                values[row, column] = np.float32(np.int32(symbol) - OFFSET)
            state = np.uint32(
                np.uint32(frequencies[kind, symbol]) * (state >> np.uint32(PRECISION))
                + slot
                - np.uint32(starts[kind, symbol])
            )
            if state < np.uint32(LOWEST):
                if next_word >= words.size:
                    return False
                state = np.uint32((state << np.uint32(16)) | np.uint32(words[next_word]))
                next_word += 1
            states[index & (NUM_STATES - 1)] = state
            index += 1
    is_even = next_word == words.size and next_escape == escapes.size
    for i in range(NUM_STATES):
        is_even &= states[i] == np.uint32(LOWEST)
    return is_even
