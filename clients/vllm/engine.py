"""What the versions of vLLM offer a connector, and what stands in for what an older one lacks.

It is looked for once, by what is there and not by version number, so a build between two versions is served
as it is. What stands in for an older version goes when versions.TESTED no longer has that version:

    before 0.32    engines ask for no sources of hits                      SOURCES
    before 0.31    listeners get the keys of events as they are hashed     event_extra_keys
    before 0.30    engines are told of lost blocks, not of failed loads    TransferResults, LoadingBlocks
                   a step has block tables of some requests or of none     BlockTables
    before 0.29    engines hand over no states at block boundaries         states_of, why_not_grouped
                   names of blocks differ between processes                why_not_named
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched import output as scheduler_output

from .plan import Load

SOURCES: dict[str, Any] = {}
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    SOURCES = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK}
except ImportError:
    pass

#: Extra keys of blocks as listeners of events expect them.
event_extra_keys: Callable[[list[Any]], list[Any]] = getattr(kv_cache_utils, "to_event_extra_keys", list)

NAMES_ARE_STABLE = hasattr(kv_cache_utils, "resolve_none_hash_seed")
STEPS_HAVE_TABLES = hasattr(getattr(scheduler_output, "KVConnectorBlockState", None), "get_block_ids")
OFFERS_STATES = "boundary_state_offloads" in getattr(
    getattr(scheduler_output, "KVConnectorBlockState", None), "__annotations__", {}
)
TAKES_FAILED_LOADS = hasattr(base, "KVConnectorTransferResults")


@dataclass
class _TransferResults:
    """What KVConnectorTransferResults has."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


TransferResults: Any = base.KVConnectorTransferResults if TAKES_FAILED_LOADS else _TransferResults


def why_not_named() -> str:
    """Return why other processes cannot find this engine's blocks by their names; empty when they can."""
    if NAMES_ARE_STABLE or os.environ.get("PYTHONHASHSEED"):
        return ""
    return (
        "before 0.29, vLLM names blocks anew in every process unless PYTHONHASHSEED is set; "
        "start all engines with the same, e.g. PYTHONHASHSEED=0"
    )


def why_not_grouped(kv_cache_config: Any) -> str:
    """Return why an engine with these KV cache groups does not survive a failed load; empty when it does."""
    num_groups = len(kv_cache_config.kv_cache_groups)
    has_states = any(
        type(one.kv_cache_spec).__name__ == "MambaSpec" for one in kv_cache_config.kv_cache_groups
    )
    if has_states and not OFFERS_STATES:
        return "this vLLM hands over no recurrent states at block boundaries; 0.29 and later do"
    if TAKES_FAILED_LOADS or num_groups == 1:
        return ""
    return f"before 0.30, vLLM ends when a load fails in a model with {num_groups} KV cache groups"


def states_of(output: Any) -> Mapping[str, Sequence[tuple[int, int, int]]]:
    """Return the recurrent states that a step's forward pass leaves at block boundaries, by request."""
    return output.kv_connector_block_state.boundary_state_offloads if OFFERS_STATES else {}


class LoadingBlocks:
    """The blocks of loads under way, for an engine that is told which blocks were lost.

    A worker turns requests into blocks with it, the scheduler blocks into requests."""

    def __init__(self) -> None:
        self._blocks: dict[str, list[int]] = {}  # by request
        self._failed: set[str] = set()  # and not over on every rank

    def begin(self, loads: Iterable[Load]) -> None:
        """Take note of loads."""
        if not TAKES_FAILED_LOADS:
            self._blocks.update({load.request_id: load.block_ids for load in loads})

    def lost(self, finished: Iterable[str], failed: Iterable[str]) -> set[int]:
        """Return the blocks of the `failed` requests; forgets those that are `finished`."""
        lost = {number for request_id in failed for number in self._blocks.get(request_id, ())}
        for request_id in finished:
            self._blocks.pop(request_id, None)
        return lost

    def failed(self, output: Any) -> Collection[str]:
        """Return which of the requests that an engine's `output` ends did not get their blocks."""
        if TAKES_FAILED_LOADS:
            return output.failed_recving or ()
        finished, lost = output.finished_recving or (), output.invalid_block_ids
        if lost:  # by one rank, and perhaps before the others have ended
            self._failed |= {name for name, blocks in self._blocks.items() if not lost.isdisjoint(blocks)}
        for request_id in finished:
            self._blocks.pop(request_id, None)
        failed = self._failed.intersection(finished)
        self._failed -= failed
        return failed


class BlockTables:
    """The block tables of running requests, one table per KV cache group."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], ...]] = {}
        self._output: Any = None  # that was taken in last

    def table(self, output: Any, request_id: str) -> Any:
        """Return a request's tables as of a step. Raises KeyError for one that is not known."""
        if STEPS_HAVE_TABLES:
            return output.kv_connector_block_state.get_block_ids(request_id)
        self.take_in(output)
        return self._tables[request_id]

    def take_in(self, output: Any) -> None:
        """Follow the tables through a step; every step once, where the engine does not hand them over."""
        if STEPS_HAVE_TABLES or output is self._output:
            return
        self._output = output
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(table) for table in new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = tuple(list(table) for table in blocks)
            elif blocks is not None:
                for table, new_blocks in zip(self._tables[request_id], blocks, strict=True):
                    table.extend(new_blocks)

    def forget(self) -> None:
        """Forget all tables: a step was missed, and what it added."""
        self._tables.clear()
        self._output = None
