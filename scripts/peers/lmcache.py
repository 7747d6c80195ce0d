"""LMCache's server mode: `lmcache server` in a separate process, asked by its own client classes.

`copies`: "engine": the engine's process gathers and scatters, in shared memory of the server's, which is LMCache's own
choice on a CPU; "server": the server copies from and to the engine's memory, as it does with a GPU's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from scripts.peers.service import Service, free_port
from scripts.peers.system import I64Array, NotOfferedError, Prompt, SystemSetting, U8Array

MODEL = "bench-peers"
CALL_S = 120.0
START_S = 240.0
STOP_S = 60.0
SETTLE_S = 120.0
GIB = 1 << 30
ENGINE = 7001
_ENVIRONMENT = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}


class LMCache:
    """The server, and one worker that has registered its memory."""

    def __init__(self, setting: SystemSetting, copies: str) -> None:
        self._setting = setting
        self._copies = copies
        geometry = setting.geometry
        shape = (geometry.blocks, 2, geometry.block_tokens, geometry.kv_heads, geometry.head_size)
        self._layers = {f"layer.{at}": torch.zeros(shape, dtype=torch.bfloat16) for at in range(geometry.layers)}
        self._port, self._http_port = free_port(), free_port()
        self._shm = f"bench-peers-{os.getpid()}"
        self._service = Service(self._command(), setting.folder / "lmcache.log", _ENVIRONMENT)
        self._context: Any = None
        self._client: Any = None
        self._transfer: Any = None
        self._asked = 0
        self._held: IPCCacheServerKey | None = None
        self._stored_chunks = 0
        self._request = ""

    def _command(self) -> list[str]:
        setting = self._setting
        size = setting.memory_bytes / GIB
        words = [
            *("lmcache", "server", "--host", "127.0.0.1", "--port", str(self._port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self._http_port)),
            *("--chunk-size", str(setting.geometry.chunk_tokens), "--max-workers", str(setting.threads)),
            *("--l1-size-gb", str(size), "--no-l1-use-lazy", "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", f"{'lmcache' if self._copies == 'server' else 'engine'}_driven"),
            *("--disable-observability",),
        ]
        if self._copies == "engine":
            words += ["--shm-name", self._shm]
        if setting.disk is not None:
            disk = {
                "type": "fs_native",
                "base_path": str(setting.disk),
                "num_workers": setting.threads,
                "use_odirect": True,
                "max_capacity_gb": setting.disk_bytes / GIB,
                "eviction": {"eviction_policy": "LRU"},
            }
            words += ["--l2-adapter", json.dumps(disk)]
        return words

    # --- its life ---

    def start(self) -> None:
        """The server, then this worker."""
        self._service.start()
        self._connect()

    def _connect(self) -> None:
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._client = RequestClientFactory.create(f"tcp://127.0.0.1:{self._port}", context=self._context)
        self._service.await_answer(lambda: self._client.noop().result(timeout=1.0), (TimeoutError,), START_S)
        geometry = self._setting.geometry
        self._transfer = create_transfer_context(
            self._layers,
            mode=f"{'lmcache' if self._copies == 'server' else 'engine'}_driven",
            instance_id=ENGINE,
            req_client=self._client,
        )
        group = EngineGroupInfo(0, tuple(range(geometry.layers)), geometry.block_tokens)
        self._transfer.register(
            self._layers,
            MODEL,
            1,
            geometry.chunk_blocks,
            CALL_S,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[group],
            engine_type=EngineType.VLLM,
        )

    def _disconnect(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
        if self._client is not None:
            self._client.close()
            self._context.term()
        self._transfer = self._client = self._context = None

    def restart(self, *, kill: bool) -> None:
        """The server; the engine connects anew."""
        self._disconnect()
        self._service.end(kill=kill, deadline_s=STOP_S)
        self.start()

    def stop(self) -> None:
        """Both."""
        self._disconnect()
        self._service.end(kill=False, deadline_s=STOP_S)

    def processes(self) -> Sequence[int]:
        """The server."""
        return [self._service.pid]

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in ("lmcache", "torch")}

    # --- the work ---

    def memory(self) -> Sequence[U8Array]:
        """u8 (blocks, bytes) of each layer."""
        blocks = self._setting.geometry.blocks
        return [layer.view(torch.uint8).numpy().reshape(blocks, -1) for layer in self._layers.values()]

    def ping(self) -> None:
        self._client.noop().result(timeout=CALL_S)

    def store(self, prompt: Prompt, blocks: I64Array) -> bool:
        request = self._new_request(prompt)
        done = self._transfer.submit_store(
            request,
            self._key(prompt, prompt.tokens, 0),
            self._layers,
            [blocks.tolist()],
            self._transfer.create_recorded_event(),
            self._setting.geometry.chunk_blocks,
        )
        stored = bool(done.result(timeout=CALL_S))
        self._client.end_session(request).result(timeout=CALL_S)
        self._stored_chunks += prompt.chunks if stored else 0
        return stored

    def lookup(self, prompt: Prompt) -> int:
        request = self._new_request(prompt)
        key = self._key(prompt, prompt.tokens, None)
        self._client.lookup(key, 1).result(timeout=CALL_S)
        # Its vLLM adapter asks in each step of the engine; asking without a pause would keep the server from its work.
        found = self._client.query_prefetch_status(request).result(timeout=CALL_S)
        if found is None:
            found = self._client.wait_prefetch_status(request, CALL_S).result(timeout=CALL_S)
        if found is None:
            raise TimeoutError("LMCache's lookup does not come to an end")
        self._held = key if found else None
        return int(found) * prompt.chunk_tokens

    def load(self, prompt: Prompt, blocks: I64Array, found: int) -> int:
        if not found:
            return 0
        done = self._transfer.submit_retrieve(
            self._request,
            self._key(prompt, found, 0),
            self._layers,
            [blocks[: found // self._setting.geometry.block_tokens].tolist()],
            self._transfer.create_recorded_event(),
            self._setting.geometry.chunk_blocks,
            skip_first_n_tokens=0,
        )
        self._held = None
        return found if done.result(timeout=CALL_S) else 0

    def release(self, prompt: Prompt) -> None:
        if self._held is not None:
            self._client.free_lookup_locks(self._held, 1).result(timeout=CALL_S)
        self._held = None
        self._client.end_session(self._request).result(timeout=CALL_S)

    def settle(self) -> None:
        """It has no report of this: waits until as many files have their last names as chunks were stored."""
        folder = self._setting.disk
        if folder is None:
            return
        until = time.monotonic() + SETTLE_S
        while (there := sum(entry.name.endswith(".data") for entry in os.scandir(folder))) < self._stored_chunks:
            if time.monotonic() > until:
                raise NotOfferedError(f"{there} of {self._stored_chunks} chunks were on disk after {SETTLE_S:.0f} s")
            time.sleep(0.002)

    def forget(self) -> None:
        """Its own call for it; files stay."""
        self._client.clear().result(timeout=CALL_S)

    def _new_request(self, prompt: Prompt) -> str:
        self._asked += 1
        self._request = f"{prompt.name}-{self._asked}"
        return self._request

    def _key(self, prompt: Prompt, tokens: int, worker: int | None) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            model_name=MODEL,
            world_size=1,
            worker_id=worker,
            token_ids=prompt.token_ids,
            start=0,
            end=tokens,
            request_id=self._request,
            num_kv_readers=1,
        )
