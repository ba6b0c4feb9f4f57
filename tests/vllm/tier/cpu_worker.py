"""vLLM's tiered offloading where there is no GPU: its scheduler side as it is, and a worker that copies
with memcpy.

vLLM ships workers for CUDA and XPU only and refuses on the CPU. The worker is the small part: it moves
blocks between the engine's cache and the primary pool. Everything that a tier meets (manager, keys, jobs,
pool, back-pressure) is vLLM's own. Use: `"spec_name": "CpuTieringSpec", "spec_module_path":
"tests.vllm.tier.cpu_worker"`.
"""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the calling thread. One block a chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._finished: list[TransferResult] = []
        self._cache: list[torch.Tensor] = []
        self._pool: list[torch.Tensor] = []
        for one in kv_caches.tensors:
            assert one.tensor.is_contiguous(), "the engine's blocks must be whole rows of its cache"
            self._cache.append(one.tensor.view(torch.int8).view(-1, one.page_size_bytes))
            self._pool.append(region.create_next_worker_view(one.page_size_bytes))

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, self._cache, src_spec.block_ids, self._pool, _chunks(dst_spec))

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, self._pool, _chunks(src_spec), self._cache, dst_spec.block_ids)

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], rows: Any, targets: list[torch.Tensor], into: Any
    ) -> bool:
        began_at_s = time.perf_counter()
        num_bytes = 0
        for source, target in zip(sources, targets, strict=True):
            for row, place in zip(rows.tolist(), into.tolist(), strict=True):
                target[place].copy_(source[row])  # one copy; indexing with lists would make two
            num_bytes += len(rows) * source.shape[1]
        self._finished.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - began_at_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._cache.clear()
        self._pool.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """TieringOffloadingSpec with a worker for the CPU."""

    _worker: MemcpyWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not self._worker:
            assert self.blocks_per_chunk == 1, "this worker knows chunks of one block only"
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemcpyWorker(kv_caches, region)
        return self._worker


def _chunks(spec: LoadStoreSpec) -> Any:
    assert isinstance(spec, CPULoadStoreSpec)
    return spec.chunk_ids
