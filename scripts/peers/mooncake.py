"""Mooncake Store on one host, so that it outlives engines and bytes go by memory and not by TCP.

That is `mooncake_master`, `mooncake_client` which lends the memory and the disk, and the engine as a client of that
process which shares its KV cache with it (a "dummy client" in Mooncake's words).
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore

from scripts.peers.service import Service, free_port
from scripts.peers.system import I64Array, NotOfferedError, Prompt, SystemSetting, U8Array

START_S = 240.0
STOP_S = 20.0
SETTLE_S = 60.0
MIB = 1 << 20
HEARTBEAT_S = 1
"""Between two looks for what must be written to disk: the least that it takes."""
BUCKET_BYTES = 32 * MIB
"""A file of its disk, written when it is full; a whole number of them has a prompt."""
CLIENT_TTL_S = 3
"""After which the master forgets a store. One that comes back before finds none of its disk's keys again."""
CALL_BUFFERS = 1024
"""Buffers that one call reads from its disk. They come over its TCP transport, whose queue turns some of 4,096 away,
and then the whole call fails.
"""
_LOOPBACK = "127.0.0.1"


class NotThereYetError(Exception):
    """A process does not answer yet."""


class Mooncake:
    """Master and store, and one engine."""

    def __init__(self, setting: SystemSetting) -> None:
        self._setting = setting
        master, client = free_port(), free_port()
        self._address = f"{_LOOPBACK}:{client}"
        self._environment = {
            "MC_TCP_BIND_ADDRESS": _LOOPBACK,
            "MOONCAKE_STORE_CHECKSUM": str(int(setting.verified)),
        }
        os.environ.update(self._environment)
        words = ["mooncake_master", f"--rpc_address={_LOOPBACK}", f"--rpc_port={master}", "--logtostderr=true"]
        words += [f"--metrics_host={_LOOPBACK}", f"--metrics_port={free_port()}"]
        words += [f"--rpc_thread_num={setting.threads}", f"--client_ttl={CLIENT_TTL_S}"]
        store = ["mooncake_client", f"--host={_LOOPBACK}", f"--port={client}", "--logtostderr=true"]
        store += [f"--master_server_address={_LOOPBACK}:{master}", "--metadata_server=P2PHANDSHAKE", "--protocol=tcp"]
        store += [f"--global_segment_size={setting.memory_bytes // MIB}MB", f"--threads={setting.threads}"]
        if setting.disk is not None:
            words += ["--enable_offload=true", "--root_fs_dir="]
            store += ["--enable_offload=true"]
            self._environment |= {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(setting.disk),
                "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": str(HEARTBEAT_S),
                "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(BUCKET_BYTES),
                "MOONCAKE_OFFLOAD_USE_URING": "1",  # with it, it uses O_DIRECT
                "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(setting.disk_bytes),
            }
        self._master = Service(words, setting.folder / "master.log", self._environment)
        self._store = Service(store, setting.folder / "store.log", self._environment)
        self._engine: Any = None
        self._base = 0
        self._memory: list[U8Array] = []
        self._stored_bytes = 0

    # --- its life ---

    def start(self) -> None:
        """Master, store, engine."""
        self._master.start()
        self._store.start()
        self._connect()

    def _connect(self) -> None:
        geometry = self._setting.geometry
        size = geometry.layers * geometry.blocks * geometry.block_bytes
        pool = size + 64 * MIB

        def connect() -> None:
            engine = MooncakeDistributedStore()
            if engine.setup_dummy(pool, 16 * MIB, self._address) != 0:
                raise NotThereYetError
            self._engine = engine

        self._store.await_answer(connect, (NotThereYetError,), START_S)
        self._base = self._engine.alloc_from_mem_pool(size)
        if not self._base or self._engine.register_buffer(self._base, size) != 0:
            raise RuntimeError("Mooncake gives the engine no memory")
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._base))
        self._memory = list(flat.reshape(geometry.layers, geometry.blocks, geometry.block_bytes))

        def answered() -> None:
            if self._engine.is_exist("nobody") < 0:
                raise NotThereYetError

        self._store.await_answer(answered, (NotThereYetError,), START_S)

    def _disconnect(self) -> None:
        self._memory = []
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def restart(self, *, kill: bool) -> None:
        """The process that has memory and disk, once the master has forgotten it. The master stays: it has the keys."""
        self._disconnect()
        self._store.end(kill=kill, deadline_s=STOP_S)
        time.sleep(CLIENT_TTL_S + 1)
        self._store.start()
        self._connect()

    def forget(self) -> None:
        self.restart(kill=False)

    def stop(self) -> None:
        """All three."""
        self._disconnect()
        self._store.end(kill=False, deadline_s=STOP_S)
        self._master.end(kill=False, deadline_s=STOP_S)

    def processes(self) -> Sequence[int]:
        """The one with the memory."""
        return [self._store.pid]

    def versions(self) -> dict[str, str]:
        return {"mooncake-transfer-engine-non-cuda": version("mooncake-transfer-engine-non-cuda")}

    # --- the work ---

    def memory(self) -> Sequence[U8Array]:
        """u8 (blocks, bytes) of each layer."""
        return self._memory

    def ping(self) -> None:
        self._engine.is_exist("nobody")

    def store(self, prompt: Prompt, blocks: I64Array) -> bool:
        places = self._places(blocks)
        codes = self._engine.batch_put_from_multi_buffers(_keys(prompt), places, self._sizes(len(places)))
        self._stored_bytes += sum(code == 0 for code in codes) * self._setting.geometry.chunk_bytes
        return all(code == 0 for code in codes)

    def lookup(self, prompt: Prompt) -> int:
        there = self._engine.batch_is_exist(_keys(prompt))
        return next((at for at, one in enumerate(there) if one != 1), len(there)) * prompt.chunk_tokens

    def load(self, prompt: Prompt, blocks: I64Array, found: int) -> int:
        if not found:
            return 0
        keys = _keys(prompt)[: found // prompt.chunk_tokens]
        places = self._places(blocks[: len(keys) * self._setting.geometry.chunk_blocks])
        step = len(keys) if self._setting.disk is None else max(1, CALL_BUFFERS // len(places[0]))
        codes: list[int] = []
        for at in range(0, len(keys), step):
            part = places[at : at + step]
            codes += self._engine.batch_get_into_multi_buffers(keys[at : at + step], part, self._sizes(len(part)))
        good = next((at for at, code in enumerate(codes) if code < 0), len(codes))
        return good * prompt.chunk_tokens

    def release(self, prompt: Prompt) -> None:
        """Its leases end by themselves."""

    def settle(self) -> None:
        """It has no report of this: waits until its files have as many bytes as were stored."""
        if self._setting.disk is None:
            return
        until = time.monotonic() + SETTLE_S
        while (written := _bytes_in(self._setting.disk)) < self._stored_bytes:
            if time.monotonic() > until:
                raise NotOfferedError(
                    f"{written / MIB:.0f} of {self._stored_bytes / MIB:.0f} MiB were on disk after {SETTLE_S:.0f} s"
                )
            time.sleep(0.002)

    def _places(self, blocks: I64Array) -> list[list[int]]:
        """Returns the addresses of each chunk, block by block of each layer."""
        geometry = self._setting.geometry
        layers = np.arange(geometry.layers, dtype=np.int64) * geometry.blocks
        rows = layers[None, :, None] + blocks.reshape(-1, 1, geometry.chunk_blocks)
        places: list[list[int]] = (self._base + rows * geometry.block_bytes).reshape(len(rows), -1).tolist()
        return places

    def _sizes(self, chunks: int) -> list[list[int]]:
        geometry = self._setting.geometry
        return [[geometry.block_bytes] * (geometry.layers * geometry.chunk_blocks)] * chunks


def _keys(prompt: Prompt) -> list[str]:
    return [name.hex() for name in prompt.names]


def _bytes_in(folder: os.PathLike[str]) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".bucket"))
