"""LMCache's side of `bench.compression.lmcache`, run by the Python of its own environment.

    python -m bench.compression.peer_lmcache MODEL FILE.npy

Its serdes as LMCache calls them, from one memory object into another, one thread, nothing of an accelerator:
`fp8`, and CacheGen (Liu et al., SIGCOMM 2024), with the arithmetic coder that LMCache has compiled by numba
where there is no CUDA, and with the bins it takes for this model by its name. FILE holds the bits of
bfloat16, [fragment, layer, plane, token, head, dim]. Prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer
from lmcache.v1.storage_backend.naive_serde.cachegen_decoder import CacheGenDeserializer
from lmcache.v1.storage_backend.naive_serde.cachegen_encoder import CacheGenSerializer

ROUNDS = 3
CACHEGEN_FRAGMENTS = 8  # it takes about a second for each


def timed(calls: list[Callable[[], Any]]) -> tuple[list[Any], float]:
    """Return what the calls answered, and how long they took together."""
    began_at = time.perf_counter()
    answers = [call() for call in calls]
    return answers, time.perf_counter() - began_at


def relative_error(raw: Any, read: Any) -> float:
    """Return the root mean square of the error over that of the values."""
    exact = raw.float()
    return float((read.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def fp8(raw: Any) -> dict[str, float]:
    stored = torch.ones(raw.shape, dtype=torch.uint8)
    back = torch.ones_like(raw)
    serializer, deserializer = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    pairs = [
        [
            (SimpleNamespace(tensor=one), SimpleNamespace(tensor=other))
            for one, other in zip(*both, strict=True)
        ]
        for both in ((raw, stored), (stored, back))
    ]
    encode, decode = [], []
    for _ in range(ROUNDS):
        encode.append(timed([partial(serializer.serialize, *pair, None) for pair in pairs[0]])[1])
        decode.append(timed([partial(deserializer.deserialize, *pair, None) for pair in pairs[1]])[1])
    size = raw.numel() * 2 / 1e9
    return answer(2.0, relative_error(raw, back), size / min(encode), size / min(decode))


def cachegen(raw: Any, model: str) -> dict[str, float]:
    _, num_layers, _, num_tokens, num_heads, head_dim = raw.shape
    metadata = SimpleNamespace(
        model_name=model,
        kv_shape=(num_layers, 2, num_tokens, num_heads, head_dim),
        kv_dtype=torch.bfloat16,
    )
    config = SimpleNamespace(chunk_size=num_tokens)
    serializer, deserializer = CacheGenSerializer(config, metadata), CacheGenDeserializer(config, metadata)
    planes = raw.flatten(4).transpose(1, 2).contiguous()  # [fragment, plane, layer, token, channel]
    objects = [SimpleNamespace(tensor=one, parent=lambda: None) for one in planes]
    deserializer.deserialize(serializer.serialize(objects[0]))  # compiles
    encode, decode = [], []
    for _ in range(ROUNDS):
        encoded, took_s = timed([partial(serializer.serialize, one) for one in objects])
        encode.append(took_s)
        decoded, took_s = timed([partial(deserializer.deserialize, one) for one in encoded])
        decode.append(took_s)
    size = raw.numel() * 2
    error = relative_error(planes, torch.stack([one.tensor for one in decoded]))
    stored = sum(len(one.byte_array) for one in encoded)
    return answer(size / stored, error, size / 1e9 / min(encode), size / 1e9 / min(decode))


def answer(ratio: float, error: float, encode: float, decode: float) -> dict[str, float]:
    return {"ratio": ratio, "error": error, "encode": encode, "decode": decode}


def main() -> None:
    torch.set_num_threads(1)
    raw = torch.from_numpy(np.load(sys.argv[2]).view(np.int16)).view(torch.bfloat16)
    found = {
        "lmcache fp8": fp8(raw.flatten(1)),
        "lmcache cachegen": cachegen(raw[:CACHEGEN_FRAGMENTS], sys.argv[1]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
