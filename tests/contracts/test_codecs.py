"""What every codec promises, over every codec: the suite that a new one joins by a line in CODECS.

Exact codecs are held to bits, NaN payloads and negative zero included; lossy ones to the bound they
declare. Bytes that nothing encodes to are refused or decode to something, but never write beyond `into`,
crash, or take memory by their word.
"""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvtier.tiers.block import DTYPE_BYTES
from kvtier.tiers.codecs.base import Codec, CodecError, DoesNotFit, Shape
from kvtier.tiers.codecs.registry import BY_NAME, codec_of_record
from tests.contracts.damage import decode_damaged
from tests.contracts.kv_values import values_like_kv

CODECS = list(BY_NAME.values())
GUARD = 64  # bytes around the target that nobody may touch
SHAPES = [
    Shape(2, 2, 16, 4, 64, "bfloat16"),
    Shape(1, 2, 16, 8, 128, "float16"),
    Shape(3, 1, 16, 1, 576, "bfloat16"),
    Shape(1, 2, 8, 3, 50, "bfloat16"),
    Shape(2, 2, 16, 2, 32, "float32"),
    Shape(2, 2, 16, 2, 64, "float8_e4m3fn"),
    Shape(3, 2, 16, 8, 128, "float8_e4m3fn"),
    Shape(2, 1, 16, 1, 576, "float8_e4m3fn"),  # a joint latent: units and half a block
    Shape(2, 2, 10, 3, 50, "float8_e5m2"),  # five units and a tail
    Shape(1, 2, 16, 8, 128, "float8_e5m2"),
    Shape(2, 2, 16, 2, 64, "int8"),
    Shape(1, 1, 1, 1, 8192, "bfloat16"),
]


def round_trip(codec: Codec, shape: Shape, payload: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
    """Encode and decode with guards around both targets; return what came back and the stored length."""
    bound = codec.stored_bound(shape)
    stored = np.full(bound + GUARD, 0xA5, np.uint8)
    length = codec.encode(shape, payload.data, stored.data[:bound])
    assert 0 < length <= bound
    assert (stored[bound:] == 0xA5).all(), "wrote beyond its bound"
    target = np.full(shape.raw_bytes + 2 * GUARD, 0x5A, np.uint8)
    codec.decode(shape, stored.data[:bound].toreadonly(), target.data[GUARD:-GUARD])
    assert (target[:GUARD] == 0x5A).all()
    assert (target[-GUARD:] == 0x5A).all(), "wrote beyond its target"
    return target[GUARD:-GUARD], length


def usual_dtype(codec: Codec) -> str:
    return "float8_e4m3fn" if codec.name == "float8" else "bfloat16"


@pytest.fixture(params=CODECS, ids=lambda make: make().name)
def codec(request: pytest.FixtureRequest) -> Codec:
    make: Callable[[], Codec] = request.param
    return make()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.dtype}-{shape.raw_bytes}")
def test_what_was_encoded_comes_back(codec: Codec, shape: Shape) -> None:
    if not codec.accepts(shape):
        pytest.skip(f"{codec.name} does not take {shape.dtype}")
    payload = values_like_kv(shape, seed=7)
    try:
        decoded, _ = round_trip(codec, shape, payload)
    except DoesNotFit:
        assert codec.name in ("lz4", "zstd") or shape.raw_bytes < 8192 or DTYPE_BYTES[shape.dtype] != 2
        return
    assert (decoded == payload).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_pattern_of_sixteen_bits_survives(codec: Codec, dtype: str) -> None:
    """NaN payloads, infinities, negative zero, subnormals: in runs of ordinary values, so that they fit."""
    shape = Shape(1, 1, 16, 256, 64, dtype)
    if not codec.accepts(shape):
        pytest.skip(f"{codec.name} does not take {dtype}")
    ordinary = values_like_kv(shape, seed=3).view(np.uint16)
    num_fitting = 0
    patterns = np.arange(65_536, dtype=np.uint16)
    np.random.default_rng(5).shuffle(patterns)
    for some in np.split(patterns, 64):
        payload = ordinary.copy()
        payload[np.random.default_rng(int(some[0])).permutation(payload.size)[: some.size]] = some
        try:
            decoded, _ = round_trip(codec, shape, payload.view(np.uint8))
        except DoesNotFit:
            continue
        num_fitting += 1
        assert (decoded == payload.view(np.uint8)).all()
    assert num_fitting == 64 or codec.name in ("lz4", "zstd") or dtype == "float16"


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_every_pattern_of_eight_bits_survives(codec: Codec, dtype: str) -> None:
    """Each of the 256 beside ordinary values, in every lane of a row of 64."""
    shape = Shape(1, 2, 64, 4, 64, dtype)
    if not codec.accepts(shape):
        pytest.skip(f"{codec.name} does not take {dtype}")
    patterns = np.arange(256, dtype=np.uint8)
    ordinary = values_like_kv(shape, seed=3)
    num_fitting = 0
    for lane in range(64):
        payload = ordinary.copy()
        payload[patterns.astype(np.int64) * 64 + lane] = np.roll(patterns, lane)
        try:
            decoded, _ = round_trip(codec, shape, payload)
        except DoesNotFit:
            continue
        num_fitting += 1
        assert (decoded == payload).all()
    assert num_fitting == 64 or codec.name in ("lz4", "zstd", "planes")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_noise_of_eight_bits_survives_where_there_is_room(codec: Codec, dtype: str) -> None:
    shape = Shape(2, 2, 16, 4, 64, dtype)
    if codec.name != "float8":
        pytest.skip("others have another reserve")
    noise = np.random.default_rng(11).integers(0, 256, shape.raw_bytes, np.uint8)
    for payload in (noise, np.zeros_like(noise), np.full_like(noise, 0xFF), np.sort(noise)):
        stored, target = np.zeros(2 * shape.raw_bytes, np.uint8), np.zeros_like(payload)
        length = codec.encode(shape, payload.data, stored.data)
        codec.decode(shape, stored.data[:length], target.data)
        assert (target == payload).all()


