"""A third-party storage that has nothing."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class ForgetfulStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there when types are checked
    """All is a miss, and nothing is stored."""

    def __init__(self, *_: Any) -> None:
        """Takes what SGLang gives."""

    def get(self, *_: Any, **__: Any) -> None:
        """A miss."""

    def batch_get(self, keys: list[str], *_: Any, **__: Any) -> list[None]:
        """Misses."""
        return [None] * len(keys)

    def set(self, *_: Any, **__: Any) -> bool:
        """Not stored."""
        return False

    batch_set = exists = set

    def batch_exists(self, *_: Any, **__: Any) -> int:
        """None of them."""
        return 0

    def batch_get_v1(self, keys: list[str], *_: Any, **__: Any) -> list[bool]:
        """Misses."""
        return [False] * len(keys)

    batch_set_v1 = batch_get_v1
