"""The two ways to pack fp8, with vectors and one value after another: same bytes, same counts, nothing
touched that is not theirs. Where the processor has no instructions for the first there is only one way."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("numba")

from kvtier.tiers.codecs.base import CodecError, Shape
from kvtier.tiers.codecs.exact.float8 import Float8, layout_of
from kvtier.tiers.codecs.kernels import float8 as loops
from kvtier.tiers.codecs.kernels import float8_vectors as vectors
from kvtier.tiers.codecs.kernels.compiling import compiled
from kvtier.tiers.codecs.trial import trial_payload
from tests.contracts.kv_values import values_like_kv

SLACK = vectors.LANES  # bytes behind a list that vectors may touch
MANTISSAS = [3, 2]
LEVELS = range(loops.NUM_LEVELS)
COUNTS = [1, 7, 8, 33, 63, 64]  # ranks of a row


@compiled
def _pack_unit(values: Any, unit: Any, ranks: Any, listed: Any, mantissa: Any) -> Any:
    if mantissa == 3:
        return vectors.pack_unit_e4m3(values, 0, unit, 0, ranks, listed, 0)
    return vectors.pack_unit_e5m2(values, 0, unit, 0, ranks, listed, 0)


@compiled
def _unpack_unit(unit: Any, values: Any, order: Any, listed: Any, mantissa: Any) -> Any:
    if mantissa == 3:
        return vectors.unpack_unit_e4m3(unit, 0, values, 0, order, listed, 0)
    return vectors.unpack_unit_e5m2(unit, 0, values, 0, order, listed, 0)


def _filled(size: int) -> NDArray[np.uint8]:
    return np.full(size, 0xA5, np.uint8)


@pytest.fixture(scope="module", autouse=True)
def _vectors() -> None:
    if _pack_unit(_filled(256), _filled(192), _filled(64), _filled(256 + SLACK), 3) == vectors.NOT_DONE:
        pytest.skip("this processor does not compress bytes")


@pytest.mark.parametrize("mantissa", MANTISSAS)
def test_a_unit_by_vectors_is_the_loops(mantissa: int) -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        values = rng.integers(0, 256, loops.UNIT).astype(np.uint8)
        if seed % 3:  # few exponents, or one
            values &= np.uint8(0x87 | (0x08 * (seed % 3 - 1)))
        order = np.resize(rng.permutation(1 << (7 - mantissa)), vectors.LANES).astype(np.uint8)
        rank_of = np.zeros(vectors.LANES, np.uint8)
        rank_of[order[: 1 << (7 - mantissa)]] = np.arange(1 << (7 - mantissa))
        num_bytes = 192 if mantissa == 3 else 160
        unit, listed = _filled(num_bytes + 1), _filled(loops.UNIT + SLACK)
        mine, mine_listed = _filled(num_bytes + 1), _filled(loops.UNIT + SLACK)
        count = loops._pack_unit(values, 0, unit, 0, rank_of, listed, mantissa)
        assert _pack_unit(values, mine, rank_of, mine_listed, mantissa) == count
        assert (mine == unit).all()
        assert (mine_listed[:count] == listed[:count]).all()
        back = _filled(loops.UNIT + 1)
        assert _unpack_unit(unit, back, order, listed, mantissa) == count
        assert (back[:-1] == values).all()
        assert back[-1] == 0xA5, "wrote beyond its values"
        assert loops._unpack_unit(unit, 0, back, 0, order, listed, mantissa) == count
        assert (back[:-1] == values).all()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_a_level_by_vectors_is_the_loops(level: int, count: int) -> None:
    rng = np.random.default_rng(count)
    base, width = loops.BASES[level], loops.WIDTHS[level]
    num_bytes = width * ((count + 7) // 8)
    ranks = np.append(rng.integers(base, 32, count), rng.integers(0, 256, SLACK)).astype(np.uint8)
    row, listed, mine, mine_listed = (_filled(128) for _ in range(4))
    found = loops._pack_level(ranks, 0, row, 0, listed, count, level)
    assert loops._pack_row(ranks, 0, mine, 0, mine_listed, 0, count, level) == found
    assert (mine[:num_bytes] == row[:num_bytes]).all()
    assert (mine_listed[:found] == listed[:found]).all()
    back = _filled(128)
    row[num_bytes:] = 0xFF  # what follows a short row is not part of it
    assert loops._unpack_row(row, 0, back, 0, listed, 0, count, level) == found
    assert (back[:count] == ranks[:count]).all()
    assert loops._unpack_level(row, 0, back, 0, listed, count, level) == found
    assert (back[:count] == ranks[:count]).all()


def test_a_list_of_another_length_is_refused_before_it_is_read() -> None:
    shape = Shape(1, 2, 16, 8, 67, "float8_e4m3fn")  # two blocks and more a part, and a tail
    payload = values_like_kv(shape, 1)
    stored = bytearray(2 * shape.raw_bytes)
    stored = stored[: Float8().encode(shape, payload.data, memoryview(stored))]
    layout, target = layout_of(shape), bytearray(shape.raw_bytes)
    for at in range(layout.ends_at, layout.ends_at + 4 * layout.num_parts * layout.num_blocks):
        bad = stored.copy()
        bad[at] ^= 1
        with pytest.raises(CodecError, match="float8"):
            Float8().decode(shape, memoryview(bad), memoryview(target))
    with pytest.raises(CodecError, match="float8"):
        Float8().decode(shape, memoryview(stored)[:-1], memoryview(target))


def test_other_values_are_refused() -> None:
    shape = Shape(1, 2, 16, 8, 64, "bfloat16")
    with pytest.raises(CodecError, match="bfloat16"):
        Float8().decode(shape, memoryview(bytes(4096)), memoryview(bytearray(shape.raw_bytes)))
    assert not Float8().accepts(shape)


@pytest.mark.parametrize(("dtype", "least"), [("float8_e4m3fn", 1.2), ("float8_e5m2", 1.4)])
def test_normal_values_take_what_is_stated(dtype: str, least: float) -> None:
    shape = Shape(2, 2, 64, 8, 128, dtype)
    payload = np.frombuffer(trial_payload(shape), np.uint8)
    length = Float8().encode(shape, payload.data, memoryview(bytearray(Float8().stored_bound(shape))))
    assert shape.raw_bytes / length > least
