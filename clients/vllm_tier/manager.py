"""KvtierTier: vLLM's SecondaryTierManager over an appliance.

All methods run in the scheduler, between two steps of the engine, so none of them waits: lookups go to a
thread of vLLM's, stores and loads to a lane each, and a step later their results are collected. None of
them raises either: a failed hook ends the engine (EngineDeadError), a missing chunk costs its prefill.
`harmless` is the last net; what is expected to go wrong (an appliance that is dead, slow, full, restarted)
never gets that far.

Source of the interface: vllm/v1/kv_offload/tiering/base.py, 0.32.
"""

import logging
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ..connector.chain_store import ChainStore
from ..connector.guard import Guard, harmless
from ..memory.buffers import address_of
from .identity import host_device, identity_of
from .lanes import WorkerLane
from .lookups import TierLookups
from .options import TierOptions
from .room import RoomWait
from .runs import group_of, hash_of, is_usable, runs_of, session_of
from .transfers import Done, PrimaryPool, TierJob, TierTransfers

LOST = "vllm:kv_offload_kvtier_lost"
NO_ROOM = "NO_ROOM_IN_POOL"  # cause of a miss: found, and the pool had no row for as long as a request waits
#: Of vLLM's pool, which it shows to no tier: how many rows are free, and how many may be evicted.
OF_POOL = ("_get_num_free_chunks", "_num_evictable_cache_chunks")
STOP_S = 15.0  # more than the deadlines of a running call together
_logger = logging.getLogger("vllm." + __name__)  # where vLLM's logging is configured


@dataclass(slots=True)
class _Tails:
    """Prefix hash of a request's chunks by (cache group, where the chunk ends): what later ones continue."""

    hashes: dict[tuple[int, int], bytes]


