"""A connector of the installed vLLM, and what an engine passes to it."""

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched import output as scheduler_output
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from kvtier.clients.vllm import engine
from kvtier.clients.vllm.scheduler.announcer import Block
from kvtier.clients.vllm.scheduler.lookups import PendingLookup

BLOCK = 128
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
PLAIN = VllmConfig()
PLAIN.cache_config.block_size = BLOCK


def config(**extra: Any) -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="KvtierConnector",
        kv_connector_module_path="kvtier.clients.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"target": "unix:///nobody/listens.sock", **extra},
    )
    made: VllmConfig = PLAIN.__class__.__new__(PLAIN.__class__)
    made.__dict__.update(PLAIN.__dict__)
    made.kv_transfer_config = transfer
    return made


def caches(*specs: Any) -> KVCacheConfig:
    specs = specs or (FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.float32),)
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=groups)


def make(role: KVConnectorRole = SCHEDULER, kv_caches: KVCacheConfig | None = None, **extra: Any) -> Any:
    return KVConnectorFactory.create_connector(config(**extra), role, kv_caches or caches())


def request(num_tokens: int, name: str = "r", salt: str | None = None) -> Request:
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    return Request(
        name,
        list(range(num_tokens)),
        SamplingParams(max_tokens=4),
        None,
        block_hasher=get_request_block_hasher(BLOCK, hash_fn),
        cache_salt=salt,
    )


class LookupAgent:
    """Answers with what it is told."""

    def __init__(self) -> None:
        self.asked: list[PendingLookup] = []
        self.announced: list[Block] = []

    def announce(self, blocks: list[Block]) -> None:
        self.announced += blocks

    def allows(self) -> bool:
        return True

    def ask(self, question: Any) -> PendingLookup:
        self.asked.append(PendingLookup(question, time.monotonic()))
        return self.asked[-1]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def step(scheduled: dict[str, int], tables: dict[str, Any]) -> Any:
    """A step of the scheduler; `tables` are those of requests that run for the first time."""
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
    new = [SimpleNamespace(req_id=name, block_ids=table) for name, table in tables.items()]
    made = SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        finished_req_ids=set(),
    )
    kind = getattr(scheduler_output, "KVConnectorBlockState", None)
    if kind and "block_ids" in kind.__annotations__:  # 0.29: tables of some requests, states of all
        made.kv_connector_block_state = kind({}, {})
    elif engine.STEPS_HAVE_TABLES:
        made.kv_connector_block_state = scheduler_output.KVConnectorBlockState(
            set(scheduled), tables.__getitem__, {}
        )
    return made


class Broken:
    """Whatever is touched breaks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"a bug in {name}")

    def __bool__(self) -> bool:
        return True
