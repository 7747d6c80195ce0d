"""Huge pages: why there are none, and how much memory has them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.linux import hugepages
from kvoffloadd.linux.hugepages import huge_bytes, why_not_transparent
from kvoffloadd.linux.sharedmem import Mapping, create_memfd, populate
from kvoffloadd.model import HUGE_PAGE_BYTES, PAGE_BYTES
from tests.kernelsettings import reserved_pages, transparent_pages

WHOLE = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
OF_SIZE = "sys/kernel/mm/transparent_hugepage/hugepages-2048kB/shmem_enabled"
WORDS = "always inherit within_size advise never deny force"


@pytest.mark.parametrize(
    ("whole", "of_size", "reason"),
    [
        ("always", None, ""),
        ("advise", None, ""),
        ("within_size", None, ""),
        ("force", "never", ""),
        ("never", None, f"/{WHOLE} is never: write advise to it"),
        ("deny", "always", f"/{WHOLE} is deny: write advise to it"),
        ("advise", "inherit", ""),
        ("never", "inherit", f"/{WHOLE} is never: write advise to it"),
        ("never", "advise", ""),
        ("advise", "never", f"/{OF_SIZE} is never: write inherit to it, and advise to /{WHOLE}"),
        (None, None, "this kernel has none for shared memory"),
    ],
)
def test_what_the_kernel_must_be_told(tmp_path: Path, whole: str | None, of_size: str | None, reason: str) -> None:
    for path, chosen in ((WHOLE, whole), (OF_SIZE, of_size)):
        if chosen is not None:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(WORDS.replace(chosen, f"[{chosen}]") + "\n")
    assert why_not_transparent(tmp_path) == reason


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked piece by piece, and has room for few answers."""
    monkeypatch.setattr(hugepages, "_SCAN_BYTES", 3 * HUGE_PAGE_BYTES)
    monkeypatch.setattr(hugepages, "_REGIONS", 1)


def counted(fd: int, *, ask: bool, populated: tuple[int, ...]) -> int:
    """Populates these of eight huge pages' worth of memory; returns the bytes in huge pages that the kernel reports."""
    mapping = Mapping.map_fd(fd, 8 * HUGE_PAGE_BYTES)
    if ask:
        mapping.ask_for_huge_pages()
    for number in populated:
        populate(mapping.address + number * HUGE_PAGE_BYTES, PAGE_BYTES, 1)
    found = huge_bytes(mapping.address, 8 * HUGE_PAGE_BYTES)
    mapping.close()
    os.close(fd)
    if found is None:
        pytest.skip("this kernel does not tell")
    return found


@pytest.mark.usefixtures("small_steps")
def test_small_pages_are_none() -> None:
    with transparent_pages(allowed=False):
        fd = create_memfd("kvo-test", 8 * HUGE_PAGE_BYTES)
        assert counted(fd, ask=True, populated=(0, 3, 7)) == 0


@pytest.mark.usefixtures("small_steps")
def test_transparent_pages_are_counted() -> None:
    with transparent_pages(allowed=True):
        fd = create_memfd("kvo-test", 8 * HUGE_PAGE_BYTES)
        assert counted(fd, ask=True, populated=(0, 2, 3, 5, 7)) == 5 * HUGE_PAGE_BYTES


@pytest.mark.usefixtures("small_steps")
def test_reserved_pages_are_counted() -> None:
    with reserved_pages(8):
        fd = create_memfd("kvo-test", 8 * HUGE_PAGE_BYTES, reserved=True)
        assert counted(fd, ask=False, populated=(1, 2, 6)) == 3 * HUGE_PAGE_BYTES


def test_a_kernel_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugepages, "_PAGEMAP_SCAN", 0xC06066FF)  # ENOTTY, as before Linux 6.7
    memory = np.zeros(HUGE_PAGE_BYTES, np.uint8)
    assert huge_bytes(memory.ctypes.data // PAGE_BYTES * PAGE_BYTES, HUGE_PAGE_BYTES) is None


def test_memory_that_is_gone_holds_none() -> None:
    """The daemon may end while it is being counted."""
    fd = create_memfd("kvo-test", HUGE_PAGE_BYTES)
    mapping = Mapping.map_fd(fd, HUGE_PAGE_BYTES)
    address = mapping.address
    mapping.close()
    os.close(fd)
    assert huge_bytes(address, HUGE_PAGE_BYTES) in (0, None)
