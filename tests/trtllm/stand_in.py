"""A stand-in for TensorRT-LLM: the abstract classes of its connector, and an executor that calls the hooks in
the order in which PyExecutor does, as read in its published source (versions 1.0 to 1.2 and main of 2026).

Its KV is a function of the tokens before, so that a wrong block is seen. What this cannot show: that the
real classes, streams and block tables are as they were read.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

BLOCK_TOKENS, LAYERS, WIDTH, NUM_BLOCKS = 8, 3, 16, 64
HOME = "tensorrt_llm._torch.pyexecutor"


class KvCacheConnectorScheduler(ABC):
    """The scheduler's half, as TensorRT-LLM demands it."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]: ...

    @abstractmethod
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None: ...


class KvCacheConnectorWorker(ABC):
    """The worker's half, as TensorRT-LLM demands it."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor: Any) -> None: ...

    @abstractmethod
    def start_load_kv(self, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def save_kv_layer(self, layer_idx: int, stream: Any) -> None: ...

    @abstractmethod
    def wait_for_save(self, stream: Any) -> None: ...

    @abstractmethod
    def get_finished(self, finished: list[int], started: list[int]) -> tuple[list[int], list[int]]: ...


def modules(home: str) -> dict[str, ModuleType]:
    """Return what `sys.modules` has to hold; `home` is where the interface is, below HOME."""
    names = ["tensorrt_llm", "tensorrt_llm._torch", HOME]
    if "." in home:
        names.append(f"{HOME}.{home.partition('.')[0]}")
    made = {name: ModuleType(name) for name in [*names, f"{HOME}.{home}"]}
    for module in made.values():
        module.__path__ = []
    made["tensorrt_llm"].__version__ = "1.2.1"  # type: ignore[attr-defined]
    interface: Any = made[f"{HOME}.{home}"]
    interface.KvCacheConnectorScheduler = KvCacheConnectorScheduler
    interface.KvCacheConnectorWorker = KvCacheConnectorWorker
    return made


def forget() -> None:
    """Let the adapter be imported anew."""
    for name in [name for name in sys.modules if name.startswith(("tensorrt_llm", "kvtier.clients.trtllm"))]:
        del sys.modules[name]


def arguments(folder: str, **changes: Any) -> Any:
    """Return what TorchLlmArgs has of what is read."""
    cache = SimpleNamespace(
        tokens_per_block=BLOCK_TOKENS, dtype="auto", max_attention_window=None, host_cache_size=None
    )
    found = {"model": folder, "kv_cache_config": cache, "tensor_parallel_size": 1, "speculative_config": None}
    return SimpleNamespace(**{**found, **changes})


@dataclass
class Request:
    """What LlmRequest has of what is read."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None
    multimodal_hashes: list[list[int]] | None = None
    py_return_context_logits: bool = False
    block_ids: list[int] = field(default_factory=list)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class Executor:
    """One rank that serves requests one after the other. `prefill_tokens` a step."""

    def __init__(self, llm_args: Any, module: Any, prefill_tokens: int = 1 << 30) -> None:
        self.worker, self.scheduler = module.KvtierWorker(llm_args), module.KvtierScheduler(llm_args)
        self.cache = torch.zeros(NUM_BLOCKS, LAYERS, 2, BLOCK_TOKENS, WIDTH, dtype=torch.bfloat16)
        self.worker.register_kv_caches(self.cache)
        self.prefill_tokens = prefill_tokens
        self._free = list(range(NUM_BLOCKS))
        self._num_requests = 0
        self._ending: dict[int, Request] = {}
        self._told: set[int] = set()

    def serve(
        self,
        tokens: Sequence[int],
        num_new: int = 3,
        num_cached: int = 0,
        aborts_after: int | None = None,
        **more: Any,
    ) -> int:
        """Serve a prompt to its end; return how many of its tokens kvtier gave.

        `num_cached`: tokens that the runtime's own cache has. Raises AssertionError for a wrong block."""
        self._num_requests += 1
        request = Request(self._num_requests, list(tokens), **more)
        num_matched: int
        num_matched, is_async = self.scheduler.get_num_new_matched_tokens(request, num_cached)
        assert not is_async
        assert num_cached + num_matched < len(tokens)
        num_blocks = -(-(len(tokens) + num_new) // BLOCK_TOKENS)
        request.block_ids, self._free = self._free[:num_blocks], self._free[num_blocks:]
        assert len(request.block_ids) == num_blocks, "blocks were not given back"
        self.compute(request, 0, num_cached)
        self.scheduler.update_state_after_alloc(request, request.block_ids)
        position, is_first = num_cached + num_matched, True
        for _ in range(1 << 30 if aborts_after is None else aborts_after):
            if position >= len(tokens) + num_new - 1:
                break
            is_prefill = position < len(tokens)
            step = min(self.prefill_tokens, len(tokens) - position) if is_prefill else 1
            told = position - (num_matched if is_first else 0)
            data = SimpleNamespace(
                request_id=request.request_id, computed_position=told, num_scheduled_tokens=step
            )
            output = SimpleNamespace(
                new_requests=[data] if is_first else [], cached_requests=[] if is_first else [data]
            )
            self.worker.bind_connector_meta(self.scheduler.build_connector_meta(output))
            self.worker.start_load_kv(None)
            if is_first:
                self.check(request, num_cached + num_matched)
            for layer in range(LAYERS):
                self.worker.wait_for_layer_load(layer, None)
                self.worker.save_kv_layer(layer, None)
            self.compute(request, position, position + step)
            self.worker.wait_for_save(None)
            position, is_first = position + step, False
            if position >= len(tokens):
                request.tokens.append(7 * position % 1000)
        if self.scheduler.request_finished(request, request.block_ids):
            self._ending[request.request_id] = request
        else:
            self.give_back(request)
        self.step()
        return num_matched

    def step(self) -> None:
        """Ask what has ended, as every step does: each id is told once, and returned once."""
        new = [name for name in self._ending if name not in self._told]
        self._told.update(new)
        saved, loaded = self.worker.get_finished(new, [])
        assert not loaded
        for name in saved:
            assert name in self._told
            self.give_back(self._ending.pop(name))

    def settle(self) -> None:
        while self._ending:
            self.step()

    def give_back(self, request: Request) -> None:
        """Other requests may write to these blocks now."""
        self.cache[request.block_ids] = -1.0
        self._free = [*self._free, *request.block_ids]

    def compute(self, request: Request, first: int, last: int) -> None:
        for position in range(first, last):
            block = request.block_ids[position // BLOCK_TOKENS]
            self.cache[block, :, :, position % BLOCK_TOKENS] = kv_of(request, position)

    def check(self, request: Request, num_tokens: int) -> None:
        for position in range(num_tokens):
            found = self.cache[request.block_ids[position // BLOCK_TOKENS], :, :, position % BLOCK_TOKENS]
            assert torch.equal(found, kv_of(request, position)), f"token {position} of {num_tokens} is wrong"


def kv_of(request: Request, position: int) -> torch.Tensor:
    """Return what a prefill computes for a token: it depends on all before, the salt and the adapter."""
    past = (tuple(request.tokens[: position + 1]), request.cache_salt, request.lora_task_id)
    generator = torch.Generator().manual_seed(hash(past) % (1 << 62))
    return torch.randn(LAYERS, 2, WIDTH, generator=generator).to(torch.bfloat16)
