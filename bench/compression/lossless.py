"""`python -m bench.compression.lossless [MODEL]`: exact codecs on real KV, against memcpy and entropy.

KV of a trained transformer (`bench.compression.train` makes one), K after RoPE, in bfloat16 or fp8, cut into
fragments as a namespace of that model would: all layers, K and V, of a block of tokens. One thread. Codecs,
memcpy and rounds take turns. The least time of each fragment over the rounds counts, because a neighbour can
only slow one down, and takes the processor for longer than a fragment. What comes back is compared bit by
bit.

Two regimes, each with a memcpy of its own: from memory, where source and target of a round are each larger
than the last cache (and both were touched before, in memory of the same kind), and from the cache, where one
fragment is coded over and over. Bytes that are counted are raw ones, read once, so memcpy at N GB/s moves
twice that.

The bound is order 0: exponents by their frequencies within each layer's K or V of a fragment, everything
else as it is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.machine import ROOT, print_machine
from bench.table import render
from kvtier.tiers.codecs.base import Codec, DoesNotFit, Shape
from kvtier.tiers.codecs.exact.float8 import MANTISSAS
from kvtier.tiers.codecs.registry import BY_NAME

MODEL = ROOT / ".cache" / "compression" / "mha"
Fragments: TypeAlias = NDArray[Any]  # [fragment, value], the bits of a value in each
Seconds: TypeAlias = NDArray[np.float64]  # of each fragment
CACHED_BYTES = 64 << 20  # of raw bytes in each round of one fragment


@dataclass
class Result:
    """What one codec made of all fragments. Seconds of each fragment in each round."""

    name: str
    stored_bytes: int = 0
    num_unfit: int = 0
    encode: list[Seconds] = field(default_factory=list)
    decode: list[Seconds] = field(default_factory=list)
    cached_encode: list[float] = field(default_factory=list)
    cached_decode: list[float] = field(default_factory=list)


class CodecRound(NamedTuple):
    """Everything encoded and decoded once."""

    lengths: list[int]  # 0: did not fit
    decoded: Fragments
    encode: Seconds
    decode: Seconds


def capture(model: Path, num_tokens: int, total_bytes: int) -> tuple[Fragments, Shape]:
    """Return real KV as [fragment, value] of bfloat16's bits, and the fragments' shape. The model of a recipe
    of `bench.compression.train` that is not there yet is trained first, in minutes."""
    import torch
    import transformers

    from bench.compression.train import RECIPES, folder_of, is_trained, train

    if model.name in RECIPES and model == folder_of(model.name) and not is_trained(model.name):
        train(model.name, RECIPES[model.name])
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


def as_float8(fragments: Fragments, shape: Shape, dtype: str) -> tuple[Fragments, Shape]:
    """Return the same values in fp8, as an engine stores them: scale 1, nearest, clamped."""
    import torch

    kind = getattr(torch, dtype)
    values = torch.from_numpy(fragments.view(np.int16)).view(torch.bfloat16).float()
    most = torch.finfo(kind).max
    return values.clamp(-most, most).to(kind).view(torch.uint8).numpy(), shape._replace(dtype=dtype)


def bound(fragments: Fragments, shape: Shape) -> float:
    """Return the ratio that order-0 coding of the exponents could reach."""
    mantissa = MANTISSAS.get(shape.dtype, 7)
    width = 8 * fragments.itemsize
    exponents = (1 << (width - 1 - mantissa)) - 1
    bits = 0.0
    for fragment in fragments:
        for part in fragment.reshape(shape.num_layers * shape.num_planes, -1):
            shares = np.bincount((part >> mantissa) & exponents, minlength=256) / part.size
            shares = shares[shares > 0]
            bits += part.size * (1 + mantissa - float((shares * np.log2(shares)).sum()))
    return fragments.size * width / bits


def code(codec: Codec, fragments: Fragments, shape: Shape) -> CodecRound:
    """Encode and decode everything once, timed."""
    stored = np.ones((len(fragments), shape.raw_bytes + shape.raw_bytes // 64 + 4096), np.uint8)
    back = np.ones_like(fragments)  # touched before the clock starts, as memcpy's target is
    payloads, places, targets = (
        [row.data for row in rows.view(np.uint8)] for rows in (fragments, stored, back)
    )
    lengths: list[int] = []
    encode_s, decode_s = np.zeros(len(fragments)), np.zeros(len(fragments))
    for number, (payload, place) in enumerate(zip(payloads, places, strict=True)):
        began_at = time.perf_counter()
        try:
            length = codec.encode(shape, payload, place)
        except DoesNotFit:
            length = 0
        encode_s[number] = time.perf_counter() - began_at
        lengths.append(length)
    for number, (place, target, length) in enumerate(zip(places, targets, lengths, strict=True)):
        if length:
            began_at = time.perf_counter()
            codec.decode(shape, place[:length], target)
            decode_s[number] = time.perf_counter() - began_at
    return CodecRound(lengths, back, encode_s, decode_s)


def round_of(codec: Codec, result: Result, fragments: Fragments, shape: Shape) -> None:
    """Measure one round: all fragments once from memory, and one fragment again and again from the cache."""
    found = code(codec, fragments, shape)
    for number, length in enumerate(found.lengths):
        assert not length or np.array_equal(found.decoded[number], fragments[number]), f"{codec.name}: bits"
    bound_bytes = codec.stored_bound(shape)
    result.num_unfit = sum(not 0 < length <= bound_bytes for length in found.lengths)
    result.stored_bytes = sum(length or shape.raw_bytes for length in found.lengths)
    result.encode.append(found.encode)
    result.decode.append(found.decode)
    place, back = np.ones(2 * shape.raw_bytes, np.uint8), np.ones(shape.raw_bytes, np.uint8)
    payload = fragments[0].view(np.uint8).data
    length = codec.encode(shape, payload, place.data)
    result.cached_encode.append(repeated(shape, lambda: codec.encode(shape, payload, place.data)))
    stored = place.data[:length]
    result.cached_decode.append(repeated(shape, lambda: codec.decode(shape, stored, back.data)))


def repeated(shape: Shape, call: Callable[[], Any]) -> float:
    """Return the least seconds of a call that was made before, over and over."""
    least_s = math.inf
    for _ in range(max(1, CACHED_BYTES // shape.raw_bytes)):
        began_at = time.perf_counter()
        call()
        least_s = min(least_s, time.perf_counter() - began_at)
    return least_s


def memcpy(fragments: Fragments, shape: Shape) -> tuple[Seconds, float]:
    """Return the seconds of a copy of each fragment, and of one fragment over and over."""
    target = np.ones_like(fragments)
    seconds = np.zeros(len(fragments))
    for number, (source, into) in enumerate(zip(fragments, target, strict=True)):
        began_at = time.perf_counter()
        np.copyto(into, source)
        seconds[number] = time.perf_counter() - began_at
    return seconds, repeated(shape, lambda: np.copyto(target[0], fragments[0]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 128], help="of a block")
    parser.add_argument("--dtype", choices=["bfloat16", *MANTISSAS], default="bfloat16")
    parser.add_argument("--mebibytes", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    for num_tokens in arguments.tokens:
        wanted = arguments.mebibytes << (20 if arguments.dtype == "bfloat16" else 21)
        fragments, shape = capture(arguments.model, num_tokens, wanted)
        if arguments.dtype != "bfloat16":
            fragments, shape = as_float8(fragments, shape, arguments.dtype)
        print(f"\n{len(fragments)} fragments of {shape.raw_bytes} bytes: {shape}")
        codecs = [make() for make in BY_NAME.values() if make().name != "identity" and make().accepts(shape)]
        results = {codec.name: Result(codec.name) for codec in codecs}
        copies = []
        for _ in range(arguments.rounds):
            copies.append(memcpy(fragments, shape))
            for codec in codecs:
                round_of(codec, results[codec.name], fragments, shape)
        print_table(fragments, shape, list(results.values()), copies)


def speed_of(rounds: list[Seconds], num_bytes: int) -> float:
    """Return GB/s by the least time of each fragment over the rounds."""
    least_s = float(np.min(rounds, axis=0).sum())
    return num_bytes / least_s / 1e9 if least_s else 0.0


def print_table(
    fragments: Fragments,
    shape: Shape,
    results: list[Result],
    copies: list[tuple[Seconds, float]],
) -> None:
    """Print a row for each codec, ratios to memcpy and to the bound beside it."""
    best = bound(fragments, shape)

    def speeds(rounds: list[Seconds], cached: list[float]) -> tuple[float, float]:
        return speed_of(rounds, fragments.nbytes), shape.raw_bytes / min(cached) / 1e9

    of_memcpy = speeds([seconds for seconds, _ in copies], [cached for _, cached in copies])
    rows = [["memcpy", "1.000", "", "", f"{of_memcpy[0]:.1f}", "", "", f"{of_memcpy[1]:.1f}", "", ""]]
    for result in results:
        ratio = fragments.nbytes / result.stored_bytes
        fits = 1 - result.num_unfit / len(fragments)
        row = [result.name, f"{ratio:.3f}", f"{ratio / best:.3f}", f"{fits:.0%}"]
        encodes = speeds(result.encode, result.cached_encode)
        decodes = speeds(result.decode, result.cached_decode)
        for encode, decode, copy in zip(encodes, decodes, of_memcpy, strict=True):
            row += [f"{encode:.2f}", f"{decode:.2f}", f"{encode / copy:.2f} / {decode / copy:.2f}"]
        rows.append(row)
    regimes = [f"{what} {where}" for where in ("memory", "cache") for what in ("enc", "dec", "× memcpy")]
    print(f"order-0 bound of the exponents: {best:.3f}; speeds in GB/s")
    print(render(["codec", "ratio", "of bound", "fits", *regimes], rows))


if __name__ == "__main__":
    main()
