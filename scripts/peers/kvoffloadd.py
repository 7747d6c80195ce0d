"""This project's daemon, and a worker with its client library."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Outcome, Ref, Registration, SharedTensor
from kvoffloadd.client.results import Found
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.disk import is_idle
from scripts.peers.system import I64Array, Prompt, SystemSetting, U8Array

CALL_S = 120.0
KEY_BYTES = 32
NAMESPACE = NamespaceSpec(model="bench-peers", key_bytes=KEY_BYTES)
_POOLS = Path("/dev/shm")


class Kvoffloadd:
    """The daemon with its defaults, but for sizes and threads. Without a disk its memory is a file that outlives it."""

    def __init__(self, setting: SystemSetting) -> None:
        self._setting = setting
        geometry = setting.geometry
        settings = {
            "copy.threads": str(setting.threads),
            "disk.read_threads": str(setting.threads),
            "disk.write_threads": str(setting.threads),
            # Slabs of whole payloads, so that small memories are used up.
            "memory.slab_bytes": str(8 * geometry.chunk_bytes),
        }
        if setting.verified:
            settings["memory.verify_loads"] = "true"
        self._pool: Path | None = None
        if setting.disk is not None:
            settings["disk.roots"] = f'[{{ path = "{setting.disk}", capacity = {setting.disk_bytes} }}]'
            settings["disk.min_free_bytes"] = "0"
            settings["disk.direct"] = "true"
        elif _POOLS.is_dir():
            self._pool = _POOLS / f"bench-peers-{os.getpid()}"
            settings["memory.pool_file"] = str(self._pool)
        self._daemon = Daemon(setting.folder, setting.memory_bytes, settings)
        self._tensors = [SharedTensor.allocate(geometry.blocks, geometry.block_bytes) for _ in range(geometry.layers)]
        refs = [Ref(number, 0, geometry.block_bytes) for number in range(geometry.layers)]
        self._group = Group(0, GroupKind.FULL, geometry.chunk_tokens, refs=refs, blocks_per_key=geometry.chunk_blocks)
        self._client: Client | None = None
        self._registration: Registration | None = None
        self._found: Found | None = None

    # --- its life ---

    def start(self) -> None:
        """The daemon, then a worker of it."""
        self._daemon.start()
        self._connect()

    def _connect(self) -> None:
        self._client = Client(self._daemon.socket, namespace=NAMESPACE, deadline_s=CALL_S)
        self._registration = self._client.register(KvCache(self._tensors, [self._group]))

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close(1.0, force=True)
        self._client = self._registration = self._found = None

    def restart(self, *, kill: bool) -> None:
        """The daemon; the worker connects anew."""
        self._disconnect()
        if kill:
            self._daemon.kill()
        else:
            self._daemon.stop()
        self.start()

    def forget(self) -> None:
        """A daemon that has started anew without the memory of the one before."""
        self._disconnect()
        self._daemon.stop()
        if self._pool is not None:
            self._pool.unlink(missing_ok=True)
        self.start()

    def stop(self) -> None:
        """Both."""
        self._disconnect()
        self._daemon.stop()
        if self._pool is not None:
            self._pool.unlink(missing_ok=True)

    def processes(self) -> Sequence[int]:
        """The daemon."""
        return [self._daemon.pid]

    def versions(self) -> dict[str, str]:
        return {"kvoffloadd": version("kvoffloadd"), "python": platform.python_version()}

    # --- the work ---

    @property
    def client(self) -> Client:
        if self._client is None:
            raise RuntimeError("it was not started")
        return self._client

    @property
    def registration(self) -> Registration:
        if self._registration is None:
            raise RuntimeError("it was not started")
        return self._registration

    def memory(self) -> Sequence[U8Array]:
        """u8 (blocks, bytes) of each layer."""
        return [tensor.array for tensor in self._tensors]

    def ping(self) -> None:
        self.client.ping()

    def store(self, prompt: Prompt, blocks: I64Array) -> bool:
        wanted = {0: (_keys(prompt), blocks.reshape(prompt.chunks, -1))}
        result = self.client.wait(self.client.store(self.registration, wanted, deadline_s=CALL_S), CALL_S)
        return result.outcome is Outcome.DONE and result.bytes == prompt.chunks * self._setting.geometry.chunk_bytes

    def lookup(self, prompt: Prompt) -> int:
        self._found = self.client.wait_ready(self.client.pin({0: _keys(prompt)}), CALL_S)
        return int(self._found.boundaries[0]) if len(self._found.boundaries) else 0

    def load(self, prompt: Prompt, blocks: I64Array, found: int) -> int:
        if not found or self._found is None:
            return 0
        chunks = found // prompt.chunk_tokens
        ids = blocks[: chunks * self._setting.geometry.chunk_blocks].reshape(chunks, -1)
        job = self.client.load(
            self.registration, {0: (_keys(prompt)[:chunks], ids)}, lease=self._found.lease, deadline_s=CALL_S
        )
        result = self.client.wait(job, CALL_S)
        if result.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            return 0
        valid = result.valid(0)
        return (chunks if valid.all() else int(valid.argmin())) * prompt.chunk_tokens

    def release(self, prompt: Prompt) -> None:
        if self._found is not None:
            self.client.release(self._found.lease)
        self._found = None

    def settle(self) -> None:
        until(lambda: is_idle(self._daemon.status()), "all that was stored is on disk", CALL_S)


def _keys(prompt: Prompt) -> U8Array:
    return np.frombuffer(b"".join(prompt.names), np.uint8).reshape(-1, KEY_BYTES)
