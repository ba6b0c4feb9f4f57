"""What travels encoded: only what pays on the connection at hand, and nothing that is not exact."""

import numpy as np
import pytest

from kvtier.tiers.codecs import streaming
from kvtier.tiers.codecs.base import CodecError, Shape
from kvtier.tiers.codecs.streaming import (
    MIN_SENT_BYTES,
    StreamEncoder,
    decode_fragment,
    name_of,
    usable_codecs,
)
from tests.contracts.kv_values import values_like_kv

SHAPE = Shape(2, 2, 64, 4, 64, "bfloat16")
PAYLOAD = values_like_kv(SHAPE, 1).data


class Clock:
    """Time that passes as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step_s = 0.0  # added with every look

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def encoder_at(bytes_per_s: float, encode_bytes_per_s: float) -> StreamEncoder:
    """Return one that knows its link and how fast it encodes."""
    clock = Clock()
    encoder = StreamEncoder(usable_codecs(), clock=clock)
    encoder.sent(MIN_SENT_BYTES, MIN_SENT_BYTES / bytes_per_s, MIN_SENT_BYTES / bytes_per_s)
    clock.step_s = SHAPE.raw_bytes / encode_bytes_per_s
    for _ in range(4):  # two of each candidate
        codec = encoder.choose(SHAPE, "auto")
        assert codec is not None
        assert encoder.encode(codec, SHAPE, PAYLOAD) is not None
    return encoder


@pytest.mark.parametrize(
    ("link", "speed", "pays"),
    [
        (0.125e9, 5e9, True),
        (0.125e9, 2e9, True),
        (0.125e9, 0.2e9, False),
        (1.25e9, 5e9, False),
        (1e9, 4e10, True),
    ],
)
def test_it_encodes_where_sending_takes_longer(link: float, speed: float, pays: bool) -> None:
    encoder = encoder_at(link, speed)
    assert (encoder.choose(SHAPE, "auto") is not None) == pays


def test_nothing_is_encoded_before_the_link_is_known() -> None:
    encoder = StreamEncoder(usable_codecs())
    assert encoder.choose(SHAPE, "auto") is None
    encoder.sent(MIN_SENT_BYTES - 1, 1.0, 1.0)
    assert encoder.choose(SHAPE, "auto") is None
    encoder.sent(1, 0.0, 0.0)
    assert encoder.choose(SHAPE, "auto") is not None


def test_a_link_that_was_never_waited_for_has_at_least_what_it_took() -> None:
    """And a slower one is noticed later."""
    encoder = encoder_at(0.1e9, 2e9)
    assert encoder.choose(SHAPE, "auto") is not None
    for _ in range(40):
        encoder.sent(MIN_SENT_BYTES, 0.0, MIN_SENT_BYTES / 4e9)
    assert encoder.choose(SHAPE, "auto") is None
    for _ in range(40):
        encoder.sent(MIN_SENT_BYTES, MIN_SENT_BYTES / 0.1e9, MIN_SENT_BYTES / 0.1e9)
    assert encoder.choose(SHAPE, "auto") is not None


def test_a_codec_that_is_named_is_taken_and_one_the_other_end_does_not_read_is_not() -> None:
    assert StreamEncoder(usable_codecs()).choose(SHAPE, "identity") is None
    for name in ("exponents", "planes", "lz4", "zstd"):
        codec = StreamEncoder(usable_codecs()).choose(SHAPE, name)
        assert codec is not None
        assert codec.name == name
        others = [one for one in usable_codecs() if name_of(one) != name]
        assert StreamEncoder(others).choose(SHAPE, name) is None


def test_what_was_encoded_comes_back_and_damage_is_seen() -> None:
    encoder = StreamEncoder(usable_codecs())
    for name in ("exponents", "planes", "zstd"):
        codec = encoder.choose(SHAPE, name)
        assert codec is not None
        encoded = encoder.encode(codec, SHAPE, PAYLOAD)
        assert encoded is not None
        assert len(encoded.stored) < 0.95 * SHAPE.raw_bytes
        into = np.zeros(SHAPE.raw_bytes, np.uint8)
        whole = memoryview(encoded.stored)
        assert decode_fragment(encoded.codec_id, SHAPE, whole, into.data, encoded.checksum)
        np.testing.assert_array_equal(into, np.frombuffer(PAYLOAD, np.uint8))
        rng = np.random.default_rng(7)
        for _ in range(50):
            damaged = bytearray(encoded.stored)
            damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
            into[:] = 0
            is_right = decode_fragment(
                encoded.codec_id, SHAPE, memoryview(damaged), into.data, encoded.checksum
            )
            assert not is_right or (into == np.frombuffer(PAYLOAD, np.uint8)).all()
        cut = whole[: len(whole) // 2]
        assert not decode_fragment(encoded.codec_id, SHAPE, cut, into.data, encoded.checksum)
        assert not decode_fragment(encoded.codec_id, SHAPE, whole, into.data, bytes(16))


def test_noise_travels_as_it_is() -> None:
    noise = np.random.default_rng(2).integers(0, 256, SHAPE.raw_bytes, np.uint8).data
    encoder = StreamEncoder(usable_codecs())
    codec = encoder.choose(SHAPE, "planes")
    assert codec is not None
    assert encoder.encode(codec, SHAPE, noise) is None


def test_only_exact_codecs_have_a_number_that_travels() -> None:
    assert 5 not in usable_codecs()
    assert 0 not in usable_codecs()
    with pytest.raises(CodecError, match="not one that travels"):
        name_of(5)
    into = memoryview(bytearray(SHAPE.raw_bytes))
    assert not decode_fragment(5, SHAPE, PAYLOAD, into, b"")


def test_what_is_not_installed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without numba there is no `exponents`, without xxhash nothing at all."""
    find_spec = streaming.importlib.util.find_spec  # type: ignore[attr-defined]
    missing: set[str] = {"numba"}
    monkeypatch.setattr(
        streaming.importlib.util,  # type: ignore[attr-defined]
        "find_spec",
        lambda name: None if name in missing else find_spec(name),
    )
    usable_codecs.cache_clear()
    try:
        assert [name_of(one) for one in usable_codecs()] == ["planes", "lz4", "zstd"]
        missing.add("xxhash")
        usable_codecs.cache_clear()
        assert usable_codecs() == ()
    finally:
        usable_codecs.cache_clear()
