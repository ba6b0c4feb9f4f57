"""Transform coding in C beside its twin in numpy and numba, and what it refuses."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtier import native as native_package
from kvtier.tiers.codecs.base import CodecError, DoesNotFit
from kvtier.tiers.codecs.lossy import transform
from kvtier.tiers.codecs.lossy.profile import Rule
from kvtier.tiers.codecs.lossy.transform import TransformSegment
from kvtier.tiers.codecs.lossy.transform_fit import fit_table
from kvtier.tiers.codecs.lossy.transform_table import TransformTable

native: Any = native_package.native
pytestmark = pytest.mark.skipif(native is None, reason="native/ was not built, or KVTIER_NATIVE is off")
HEAD_DIM, NUM_HEADS = 16, 5
KINDS = ("like the samples", "outliers", "loud", "far", "huge", "any bits", "zero")


@pytest.fixture(autouse=True, params=("plain", "avx2", "avx512"))
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each way to multiply that this processor has."""
    if not native.use(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    native.use(None)


@cache
def fitted(num_heads: int, step: float) -> tuple[bytes, NDArray[np.float32]]:
    """A table, and values like those that it was fitted to."""
    rng = np.random.default_rng(num_heads)
    num_dims = num_heads * HEAD_DIM
    basis, _ = np.linalg.qr(rng.standard_normal((num_dims, num_dims)))
    values = (
        rng.standard_normal((1024, num_dims)) * np.exp(-np.arange(num_dims) * 3 / num_dims)
    ) @ basis + 0.5
    return fit_table(values.astype(np.float32), step)[0], values.astype(np.float32)


def segment_of(num_heads: int, first_head: int, step: float, is_half: bool) -> TransformSegment:
    rule = Rule(0, 0, first_head, first_head + num_heads, "transform", step=step, reserve_bits=15, table=0)
    return TransformSegment(rule, HEAD_DIM, is_half=is_half, table=fitted(num_heads, step)[0])


def words_of(values: NDArray[np.float32], is_half: bool) -> NDArray[np.uint16]:
    if is_half:
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def words_like(kind: str, num_tokens: int, num_heads: int, step: float, is_half: bool, seed: int) -> Any:
    """Words [token, num_heads * dim] of a kind."""
    rng = np.random.default_rng(seed)
    values = fitted(num_heads, step)[1][seed : seed + num_tokens].copy()
    match kind:
        case "outliers":
            values[rng.random(values.shape) < 0.02] *= 100
        case "loud":
            values *= rng.choice([1, 30], (num_tokens, 1)).astype(np.float32)
        case "far":
            values[rng.random(num_tokens) < 0.5] *= 3000
        case "huge":
            values *= np.float32(1e4 if is_half else rng.choice([1e6, 1e30]))
        case "any bits":
            return rng.integers(0, 1 << 16, values.shape).astype(np.uint16)
        case "zero":
            values[:] = rng.choice([0.0, -0.0, 1e-6])
    return words_of(values, is_half)


def outcome(segment: TransformSegment, words: NDArray[np.uint16], room: int) -> bytes | None:
    """The encoded bytes, None where there are none."""
    into = np.full(room + 8, 0xA5, np.uint8)
    try:
        length = segment.encode(words, into[:room])
    except DoesNotFit:
        length = 0
    assert (into[room:] == 0xA5).all()
    return into[:length].tobytes() or None


def decoded(segment: TransformSegment, stored: NDArray[np.uint8], shape: tuple[int, ...]) -> bytes | None:
    """The words around and in the segment, None where the bytes are refused."""
    words = np.full(shape, 0xA5A5, np.uint16)
    try:
        segment.decode(stored, words)
    except CodecError:
        return None
    return words.tobytes()


def twin_of(function: Any, *arguments: Any) -> Any:
    """The answer of the twin in Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform, "native", None)
        return function(*arguments)


@given(
    kind=st.sampled_from(KINDS),
    num_tokens=st.integers(1, 13),
    num_heads=st.sampled_from([1, 2, 3]),
    first_head=st.integers(0, 2),
    step=st.sampled_from([0.02, 0.3]),
    is_half=st.booleans(),
    seed=st.integers(0, 500),
    room=st.sampled_from([0, 39, 40, 100, 300, 1 << 16]),
)
def test_the_twins_write_the_same_and_read_it_back(
    kind: str,
    num_tokens: int,
    num_heads: int,
    first_head: int,
    step: float,
    is_half: bool,
    seed: int,
    room: int,
) -> None:
    segment = segment_of(num_heads, first_head, step, is_half)
    words = np.full((num_tokens, NUM_HEADS, HEAD_DIM), 0x4000, np.uint16)
    mine = words[:, first_head : first_head + num_heads]
    mine[:] = words_like(kind, num_tokens, num_heads, step, is_half, seed).reshape(mine.shape)
    stored = outcome(segment, words, room)
    assert stored == twin_of(outcome, segment, words, room)
    if stored is None:
        assert room < 1 << 16 or kind != "like the samples"
        return
    encoded = np.frombuffer(stored, np.uint8)
    found = decoded(segment, encoded, words.shape)
    assert found is not None
    assert found == twin_of(decoded, segment, encoded, words.shape)
    rng = np.random.default_rng(seed)
    for _ in range(3):  # damaged: the same is refused, and what is not is read the same way
        bad = encoded.copy()
        bad[rng.integers(0, rng.choice([12, 40, bad.size]))] ^= 1 << rng.integers(0, 8)
        bad = bad[: int(rng.integers(0, bad.size))] if rng.random() < 0.5 else bad
        found = decoded(segment, bad, words.shape)
        assert found == twin_of(decoded, segment, bad, words.shape)


def test_tokens_are_coded_whichever_way_their_sums_need() -> None:
    """Sums of 32 bits, of 64, and escapes: each was taken in the property above."""
    forward = TransformTable.from_bytes(fitted(2, 0.02)[0]).forward
    for kind, has_far in (("like the samples", False), ("far", True)):
        values = words_like(kind, 13, 2, 0.02, False, 3).astype(np.uint32) << 16
        units = values.view(np.float32) * 2.0**forward.unit_bits / 0.02
        squares = np.square(units, dtype=np.float64).sum(axis=1)
        assert (squares > 4 * forward.limit).any() == has_far
        assert (squares < forward.limit / 4).any()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        (0, np.zeros(95, np.uint16)),  # no whole token
        (1, np.zeros(16 * 16 - 1, np.int16)),
        (2, np.zeros(17, np.float32)),
        (3, np.full(16, 1, np.uint8)),  # a class that is not there
        (3, np.zeros(15, np.uint8)),
        (3, np.zeros(0, np.uint8)),
        (6, np.zeros(255, np.int32)),
        (7, 17),  # columns beyond the token
        (7, -1),
        (8, 0),
        (8, 1 << 62),
        (11, 0),
        (11, 31),
        (12, 63),
    ],
)
def test_numbers_that_do_not_fit_are_refused(argument: int, value: Any) -> None:
    table = TransformTable.from_bytes(fitted(1, 0.3)[0])
    one_class = np.zeros(16, np.uint8)
    matrix, coded, slots = np.zeros(256, np.int16), table.coded_symbols[:1], table.slots[:1]
    words, mean, stored = np.zeros(96, np.uint16), table.mean, np.zeros(64, np.uint8)
    right = [
        words,
        matrix,
        mean,
        one_class,
        coded,
        stored,
        np.zeros(256, np.int32),
        16,
        32,
        False,
        1.0,
        20,
        30,
        1e6,
    ]
    native.encode_transform(*right)
    wrong = [*right[:argument], value, *right[argument + 1 :]]
    with pytest.raises(ValueError, match=r"segment|table"):
        native.encode_transform(*wrong)
    if argument > 8 or argument == 6:
        return
    with pytest.raises(ValueError, match="segment"):
        native.decode_transform(*wrong[:4], slots, stored, 0, *wrong[7:11])


@pytest.mark.parametrize(("num_bytes", "num_escapes"), [(31, 0), (33, 0), (64, 9), (64, -1), (64, 1 << 62)])
def test_lengths_that_do_not_fit_are_refused(num_bytes: int, num_escapes: int) -> None:
    table = TransformTable.from_bytes(fitted(1, 0.3)[0])
    words, matrix, classes = np.zeros(16, np.uint16), np.zeros(256, np.int16), np.zeros(16, np.uint8)
    stored = np.zeros(num_bytes, np.uint8)
    with pytest.raises(ValueError, match="not as long"):
        native.decode_transform(
            words, matrix, table.mean, classes, table.slots, stored, num_escapes, 0, 16, False, 1.0
        )
