"""`python -m bench.compression.lmcache [MODEL]`: codecs on real KV against LMCache's serdes, in one run.

The same fragments for all, from memory, one thread each; LMCache runs in its own environment
(peer_lmcache.py) between our rounds, and the best round of each counts. Its fp8 is a cast without scales;
CacheGen is asked about a few fragments only, because it takes a second for each.
Beside speed (GB/s of raw bytes) and ratio stands what is lost: the root mean square of the error, by that of
the values. `x / y` are the speeds of encoding and decoding as multiples of LMCache's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.compression.lossless import MODEL, CodecRound, capture, code, speed_of
from bench.machine import ROOT, print_machine
from bench.peers import is_installed, python_of
from bench.table import render
from kvtier.tiers.codecs.base import Codec, Shape
from kvtier.tiers.codecs.exact.exponents import Exponents
from kvtier.tiers.codecs.exact.planes import Planes
from kvtier.tiers.codecs.lossy.profile import Coder, Profile, uniform_rules
from kvtier.tiers.codecs.lossy.profiled import Profiled

PEERS = ROOT / ".cache" / "peers"
HEADER = ("codec", "ratio", "error", "encode", "decode", "× fp8's", "× CacheGen's")


def codecs_for(shape: Shape) -> dict[str, Codec]:
    """Return our codecs by what to call them."""
    lossy: dict[str, tuple[Coder, int]] = {
        "int8": ("int", 8),
        "int5": ("int", 5),
        "int4": ("int", 4),
    }
    found: dict[str, Codec] = {"exponents": Exponents(), "planes": Planes()}
    for name, (coder, bits) in lossy.items():
        rules = uniform_rules(shape.num_layers, shape.num_planes, shape.num_heads, coder, bits)
        sizes = (shape.num_layers, shape.num_heads, shape.head_dim, shape.num_planes)
        found[name] = Profiled(Profile(bytes(32), *sizes, shape.dtype, rules))
    return found


def peers(fragments: NDArray[np.uint16], shape: Shape, model: Path) -> dict[str, dict[str, float]]:
    """Return what LMCache makes of the same bytes. Raises SystemExit when it does not run."""
    if not is_installed(PEERS, "lmcache"):
        raise SystemExit("LMCache is not installed: python -m bench.peers install lmcache")
    axes = (shape.num_layers, shape.num_planes, shape.num_tokens, shape.num_heads, shape.head_dim)
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, fragments.reshape(-1, *axes))
        command = [str(python_of(PEERS, "lmcache")), "-m", "bench.compression.peer_lmcache"]
        command += [str(model), file.name]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if answer.returncode:
        raise SystemExit(f"LMCache did not run: {answer.stderr[-600:]}")
    found: dict[str, dict[str, float]] = json.loads(answer.stdout.splitlines()[-1])
    return found


def error_of(raw: NDArray[np.uint16], read: NDArray[np.uint16]) -> float:
    """Return the root mean square of the error, by that of the values."""
    exact, got = (
        (words.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for words in (raw, read)
    )
    return float(np.sqrt(np.square(got - exact).mean() / np.square(exact).mean()))


def row(name: str, one: dict[str, float], theirs: dict[str, dict[str, float]]) -> list[str]:
    speeds = [f"{one[way]:.3g}" for way in ("encode", "decode")]
    times = [
        " / ".join(f"{one[way] / their[way]:.3g}" for way in ("encode", "decode"))
        for their in theirs.values()
    ]
    return [name, f"{one['ratio']:.2f}", f"{100 * one['error']:.2f} %", *speeds, *times]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, default=256, help="of a block; LMCache's own default")
    parser.add_argument("--mebibytes", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    print_machine()
    fragments, shape = capture(arguments.model, arguments.tokens, arguments.mebibytes << 20)
    print(f"\n{len(fragments)} fragments of {shape.raw_bytes} bytes: {shape}")
    codecs = codecs_for(shape)
    rounds: dict[str, list[CodecRound]] = {name: [] for name in codecs}
    theirs: dict[str, dict[str, float]] = {}
    for number in range(arguments.rounds):
        for name, codec in codecs.items():
            rounds[name].append(code(codec, fragments, shape))
        if number == arguments.rounds // 2:
            theirs = peers(fragments, shape, arguments.model)
    rows = [row(name, one, theirs) for name, one in theirs.items()]
    for name, found in rounds.items():
        stored = sum(length or shape.raw_bytes for length in found[0].lengths)
        one = {
            "ratio": fragments.nbytes / stored,
            "error": error_of(fragments, found[0].decoded),
            "encode": speed_of([each.encode for each in found], fragments.nbytes),
            "decode": speed_of([each.decode for each in found], fragments.nbytes),
        }
        rows.append(row(name, one, theirs))
    print(render(HEADER, rows))


if __name__ == "__main__":
    main()
