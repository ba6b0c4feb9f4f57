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
from kvtier.tiers.codecs.lossy.profile import Coder, Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled
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
TOTAL_BYTES = 48 << 20


def codec_for(shape: Shape, coder: Coder, bits: int) -> Profiled:
    """Return a codec that treats all heads alike, in groups of at most 64 tokens."""
    rules = uniform_rules(
        shape.num_layers, shape.num_planes, shape.num_heads, coder, bits, min(64, shape.num_tokens)
    )
    sizes = (shape.num_layers, shape.num_heads, shape.head_dim, shape.num_planes)
    return Profiled(Profile(bytes(32), *sizes, shape.dtype, rules))


def speeds(codec: Profiled, shape: Shape, num_rounds: int) -> tuple[float, float, float]:
    """Return the ratio, and GB/s of payload that one thread encodes and decodes."""
    num_fragments = TOTAL_BYTES // shape.raw_bytes
    raw = np.frombuffer(bytes(trial_payload(shape)) * num_fragments, np.uint8).reshape(num_fragments, -1)
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
            found = speeds(codec_for(shape, coder, bits), shape, arguments.rounds)
            cells = [f"{number:.2f}" for number in found]
            rows.append([f"{shape.raw_bytes >> 10} KiB", f"{coder}{bits or ''}", *cells])
    print(render(["fragment", "codec", "ratio", "encode GB/s", "decode GB/s"], rows))


if __name__ == "__main__":
    main()