def test_noise_does_not_fit_and_says_so(codec: Codec) -> None:
    shape = Shape(2, 2, 16, 4, 64, usual_dtype(codec))
    noise = np.random.default_rng(11).integers(0, 256, shape.raw_bytes, np.uint8)
    if codec.name == "identity":
        assert (round_trip(codec, shape, noise)[0] == noise).all()
    else:
        with pytest.raises(DoesNotFit):
            round_trip(codec, shape, noise)


def test_a_place_that_is_too_short_is_not_overrun(codec: Codec) -> None:
    shape = Shape(1, 2, 16, 2, 64, usual_dtype(codec))
    payload = values_like_kv(shape, seed=9)
    for length in (0, 1, 7, 64, shape.raw_bytes // 2):
        place = np.full(length + GUARD, 0xA5, np.uint8)
        with pytest.raises(DoesNotFit):
            codec.encode(shape, payload.data, place.data[:length])
        assert (place[length:] == 0xA5).all()


def test_memory_that_lies_askew(codec: Codec) -> None:
    """Payload, stored bytes and target at odd addresses: slower perhaps, but the same."""
    shape = Shape(1, 2, 16, 2, 64, usual_dtype(codec))
    payload = np.empty(shape.raw_bytes + 1, np.uint8)[1:]
    payload[:] = values_like_kv(shape, seed=2)
    bound = codec.stored_bound(shape)
    stored = np.zeros(bound + 1, np.uint8)[1:]
    try:
        codec.encode(shape, payload.data, stored.data)
    except DoesNotFit:
        return
    target = np.zeros(shape.raw_bytes + 1, np.uint8)[1:]
    codec.decode(shape, stored.data, target.data)
    assert (target == payload).all()


def test_damaged_bytes_never_break_anything(codec: Codec) -> None:
    """Flipped, cut, swapped and invented bytes: refused or decoded to something, within the target."""
    found = decode_damaged(codec, Shape(2, 2, 16, 2, 64, usual_dtype(codec)), num_records=400)
    assert found["refused"] > 50 or codec.name == "identity"


def test_a_frame_that_claims_to_be_huge_is_refused() -> None:
    """A bomb: a valid zstd frame of a gigabyte of zeros in a few kilobytes."""
    import zstandard

    shape = Shape(1, 2, 16, 2, 64, "bfloat16")
    bomb = zstandard.ZstdCompressor(level=3).compress(bytes(64 << 20))
    for name, frame in (("zstd", bomb), ("planes", bomb)):
        stored = len(frame).to_bytes(4, "little") + frame + bytes(shape.raw_bytes)
        with pytest.raises(CodecError, match="more than"):
            BY_NAME[name]().decode(shape, memoryview(stored), memoryview(bytearray(shape.raw_bytes)))


def test_the_same_bytes_encode_the_same(codec: Codec) -> None:
    shape = Shape(1, 2, 16, 2, 64, usual_dtype(codec))
    payload = values_like_kv(shape, seed=4)
    stored = [np.zeros(codec.stored_bound(shape), np.uint8) for _ in range(2)]
    try:
        lengths = [codec.encode(shape, payload.data, into.data) for into in stored]
    except DoesNotFit:
        return
    assert lengths[0] == lengths[1]
    assert (stored[0] == stored[1]).all()


def test_a_record_finds_its_codec_again(codec: Codec) -> None:
    assert codec_of_record(codec.codec_id, codec.parameters()).name == codec.name
    assert len(codec.parameters()) <= 32
    with pytest.raises(CodecError):
        codec_of_record(9_999, b"")
