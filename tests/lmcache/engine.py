"""LMCache's own in-process engine on host tensors, with kvtier as its remote tier. Run as a program it is
the second process: it retrieves and prints what it found."""

import json
import os
import sys
from typing import Any

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", LMCACHE_DISABLE_BANNER="1")
os.environ.update(OMP_NUM_THREADS="1")

import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

NUM_LAYERS, NUM_HEADS, HEAD_DIM, CHUNK_TOKENS = 4, 2, 16, 32
CHUNK_BYTES = 2 * NUM_LAYERS * CHUNK_TOKENS * NUM_HEADS * HEAD_DIM * 2
INSTANCE = "kvtier-test"


class HostConnector(MockGPUConnector):
    """The engine's side of the copies: one tensor [K and V, layer, token, head and dim] in host memory."""

    def __init__(self) -> None:
        super().__init__((NUM_LAYERS, 2, CHUNK_TOKENS, NUM_HEADS, HEAD_DIM))
        self.past: Any = None

    def get_shape(self, num_tokens: int) -> Any:
        return torch.Size([2, NUM_LAYERS, num_tokens, NUM_HEADS * HEAD_DIM])

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            one.tensor.copy_(self.past[:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.past[:, :, start:end] = one.tensor


class Engine:
    """One engine; use it as a context manager, because LMCache keeps engines in a global table."""

    def __init__(self, target: str, model: str = "a model", **more: Any) -> None:
        prefix = "remote_storage_plugin.kvtier."
        extra = {
            f"{prefix}module_path": "kvtier.clients.lmcache",
            f"{prefix}class_name": "KvtierConnectorAdapter",
            f"{prefix}target": target,
            **more.pop("extra", {}),
        }
        settings = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": False,  # nothing is kept in the process
            "max_local_cpu_size": 0.02,
            "lmcache_instance_id": INSTANCE,
            "remote_storage_plugins": ["kvtier"],
            "remote_serde": "naive",
            "pre_caching_hash_algorithm": "sha256_cbor",  # the same in every process
            "extra_config": extra,
            **more,
        }
        metadata = LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(NUM_LAYERS, 2, CHUNK_TOKENS, NUM_HEADS, HEAD_DIM),
            chunk_size=CHUNK_TOKENS,
        )
        self.connector = HostConnector()
        self.engine = LMCacheEngineBuilder.get_or_create(
            INSTANCE,
            LMCacheEngineConfig.from_defaults(**settings),
            metadata,
            self.connector,
            lambda tensor, rank: None,
            lambda value, rank: value,
        )
        self.engine.post_init()

    @property
    def remote(self) -> Any:
        """kvtier's connector; None where LMCache could not make it."""
        backend = self.engine.storage_manager.storage_backends.get("RemoteBackend-kvtier")
        return backend.connection.getWrappedConnector() if backend and backend.connection else None

    def lookup(self, tokens: list[int]) -> int:
        """Return how many tokens are stored."""
        return int(self.engine.lookup(tokens))

    def store(self, tokens: list[int]) -> None:
        """Store a prompt; LMCache returns before the bytes are stored."""
        self.connector.past = past_of(tokens)
        self.engine.store(tokens)

    def retrieve(self, tokens: list[int]) -> tuple[int, bool]:
        """Return how many tokens came back, and whether they are the right ones."""
        self.connector.past = torch.zeros_like(past_of(tokens))
        number = int(self.engine.retrieve(tokens).sum())
        expected = past_of(tokens)[:, :, :number]
        return number, bool(torch.equal(self.connector.past[:, :, :number], expected))

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        LMCacheEngineBuilder.destroy(INSTANCE)


def prompt(num_tokens: int, seed: int = 1) -> list[int]:
    """Return random tokens."""
    source = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(1, 30000, (num_tokens,), generator=source)]


def past_of(tokens: list[int]) -> Any:
    """Return a made-up past in which every number depends on all tokens before it."""
    sums = torch.tensor(tokens, dtype=torch.float64).cumsum(0) % 8191
    shape = (2, NUM_LAYERS, len(tokens), NUM_HEADS * HEAD_DIM)
    steps = torch.arange(2 * NUM_LAYERS * NUM_HEADS * HEAD_DIM).reshape(2, NUM_LAYERS, 1, -1)
    return (sums[None, None, :, None] + steps).expand(shape).to(torch.bfloat16)


if __name__ == "__main__":
    with Engine(sys.argv[1]) as engine:
        told = prompt(int(sys.argv[2]))
        print(json.dumps([engine.lookup(told), *engine.retrieve(told)]))
