"""Acquires what a start needs from the system, and attributes the system's refusals."""

from __future__ import annotations

import asyncio
import errno
import resource
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffloadd import socketpath
from kvoffloadd.errors import BusyError, ConfigError, LimitError
from kvoffloadd.units import format_bytes

EXECUTOR_THREADS = 8

_NO_THREAD = "can't start new thread"
"""Python's message, which has no separate exception class."""


@contextmanager
def refusals() -> Iterator[None]:
    """Turns the system's refusals within the context into a ConfigError that names the limit. Tables are mapped for the
    worst case, and used little by little.
    """
    try:
        yield
    except (LimitError, MemoryError) as error:
        raise _no_address_space(error) from None
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise _no_address_space(error) from None
        if error.errno == errno.EFBIG:
            most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            raise ConfigError(
                f"the memory tier is a file, and files may have at most {format_bytes(most)}: raise `ulimit -f` "
                "(LimitFSIZE= of a unit), or lower memory.capacity_bytes"
            ) from None
        raise
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise _no_threads(error) from None
    except BusyError as error:  # for the threads of a user: a peer may connect again later, a start can't wait
        raise _no_threads(error) from None


def _no_threads(error: Exception) -> ConfigError:
    return ConfigError(f"the daemon can't start its threads ({error}): raise TasksMax, `ulimit -u` or `ulimit -v`")


def _no_address_space(error: Exception) -> ConfigError:
    return ConfigError(
        f"the kernel refuses the address space ({error}): set vm.overcommit_memory to 0 or 1 (2 charges at once "
        "what is used little by little), raise `ulimit -v` and vm.max_map_count, or lower memory.capacity_bytes"
    )


def check_proc(root: Path = Path("/")) -> None:
    """Raises ConfigError if /proc is missing: without it, processes and the machine's memory are unknown."""
    if not (root / "proc/self/stat").exists():
        raise ConfigError("/proc is not mounted: the daemon needs it (mount -t proc proc /proc)")


def check_user(uid: int) -> None:
    """Raises ConfigError if this daemon's user can't be told apart from others, who would have all of its rights."""
    if uid == socketpath.unmapped_uid():
        raise ConfigError(
            f"the daemon runs as uid {uid}, which {socketpath.STANDS_FOR_MANY}: run it as a user with another number, "
            "or without a user namespace"
        )


def raise_descriptor_limit() -> None:
    """Raises this process's limit of descriptors to its hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_executor() -> ThreadPoolExecutor:
    """Makes the executor for occasional work off the loop. All of its threads are started immediately: later it may be
    impossible to make one. Raises RuntimeError if they can't all be made now.
    """
    executor = ThreadPoolExecutor(EXECUTOR_THREADS, "kvo-beside")
    together = threading.Barrier(EXECUTOR_THREADS)
    try:
        for _ in range(EXECUTOR_THREADS):
            executor.submit(together.wait)
    except RuntimeError:
        together.abort()  # or the threads already started would never end, and neither would the process
        executor.shutdown(wait=False)
        raise
    return executor


def choose_runner(use_uvloop: bool | str) -> Callable[[Coroutine[Any, Any, int]], int]:
    """Returns uvloop if it is installed and wanted, asyncio otherwise."""
    if use_uvloop is False:
        return asyncio.run
    try:
        import uvloop
    except ImportError:
        if use_uvloop is True:
            raise ConfigError(
                "server.use_uvloop = true: uvloop is not installed (in a checkout: pip install '.[uvloop]')"
            ) from None
        return asyncio.run
    return uvloop.run
