"""States as bytes: every cut and join gives back what went in, and what is not known is refused."""

import struct

import numpy as np
import pytest

from kvtier.clients.llamacpp.state import CELL, StateLayout, UnsupportedState, layout_of, num_cells


def state_of(num_tokens: int, is_transposed: bool, seed: int = 1, rotations: tuple[int, ...] = ()) -> bytes:
    """Return a state of two layers with random rows, as llama.cpp writes it."""
    random = np.random.default_rng(seed)
    cells = np.zeros(num_tokens, CELL)
    cells["position"], cells["num_sequences"] = np.arange(num_tokens), 1
    state = struct.pack("<I", 5) + b"llama" + struct.pack("<II", 1, num_tokens) + cells.tobytes()
    state += struct.pack(f"<{2 + len(rotations)}I", is_transposed, 2, *rotations)
    for row_bytes in (24, 24):
        state += struct.pack("<iQ", 1, row_bytes) + random.bytes(row_bytes * num_tokens)
    for row_bytes in (32, 32):
        head = (
            struct.pack("<iII", 1, 2, row_bytes // 2) if is_transposed else struct.pack("<iQ", 1, row_bytes)
        )
        state += head + random.bytes(row_bytes * num_tokens)
    return state


@pytest.fixture(params=[False, True], ids=["rows", "transposed"])
def whole(request: pytest.FixtureRequest) -> np.ndarray:
    return np.frombuffer(state_of(24, request.param), np.uint8)


@pytest.mark.parametrize("block_tokens", [1, 4, 8, 24])
def test_blocks_give_the_state_back(whole: np.ndarray, block_tokens: int) -> None:
    layout = layout_of(whole)
    assert (layout.token_bytes, num_cells(whole)) == (112, 24)
    blocks = layout.cut(whole, 0, 24 // block_tokens, block_tokens)
    assert blocks.shape == (24 // block_tokens, block_tokens * 112)
    assert np.array_equal(layout.join(blocks, block_tokens), whole)


def test_a_beginning_is_the_same_blocks_however_long_the_rest(whole: np.ndarray) -> None:
    layout = layout_of(whole)
    blocks = layout.cut(whole, 0, 6, 4)
    short = layout.join(blocks[:3], 4)
    assert num_cells(short) == 12
    assert layout_of(short) == layout
    assert np.array_equal(layout.cut(short, 0, 3, 4), blocks[:3])
    assert np.array_equal(layout.cut(whole, 8, 2, 4), blocks[2:4])


def test_states_with_rotations_come_back_with_them() -> None:
    whole = np.frombuffer(state_of(24, True, rotations=(64, 0)), np.uint8)
    layout = layout_of(whole, 2)
    assert layout.rotations == (64, 0)
    assert np.array_equal(layout.join(layout.cut(whole, 0, 6, 4), 4), whole)
    with pytest.raises(UnsupportedState):
        layout_of(whole)


def damaged(state: bytes, offset: int, form: str, value: int) -> bytes:
    packed = struct.pack(form, value)
    return state[:offset] + packed + state[offset + len(packed) :]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state[:-1], "1 bytes too early"),
        (lambda state: state + b"0000", "4 bytes behind"),
        (lambda state: damaged(state, 9, "<I", 2), "2 caches"),
        (lambda state: damaged(state, 17, "<i", 7), "one sequence"),
        (lambda state: damaged(state, 21, "<I", 2), "one sequence"),
        (lambda state: damaged(state, 17 + 24 * 12, "<I", 9), "at most 1"),
        (lambda state: damaged(state, 0, "<I", 1 << 20), "at most 256"),
        (lambda state: b"", "too early"),
    ],
)
def test_what_is_not_known_is_refused(change: object, words: str) -> None:
    assert callable(change)
    state = change(state_of(24, True))
    with pytest.raises(UnsupportedState, match=words):
        layout_of(np.frombuffer(state, np.uint8))


def test_layouts_are_compared_by_what_they_say() -> None:
    one, other = (layout_of(np.frombuffer(state_of(n, True, n), np.uint8)) for n in (3, 9))
    assert one == other
    assert isinstance(one, StateLayout)
    assert one != layout_of(np.frombuffer(state_of(3, False), np.uint8))
