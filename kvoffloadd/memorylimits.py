"""How much memory this machine, and the cgroups that the process is in, still allow; what the kernel tells is read.

`root` is where proc and sys are mounted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from kvoffloadd.errors import ConfigError
from kvoffloadd.model import HUGE_PAGE_BYTES
from kvoffloadd.units import BYTES_MAX, format_bytes

_COMMIT = ("CommitLimit", "Committed_AS")
_MEMORY_FILES = (  # limit, usage, and in memory.stat what is given back on demand
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
_HUGE_PAGE_FILES = (
    ("hugetlb.2MB.max", "hugetlb.2MB.current", ""),
    ("hugetlb.2MB.limit_in_bytes", "hugetlb.2MB.usage_in_bytes", ""),
)
_MAPPINGS_MAX = 65_530  # the kernel's default
_OWN_MAPPINGS = 4096  # at least so many are for libraries, tables and threads of the daemon
_NO_LIMIT_BYTES = 1 << 60  # cgroups of version 1 have a number where there is no limit


def check_memory_fits(capacity_bytes: int, root: Path = Path("/")) -> None:
    """Refuses a memory tier that this machine or this cgroup can't hold: the daemon would be killed while it prefaults.

    Raises:
        ConfigError: `capacity_bytes` is more than min(MemAvailable, the cgroups' headroom).
    """
    available, source = min(_memory_limits(root), default=(BYTES_MAX, ""))
    if capacity_bytes > available:
        raise ConfigError(
            f"memory.capacity_bytes = {capacity_bytes} ({format_bytes(capacity_bytes)}): "
            f"only {format_bytes(available)} are available ({source})"
        )


def check_huge_pages_fit(size_bytes: int, root: Path = Path("/")) -> None:
    """Refuses memory in reserved huge pages that the system, or this cgroup, does not have.

    Raises:
        ConfigError: what is there, and what to do.
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
        headroom, group = min(_cgroup_limits(root, "hugetlb", *_HUGE_PAGE_FILES), default=(BYTES_MAX, ""))
        if headroom < needed * HUGE_PAGE_BYTES:
            reason = f"it takes {needed} huge pages of 2 MiB, and {group} allows {headroom // HUGE_PAGE_BYTES} more"
    if reason:
        raise ConfigError(f'memory.huge_pages = "reserved": {reason}')


def has_memory_limit(root: Path = Path("/")) -> bool:
    """Whether a cgroup limits this process's memory."""
    return any(source.startswith("cgroup") and room < _NO_LIMIT_BYTES for room, source in _memory_limits(root))


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or what the cgroups of this process still allow, if that is less."""
    total = re.search(r"^MemTotal:\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    limits = [room for room, _ in _cgroup_limits(root, "memory", *_MEMORY_FILES)]
    return min([int(total[1]) << 10, *limits] if total else limits, default=BYTES_MAX)


def mappings_max(root: Path = Path("/")) -> int:
    """How many mappings the kernel allows a process."""
    return int(_text(root / "proc/sys/vm/max_map_count") or _MAPPINGS_MAX)


def worker_totals(root: Path = Path("/")) -> dict[str, int]:
    """What the kernel can spend on the memory of all workers together: see `server.account`."""
    mappings = mappings_max(root)
    return {
        "mappings": max(0, mappings - max(_OWN_MAPPINGS, mappings // 8)),
        "page_table_bytes": memory_bytes(root) // 64,  # enough to map all memory eight times
    }


def page_table_bytes(root: Path = Path("/")) -> int:
    """What the kernel uses for the page tables of this process."""
    used = re.search(r"^VmPTE:\s+(\d+) kB$", _text(root / "proc/self/status"), re.MULTILINE)
    return int(used[1]) << 10 if used else 0


def _memory_limits(root: Path) -> Iterator[tuple[int, str]]:
    """Bytes that may still be allocated, and which limit says so."""
    meminfo = _text(root / "proc/meminfo")
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if available:
        yield int(available[1]) << 10, "MemAvailable"
    if _text(root / "proc/sys/vm/overcommit_memory").strip() == "2":
        most, used = (re.search(rf"^{name}:\s+(\d+) kB$", meminfo, re.MULTILINE) for name in _COMMIT)
        if most and used:
            yield max(0, int(most[1]) - int(used[1])) << 10, "CommitLimit, which vm.overcommit_memory = 2 sets"
    yield from _cgroup_limits(root, "memory", *_MEMORY_FILES)


def _cgroup_limits(
    root: Path, controller: str, files: tuple[str, str, str], files_v1: tuple[str, str, str]
) -> Iterator[tuple[int, str]]:
    """Bytes that each cgroup of this process still allows, and its name."""
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
            if (headroom := _headroom(group, *names)) is not None:
                yield headroom, f"cgroup {group}"
            if group == mount:
                break


def _headroom(group: Path, limit: str, usage: str, cache: str) -> int | None:
    most, used = _text(group / limit).strip(), _text(group / usage).strip()
    if not (most.isdigit() and used.isdigit()):
        return None
    # Page cache that was not used lately counts as used, and is given back on demand.
    reclaimable = re.search(rf"^{cache} (\d+)$", _text(group / "memory.stat"), re.MULTILINE) if cache else None
    return max(0, int(most) - int(used) + (int(reclaimable[1]) if reclaimable else 0))


def _text(path: Path) -> str:
    """A small file of the kernel's; empty where this kernel has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