class KvtierTier(SecondaryTierManager):  # type: ignore[misc]
    """Keeps chunks of the primary pool in a kvtier appliance. Settings: TierOptions."""

    medium: ClassVar[Medium] = Medium.STORAGE  # what a request's kv_load_tiers filter calls it
    # Memory or nvme: a tier cannot say which, for it answers before the load.
    cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **settings: Any,
    ) -> None:
        """Raises InvalidRequest (a ValueError) for bad settings or when the weights are not found, ValueError
        for an untested vLLM: mistakes to be seen at the start. An appliance that is not there is none."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self.options = TierOptions.from_settings(settings)
        self.identity = identity_of(
            offloading_spec.config, self.block_size_bytes, self.options, vllm.__version__, _device()
        )
        self.guard = Guard(_logger.name)
        self.room = RoomWait(self.options.wait_for_room_s)
        self._pool: Any = None  # vLLM's; None: not known
        self._loading: dict[int, str] = {}  # by job: the request that asked
        self._broken: list[JobResult] = []  # jobs that a defect of ours kept from their lane
        self._start(primary_kv_view)
        _logger.info(
            "kvtier tier: chunks of %d bytes, %s", self.block_size_bytes, self.identity.namespace(0).geometry
        )

    def _start(self, primary_kv_view: memoryview) -> None:
        """Make the threads, and for each of them a connection that is opened when it is used."""
        options = self.options
        num_rows = len(primary_kv_view)
        pool = PrimaryPool(address_of(np.asarray(primary_kv_view)), num_rows, self.block_size_bytes)
        self._probes = self._transfers(pool, options.lookup_timeout_s)
        self._stores = self._transfers(pool, options.store_timeout_s, options.staging_bytes)
        self._loads = self._transfers(pool, options.load_timeout_s)
        max_waiting = max(1, int(num_rows * options.max_waiting_fraction))
        self.store_lane: WorkerLane[TierJob, Done] = WorkerLane(
            "kvtier-store", self._stores.store, _undone, max_waiting
        )
        self.load_lane: WorkerLane[TierJob, Done] = WorkerLane(
            "kvtier-load", self._loads.load, _undone, num_rows
        )
        self.lookups = TierLookups(self.tier_type, self._probes.probe)

    # ------------------------------------------------------------------------------------ lookups

    @harmless(lambda *_: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from what is known; RETRY while the question is on its way."""
        if not is_usable(key) or self.guard.breaker.turns_away():
            return LookupResult.MISS
        found = self.lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return self._if_room(key, req_context.req_id) if found else LookupResult.MISS

    def _if_room(self, key: OffloadKey, request: str) -> LookupResult:
        """Return HIT where the pool has a row for a found chunk, RETRY while the request may wait for one."""
        pool, num_kept = self._pool, self.room.num_kept(request, key)
        if pool is None or pool._get_num_free_chunks() + pool._num_evictable_cache_chunks > num_kept:
            return LookupResult.HIT
        num_tokens = self.lookups.num_asked(request) * self.identity.chunk_tokens.get(0, 1)
        if self.room.may_wait(request, num_tokens):
            return LookupResult.RETRY
        self.guard.count(NO_ROOM)
        return LookupResult.MISS

    @harmless(lambda *_: None)
    def serve_external_requests(self, parent: Any) -> None:
        """Learn where the primary pool is. A vLLM that hides it waits for no room."""
        pool = getattr(getattr(parent, "_m", None), "primary_tier", None)
        self._pool = pool if all(hasattr(pool, name) for name in OF_POOL) else None

    @harmless(lambda *_: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Say which blocks of the request to offer."""
        return RequestOffloadingContext(OffloadPolicy(f"{self.options.offload}_level"))

    @harmless(lambda *_: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget verdicts that only this request asked for."""
        self.lookups.cleanup(req_context.req_id)
        self.room.forget(req_context.req_id)

    @harmless(lambda *_: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the step's questions."""
        self.lookups.flush()
        self.room.step_ended(context.new_req_ids)

    # ---------------------------------------------------------------------------------- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue a store; drop it, with a cause, when too many wait."""
        self.room.offered(len(job_metadata.chunk_ids) * self.identity.chunk_tokens.get(0, 1))
        self._submit(self.store_lane, job_metadata, "STORE_QUEUE_FULL")

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue a load."""
        self._loading[job_metadata.job_id] = job_metadata.req_context.req_id
        self._submit(self.load_lane, job_metadata, "LOAD_QUEUE_FULL")

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what ended since the last call. Chunks that could not be loaded are misses from now on."""
        broken, self._broken = self._broken, []
        return [*broken, *self._finished_jobs()]

    @harmless(lambda *_: None)
    def drain_jobs(self) -> None:
        """Let no transfer touch the pool any more; the cache is being reset.

        vLLM does not say why: perhaps the weights were updated in place. Unless told otherwise, nothing that
        was stored before is used again by this engine.
        """
        self.store_lane.drain()
        self.load_lane.drain()
        if self.options.on_reset == "forget":
            self.identity = replace(self.identity, epoch=uuid.uuid4().hex)

    def shutdown(self) -> None:
        """Stop all threads. Raises RuntimeError when a copy still runs: vLLM then leaves the pool mapped."""
        self.lookups.shutdown()
        stopped = [self.store_lane.stop(STOP_S), self.load_lane.stop(STOP_S)]
        if not all(stopped):
            raise RuntimeError(f"kvtier: a transfer did not end within {STOP_S:g} s")
        for transfers in (self._probes, self._stores, self._loads):
            transfers.close()

    # ------------------------------------------------------------------------------------ metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Return what `get_stats` reports."""
        text = "Chunks or calls that came to nothing in the kvtier tier, labeled by cause."
        return {LOST: OffloadingCounterMetadata(documentation=text, labelnames=("cause",))}

    @harmless(lambda *_: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return how often each cause occurred since the last call."""
        causes = self.guard.take_causes()
        if not causes:
            return None
        stats = OffloadingConnectorStats()
        for cause, number in causes.items():
            stats.increase_counter(LOST, number, (cause,))
        return stats

    # ---------------------------------------------------------------------------------- internals

    def _transfers(self, pool: PrimaryPool, timeout_s: float, staging_bytes: int = 0) -> TierTransfers:
        store = ChainStore.at(self.options, self.guard, timeout_s, staging_bytes)
        return TierTransfers(store, lambda group: self.identity.namespace(group), pool)

    def _submit(self, lane: WorkerLane[TierJob, Done], given: TransferJob, cause: str) -> None:
        try:
            job = self._job(given)
            if not lane.submit(job, len(given.chunk_ids)):
                self.guard.count(cause, len(given.chunk_ids))
        except Exception:
            self.guard.defect(f"job {given.job_id}")
            self._loading.pop(given.job_id, None)
            self._broken.append(JobResult(given.job_id, False))

    def _job(self, given: TransferJob) -> TierJob:
        """Return a job of vLLM in kvtier's types. Reads the request: for the scheduler's thread only."""
        context = given.req_context
        usable = [
            (key, row)
            for key, row in zip(given.keys, given.chunk_ids.tolist(), strict=True)
            if is_usable(key)
        ]
        tails = {} if given.is_promotion else self._tails(context).hashes
        runs = runs_of(
            [key for key, _ in usable],
            [row for _, row in usable],
            context.get_offload_key_position,
            self.identity.chunk_tokens,
            lambda group, position: tails.get((group, position), b""),
        )
        if not given.is_promotion:
            for run in runs:
                end = context.get_offload_key_position(run.keys[-1])
                if end:
                    tails[run.group, end] = run.hashes[-1]
        return TierJob(given.job_id, tuple(runs), session_of(context.kv_transfer_params))

    def _tails(self, context: ReqContext) -> "_Tails":
        """Return what a store of this request may continue: at first every chunk of its prompt, because those
        before the first that is stored were hits."""
        tails: _Tails | None = context.get_state(_Tails)
        if tails is None:
            known = getattr(context, "_offload_key_positions", {})  # there is no public way from place to key
            tails = _Tails({(group_of(key), end): hash_of(key) for key, end in known.items()})
            context.set_state(tails)
        return tails

    def _finished_jobs(self) -> Iterator[JobResult]:
        for done in self.store_lane.take_finished():
            yield JobResult(done.job.job_id, done.is_complete, None, done.duration_s, done.num_bytes)
        for done in self.load_lane.take_finished():
            self._forget_hits(done)
            request = self._loading.pop(done.job.job_id, "")
            if self.lookups.num_asked(request):  # it has not ended meanwhile
                self.room.arrived(request, done.keys)
            keys = done.keys or None
            yield JobResult(done.job.job_id, done.is_complete, keys, done.duration_s, done.num_bytes)

    @harmless(lambda *_: None)
    def _forget_hits(self, done: Done) -> None:
        """What could not be loaded is a miss until its requests end; otherwise they would ask for ever."""
        moved = set(done.keys)
        self.lookups.mark_miss([key for run in done.job.runs for key in run.keys if key not in moved])


def _undone(job: TierJob) -> Done:
    return Done(job, ())


def _device() -> str:
    capability = torch.backends.cpu.get_cpu_capability()
    return host_device(current_platform.device_type, capability)
