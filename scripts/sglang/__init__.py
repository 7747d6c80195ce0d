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


def linker_options(**extra: Any) -> dict[str, Any]:
    """Arguments of SGLang's `Engine` that have the daemon load and store its pages directly. `extra`: of our linker."""
    config = {"linker": "KVOffloaddLinker", "linker_module_path": MODULE, "linker_extra_config": extra}
    return {
        "enable_unified_cache_external_linker": True,
        "unified_cache_external_linker_backend": "dynamic",
        "unified_cache_external_linker_config": config,
    }
