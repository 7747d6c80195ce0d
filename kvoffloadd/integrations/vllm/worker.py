"""vLLM's offloading worker: a rank's stores and loads, carried by the daemon."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvoffloadd.client import Client, Ready, Timeline
from kvoffloadd.integrations.vllm.adapters import RANK, LoadedAdapter
from kvoffloadd.integrations.vllm.blocks import load_chunks, store_chunks
from kvoffloadd.integrations.vllm.caches import registered
from kvoffloadd.integrations.vllm.config import Options
from kvoffloadd.integrations.vllm.keys import KeyNames, by_group
from kvoffloadd.integrations.vllm.parts import LayerFacts, share
from kvoffloadd.integrations.vllm.transfer_thread import Transfer, TransferThread
from kvoffloadd.model import Direction

_CLOSE_S = 5.0
_LET_GO_S = 20.0


class KeysLoadStoreSpec(LoadStoreSpec):
    """The keys of a transfer, which travel, pickled by vLLM, from the scheduler to the workers.

    `groups`: for each of the engine's groups, in vLLM's order, its index and the daemon's keys. `adapter`: the
    request's.
    """

    def __init__(
        self,
        offload_keys: Iterable[bytes],
        group_ids: Sequence[int],
        names: KeyNames,
        adapter: LoadedAdapter | None = None,
    ) -> None:
        named = by_group(offload_keys, names)
        self.adapter = adapter
        self.groups: list[tuple[int, list[bytes]]] = [(group, named.get(group, [])) for group in group_ids]


@dataclass
class LoadStoreResult(TransferResult):
    """Adds `partial` to vLLM's result: see `Ended`."""

    partial: bool = False


class KVOffloaddWorker(OffloadingWorker):
    """Carries out a rank's transfers. `submit_*` always take the job: a store that the daemon refuses is dropped, a
    load fails.
    """

    def __init__(self, client: Client, config: Any, kv_caches: Any, options: Options, facts: LayerFacts) -> None:
        """Moves the KV cache into shared memory (CPU), or makes it known to other processes (CUDA)."""
        self._writes = share(config).writes
        self._blocks_per_key = config.cache.blocks_per_chunk
        self._points = _Points(kv_caches.tensors[0].tensor.device)
        caches = registered(config, kv_caches, facts, self._points.timelines)
        self._transfer_thread = TransferThread(client, caches, job_deadline_s=options.job_deadline_s)
        self._refused: list[LoadStoreResult] = []
        self._sleep_s = options.job_deadline_s + _LET_GO_S

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: KeysLoadStoreSpec) -> bool:
        """Stores from the GPU to the daemon. It ends at once where another rank, which holds the same bytes, stores
        them, and where the request's adapter is not the one that this rank has loaded, or was not in between.
        """
        groups, writes = dst_spec.groups, self._writes and RANK.is_loaded(dst_spec.adapter)
        chunks = store_chunks(groups, src_spec, self._blocks_per_key) if writes else {}
        self._transfer_thread.submit(Transfer(job_id, Direction.STORE, chunks, self._points.now()))
        return True

    def submit_load(
        self, job_id: int, src_spec: KeysLoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Loads from the daemon to the GPU. `expedited`: vLLM, from 0.33 on, waits for it within the step. It fails
        where this rank has loaded another state of the request's adapter.
        """
        if not RANK.is_loaded(src_spec.adapter):
            self._refused.append(LoadStoreResult(job_id, success=False))
            return True
        chunks = load_chunks(src_spec.groups, dst_spec, self._blocks_per_key)
        self._transfer_thread.submit(Transfer(job_id, Direction.LOAD, chunks, self._points.now(), expedited))
        return True

    def get_finished(self) -> list[LoadStoreResult]:
        """Returns the transfers that ended since the last call."""
        refused, self._refused = self._refused, []
        return refused + [
            LoadStoreResult(
                job_id=ended.number,
                success=ended.success,
                transfer_size=ended.bytes or None,
                transfer_time=ended.seconds if ended.bytes else None,
                partial=ended.partial,
            )
            for ended in self._transfer_thread.ended()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Waits until these have ended, whatever the daemon does: their blocks may not be used before that."""
        self._transfer_thread.wait(job_ids)

    def sleep(self) -> None:
        """Has the daemon release the KV cache; until `wake`, stores are dropped and loads fail. Raises
        DeadlineError.
        """
        self._transfer_thread.sleep(self._sleep_s)

    def wake(self) -> None:
        """Shares the KV cache again: it is back, in other memory."""
        self._transfer_thread.wake()

    def shutdown(self) -> None:
        """Ends the session."""
        self._transfer_thread.close(_CLOSE_S)


class _Points:
    """Signals when blocks are final: at once on a CPU, on a GPU when its stream reaches its present end.

    The signal is written on a separate stream that waits for the engine's: which one that is may change.
    """

    def __init__(self, device: Any) -> None:
        self._timeline: Timeline | None = None
        if device.type == "cuda":
            self._cuda = importlib.import_module("torch").cuda
            self._device = device
            with self._cuda.device(device):
                self._stream = self._cuda.Stream(device)
                self._timeline = Timeline(self._stream)

    @property
    def timelines(self) -> list[Timeline]:
        return [] if self._timeline is None else [self._timeline]

    def now(self) -> Ready | None:
        """Returns the point that all work launched so far will reach."""
        if self._timeline is None:
            return None
        with self._cuda.device(self._device):
            self._stream.wait_stream(self._cuda.current_stream())
            return self._timeline.signal()
