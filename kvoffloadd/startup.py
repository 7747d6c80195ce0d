"""What a start takes from the system, and whose fault it is if the system refuses."""

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

from kvoffloadd.errors import BusyError, ConfigError, LimitError
from kvoffloadd.units import format_bytes

EXECUTOR_THREADS = 8

_NO_THREAD = "can't start new thread"
"""What Python says, without a class of its own."""


@contextmanager
def refusals() -> Iterator[None]:
    """What the system refuses within is a ConfigError that names the limit. Tables are mapped for the worst case, and
    used little by little.
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
    except BusyError as error:  # of the threads of a user: one who connects may come again, a start may not
        raise _no_threads(error) from None


def _no_threads(error: Exception) -> ConfigError:
    return ConfigError(f"the daemon can't start its threads ({error}): raise TasksMax, `ulimit -u` or `ulimit -v`")


def _no_address_space(error: Exception) -> ConfigError:
    return ConfigError(
        f"the kernel refuses the address space ({error}): set vm.overcommit_memory to 0 or 1 (2 charges at once "
        "what is used little by little), raise `ulimit -v` and vm.max_map_count, or lower memory.capacity_bytes"
    )


def check_proc(root: Path = Path("/")) -> None:
    """Raises ConfigError if /proc is not there: without it, processes and the machine's memory can't be told."""
    if not (root / "proc/self/stat").exists():
        raise ConfigError("/proc is not mounted: the daemon needs it (mount -t proc proc /proc)")


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as its hard limit does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def make_executor() -> ThreadPoolExecutor:
    """The executor for what runs off the loop now and then. All of its threads are started: later there may be none to
    be had. Raises RuntimeError if there are not so many now.
    """
    executor = ThreadPoolExecutor(EXECUTOR_THREADS, "kvo-beside")
    together = threading.Barrier(EXECUTOR_THREADS)
    try:
        for _ in range(EXECUTOR_THREADS):
            executor.submit(together.wait)
    except RuntimeError:
        together.abort()  # or those that are there would wait for ever, and the process for them
        executor.shutdown(wait=False)
        raise
    return executor


def choose_runner(use_uvloop: bool | str) -> Callable[[Coroutine[Any, Any, int]], int]:
    """uvloop if it is installed and wanted, asyncio otherwise."""
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
