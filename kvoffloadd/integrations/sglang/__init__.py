"""SGLang stores its pages in the daemon: `KVOffloaddStorage`, a storage for its HiCache, and `KVOffloaddLinker`, which
has no HiCache and no host pool in between.

Importing this loads neither SGLang nor torch; the names do, and raise ImportError where the installed SGLang is not
supported.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVOffloaddLinker", "KVOffloaddStorage"]

_MODULES = {"KVOffloaddLinker": "linker", "KVOffloaddStorage": "storage"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not at the top: only SGLang's processes have SGLang, and our tests of the pure parts run without it.
    from kvoffloadd.integrations.sglang import versions

    versions.check()
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
