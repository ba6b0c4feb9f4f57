"""LMCache's side of `bench.compression.lossless`, run by the Python of its own environment.

    python -m bench.compression.peer_lmcache FILE.npy

Its `fp8` serde, the one codec of its that runs without an accelerator (CacheGen moves tensors to one first),
as LMCache calls it: from the tensor of one memory object into that of another, one thread. Prints JSON.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer


def main() -> None:
    torch.set_num_threads(1)
    raw = torch.from_numpy(np.load(sys.argv[1]).view(np.int16)).view(torch.bfloat16)  # [fragment, value]
    stored = torch.empty(raw.shape, dtype=torch.uint8)
    back = torch.empty_like(raw)
    serializer, deserializer = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()
    encode, decode = [], []
    for _ in range(3):
        began_at = time.perf_counter()
        for source, target in zip(raw, stored, strict=True):
            serializer.serialize(SimpleNamespace(tensor=source), SimpleNamespace(tensor=target), None)
        encode.append(time.perf_counter() - began_at)
        began_at = time.perf_counter()
        for source, target in zip(stored, back, strict=True):
            deserializer.deserialize(SimpleNamespace(tensor=source), SimpleNamespace(tensor=target), None)
        decode.append(time.perf_counter() - began_at)
    size = raw.numel() * 2
    answer = {"ratio": 2.0, "encode_gb_s": size / min(encode) / 1e9, "decode_gb_s": size / min(decode) / 1e9}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
