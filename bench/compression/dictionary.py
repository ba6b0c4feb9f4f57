"""`python -m bench.compression.dictionary [MODEL]`: what a zstd dictionary gains on real KV.

A dictionary holds what records have in common before they begin. Half of the fragments train one (of 110 KiB,
zstd's own default, and for the shortest fragments most favourable), the other half is compressed with and
without it: the bytes as they lie, and the exponents alone as codec `planes` has them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.compression.lossless import MODEL, capture
from bench.machine import describe
from bench.table import render

DICTIONARY_BYTES = 110 << 10
MIB = 1 << 20


def ratio(samples: list[bytes], level: int, dictionary: zstandard.ZstdCompressionDict | None) -> float:
    """Return raw over compressed bytes."""
    compressor = (
        zstandard.ZstdCompressor(level=level, dict_data=dictionary)
        if dictionary
        else zstandard.ZstdCompressor(level=level)
    )
    return sum(map(len, samples)) / sum(len(compressor.compress(sample)) for sample in samples)


def exponents_of(fragment: NDArray[np.uint16]) -> bytes:
    """Return the top bytes of the rotated words: what codec `planes` gives to zstd."""
    rotated = (fragment << 1) | (fragment >> 15)
    return (rotated >> 8).astype(np.uint8).tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 3, 9])
    parser.add_argument("--mebibytes", type=int, default=24)
    arguments = parser.parse_args()
    for label, value in describe({"zstandard": zstandard.__version__}).items():
        print(f"{label:9}{value}")
    rows = []
    for num_tokens in arguments.tokens:
        fragments, shape = capture(arguments.model, num_tokens, arguments.mebibytes * MIB)
        for name, samples in (
            ("as they lie", [fragment.tobytes() for fragment in fragments]),
            ("exponents", [exponents_of(fragment) for fragment in fragments]),
        ):
            half = len(samples) // 2
            dictionary = zstandard.train_dictionary(DICTIONARY_BYTES, [*samples[:half]])
            for level in arguments.levels:
                without = ratio(samples[half:], level, None)
                with_it = ratio(samples[half:], level, dictionary)
                gain = f"{100 * (with_it / without - 1):+.2f} %"
                rows.append(
                    [
                        f"{shape.raw_bytes >> 10} KiB, {name}",
                        str(level),
                        f"{without:.4f}",
                        f"{with_it:.4f}",
                        gain,
                    ]
                )
    print(render(["fragments", "level", "without", "with", "gain"], rows))


if __name__ == "__main__":
    main()
