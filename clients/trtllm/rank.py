"""OneRank: what both halves of the connector share. TensorRT-LLM makes them in one process, with the same
arguments.

    match    asked once for each request, in the scheduling loop: load into host memory, promise what came
    load     before the pass: from host memory into the cache, on the pass's stream
    save     when a request has finished: its full blocks, by a thread, while its blocks are kept

A load cannot fail here: there is no way to take a promise back. So only bytes in memory of this process are
promised, and a daemon that dies meanwhile costs nothing. The price is that the scheduling loop waits for the
load, `load_timeout_s` at most. For the same reason one rank only is served: the scheduler of rank 0 cannot
hold the shards of others. Saving while requests run was rejected: blocks of a request may be given back, and
shared with others, at any step of it; at its end they are kept until the save says so.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from ...v1.types import NamespaceIdentity
from ..connector.chain_store import ChainStore
from ..connector.guard import PLUGIN_BUG, Guard
from ..connector.opaque import opaque_identity, token_frame
from ..connector.plugin_options import ChainOptions, options_from
from ..errors import InvalidRequest, KvtierError
from ..values.keys import prefix_hashes

log = logging.getLogger(__name__)

FORMAT = 1  # of a block; raise it when the same bytes would mean something else
PIECE_BYTES = 64 << 20  # copied at a time
SETTINGS = "KVTIER_TRTLLM"  # environment: a JSON object of RankOptions; the runtime has no place for them
NOT_SERVED = "NOT_SERVED"  # cause of a miss: adapters, images, embeddings
#: Of a request: each changes its KV, and is not covered by the names of its blocks.
NOT_NAMED = (
    "lora_task_id",
    "prompt_embedding_table",
    "multimodal_hashes",
    "multimodal_embedding",
    "py_multimodal_data",
    "mrope_rotary_cos_sin",
    "skip_cross_attn_blocks",
)


@dataclass(frozen=True, slots=True)
class RankOptions(ChainOptions):
    """Settings; `load_timeout_s` is what the scheduling loop waits for a load at most."""

    name: str = "trtllm"
    load_timeout_s: float = 0.5
    max_load_bytes: int = 1 << 30  # of one request: host memory

    @classmethod
    def from_env(cls) -> "RankOptions":
        """Read SETTINGS. Raises InvalidRequest naming the setting."""
        text = os.environ.get(SETTINGS, "{}")
        try:
            settings = json.loads(text)
        except ValueError:
            settings = None
        if not isinstance(settings, dict):
            raise InvalidRequest(f"{SETTINGS} must be a JSON object, is {text!r}", reason="BAD_OPTION")
        return options_from(cls, settings, SETTINGS)


def why_not(arguments: Any) -> str:
    """Return why an engine with these arguments is not served; empty when it is."""
    cache = getattr(arguments, "kv_cache_config", None)
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    if any((getattr(arguments, name, 1) or 1) > 1 for name in sizes):
        return "it has several ranks, and a promise must be kept by all of them; one rank is served"
    if getattr(arguments, "speculative_config", None) is not None:
        return "it decodes speculatively, and its draft's KV is not stored"
    if getattr(cache, "max_attention_window", None):
        return "it has attention windows: blocks behind them are gone when a request ends"
    if getattr(cache, "host_cache_size", None):
        return "it keeps KV in host memory itself (host_cache_size): its block ids are no places in the cache"
    return ""


class OneRank:
    """One rank's blocks. The scheduler's half and the worker's call from one thread, or take turns."""

    def __init__(
        self, arguments: Any, options: RankOptions, guard: Guard, make_store: Callable[[float], ChainStore]
    ) -> None:
        """`make_store(deadline_s)` gives a connection of its own, guarded by `guard`."""
        self.guard = guard
        self.arguments = arguments
        self.identity: NamespaceIdentity | None = None  # None: nothing is served
        self._options = options
        self._loads, self._saves = make_store(options.load_timeout_s), make_store(options.store_timeout_s)
        self._pages: Any = None  # the cache as [block, bytes of a block] uint8
        self._block_tokens = 1
        self._staged: dict[int, tuple[int, Any]] = {}  # by request: first block, bytes of the promised ones
        self._placed: list[tuple[list[int], Any]] = []
        self._num_computed: dict[int, int] = {}  # by request: tokens with KV after the pass under way
        self._saving: dict[int, Future[None]] = {}
        self._asked: set[int] = set()  # saves that the runtime wants to hear of
        self._threads = ThreadPoolExecutor(1, "kvtier-save")

    # ------------------------------------------------------------------------------------- start

    def serve(self, tensor: Any) -> None:
        """Begin to serve a cache, unless it cannot be served: then the log says why."""
        try:
            why = why_not(self.arguments) or self._open(tensor)
        except (KvtierError, OSError) as problem:
            why = str(problem)
        if why:
            self.identity = None
            log.warning("kvtier serves nothing to this engine: %s", why)

    def _open(self, tensor: Any) -> str:
        import torch
        from tensorrt_llm import __version__ as version

        if not tensor.is_contiguous():
            return f"its cache is not contiguous: {tuple(tensor.shape)}, strides {tensor.stride()}"
        cache = self.arguments.kv_cache_config
        self._block_tokens = int(cache.tokens_per_block)
        self._pages = tensor.view(torch.uint8).reshape(tensor.shape[0], -1)
        facts = {
            "format": FORMAT,
            "version": ".".join(str(version).split(".")[:2]),  # layouts are its own affair
            "shape": list(tensor.shape[1:]),
            "dtype": [str(tensor.dtype), str(getattr(cache, "dtype", None))],
            "attention": str(getattr(self.arguments, "attn_backend", None)),
            "quantized": str(getattr(self.arguments, "quant_config", None)),
            "variant": self._options.variant,
        }
        weights = self._options.weights_of(str(self.arguments.model))
        block_bytes = int(self._pages.shape[1])
        self.identity = opaque_identity(
            weights, block_bytes, self._block_tokens, f"trtllm.{FORMAT}", facts, "rank=0/1"
        )
        return ""

    # ------------------------------------------------------------------------------------- loads

    def match(self, request: Any, num_computed_tokens: int) -> int:
        """Load what follows `num_computed_tokens`; return how many tokens that gave, whole blocks."""
        self._staged.pop(request.request_id, None)
        first, rest = divmod(num_computed_tokens, self._block_tokens)
        # Logits of the whole prompt: a token that is loaded has none.
        wants_all = getattr(request, "py_return_context_logits", False)
        if self.identity is None or rest or wants_all:
            return 0
        hashes = self._names(request)
        block_bytes = int(self._pages.shape[1])
        hashes = hashes[: first + max(1, self._options.max_load_bytes // block_bytes)]
        before, wanted = hashes[:first], hashes[first:]
        num_found = self._loads.num_available(self.identity, wanted, before) if wanted else 0
        if not num_found:
            return 0
        host = self._host_blocks(num_found)
        num_blocks = self._loads.load(self.identity, wanted[:num_found], list(host.numpy()), before=before)
        if num_blocks:
            self._staged[request.request_id] = first, host[:num_blocks]
        return num_blocks * self._block_tokens

    def place(self, request_id: int, block_ids: Sequence[int]) -> None:
        """Take the blocks of a request, in order. Raises RuntimeError when promised ones have no place."""
        if request_id not in self._staged:
            return
        first, host = self._staged[request_id]
        places = [int(number) for number in block_ids[first : first + len(host)]]
        if len(places) < len(host):
            raise RuntimeError(f"{len(host)} blocks were promised, {len(places)} of them have a place")
        self._placed.append((places, host))

    def load(self, stream: Any) -> None:
        """Copy the placed blocks into the cache, on `stream`."""
        placed, self._placed = self._placed, []
        if not placed:
            return
        import torch

        on_stream = torch.cuda.stream(stream) if self._pages.is_cuda else nullcontext()
        with on_stream:
            for places, host in placed:
                for some in _pieces(len(places), int(self._pages.shape[1])):
                    where = torch.tensor(places[some], device=self._pages.device)
                    self._pages.index_copy_(0, where, host[some].to(self._pages.device))

    def stepped(self, requests: Iterable[Any]) -> None:
        """Note how far the pass that follows computes each request.

        The runtime leaves what was promised out of the first position that it tells."""
        for data in requests:
            _, host = self._staged.pop(data.request_id, (0, ()))
            num_computed = data.computed_position + len(host) * self._block_tokens
            self._num_computed[data.request_id] = num_computed + data.num_scheduled_tokens

    # ------------------------------------------------------------------------------------- saves

    def save(self, request: Any, block_ids: Sequence[int]) -> bool:
        """Begin to save a finished request's full blocks; return whether anything is being saved."""
        self._staged.pop(request.request_id, None)
        num_computed = self._num_computed.pop(request.request_id, 0)
        if self.identity is None or self.guard.breaker.turns_away():
            return False
        hashes = [] if _has_beams(request) else self._names(request, num_computed)[: len(block_ids)]
        if not hashes:
            return False
        places = [int(number) for number in block_ids[: len(hashes)]]
        self._saving[request.request_id] = self._threads.submit(self._save, hashes, places)
        return True

    def saved(self, asked: Iterable[int]) -> list[int]:
        """Return those of the requests that were `asked` for so far with blocks that are read no more."""
        self._asked.update(asked)
        over = [name for name in self._asked if name not in self._saving or self._saving[name].done()]
        for name in over:
            self._asked.discard(name)
            if (save := self._saving.pop(name, None)) and (problem := save.exception()):
                self.guard.count(PLUGIN_BUG)
                log.error("a save failed: %s", problem)
        return sorted(over)

    def _save(self, hashes: Sequence[bytes], places: Sequence[int]) -> None:
        import torch

        assert self.identity is not None
        num_known = self._saves.num_stored(self.identity, hashes)
        if num_known is None or num_known == len(hashes):
            return
        on_stream: Any = nullcontext()
        if self._pages.is_cuda:  # a request may end while the pass that computes its last block still runs
            torch.cuda.synchronize(self._pages.device)
            on_stream = torch.cuda.stream(torch.cuda.Stream(self._pages.device))
        with on_stream:
            for some in _pieces(len(hashes), int(self._pages.shape[1]), num_known):
                where = torch.tensor(places[some], device=self._pages.device)
                blocks = self._pages.index_select(0, where).cpu()
                parent = hashes[some.start - 1] if some.start else b""
                kept = self._saves.store(self.identity, hashes[some], list(blocks.numpy()), parent=parent)
                if kept.num_blocks < len(blocks):
                    return  # what follows would have no parent

    def close(self) -> None:
        """End the saves under way, and the connections."""
        with _making:
            _ranks.pop(id(self.arguments), None)
        self._threads.shutdown(cancel_futures=True)
        self._loads.close()
        self._saves.close()

    # --------------------------------------------------------------------------------- internals

    def _names(self, request: Any, max_tokens: int | None = None) -> list[bytes]:
        """Return the names of a request's first full blocks, never of its last token; none where names would
        not say all."""
        if any(getattr(request, name, None) is not None for name in NOT_NAMED):
            self.guard.count(NOT_SERVED)
            return []
        salts = {name: getattr(request, name, None) for name in ("cache_salt", "cache_salt_id")}
        keys = [f"{name}={salt}" for name, salt in salts.items() if salt is not None]
        tokens = request.get_tokens(0)[:-1][:max_tokens]
        return prefix_hashes(token_frame(self._block_tokens), tokens, extra_keys=keys)

    def _host_blocks(self, num_blocks: int) -> Any:
        import torch

        return torch.empty(
            (num_blocks, self._pages.shape[1]), dtype=torch.uint8, pin_memory=self._pages.is_cuda
        )


def _pieces(num_blocks: int, block_bytes: int, first: int = 0) -> Iterator[slice]:
    """Yield the blocks from `first` on, PIECE_BYTES at a time."""
    step = max(1, PIECE_BYTES // block_bytes)
    for start in range(first, num_blocks, step):
        yield slice(start, min(start + step, num_blocks))


def _has_beams(request: Any) -> bool:
    """Whether the blocks of a request are of several answers."""
    return (getattr(getattr(request, "sampling_config", None), "beam_width", 1) or 1) > 1


_ranks: dict[int, OneRank] = {}
_making = threading.Lock()  # the halves are made on two threads


def rank_of(arguments: Any) -> OneRank:
    """Return what the halves that were made with the same arguments share."""
    with _making:
        made = _ranks.get(id(arguments))  # held by the rank: no other object has this number meanwhile
        if made is None or made.arguments is not arguments:
            options, guard = RankOptions.from_env(), Guard(__name__)

            def make_store(deadline_s: float) -> ChainStore:
                return ChainStore.at(options, guard, deadline_s, options.staging_bytes)

            made = _ranks[id(arguments)] = OneRank(arguments, options, guard, make_store)
        return made
