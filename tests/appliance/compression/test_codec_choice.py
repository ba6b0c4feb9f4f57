"""Which codec is chosen: by rule, by name, and by what the disk and the codecs do."""

from pathlib import Path

import pytest

from kvtier.appliance.compression.codec_choice import CodecChoice
from kvtier.appliance.compression.codec_trials import decode_speed
from kvtier.appliance.config import CompressionRule, CompressionSettings, Settings, SettingsError
from kvtier.appliance.core.encodings import Encoding
from kvtier.tiers.block import Geometry, NamespaceIdentity
from kvtier.tiers.codecs.base import Shape, shape_of
from kvtier.tiers.codecs.needs import Need
from kvtier.tiers.codecs.registry import codec_named
from kvtier.tiers.codecs.streaming import CANDIDATES

MODEL = bytes.fromhex("ab" * 16)
LLAMA = NamespaceIdentity(MODEL, Geometry(8, 8, 128, 16, "bfloat16", layers_per_group=2))
SPEEDS = {("bfloat16", "exponents"): 8e9, ("bfloat16", "planes"): 4e9}


def names(choice: CodecChoice, identity: NamespaceIdentity = LLAMA) -> list[str]:
    """Return the codec of each layer group, and check what is reserved for it."""
    found = []
    for group, encoding in enumerate(choice.encodings_of(identity)):
        shape = shape_of(identity.geometry, group)
        codecs = [codec_named(name) for name in ("identity", "exponents", "planes", "lz4", "zstd")]
        codec = next(c for c in codecs if c.codec_id == (encoding.codec_id if encoding else 0))
        assert encoding in (None, Encoding(codec.codec_id, codec.stored_bound(shape)))
        found.append(codec.name)
    return found


@pytest.mark.parametrize(
    ("bandwidth", "expected"),
    [(0.1e9, "planes"), (1e9, "exponents"), (2e9, "exponents"), (30e9, "identity")],
)
def test_auto_takes_what_loads_quickest(bandwidth: float, expected: str) -> None:
    assert names(CodecChoice(CompressionSettings(), SPEEDS, bandwidth, 1)) == [expected] * 4


def test_more_threads_make_codecs_worth_more() -> None:
    speeds = {("bfloat16", "exponents"): 1e9}
    assert names(CodecChoice(CompressionSettings(), speeds, 1e9, 1)) == ["identity"] * 4
    assert names(CodecChoice(CompressionSettings(), speeds, 1e9, 8)) == ["exponents"] * 4


def test_nothing_is_guessed_before_it_was_measured() -> None:
    assert names(CodecChoice(CompressionSettings(), {}, 1e6, 1)) == ["identity"] * 4
    other = NamespaceIdentity(MODEL, Geometry(2, 1, 64, 16, "float16"))
    assert names(CodecChoice(CompressionSettings(), SPEEDS, 1e6, 1), other) == ["identity"]


def test_the_first_rule_that_matches_counts() -> None:
    settings = CompressionSettings(
        codec="lz4",
        rules=[
            CompressionRule(layers="0-2", codec="identity"),  # group 0; group 1 is half inside
            CompressionRule(model="abab", layers="0-5", codec="planes"),
            CompressionRule(model="ffff", codec="zstd"),
            CompressionRule(edge="remote", codec="zstd"),
        ],
    )
    assert names(CodecChoice(settings)) == ["identity", "planes", "planes", "lz4"]


def test_what_was_needed_is_what_is_reserved() -> None:
    """Learned shares replace the codec's own idea, and count in what loads quickest."""
    exponents, planes = codec_named("exponents"), codec_named("planes")
    shape = shape_of(LLAMA.geometry, 1)
    learned = {
        Need(exponents.codec_id, LLAMA.digest, 0): 0.9,
        Need(planes.codec_id, LLAMA.digest, 1): 0.5,
        Need(exponents.codec_id, LLAMA.digest, 2): 1.0,
        Need(planes.codec_id, LLAMA.digest, 2): 1.0,
    }
    chosen = CodecChoice(CompressionSettings(), SPEEDS, 1e9, 1, reserves=learned).encodings_of(LLAMA)
    assert chosen[0] == Encoding(planes.codec_id, planes.stored_bound(shape))
    assert chosen[1] == Encoding(planes.codec_id, shape.raw_bytes // 2)
    assert chosen[2] is None
    assert chosen[3] == Encoding(exponents.codec_id, exponents.stored_bound(shape))


def test_a_codec_that_does_not_take_the_dtype_is_no_codec() -> None:
    float16 = NamespaceIdentity(MODEL, Geometry(2, 1, 64, 16, "float16"))
    assert names(CodecChoice(CompressionSettings(codec="exponents")), float16) == ["identity"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"])
def test_speeds_are_measured_for_every_dtype(dtype: str) -> None:
    for name in CANDIDATES:
        speed = decode_speed(name, dtype)
        assert (speed > 0) == (name == "planes" or codec_named(name).accepts(Shape(1, 2, 16, 1, 64, dtype)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compression: {codec: gzip}", "'auto', 'identity', 'exponents'"),
        ("compression: {rules: [{layers: '3-1', codec: planes}]}", "no range of layers"),
        ("compression: {rules: [{edge: dram, codec: planes}]}", "'nvme' or 'remote'"),
        ("compression: {rules: [{model: XYZ, codec: planes}]}", "model"),
        ("compression: {rules: [{layers: '3'}]}", "must be given: Codec for these fragments;"),
        ("compression: {rules: [{layer: '3', codec: lz4}]}", "did you mean 'layers'"),
    ],
)
def test_what_is_wrong_is_said(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        Settings.load(path, env={})
