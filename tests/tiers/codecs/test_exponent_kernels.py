"""The two ways to pack a block of exponents, with vectors and one by one: same bytes, same counts, nothing
touched that is not theirs. Where the processor has no instructions for the first there is only one way."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba")

from kvtier.tiers.codecs.kernels import exponents as loops
from kvtier.tiers.codecs.kernels.compiling import compiled
from kvtier.tiers.codecs.kernels.exponent_vectors import NOT_DONE, pack_block, unpack_block

TOP = np.uint8(130)
SLACK = 64  # bytes behind a list that vectors may touch
SHARES = [0.0, 0.01, 0.03, 0.3, 1.0]  # of values that are exceptions


@compiled
def _packed(values: Any, blocks: Any, exceptions: Any, at: Any, top: Any) -> Any:
    return pack_block(values, 0, blocks, 0, exceptions, at, top)


@compiled
def _unpacked(blocks: Any, values: Any, exceptions: Any, at: Any, top: Any) -> Any:
    return unpack_block(blocks, 0, values, 0, exceptions, at, top)


@pytest.fixture(scope="module", autouse=True)
def _vectors() -> None:
    values, exceptions = np.zeros(loops.BLOCK, np.uint16), np.zeros(loops.BLOCK + SLACK, np.uint8)
    if _packed(values, np.zeros(loops.BLOCK_BYTES, np.uint8), exceptions, 0, TOP) == NOT_DONE:
        pytest.skip("this processor does not compress bytes")


def _block(share: float, seed: int) -> NDArray[np.uint16]:
    """Every bit of a value is random, but for the exponents of those in the window."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 16, loops.BLOCK).astype(np.uint16)
    inside = (TOP - rng.integers(0, loops.WINDOW, loops.BLOCK)).astype(np.uint16) << 7
    return np.where(rng.random(loops.BLOCK) < share, words, (words & 0x807F) | inside).astype(np.uint16)


def _one_by_one(values: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return block and exceptions."""
    block, exceptions = np.empty(loops.BLOCK_BYTES, np.uint8), np.empty(loops.BLOCK, np.uint8)
    count = loops._pack_block(values, TOP, block, exceptions)
    return block, exceptions[:count]


@pytest.mark.parametrize("share", SHARES)
def test_vectors_write_what_the_loops_write(share: float) -> None:
    for seed in range(20):
        values = _block(share, seed)
        block, exceptions = _one_by_one(values)
        before = 5
        mine = np.full(loops.BLOCK_BYTES + 1, 0xA5, np.uint8)
        mine_listed = np.full(before + exceptions.size + SLACK + 1, 0xA5, np.uint8)
        assert _packed(values, mine, mine_listed[:-1], before, TOP) == exceptions.size
        assert np.array_equal(mine[:-1], block)
        assert np.array_equal(mine_listed[before : before + exceptions.size], exceptions)
        assert (mine_listed[:before] == 0xA5).all()
        assert mine[-1] == mine_listed[-1] == 0xA5, "wrote beyond its array"


@pytest.mark.parametrize("share", SHARES)
def test_vectors_read_what_the_loops_write(share: float) -> None:
    for seed in range(20):
        values = _block(share, seed)
        block, exceptions = _one_by_one(values)
        listed = np.concatenate([np.full(3, 0xA5, np.uint8), exceptions, np.full(SLACK, 0xA5, np.uint8)])
        back = np.full(loops.BLOCK + 1, 0x5A5A, np.uint16)
        assert _unpacked(block, back, listed, 3, TOP) == exceptions.size
        assert np.array_equal(back[:-1], values)
        assert back[-1] == 0x5A5A, "wrote beyond its values"


def test_vectors_leave_to_the_loops_what_has_no_room() -> None:
    values = _block(0.03, 1)
    block, exceptions = _one_by_one(values)
    back = np.empty(loops.BLOCK, np.uint16)
    for room in (0, 1, exceptions.size, exceptions.size + SLACK - 1):
        listed = np.full(room, 0xA5, np.uint8)
        assert _packed(values, block.copy(), listed, 0, TOP) == NOT_DONE
        assert (listed == 0xA5).all()
        assert _unpacked(block, back, listed, 0, TOP) == NOT_DONE
