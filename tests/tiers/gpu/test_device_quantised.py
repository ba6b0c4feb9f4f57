"""The device's decoder of quantised records: its own source run on the host, bit for bit what the host's
loops do; and what it refuses."""

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from kvtier.tiers.codecs.base import CodecError, Shape
from kvtier.tiers.codecs.lossy.profile import Profile, Rule, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
from kvtier.tiers.gpu.decode.quantised import DeviceQuantised
from kvtier.tiers.gpu.decode.quantised_kernels import NAMES, SOURCE
from kvtier.tiers.gpu.decode.records import NUM_SLABS, Record

from .device_bench import DeviceBench
from .host_kernels import on_host
from .nvrtc import compiled

LAYERS, PLANES, TOKENS, HEADS, DIM = 3, 2, 12, 4, 24
SHAPE = Shape(2, PLANES, TOKENS, HEADS, DIM, "bfloat16", first_layer=1)


def profiled(rules: tuple[Rule, ...], dtype: str = "bfloat16") -> Profiled:
    return Profiled(Profile(bytes(32), LAYERS, HEADS, DIM, PLANES, dtype, rules))


def mixed_rules() -> tuple[Rule, ...]:
    """Every coder side by side, in one layer, with groups that do and do not divide the block."""
    heads = [
        {"coder": "int", "bits": 3, "axis": "channel", "group_tokens": 4},
        {"coder": "exact"},
        {"coder": "int", "bits": 5, "axis": "token", "group_tokens": 5},
        {"coder": "int", "bits": 7, "axis": "token", "group_tokens": 0},
    ]
    return tuple(
        Rule(layer, plane, head, head + 1, **heads[(head + layer + plane) % 4])  # type: ignore[arg-type]
        for layer in range(LAYERS)
        for plane in range(PLANES)
        for head in range(HEADS)
    )


def words(seed: int, dtype: str) -> bytes:
    """KV with outliers, tiny values, zeros of both signs and a constant channel."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, (SHAPE.num_layers, PLANES, TOKENS, HEADS, DIM)).astype(np.float32)
    values[..., 3] *= 60
    values[:, :, :, 1] *= 1e-6
    values[..., 5] = 2.5
    values[:, :, 2] = -0.0
    values[:, :, 4, 2] = 0
    if dtype == "float16":
        return values.astype(np.float16).tobytes()
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[DeviceBench]:
    made = DeviceBench(lambda device: DeviceQuantised(device, on_host(SOURCE, NAMES)), len(request.node.name))
    with closing(made) as bench:
        yield bench


def encoded(codec: Profiled, shape: Shape, payload: bytes) -> bytes:
    stored = bytearray(codec.stored_bound(shape))
    codec.encode(shape, memoryview(payload), memoryview(stored))
    return bytes(stored)


def on_the_host(codec: Profiled, shape: Shape, stored: bytes) -> bytes:
    into = bytearray(shape.raw_bytes)
    codec.decode(shape, memoryview(stored), memoryview(into))
    return bytes(into)


RULES = {
    **{f"int{bits}": uniform_rules(LAYERS, PLANES, HEADS, "int", bits, 4) for bits in (2, 3, 4, 5, 6, 7, 8)},
    "int5, block": uniform_rules(LAYERS, PLANES, HEADS, "int", 5),
    "exact": uniform_rules(LAYERS, PLANES, HEADS, "exact"),
    "mixed": mixed_rules(),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", RULES)
def test_bit_for_bit_what_the_host_decodes(bench: DeviceBench, name: str, dtype: str) -> None:
    codec = profiled(RULES[name], dtype)
    shape = SHAPE._replace(dtype=dtype)
    stored = [encoded(codec, shape, words(seed, dtype)) for seed in range(3)]
    status, decoded = bench.decode(codec, shape, stored)
    assert status == [0, 0, 0]
    assert decoded == [on_the_host(codec, shape, s) for s in stored]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["int8", "int3", "mixed"])
def test_bit_for_bit_with_any_scales_and_codes(bench: DeviceBench, name: str, dtype: str) -> None:
    """Records that no encoder wrote: every code, scales of any size, subnormal ones and negative ones."""
    codec = profiled(RULES[name], dtype)
    shape = SHAPE._replace(dtype=dtype)
    rng = np.random.default_rng(7)
    stored = []
    for _ in range(8):
        random = rng.integers(0, 1 << 16, codec.stored_bound(shape) // 2 + 1, np.uint16)
        random &= 0xFBFF  # finite scales, among them such as take values beyond the range of float16
        stored.append(random.tobytes()[: codec.stored_bound(shape)])
    status, decoded = bench.decode(codec, shape, stored)
    assert status == [0] * 8
    assert decoded == [on_the_host(codec, shape, s) for s in stored]


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_scale_that_is_not_finite_is_refused_as_on_the_host(bench: DeviceBench, name: str) -> None:
    codec = profiled(RULES[name])
    good = encoded(codec, SHAPE, words(1, "bfloat16"))
    damaged = bytearray(good)
    damaged[0:2] = (0x7C00).to_bytes(2, "little")
    with pytest.raises(CodecError):
        on_the_host(codec, SHAPE, bytes(damaged))
    status, decoded = bench.decode(codec, SHAPE, [good, bytes(damaged), good])
    assert status == [0, 1, 0]
    assert decoded[0] == decoded[2] == on_the_host(codec, SHAPE, good)


def test_what_stays_on_the_host(bench: DeviceBench) -> None:
    codec = profiled(RULES["int4"])
    assert bench.decoder.limits(codec, SHAPE).min_bytes == codec.stored_bound(SHAPE)
    assert bench.decoder.limits(codec, SHAPE._replace(num_heads=2)).max_fragments == 0, "another model's"


def test_without_scratch_the_answer_is_none_and_not_a_wait(bench: DeviceBench) -> None:
    codec = profiled(RULES["int4"])
    stored = encoded(codec, SHAPE, words(1, "bfloat16"))
    record = Record(bench.place(stored), len(stored), bench.place(b"", SHAPE.raw_bytes))
    tickets = [bench.decoder.decode(bench.stream, codec, SHAPE, [record]) for _ in range(NUM_SLABS + 1)]
    assert [ticket is None for ticket in tickets] == [False] * NUM_SLABS + [True]
    bench.finish()


@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_it_compiles_for_a_gpu(architecture: str) -> None:
    assert f".entry {NAMES[0]}" in compiled(SOURCE, architecture)
