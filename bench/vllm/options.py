"""What an engine process is told: plain values that travel as JSON, and the environment they need."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

Connector = dict[str, Any]  # vLLM's KVTransferConfig as a dict
SWITCH_VARIABLE = "KVTIER_BENCH_SWITCH"  # path of a file with one byte: 1 is on (switch.py)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One engine. Sizes in tokens; `connector` None is vLLM alone with its own prefix cache."""

    model: str = "tiny"
    dtype: str = "float32"
    block_tokens: int = 32
    max_model_tokens: int = 4096
    max_batch_tokens: int = 2048  # of one step: longer prompts are prefilled in chunks
    max_requests: int = 16  # of one step
    num_blocks: int | None = None  # of the engine's own cache; few of them force preemptions
    prefix_caching: bool = True
    num_workers: int = 1  # tensor parallel
    in_one_process: bool = False  # starts in half the time; as it is deployed, an engine has three
    seed: int = 0
    connector: Connector | None = None
    more: dict[str, Any] = field(
        default_factory=dict
    )  # further arguments of vLLM's `LLM`, or in place of these
    environment: dict[str, str] = field(default_factory=dict)


def kvtier_connector(target: str, **settings: Any) -> Connector:
    """Return the configuration of kvtier's connector for the appliance at `target`."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_connector_module_path": "kvtier.clients.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": target, **settings},
    }


def environment_of(options: EngineOptions) -> dict[str, str]:
    """Return the environment of an engine process: one thread per core, little memory, no network.

    Spinning OpenMP threads make a shared machine several times slower, so they sleep at once.
    """
    num_cores = os.cpu_count() or 1
    num_ranks = options.num_workers * options.more.get("pipeline_parallel_size", 1)
    share = max(1, num_cores // num_ranks)
    first_cores = [rank * share % num_cores for rank in range(num_ranks)]
    bound = "|".join(f"{core}-{core + share - 1}" if share > 1 else str(core) for core in first_cores)
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "GOMP_SPINCOUNT": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if options.in_one_process else "1",
        **options.environment,
    }
