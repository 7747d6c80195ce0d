"""SGLang's entry point for plug-ins (`sglang.srt.plugins`): it calls `install` in each of its processes.

A storage can be given to an engine that runs. It must not take that engine's weights for those of its model's files if
these have been written again since, or the weights changed in place: so files are recorded before SGLang loads them,
and weights are watched from the start on, whether there is a storage or not.
"""

from __future__ import annotations

import sys
from typing import Any

from kvoffloadd.integrations.sglang import flags, versions

_ARGUMENTS = "sglang.srt.arg_groups.hicache_hook.handle_hicache"
"""Resolves SGLang's arguments for HiCache, in the process that starts the others."""

_SCHEDULER = "sglang.srt.managers.scheduler"
"""Loaded in schedulers' processes when they call plug-ins, before any model; other processes must not load it for
us.
"""


def install() -> None:
    """Starts to watch before the engine loads anything, and completes its arguments. Does nothing for a release that is
    not supported.
    """
    try:
        versions.check()
    except ImportError:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_ARGUMENTS, _complete, HookType.BEFORE)
    if _SCHEDULER not in sys.modules:
        return
    HookRegistry.register(f"{_SCHEDULER}.Scheduler.__init__", _watch, HookType.BEFORE)


def _complete(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    given = resolving_view(server_args)
    found = flags.completed({name: getattr(given, name) for name in flags.READ})
    if found:
        declare_resolution(server_args, "kvoffloadd", **found)


def _watch(*_: Any, **__: Any) -> None:
    # SGLang has imported all that this imports by then.
    from kvoffloadd.integrations.sglang import engine

    engine.watch_start()
