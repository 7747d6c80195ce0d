"""Settings of this machine's kernel that a test changes for a while. One test at a time: others wait."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffloadd.linux.hugepages import why_not_transparent

_RESERVED = Path("/proc/sys/vm/nr_hugepages")
_TRANSPARENT = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_LOCK = Path(tempfile.gettempdir()) / "kvoffloadd-test-kernel-settings.lock"


@contextmanager
def reserved_pages(count: int) -> Iterator[None]:
    """The system's pool has `count` huge pages within, all of them free."""
    with _alone():
        if int(_RESERVED.read_text()):
            pytest.skip("the machine's huge pages are in use")
        try:
            _RESERVED.write_text(str(count))
            if int(_RESERVED.read_text()) < count:
                pytest.skip("there are not enough huge pages")
            yield
        finally:
            _RESERVED.write_text("0")


@contextmanager
def transparent_pages(*, allowed: bool) -> Iterator[None]:
    """Whether shared memory that asks for transparent huge pages gets them."""
    with _alone():
        if not _TRANSPARENT.exists():
            pytest.skip("this kernel has no transparent huge pages of shared memory")
        before = _TRANSPARENT.read_text().partition("[")[2].partition("]")[0]
        try:
            _TRANSPARENT.write_text("advise" if allowed else "never")
            if allowed and (reason := why_not_transparent()):
                pytest.skip(reason)
            yield
        finally:
            _TRANSPARENT.write_text(before)


@contextmanager
def _alone() -> Iterator[None]:
    if os.geteuid() != 0 or not os.access(_RESERVED, os.W_OK):
        pytest.skip("only root can change the kernel's settings")
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
