"""SGLang's storages and linkers with a clock on each call, for `bench_sglang`: loaded by SGLang, in its scheduler.

The names are those of the classes that are timed: `KVOffloaddStorage`, `HiCacheFile` (SGLang's own file backend) and
`KVOffloaddLinker`. `timings` of the extra config is a folder. There `pid` has the process id; at each SIGUSR2 it
writes what was counted since the last one to `timings.json`, and begins anew.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = "kvoffloadd.integrations.sglang"
STORAGE_METHODS = (
    "batch_exists",
    "batch_exists_v2",
    "batch_get",
    "batch_get_v1",
    "batch_get_v2",
    "batch_set",
    "batch_set_v1",
    "batch_set_v2",
    "get_stats",
)
LINKER_METHODS = (
    "lookup",
    "load",
    "start_layer_wise_loading",
    "finish_layer_wise_loading",
    "offload",
    "num_completed_offloads",
    "pop_completed_offload",
    "cancel_queued_load",
)
CLASSES = {
    "KVOffloaddStorage": (OURS, STORAGE_METHODS),
    "HiCacheFile": ("sglang.srt.mem_cache.hicache_storage", STORAGE_METHODS),
    "KVOffloaddLinker": (OURS, LINKER_METHODS),
}
SCHEDULER = "scheduler"
"""What the main thread is called here; SGLang's others have the names of their functions."""

CACHE = "sglang.srt.mem_cache.unified_radix_cache", "UnifiedRadixCache"
HOOKS = ("match_prefix", "prefetch_from_storage", "check_prefetch_progress", "init_load_back")
"""What SGLang's scheduler calls of its tree for a request, our methods included where it calls them."""


class StorageTimer:
    """`calls`: by thread and method, (seconds, seconds on the processor) of each. `waits`: of each request, from when
    the storage was asked to when it might be computed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._calls: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._waits: list[float] = []
        self._asked: dict[Any, float] = {}
        self._processor = _processor_s()
        signal.signal(signal.SIGUSR2, lambda *_: self._tell())
        (folder / "pid").write_text(str(os.getpid()), encoding="utf-8")

    def time(self, owner: type, name: str) -> None:
        """Replace a method by one that is timed."""
        method = getattr(owner, name, None)
        if method is not None:
            setattr(owner, name, self._timed(name, method))

    def await_prefetches(self, owner: type) -> None:
        """Note how long requests wait for their lookup's answer."""
        ask, check = owner.prefetch_from_storage, owner.check_prefetch_progress  # type: ignore[attr-defined]

        @functools.wraps(ask)
        def started(cache: Any, request: Any, *arguments: Any, **named: Any) -> Any:
            self._asked.setdefault(request, time.perf_counter())
            return ask(cache, request, *arguments, **named)

        @functools.wraps(check)
        def checked(cache: Any, request: Any) -> Any:
            done = check(cache, request)
            if done and request in self._asked:
                self._waits.append(time.perf_counter() - self._asked.pop(request))
            return done

        owner.prefetch_from_storage = started  # type: ignore[attr-defined]
        owner.check_prefetch_progress = checked  # type: ignore[attr-defined]

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            began, processor = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **named)
            finally:
                took = time.perf_counter() - began, time.thread_time() - processor
                self._calls[_name_of(threading.current_thread()), name].append(took)

        return wrapper

    def _tell(self) -> None:
        """Runs in the scheduler's thread, between two of its instructions."""
        before, self._processor = self._processor, _processor_s()
        calls, self._calls = self._calls, defaultdict(list)
        waits, self._waits = self._waits, []
        timings = {
            "calls": [[thread, method, times] for (thread, method), times in calls.items()],
            "waits_s": waits,
            "processor_s": {name: spent - before.get(name, 0.0) for name, spent in self._processor.items()},
        }
        part = self._folder / "timings.part"
        part.write_text(json.dumps(timings), encoding="utf-8")
        part.rename(self._folder / "timings.json")


def _name_of(thread: threading.Thread) -> str:
    """SGLang's threads are "Thread-5 (prefetch_thread_func)"."""
    if thread is threading.main_thread():
        return SCHEDULER
    return thread.name.partition("(")[2].rstrip(")") or thread.name


def _processor_s() -> dict[str, float]:
    """Returns the processor time of each of Python's threads, by its name."""
    found: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        path = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if path.exists():
            found[_name_of(thread)] += int(path.read_text(encoding="ascii").split()[0]) / 1e9
    return dict(found)


def __getattr__(name: str) -> Any:
    """The class of that name, timed from its constructor on."""
    if name not in CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, methods = CLASSES[name]
    base = getattr(importlib.import_module(module), name)

    def timed(self: Any, first: Any, *arguments: Any, **named: Any) -> None:
        extra = named.get("extra_config") or getattr(first, "extra_config", None) or {}
        clock = StorageTimer(Path(extra["timings"]))
        for method in methods:
            clock.time(made, method)
        cache = getattr(importlib.import_module(CACHE[0]), CACHE[1])
        clock.await_prefetches(cache)
        for hook in HOOKS:
            clock.time(cache, hook)
        if name == "HiCacheFile":  # which takes no arguments of SGLang's factory for dynamic ones
            base.__init__(self, first)
        else:
            base.__init__(self, first, *arguments, **named)

    made = type(name, (base,), {"__init__": timed})
    return made
