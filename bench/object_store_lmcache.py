"""LMCache's in-process engine with its S3 connector, for one prompt; executed by LMCache's own interpreter.

    PYTHON -m bench.object_store_lmcache HOST:PORT store|get NUM_TOKENS

The process is a host with nothing in its memory. HOST is the bucket's virtual host: LMCache's connector
names no bucket in a path. Prints one line of JSON.
"""

import json
import os
import sys
import time
from typing import Any

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_DISABLE_BANNER="1", OMP_NUM_THREADS="1")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

from bench.object_store_prompts import CHUNK_TOKENS, HEAD_DIM, NUM_HEADS, NUM_LAYERS, payload

INSTANCE = "bench-object-store"
SHAPE = (NUM_LAYERS, 2, CHUNK_TOKENS, NUM_HEADS, HEAD_DIM)
STORED_WITHIN_S = 300.0


class HostConnector(MockGPUConnector):  # type: ignore[misc]
    """The engine's side of the copies: `past`, (2, layers, tokens, heads x dim) in host memory."""

    def __init__(self, past: torch.Tensor) -> None:
        super().__init__(SHAPE)
        self.past = past

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, NUM_LAYERS, num_tokens, NUM_HEADS * HEAD_DIM])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            one.tensor.copy_(self.past[:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.past[:, :, start:end] = one.tensor


def engine_of(host: str, connector: HostConnector) -> Any:
    """Return an engine that keeps nothing itself: all other settings are LMCache's own."""
    settings = {
        "chunk_size": CHUNK_TOKENS,
        "local_cpu": False,
        "max_local_cpu_size": 1.0,  # GiB, of buffers for objects on their way
        "remote_url": f"s3://{host}",
        "remote_serde": "naive",
        "blocking_timeout_secs": 60,
        "pre_caching_hash_algorithm": "sha256_cbor",  # the same in every process
        "extra_config": {
            "s3_region": "us-east-1",
            "disable_tls": True,
            "s3_prefer_http2": False,
            "save_chunk_meta": False,
            "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        },
    }
    metadata = LMCacheMetadata(
        model_name="bench",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=SHAPE,
        chunk_size=CHUNK_TOKENS,
    )
    engine = LMCacheEngineBuilder.get_or_create(
        INSTANCE,
        LMCacheEngineConfig.from_defaults(**settings),
        metadata,
        connector,
        lambda tensor, rank: None,
        lambda value, rank: value,
    )
    engine.post_init()
    return engine


def store(engine: Any, tokens: list[int]) -> dict[str, Any]:
    """Store a prompt and wait until another lookup of its chunks finds them all."""
    engine.store(tokens)
    (backend,) = (one for name, one in engine.storage_manager.storage_backends.items() if "Remote" in name)
    keys = [key for _, _, key in engine.token_database.process_tokens(tokens)]
    ends_at = time.monotonic() + STORED_WITHIN_S
    while not all(backend.contains(key) for key in keys):
        if time.monotonic() > ends_at:
            raise TimeoutError("LMCache did not store all chunks")
        time.sleep(0.1)
    return {"num_objects": len(keys)}


def get(engine: Any, connector: HostConnector, tokens: list[int]) -> dict[str, Any]:
    """Look a prompt up and retrieve it, as a serving engine does. Returns seconds, tokens, whether right."""
    expected = connector.past.clone()
    connector.past.zero_()
    began_at = time.perf_counter()
    num_found = int(engine.lookup(tokens))
    num_tokens = int(engine.retrieve(tokens).sum()) if num_found else 0
    took_s = time.perf_counter() - began_at
    is_right = torch.equal(connector.past.view(torch.int16), expected.view(torch.int16))
    return {"seconds": took_s, "num_tokens": num_tokens, "is_right": is_right}


def main() -> None:
    host, what, num_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
    shape = (2, NUM_LAYERS, num_tokens, NUM_HEADS * HEAD_DIM)
    connector = HostConnector(torch.from_numpy(payload(num_tokens)).view(torch.bfloat16).reshape(shape))
    tokens = [num_tokens, *range(1, num_tokens)]
    engine = engine_of(host, connector)
    told = store(engine, tokens) if what == "store" else get(engine, connector, tokens)
    print(json.dumps(told), flush=True)
    os._exit(0)  # its threads do not end on their own


if __name__ == "__main__":
    main()
