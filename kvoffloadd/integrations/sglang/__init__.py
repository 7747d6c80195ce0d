"""SGLang's HiCache stores its pages in the daemon: `KVOffloaddStorage`, a dynamic storage backend.

Importing this loads neither SGLang nor torch; the name does, and raises ImportError where the installed SGLang is none
of those that are supported.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVOffloaddStorage"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not at the top: SGLang is there in its own processes only, and our tests of the pure parts have none.
    from kvoffloadd.integrations.sglang import versions

    versions.check()
    from kvoffloadd.integrations.sglang.storage import KVOffloaddStorage

    return KVOffloaddStorage
