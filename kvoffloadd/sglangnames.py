"""The words by which SGLang finds the storage: users type them, the plug-in completes them, `plan` and `flags` print
them.
"""

from __future__ import annotations

from typing import Final

PACKAGE: Final = "kvoffloadd.integrations.sglang"

STORAGE_CLASS: Final = {"module_path": PACKAGE, "class_name": "KVOffloaddStorage"}
"""The part of `STORAGE` that users have to give."""

STORAGE: Final = {"backend_name": "kvoffloadd", **STORAGE_CLASS, "interface_v1": 1, "allocator": "shm"}
"""The value of `STORAGE_FLAG`."""

STORAGE_FLAG: Final = "--hicache-storage-backend-extra-config"
