"""vLLM's own tiering, as it is but for the worker: its own copies by CUDA alone, this one by torch on a CPU.

For `bench_vllm`. It is a separate module, since vLLM loads specs by their modules' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class TieringOnCpu(TieringOffloadingSpec):  # type: ignore[misc]  # of vLLM, which has no types here
    """Manager, primary tier and secondary tiers are vLLM's."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Makes the worker for the only rank."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CopyingWorker(kv_caches, self.blocks_per_chunk, region)


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # of vLLM, which has no types here
    """Copies at once, in the engine's thread. One KV cache group."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._engine = [one.tensor for one in kv_caches.tensors]
        self._region_views = [
            region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk).unflatten(1, (blocks_per_chunk, -1))
            for one in kv_caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Engine -> region."""
        blocks, chunks, places = self._pairs(src_spec, dst_spec)
        for engine, region in zip(self._engine, self._region_views, strict=True):
            region[chunks, places] = engine[blocks]
        return self._end(job_id)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Region -> engine."""
        blocks, chunks, places = self._pairs(dst_spec, src_spec)
        for engine, region in zip(self._engine, self._region_views, strict=True):
            engine[blocks] = region[chunks, places]
        return self._end(job_id)

    def get_finished(self) -> list[TransferResult]:
        """All since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        """Give the region back."""
        self._region_views.clear()
        self._region.cleanup()

    def _pairs(self, engine_spec: Any, region_spec: Any) -> Sequence[torch.Tensor]:
        first = engine_spec.block_indices[0] % self._blocks_per_chunk
        at = np.arange(first, first + len(engine_spec.block_ids))
        chunks = region_spec.chunk_ids[at // self._blocks_per_chunk]
        arrays = (engine_spec.block_ids, chunks, at % self._blocks_per_chunk)
        return [torch.from_numpy(np.asarray(one, np.int64)) for one in arrays]

    def _end(self, job_id: int) -> bool:
        self._ended.append(TransferResult(job_id=job_id, success=True))
        return True
