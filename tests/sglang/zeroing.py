"""A storage and a linker that load zeros: what the tests compare must be able to differ."""

from __future__ import annotations

from typing import Any

from kvoffloadd.integrations.sglang.linker import KVOffloaddLinker
from kvoffloadd.integrations.sglang.storage import KVOffloaddStorage


class ZeroingStorage(KVOffloaddStorage):
    """Is our storage, but for what pages hold once they are loaded."""

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Answers as if all were well."""
        done = super().batch_get_v1(keys, host_indices, extra_info)
        pool = self._host_pools["kv"]
        pool.kv_buffer[:, host_indices[:: pool.page_size] // pool.page_size] = 0
        return done


class ZeroingLinker(KVOffloaddLinker):
    """The same, from device pools."""

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Answers as if all were well."""
        done = super().load(rid, transfers)
        (pool,), (transfer,) = self._device_pools, transfers
        for buffer in pool.buffers:
            buffer[transfer.device_indices] = 0
        return done
