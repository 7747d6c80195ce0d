"""SGLang's entry point for plug-ins (`sglang.srt.plugins`): it calls `install` in each of its processes.

A storage can be given to an engine that runs. It must not take that engine's weights for those of its model's name if
they were changed in place before: so they are watched from the start on, whether there is a storage or not.
"""

from __future__ import annotations

import sys
from typing import Any

from kvoffloadd.integrations.sglang import versions

_TREE = "sglang.srt.mem_cache.unified_radix_cache"
"""Schedulers' processes have it loaded when they call plug-ins, before any model; others shall not load it for us."""


def install() -> None:
    """Watch the weights from when the engine has a cache. Nothing for a release that is not supported."""
    try:
        versions.check()
    except ImportError:
        return
    if _TREE not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_TREE}.UnifiedRadixCache.__init__", _watch, HookType.BEFORE)


def _watch(*_: Any, **__: Any) -> None:
    # By then the model is there, and with it whatever this imports.
    from kvoffloadd.integrations.sglang import engine

    engine.watch_weights()
