"""Reads from the kernel how much memory this machine, and the cgroups of this process, still allow.

`root` is where proc and sys are mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvoffloadd.errors import ConfigError
from kvoffloadd.model import HUGE_PAGE_BYTES
from kvoffloadd.units import BYTES_MAX, format_bytes

_COMMIT = ("CommitLimit", "Committed_AS")


class _Files(NamedTuple):
    """The names of a cgroup's files with limits and usage, and the names in memory.stat of memory that the kernel frees
    on demand.
    """

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...] = ()


# Above memory.high, a process is neither killed nor makes progress: shared memory can't be reclaimed without swap.
_MEMORY_FILES = _Files(
    ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file", "slab_reclaimable")
)
_MEMORY_FILES_V1 = _Files(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_MAPPINGS_MAX = 65_530  # the kernel's default
_OWN_MAPPINGS = 4096  # the least number that is left for libraries, tables and threads of the daemon
_HUGE_PAGE_FILES = _Files(("hugetlb.2MB.max",), "hugetlb.2MB.current")
_HUGE_PAGE_FILES_V1 = _Files(("hugetlb.2MB.limit_in_bytes",), "hugetlb.2MB.usage_in_bytes")
_NO_LIMIT_BYTES = 1 << 60  # cgroups of version 1 have a number where there is no limit


def check_memory_fits(capacity_bytes: int, root: Path = Path("/")) -> None:
    """Rejects a memory tier that this machine or this cgroup can't hold: the daemon would be killed while it prefaults.

    Raises:
        ConfigError: `capacity_bytes` is more than min(MemAvailable, the cgroups' headroom).
    """
    available, source = available_memory(root)
    if capacity_bytes > available:
        raise ConfigError(
            f"memory.capacity_bytes = {capacity_bytes} ({format_bytes(capacity_bytes)}): "
            f"only {format_bytes(available)} are available ({source})"
        )


def available_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Returns how many bytes this machine and the cgroups of this process still allow, and the limit that applies."""
    return min(_memory_limits(root), default=(BYTES_MAX, ""))


def check_huge_pages_fit(size_bytes: int, root: Path = Path("/")) -> None:
    """Rejects memory in reserved huge pages that the system, or this cgroup, does not have.

    Raises:
        ConfigError: the system does not have them; the message has the reason and a remedy.
    """
    folder, needed = root / "sys/kernel/mm/hugepages/hugepages-2048kB", -(-size_bytes // HUGE_PAGE_BYTES)
    names = ("nr_hugepages", "free_hugepages", "resv_hugepages", "nr_overcommit_hugepages", "surplus_hugepages")
    total, free, promised, extra, surplus = (int(_text(folder / name) or 0) for name in names)
    available = free - promised + max(0, extra - surplus)
    reason = ""
    if not folder.is_dir():
        reason = "this kernel has no huge pages of 2 MiB"
    elif available < needed:
        reason = (
            f"it takes {needed} huge pages of 2 MiB, and {available} of {total} are free: "
            f"sysctl vm.nr_hugepages={total - available + needed}"
        )
    else:
        headroom, group = min(
            _cgroup_limits(root, "hugetlb", _HUGE_PAGE_FILES, _HUGE_PAGE_FILES_V1), default=(BYTES_MAX, "")
        )
        if headroom < needed * HUGE_PAGE_BYTES:
            reason = f"it takes {needed} huge pages of 2 MiB, and {group} allows {headroom // HUGE_PAGE_BYTES} more"
    if reason:
        raise ConfigError(f'memory.huge_pages = "reserved": {reason}')


def has_memory_limit(root: Path = Path("/")) -> bool:
    """Returns whether a cgroup limits this process's memory."""
    return any(source.startswith("cgroup") and room < _NO_LIMIT_BYTES for room, source in _memory_limits(root))


def memory_bytes(root: Path = Path("/")) -> int:
    """Returns the machine's memory, or the least limit of this process's cgroups, regardless of usage."""
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    limits = [int(total[1]) << 10] if total else []
    for group, files in _cgroups(root, "memory", _MEMORY_FILES, _MEMORY_FILES_V1):
        limits += [int(most) for most in _limits(group, files).values()]
    return min(limits, default=BYTES_MAX)


def mappings_max(root: Path = Path("/")) -> int:
    """Returns how many mappings the kernel allows a process."""
    return int(_text(root / "proc/sys/vm/max_map_count") or _MAPPINGS_MAX)


def worker_totals(root: Path = Path("/")) -> dict[str, int]:
    """Returns what the kernel can spend on the memory of all workers together: see `server.account`."""
    mappings = mappings_max(root)
    return {
        "mappings": max(0, mappings - max(_OWN_MAPPINGS, mappings // 8)),
        "page_table_bytes": memory_bytes(root) // 64,  # enough to map all memory eight times
    }


def page_table_bytes(root: Path = Path("/")) -> int:
    """Returns the memory that the kernel uses for this process's page tables."""
    used = re.search(r"^VmPTE:\s+(\d+) kB$", _text(root / "proc/self/status"), re.MULTILINE)
    return int(used[1]) << 10 if used else 0


def _memory_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Yields the bytes that may still be allocated, and the limit that applies."""
    meminfo = _text(root / "proc/meminfo")
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if available:
        yield int(available[1]) << 10, "MemAvailable"
    if _text(root / "proc/sys/vm/overcommit_memory").strip() == "2":
        most, used = (re.search(rf"^{name}:\s+(\d+) kB$", meminfo, re.MULTILINE) for name in _COMMIT)
        if most and used:
            yield max(0, int(most[1]) - int(used[1])) << 10, "CommitLimit, which vm.overcommit_memory = 2 sets"
    yield from _cgroup_limits(root, "memory", _MEMORY_FILES, _MEMORY_FILES_V1)


def _cgroup_limits(root: Path, controller: str, files: _Files, files_v1: _Files) -> Iterator[tuple[int, str]]:
    """Yields the bytes that each limit of each cgroup of this process still allows, and that limit."""
    for group, names in _cgroups(root, controller, files, files_v1):
        for limit, headroom in _headrooms(group, names):
            yield headroom, f"cgroup {group}, {limit}"


def _cgroups(root: Path, controller: str, files: _Files, files_v1: _Files) -> Iterator[tuple[Path, _Files]]:
    """Yields the cgroups of this process, and the names of their files."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", files
        elif controller in controllers.split(","):
            mount, names = root / "sys/fs/cgroup" / controller, files_v1
        else:
            continue
        # Any ancestor's limit binds too; in a container the path may name a group that is not mounted there.
        folder = mount / place.lstrip("/")
        for group in [folder, *folder.parents]:
            yield group, names
            if group == mount:
                break


def _limits(group: Path, files: _Files) -> dict[str, int]:
    """Returns the limits that the group has, by name."""
    found = {limit: _text(group / limit).strip() for limit in files.limits}
    return {limit: int(most) for limit, most in found.items() if most.isdigit()}


def _headrooms(group: Path, files: _Files) -> Iterator[tuple[str, int]]:
    """Yields the bytes that each limit of the group still allows, with its name."""
    used, limits = _text(group / files.usage).strip(), _limits(group, files)
    if not used.isdigit() or not limits:
        return
    # Page cache and the kernel's caches of files count as used, but are freed on demand, as in MemAvailable.
    figures = dict(line.partition(" ")[::2] for line in _text(group / "memory.stat").splitlines() if files.reclaimable)
    reclaimable = sum(int(figures.get(name, "0")) for name in files.reclaimable)
    for limit, most in limits.items():
        yield limit, max(0, most - max(0, int(used) - reclaimable))


def _text(path: Path) -> str:
    """Returns the text of a small file of the kernel's; empty if this kernel has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
