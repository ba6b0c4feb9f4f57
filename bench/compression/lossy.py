"""`python -m bench.compression.lossy`: how fast lossy codecs encode and decode fragments of several sizes.

Values as a transformer makes them, every layer, K and V by one rule, through the daemon's own codec, from
memory (48 MiB read, as many written), one thread, the best of several rounds. What the codecs cost in quality
is another question (calibrated.py).
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from bench.machine import print_machine
from bench.table import render
from kvtier.tiers.codecs.base import Shape
from kvtier.tiers.codecs.lossy.profile import Coder, Profile, Rule, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
from kvtier.tiers.codecs.lossy.transform_fit import fit_table
from kvtier.tiers.codecs.trial import trial_payload

SHAPES = (
    Shape(6, 2, 16, 2, 64, "bfloat16"),
    Shape(8, 2, 16, 8, 128, "bfloat16"),
    Shape(6, 2, 256, 2, 64, "bfloat16"),
)
CODERS: tuple[tuple[Coder, int], ...] = (
    ("int", 8),
    ("int", 5),
    ("int", 4),
    ("int", 2),
)
# One basis a layer and plane: of 128 dimensions, and of 512.
TRANSFORM_SHAPES = (Shape(6, 2, 128, 2, 64, "bfloat16"), Shape(4, 2, 128, 4, 128, "bfloat16"))
STEPS = (0.2, 0.45, 1.0)
TOTAL_BYTES = 48 << 20


def codec_for(shape: Shape, coder: Coder, bits: int) -> Profiled:
    """Return a codec that treats all heads alike, in groups of at most 64 tokens."""
    rules = uniform_rules(
        shape.num_layers, shape.num_planes, shape.num_heads, coder, bits, min(64, shape.num_tokens)
    )
    sizes = (shape.num_layers, shape.num_heads, shape.head_dim, shape.num_planes)
    return Profiled(Profile(bytes(32), *sizes, shape.dtype, rules))


def transform_case(shape: Shape, step: float) -> tuple[Profiled, memoryview]:
    """Return a codec, and a payload of the values it was fitted to: their spread falls from axis to axis."""
    rng = np.random.default_rng(1)
    num_dims = shape.num_heads * shape.head_dim
    basis, _ = np.linalg.qr(rng.standard_normal((num_dims, num_dims)))
    spread = 3 * np.exp(-np.arange(num_dims) * 3.5 / num_dims)
    num_rows = shape.num_layers * shape.num_planes * shape.num_tokens
    values = (rng.standard_normal((num_rows, num_dims)) * spread @ basis).astype(np.float32)
    table, reserve_bits = fit_table(values, step)
    rules = tuple(
        Rule(layer, plane, 0, shape.num_heads, "transform", step=step, reserve_bits=reserve_bits, table=0)
        for layer in range(shape.num_layers)
        for plane in range(shape.num_planes)
    )
    sizes = (shape.num_layers, shape.num_heads, shape.head_dim, shape.num_planes)
    payload = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return Profiled(Profile(bytes(32), *sizes, shape.dtype, rules, (table,))), memoryview(payload)


def speeds(codec: Profiled, shape: Shape, payload: memoryview, num_rounds: int) -> tuple[float, float, float]:
    """Return the ratio, and GB/s of payload that one thread encodes and decodes."""
    num_fragments = TOTAL_BYTES // shape.raw_bytes
    raw = np.frombuffer(bytes(payload) * num_fragments, np.uint8).reshape(num_fragments, -1)
    stored = np.zeros((num_fragments, codec.stored_bound(shape)), np.uint8)
    decoded = np.zeros_like(raw)
    fragments = [[row.data for row in one] for one in (raw, stored, decoded)]
    encode_s = decode_s = float("inf")
    for _ in range(num_rounds):
        began_at = time.perf_counter()
        for payload, into in zip(fragments[0], fragments[1], strict=True):
            codec.encode(shape, payload, into)
        encoded_at = time.perf_counter()
        for source, target in zip(fragments[1], fragments[2], strict=True):
            codec.decode(shape, source, target)
        decode_s = min(decode_s, time.perf_counter() - encoded_at)
        encode_s = min(encode_s, encoded_at - began_at)
    return raw.nbytes / stored.nbytes, raw.nbytes / encode_s / 1e9, raw.nbytes / decode_s / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    rows = []
    for shape in SHAPES:
        for coder, bits in CODERS:
            codec = codec_for(shape, coder, bits)
            found = speeds(codec, shape, trial_payload(shape), arguments.rounds)
            cells = [f"{number:.2f}" for number in found]
            rows.append([f"{shape.raw_bytes >> 10} KiB", f"{coder}{bits or ''}", *cells])
    for shape in TRANSFORM_SHAPES:
        for step in STEPS:
            codec, payload = transform_case(shape, step)
            found = speeds(codec, shape, payload, arguments.rounds)
            num_dims = shape.num_heads * shape.head_dim
            cells = [f"{number:.2f}" for number in found]
            rows.append([f"{shape.raw_bytes >> 10} KiB", f"transform {step} of {num_dims}", *cells])
    print(render(["fragment", "codec", "ratio", "encode GB/s", "decode GB/s"], rows))


if __name__ == "__main__":
    main()
