"""Codec zstd: one frame, every level reads alike, and no frame that needs a dictionary."""

import numpy as np
import pytest
import zstandard

from kvtier.tiers.codecs.base import CodecError, CodecMissing
from kvtier.tiers.codecs.exact.general import Zstd
from tests.tiers.cold.test_encoded import SHAPE

WORDS = [np.random.default_rng(seed).bytes(48) for seed in range(40)]


def payload(seed: int) -> bytes:
    """Return a payload that repeats phrases which every payload has."""
    rng = np.random.default_rng(seed)
    picked = b"".join(WORDS[i] for i in rng.integers(0, len(WORDS), SHAPE.raw_bytes // 48 + 1))
    return picked[: SHAPE.raw_bytes]


def test_every_level_is_read() -> None:
    """Records and streams may have been written with another level than ours."""
    for level in (1, 19):
        frame = zstandard.ZstdCompressor(level=level).compress(payload(3))
        stored, into = len(frame).to_bytes(4, "little") + frame, bytearray(SHAPE.raw_bytes)
        Zstd().decode(SHAPE, memoryview(stored), memoryview(into))
        assert into == payload(3)


def test_a_frame_that_names_a_dictionary_is_refused() -> None:
    """No release wrote one: it is damage, and not a record to keep until a file comes back."""
    samples = [payload(seed)[start : start + 4096] for seed in range(16) for start in range(0, 16384, 4096)]
    dictionary = zstandard.train_dictionary(4096, [*samples])
    frame = zstandard.ZstdCompressor(level=1, dict_data=dictionary).compress(payload(2))
    stored = len(frame).to_bytes(4, "little") + frame
    into = memoryview(bytearray(SHAPE.raw_bytes))
    with pytest.raises(CodecError, match="Dictionary mismatch") as caught:
        Zstd().decode(SHAPE, memoryview(stored), into)
    assert not isinstance(caught.value, CodecMissing)
