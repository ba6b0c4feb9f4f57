"""llama.cpp's state of a context, cut into blocks of tokens and put together again.

`llama_state_get_data` writes, in the order of the machine (llama-context.cpp, llama-kv-cache.cpp):

    text    architecture
    u32     streams                          1: a context with one cache for all sequences
    u32     cells
    cells * i32 position, u32 sequences (1), i32 sequence (0)
    u32     values are transposed; u32 layers
            since 2026 u32, u32: how far keys and values are rotated
    layers * i32 type of keys, u64 bytes of a row; cells * row
    layers * i32 type of values, u64 bytes of a row; cells * row
             transposed: i32 type, u32 bytes of an element, u32 elements; elements * (cells * element)

So each token's bytes are found without knowing the model. What does not read like this to the last byte
(windows, recurrent state, several sequences, positions in several dimensions) is refused: nothing in here
guesses. The first state that a cache sees is cut and joined, and must come out as it was. A scratch sequence
for every block, by `llama_memory_seq_cp`, would need no format; it needs contexts for several sequences,
which llama-cpp-python does not make.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
CELL = np.dtype([("position", "<i4"), ("num_sequences", "<u4"), ("sequence", "<i4")])
MAX_LAYERS = 4096
MAX_TEXT_BYTES = 256


class UnsupportedState(ValueError):
    """A model or context with a state that is not one row of tokens, or is not written as known here."""


@dataclass(frozen=True, slots=True)
class Plane:
    """Keys or values of a layer: `row_bytes` a token, in `num_columns` columns where they are transposed."""

    kind: int  # ggml's type
    row_bytes: int
    num_columns: int = 0  # 0: rows lie token after token


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What all states of one model and context have in common. Keys of all layers come before all values."""

    architecture: bytes
    is_transposed: bool
    keys: tuple[Plane, ...]
    values: tuple[Plane, ...]
    rotations: tuple[int, ...] = ()  # of keys and values; empty where llama.cpp does not write them yet

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return sum(plane.row_bytes for plane in (*self.keys, *self.values))

    def cut(self, state: Bytes, first_token: int, num_blocks: int, block_tokens: int) -> Bytes:
        """Return blocks from `first_token` on: (num_blocks, bytes of a block) uint8."""
        num_tokens = num_cells(state)
        blocks = np.empty((num_blocks, block_tokens * self.token_bytes), np.uint8)
        for plane, start, place in self._planes(num_tokens):
            data = state[start : start + num_tokens * plane.row_bytes]
            into = blocks[:, place * block_tokens : (place + plane.row_bytes) * block_tokens]
            last_token = first_token + num_blocks * block_tokens
            if plane.num_columns:
                item = plane.row_bytes // plane.num_columns
                columns = data.reshape(plane.num_columns, num_tokens, item)[:, first_token:last_token]
                columns = columns.reshape(plane.num_columns, num_blocks, block_tokens * item)
                into[:] = columns.swapaxes(0, 1).reshape(num_blocks, -1)
            else:
                rows = data.reshape(num_tokens, plane.row_bytes)[first_token:last_token]
                into[:] = rows.reshape(num_blocks, -1)
        return blocks

    def join(self, blocks: Bytes, block_tokens: int) -> Bytes:
        """Return the state that has the tokens of `blocks` (as `cut` returns them), from position 0 on."""
        num_blocks, num_tokens = len(blocks), len(blocks) * block_tokens
        state = np.empty(self._num_bytes(num_tokens), np.uint8)
        for offset, header in self._headers(num_tokens):
            state[offset : offset + len(header)] = np.frombuffer(header, np.uint8)
        for plane, start, place in self._planes(num_tokens):
            into = state[start : start + num_tokens * plane.row_bytes]
            data = blocks[:, place * block_tokens : (place + plane.row_bytes) * block_tokens]
            if plane.num_columns:
                item = plane.row_bytes // plane.num_columns
                columns = data.reshape(num_blocks, plane.num_columns, block_tokens * item).swapaxes(0, 1)
                into.reshape(plane.num_columns, num_blocks, block_tokens * item)[:] = columns
            else:
                into.reshape(num_blocks, -1)[:] = data
        return state

    def _headers(self, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, bytes) of all that is no row of a token."""
        cells = np.zeros(num_tokens, CELL)
        cells["position"], cells["num_sequences"] = np.arange(num_tokens), 1
        text = struct.pack("<I", len(self.architecture)) + self.architecture
        head = text + struct.pack("<II", 1, num_tokens) + cells.tobytes()
        numbers = (int(self.is_transposed), len(self.keys), *self.rotations)
        head += struct.pack(f"<{len(numbers)}I", *numbers)
        offset = 0
        for plane in (*self.keys, *self.values):
            head += _header_of(plane)
            yield offset, head
            offset += len(head) + num_tokens * plane.row_bytes
            head = b""

    def _planes(self, num_tokens: int) -> Iterator[tuple[Plane, int, int]]:
        """Yield (plane, where its rows begin in a state, bytes of a token before it)."""
        place = 0
        for plane, (offset, header) in zip(
            (*self.keys, *self.values), self._headers(num_tokens), strict=True
        ):
            yield plane, offset + len(header), place
            place += plane.row_bytes

    def _num_bytes(self, num_tokens: int) -> int:
        return sum(len(header) for _, header in self._headers(num_tokens)) + num_tokens * self.token_bytes


def layout_of(state: Bytes, num_rotations: int = 0) -> StateLayout:
    """Return the layout of a state, which has so many numbers of rotations (2 since 2026).

    Raises UnsupportedState when it is not read to its last byte."""
    reader = _StateReader(state)
    architecture = reader.take(reader.number("<I", MAX_TEXT_BYTES)).tobytes()
    num_streams = reader.number("<I")
    if num_streams != 1:
        raise UnsupportedState(
            f"a context with {num_streams} caches; kvtier serves those with one (kv_unified)"
        )
    num_tokens = reader.number("<I")
    cells = np.frombuffer(reader.take(num_tokens * CELL.itemsize).tobytes(), CELL)
    are_in_order = bool((cells["position"] == np.arange(num_tokens)).all())
    if not are_in_order or (cells["num_sequences"] != 1).any() or cells["sequence"].any():
        raise UnsupportedState("the cells of the cache are not one sequence, from its first token on")
    is_transposed, num_layers = reader.number("<I", 1), reader.number("<I", MAX_LAYERS)
    rotations = tuple(reader.number("<I") for _ in range(num_rotations))
    keys = tuple(reader.plane(num_tokens, False) for _ in range(num_layers))
    values = tuple(reader.plane(num_tokens, bool(is_transposed)) for _ in range(num_layers))
    if reader.offset != len(state):
        rest = len(state) - reader.offset
        raise UnsupportedState(
            f"{rest} bytes behind the state: a second cache, of a window or of recurrent state"
        )
    return StateLayout(architecture, bool(is_transposed), keys, values, rotations)


def num_cells(state: Bytes) -> int:
    """Return how many tokens a state has."""
    reader = _StateReader(state)
    reader.take(reader.number("<I", MAX_TEXT_BYTES) + 4)
    return reader.number("<I")


def _header_of(plane: Plane) -> bytes:
    if plane.num_columns:
        return struct.pack("<iII", plane.kind, plane.row_bytes // plane.num_columns, plane.num_columns)
    return struct.pack("<iQ", plane.kind, plane.row_bytes)


class _StateReader:
    def __init__(self, state: Bytes) -> None:
        self.offset = 0
        self._state = state

    def take(self, num_bytes: int) -> Bytes:
        taken = self._state[self.offset : self.offset + num_bytes]
        if len(taken) != num_bytes:
            raise UnsupportedState(f"a state that ends {num_bytes - len(taken)} bytes too early")
        self.offset += num_bytes
        return taken

    def numbers(self, form: str) -> Sequence[Any]:
        return struct.unpack(form, self.take(struct.calcsize(form)).tobytes())

    def number(self, form: str, limit: int = 1 << 32) -> int:
        (value,) = self.numbers(form)
        if value > limit:
            raise UnsupportedState(f"a state that says {value} where at most {limit} makes sense")
        return int(value)

    def plane(self, num_tokens: int, is_transposed: bool) -> Plane:
        if is_transposed:
            kind, item, num_columns = self.numbers("<iII")
            plane = Plane(kind, item * num_columns, num_columns)
        else:
            plane = Plane(*self.numbers("<iQ"))
        self.take(num_tokens * plane.row_bytes)
        return plane
