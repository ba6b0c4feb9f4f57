"""The two classes that TensorRT-LLM loads by name. What they do is in rank.py.

Source of the interface: tensorrt_llm/_torch/pyexecutor/kv_cache_connector.py of 1.0 to 1.2, which moved to
.../pyexecutor/connectors/kv_cache_connector.py.
"""

import importlib
from typing import Any

from ..connector.guard import harmless
from .rank import rank_of

HOMES = ("connectors.kv_cache_connector", "kv_cache_connector")


def _interface() -> Any:
    for home in HOMES:
        try:
            return importlib.import_module(f"tensorrt_llm._torch.pyexecutor.{home}")
        except ModuleNotFoundError as problem:
            if problem.name is None or not f"tensorrt_llm._torch.pyexecutor.{home}".startswith(problem.name):
                raise  # found, and something that it needs is not
    raise ImportError(f"this TensorRT-LLM has no KV cache connector: looked for {' and '.join(HOMES)}")


_found = _interface()
SchedulerBase: Any = _found.KvCacheConnectorScheduler
WorkerBase: Any = _found.KvCacheConnectorWorker


class KvtierScheduler(SchedulerBase):  # type: ignore[misc]
    """Promises what the rank has loaded into host memory already. Raises InvalidRequest for bad settings."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._rank = rank_of(llm_args)
        self.guard = self._rank.guard

    @harmless(lambda *_: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens after `num_computed_tokens` need no computation, and False.

        The load is part of the next pass."""
        return self._rank.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Note where the promised blocks go. Raises RuntimeError where one has no place."""
        self._rank.place(request.request_id, block_ids)

    @harmless(lambda *_: None)
    def build_connector_meta(self, scheduler_output: Any) -> None:
        """Note how far requests are computed; the worker of this process needs no message."""
        self._rank.stepped([*scheduler_output.new_requests, *scheduler_output.cached_requests])

    @harmless(lambda *_: False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Begin to save; return whether the blocks are still read, until `get_finished` says otherwise."""
        return self._rank.save(request, cache_block_ids)


class KvtierWorker(WorkerBase):  # type: ignore[misc]
    """Copies between the KV cache and host memory. Raises InvalidRequest for bad settings."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._rank = rank_of(llm_args)
        self.guard = self._rank.guard

    def register_kv_caches(self, kv_cache_tensor: Any, *others: Any) -> None:
        """Begin to serve the cache: [block, ...], contiguous. What cannot be served is said in the log."""
        self._rank.serve(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        """Copy what was promised into the cache, before what the stream does next. May raise, too."""
        self._rank.load(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: the stream has the copies of all layers before it."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a request is saved when it has finished."""

    def wait_for_save(self, stream: Any) -> None:
        """Nothing: saves are not part of a pass."""

    @harmless(lambda *_: ([], []))
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the requests with saves that have ended; no load is asynchronous."""
        return self._rank.saved(finished_gen_req_ids), []

    def shutdown(self) -> None:
        """End the saves under way, and the connections."""
        self._rank.close()
