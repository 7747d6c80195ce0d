"""SGLang with this daemon: a first look."""

from __future__ import annotations

import json
from typing import Any

MODULE = "kvoffloadd.integrations.sglang"


def storage_options(**extra: Any) -> dict[str, Any]:
    """Arguments of SGLang's `Engine` that have its HiCache store pages in the daemon. `extra`: of our storage."""
    named = {"backend_name": "kvoffloadd", "module_path": MODULE, "class_name": "KVOffloaddStorage"}
    return {
        "enable_hierarchical_cache": True,
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(named | {"interface_v1": 1, "allocator": "shm"} | extra),
    }
