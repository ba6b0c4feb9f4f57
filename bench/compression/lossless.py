"""`python -m bench.compression.lossless [MODEL]`: exact codecs on real KV, against memcpy, the entropy
bound and LMCache.

KV of a trained transformer (`bench.compression.train` makes one), K after RoPE, in bfloat16, cut into
fragments as a namespace of that model would: all layers, K and V, of a block of tokens. One thread; the
buffers together are larger than the caches, so that memcpy is memory's. Codecs, memcpy and rounds take
turns; the best round of each counts, because a neighbour can only slow one down. What comes back is
compared bit by bit.

The bound is order 0: exponents by their frequencies within each layer's K or V of a fragment, everything
else as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.machine import ROOT, describe
from bench.peers import is_installed, python_of
from bench.table import render
from kvtier.tiers.codecs.base import Codec, DoesNotFit, Shape
from kvtier.tiers.codecs.registry import BY_NAME

MODEL = ROOT / ".cache" / "compression" / "mha"
PEERS = ROOT / ".cache" / "peers"


@dataclass
class Result:
    """What one codec made of all fragments."""

    name: str
    stored_bytes: int = 0
    num_unfit: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


def capture(model: Path, num_tokens: int, total_bytes: int) -> tuple[NDArray[np.uint16], Shape]:
    """Return real KV as [fragment, value] of bfloat16's bits, and the fragments' shape."""
    import torch
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model)
    text = "\n".join(path.read_text(errors="ignore") for path in sorted(ROOT.glob("docs/**/*.md")))
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    fragments: list[NDArray[np.uint16]] = []
    shape: Shape | None = None
    num_bytes = start = 0
    while num_bytes < total_bytes and start + 1024 <= len(ids):
        with torch.no_grad():
            past = loaded(ids[None, start : start + 1024], use_cache=True).past_key_values
        start += 1024
        layers = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in past.layers])
        blocks = layers.to(torch.bfloat16).permute(0, 1, 3, 2, 4).unflatten(2, (-1, num_tokens))
        blocks = blocks.permute(2, 0, 1, 3, 4, 5).contiguous()  # block, layer, plane, token, head, dim
        num_layers, num_planes, _, num_heads, head_dim = (int(size) for size in blocks.shape[1:])
        shape = Shape(num_layers, num_planes, num_tokens, num_heads, head_dim, "bfloat16")
        fragments.append(blocks.view(torch.int16).numpy().view(np.uint16).reshape(len(blocks), -1))
        num_bytes += fragments[-1].nbytes
    assert shape is not None, "too little text"
    return np.concatenate(fragments), shape


def bound(fragments: NDArray[np.uint16], shape: Shape) -> float:
    """Return the ratio that order-0 coding of the exponents could reach."""
    bits = 0.0
    for fragment in fragments:
        for part in fragment.reshape(shape.num_layers * shape.num_planes, -1):
            shares = np.bincount((part >> 7) & 0xFF, minlength=256) / part.size
            shares = shares[shares > 0]
            bits += part.size * (8 - float((shares * np.log2(shares)).sum()))
    return fragments.size * 16 / bits


def round_of(codec: Codec, result: Result, fragments: NDArray[np.uint16], shape: Shape) -> None:
    """Encode and decode everything once, timed."""
    stored = np.ones((len(fragments), shape.raw_bytes + shape.raw_bytes // 64 + 4096), np.uint8)
    back = np.ones_like(fragments)  # touched before the clock starts, as memcpy's target is
    lengths = []
    began_at = time.perf_counter()
    for fragment, into in zip(fragments, stored, strict=True):
        try:
            lengths.append(codec.encode(shape, fragment.view(np.uint8).data, into.data))
        except DoesNotFit:
            lengths.append(0)
    result.encode_s.append(time.perf_counter() - began_at)
    began_at = time.perf_counter()
    for number, length in enumerate(lengths):
        if length:
            codec.decode(shape, stored[number].data[:length], back[number].view(np.uint8).data)
    result.decode_s.append(time.perf_counter() - began_at)
    for number, length in enumerate(lengths):
        assert not length or np.array_equal(back[number], fragments[number]), f"{codec.name}: wrong bits"
    bound_bytes = codec.stored_bound(shape)
    result.num_unfit = sum(not 0 < length <= bound_bytes for length in lengths)
    result.stored_bytes = sum(length or shape.raw_bytes for length in lengths)


def memcpy_speed(fragments: NDArray[np.uint16]) -> float:
    """Return the GB/s of one copy of everything, fragment by fragment."""
    target = np.empty_like(fragments)
    target[:] = 0
    began_at = time.perf_counter()
    for source, into in zip(fragments, target, strict=True):
        np.copyto(into, source)
    return fragments.nbytes / (time.perf_counter() - began_at) / 1e9


def peer(fragments: NDArray[np.uint16]) -> dict[str, float] | None:
    """Return what LMCache's fp8 does with the same bytes; None when it is not installed."""
    if not is_installed(PEERS, "lmcache"):
        return None
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, fragments)
        command = [str(python_of(PEERS, "lmcache")), "-m", "bench.compression.peer_lmcache", file.name]
        answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if answer.returncode:
        print(f"lmcache did not run: {answer.stderr[-300:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(answer.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128], help="of a block")
    parser.add_argument("--mebibytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for label, value in describe({}).items():
        print(f"{label:9}{value}")
    for num_tokens in arguments.tokens:
        fragments, shape = capture(arguments.model, num_tokens, arguments.mebibytes << 20)
        print(f"\n{len(fragments)} fragments of {shape.raw_bytes} bytes: {shape}")
        codecs = [make() for make in BY_NAME.values() if make().name != "identity"]
        results = {codec.name: Result(codec.name) for codec in codecs}
        copies = []
        for _ in range(arguments.rounds):
            copies.append(memcpy_speed(fragments))
            for codec in codecs:
                round_of(codec, results[codec.name], fragments, shape)
        print_table(fragments, shape, list(results.values()), max(copies), peer(fragments))


def print_table(
    fragments: NDArray[np.uint16],
    shape: Shape,
    results: list[Result],
    memcpy: float,
    lmcache: dict[str, float] | None,
) -> None:
    """Print a row for each codec, ratios to memcpy and to the bound beside it."""
    best = bound(fragments, shape)
    rows = [["memcpy", "1.000", "", f"{memcpy:.2f}", "", "", ""]]
    for result in results:
        ratio = fragments.nbytes / result.stored_bytes
        encode, decode = (fragments.nbytes / min(times) / 1e9 for times in (result.encode_s, result.decode_s))
        fits = 1 - result.num_unfit / len(fragments)
        speeds = [f"{encode:.2f}", f"{decode:.2f}", f"{encode / memcpy:.2f} / {decode / memcpy:.2f}"]
        rows.append([result.name, f"{ratio:.3f}", f"{ratio / best:.3f}", *speeds, f"{fits:.0%}"])
    if lmcache is not None:
        encode, decode = lmcache["encode_gb_s"], lmcache["decode_gb_s"]
        speeds = [f"{encode:.2f}", f"{decode:.2f}", f"{encode / memcpy:.2f} / {decode / memcpy:.2f}"]
        rows.append(["lmcache fp8 (lossy)", f"{lmcache['ratio']:.3f}", "", *speeds, ""])
    print(f"order-0 bound of the exponents: {best:.3f}")
    print(render(["codec", "ratio", "of bound", "encode GB/s", "decode GB/s", "of memcpy", "fits"], rows))


if __name__ == "__main__":
    main()
