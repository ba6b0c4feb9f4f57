"""What travels encoded: only what pays on the connection at hand, and nothing that is not exact."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from kvtier.tiers.codecs import streaming
from kvtier.tiers.codecs.base import CodecError, Shape
from kvtier.tiers.codecs.contest import EncodingContest
from kvtier.tiers.codecs.registry import codec_named, codec_of_record
from kvtier.tiers.codecs.streaming import (
    SendMeter,
    StreamChoice,
    StreamEncoder,
    decode_fragment,
    is_brief,
    usable_codecs,
)
from tests.contracts.kv_values import values_like_kv

SHAPE = Shape(2, 2, 64, 4, 64, "bfloat16")
PAYLOAD = values_like_kv(SHAPE, 1).data


def sent_at(encoder: StreamEncoder, coded_gain: float) -> StreamChoice:
    """Send a gigabyte over a connection where encoding gains so much; return how the next fragment goes."""
    for _ in range(4096):
        choice = encoder.choose(SHAPE, "auto")
        choice.count_sent(1 << 20, 1e-3 / (coded_gain if choice.codec is not None else 1.0))
    return encoder.choose(SHAPE, "auto")


@pytest.mark.parametrize(("gain", "pays"), [(1.4, True), (0.8, False)])
def test_it_encodes_where_that_was_found_to_pay(gain: float, pays: bool) -> None:
    codec = sent_at(StreamEncoder(usable_codecs()), gain).codec
    assert (codec is not None) == pays
    assert codec is None or codec.name == "exponents"


def test_nothing_is_encoded_at_first_and_what_is_never_encoded_is_no_question() -> None:
    encoder = StreamEncoder(usable_codecs())
    assert encoder.choose(SHAPE, "auto").codec is None
    assert encoder.choose(SHAPE, "auto").contest is not None
    assert encoder.choose(SHAPE, "identity").contest is None
    assert encoder.choose(SHAPE, "planes").contest is None
    assert StreamEncoder([]).choose(SHAPE, "auto") == StreamChoice(None)


def test_between_hosts_a_codec_counts_once_its_loops_are_loaded() -> None:
    """Loading takes seconds on a busy host, and one that keeps silent for a second is given up."""
    code = (
        "from kvtier.appliance.compression.codec_trials import decode_speed\n"
        "from kvtier.tiers.codecs.streaming import loaded_codecs\n"
        "both = lambda: [list(loaded_codecs('bfloat16', encodes=one)) for one in (True, False)]\n"
        "before = both()\n"
        "assert decode_speed('exponents', 'bfloat16')\n"
        "print([before, both()])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = json.loads(run.stdout)
    number = codec_named("exponents").codec_id
    assert codec_named("zstd").codec_id in before[0]
    assert all(number not in ids for ids in before)
    assert all(set(ids) - set(those) == {number} for ids, those in zip(after, before, strict=True))


def test_values_that_exponents_does_not_know_are_a_question_of_their_own() -> None:
    encoder = StreamEncoder(usable_codecs())
    sent_at(encoder, 1.4)
    halves = SHAPE._replace(dtype="float16")
    first = encoder.choose(halves, "auto")
    assert first.codec is None
    assert first.contest is not encoder.choose(SHAPE, "auto").contest
    for _ in range(4096):
        choice = encoder.choose(halves, "auto")
        choice.count_sent(1 << 20, 1e-3 / (1.4 if choice.codec is not None else 1.0))
    codec = encoder.choose(halves, "auto").codec
    assert codec is not None
    assert codec.name == "planes"


def test_a_meter_leaves_out_what_was_waited_for() -> None:
    now = [0.0]
    found: list[tuple[int, float]] = []
    meter = SendMeter(lambda: now[0])
    choice = StreamChoice(
        None, cast(EncodingContest, SimpleNamespace(sent=lambda _, num, s: found.append((num, s))))
    )
    now[0] = 5.0
    meter.begin()
    now[0] = 5.5
    meter.sent(choice, 7)
    now[0] = 5.75
    meter.sent(choice, 8)
    assert found == [(7, 0.5), (8, 0.25)]


def test_brief_is_what_has_run_here_before() -> None:
    """The first time may compile, and is left to a thread."""
    encoder = StreamEncoder(usable_codecs())
    shape = SHAPE._replace(num_tokens=32)
    number = codec_named("exponents").codec_id
    assert encoder.encode(codec_named("exponents"), shape, PAYLOAD[: shape.raw_bytes]) is not None
    assert is_brief(number, shape, encodes=True)
    assert not is_brief(number, shape._replace(num_tokens=1 << 14), encodes=True)
    assert not is_brief(number, shape._replace(dtype="float16"), encodes=True)
    assert encoder.encode(codec_named("planes"), shape, PAYLOAD[: shape.raw_bytes]) is not None
    assert not is_brief(codec_named("planes").codec_id, shape, encodes=True)


def test_a_codec_that_is_named_is_taken_and_one_the_other_end_does_not_read_is_not() -> None:
    assert StreamEncoder(usable_codecs()).choose(SHAPE, "identity").codec is None
    for name in ("exponents", "planes", "lz4", "zstd"):
        codec = StreamEncoder(usable_codecs()).choose(SHAPE, name).codec
        assert codec is not None
        assert codec.name == name
        others = [one for one in usable_codecs() if codec_of_record(one, b"").name != name]
        assert StreamEncoder(others).choose(SHAPE, name).codec is None


def test_what_was_encoded_comes_back_and_damage_is_seen() -> None:
    encoder = StreamEncoder(usable_codecs())
    for name in ("exponents", "planes", "zstd"):
        codec = encoder.choose(SHAPE, name).codec
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
    codec = encoder.choose(SHAPE, "planes").codec
    assert codec is not None
    assert encoder.encode(codec, SHAPE, noise) is None


def test_only_exact_codecs_have_a_number_that_travels() -> None:
    assert 5 not in usable_codecs()
    assert 0 not in usable_codecs()
    with pytest.raises(CodecError, match="not one of this version's"):
        codec_of_record(5, b"")
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
        assert [codec_of_record(one, b"").name for one in usable_codecs()] == ["planes", "lz4", "zstd"]
        missing.add("xxhash")
        usable_codecs.cache_clear()
        assert usable_codecs() == ()
    finally:
        usable_codecs.cache_clear()
