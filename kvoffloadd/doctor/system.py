"""Checks the kernel, its limits, and memory."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
from collections.abc import Callable, Iterator

from kvoffloadd.config import Config, CopyConfig, MemoryConfig
from kvoffloadd.device.copyruns import copy_payloads
from kvoffloadd.doctor.diagnosis import Diagnosis, note, ok, problem
from kvoffloadd.doctor.host import Host
from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.hugepages import why_not_transparent
from kvoffloadd.linux.memorylimits import (
    check_huge_pages_fit,
    check_memory_fits,
    has_memory_limit,
    mappings_max,
    worker_totals,
)
from kvoffloadd.linux.numa import memory_nodes
from kvoffloadd.model import HUGE_PAGE_BYTES
from kvoffloadd.native import loader
from kvoffloadd.storage.arenafile import file_bytes
from kvoffloadd.units import format_bytes

KERNEL_MIN = (5, 15)
FEATURES = (
    ((6, 5), "the death of a process in another PID namespace is seen only by its socket"),
    ((6, 7), "memory.huge_bytes is not known"),
    ((6, 16), "unexpected descriptors from peers are closed one by one"),
)
"""The features of later kernels that the daemon uses, described by what earlier ones lack."""

SHM_BYTES_SMALL = 1 << 30
"""Containers have 64 MiB by default; a KV cache in shared memory is larger than this."""

DESCRIPTORS_BESIDE = 256
"""The descriptors that the daemon itself needs: for disks, lanes, its log."""


def check_kernel(host: Host) -> Iterator[Diagnosis]:
    """Reports the kernel's version, and the features that the daemon must do without."""
    found = re.match(r"(\d+)\.(\d+)", host.kernel)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < KERNEL_MIN:
        yield problem("kernel", f"Linux {host.kernel}", "Linux {}.{} or newer is needed".format(*KERNEL_MIN))
        return
    missing = [text for since, text in FEATURES if version < since]
    found_text = f"Linux {host.kernel}"
    # No remedy but another kernel, and the daemon works without: a line is enough.
    yield ok("kernel", f"{found_text}; {'; '.join(missing)}" if missing else found_text)


def check_helpers() -> Iterator[Diagnosis]:
    """Checks the parts in C, which pip leaves out if there is no compiler."""
    if loader.HELPER is None:
        yield note(
            "compiled helpers",
            "not built, or not for this version; small copies, lookups and checksums are slower",
            "install a C compiler and Python's headers (Debian: gcc python3-dev), then install kvoffloadd again",
        )
    else:
        yield ok("compiled helpers", "built")


def check_loads(memory: MemoryConfig) -> Iterator[Diagnosis]:
    """Reports how payloads that have changed in memory are kept from being loaded."""
    hashes = copy_payloads is not None
    if memory.verify_loads is True:
        yield ok(
            "verified loads", f"to shared memory {'while' if hashes else 'before'} they are copied; to GPUs before"
        )
    elif not memory.verify_loads:
        yield ok("verified loads", "of what an earlier daemon left; no others (memory.verify_loads = false)")
    elif hashes:
        yield ok("verified loads", "to shared memory, while they are copied; not to GPUs")
    else:
        yield note(
            "verified loads", "none but of what an earlier daemon left: the compiled helper is not in use",
            "build the compiled helpers, or set memory.verify_loads = true, which costs a pass over their bytes",
        )  # fmt: skip


def check_memory(memory: MemoryConfig, host: Host, *, is_running: bool) -> Iterator[Diagnosis]:
    """Checks whether the memory tier fits, in which pages, and on which nodes."""
    size = format_bytes(memory.capacity_bytes)
    if is_running:
        yield ok("memory tier", f"{size}; not compared with free memory, because a daemon is running")
    elif memory.pool_file:
        yield ok("memory tier", f"{size}, in memory.pool_file")
    else:
        try:
            _check_pool_fits(memory, host)
        except ConfigError as error:
            yield problem("memory tier", str(error), "reduce memory.capacity_bytes, or free memory")
        else:
            yield ok("memory tier", f"{size} are available")
    yield from _check_huge_pages(memory, host)
    try:
        chosen = memory_nodes(memory.numa, host.root)
    except ConfigError as error:
        yield problem("NUMA", str(error), "name other nodes in memory.numa")
    else:
        yield ok("NUMA", f"spread over nodes {', '.join(map(str, chosen))}" if chosen else "left to the kernel")


def _check_pool_fits(memory: MemoryConfig, host: Host) -> None:
    if memory.huge_pages == "reserved":
        check_huge_pages_fit(file_bytes(memory.capacity_bytes, memory.slab_bytes, HUGE_PAGE_BYTES), host.root)
    else:
        check_memory_fits(memory.capacity_bytes, host.root)


def _check_huge_pages(memory: MemoryConfig, host: Host) -> Iterator[Diagnosis]:
    if memory.huge_pages in ("off", "reserved") or memory.pool_file:
        where = ", decided by the file system of memory.pool_file" if memory.pool_file else ""
        yield ok("huge pages", f"memory.huge_pages = {memory.huge_pages}{where}")
    elif why := why_not_transparent(host.root):
        yield note(
            "huge pages",
            f"none: {why}",
            "do this as root, and by tmpfiles.d after each boot; or set memory.huge_pages = off",
        )
    else:
        yield ok("huge pages", "the kernel provides transparent huge pages where it has them")


def check_holes(copy: CopyConfig, host: Host, has_userfaultfd: bool) -> Iterator[Diagnosis]:
    """Checks whether the daemon can be charged for memory that engines have not populated."""
    if copy.fill_holes == "auto" and has_memory_limit(host.root) and not has_userfaultfd:
        yield note(
            "memory limit", "a cgroup limits this process, and pages that engines have not populated count towards it",
            "allow userfaultfd (containers: the seccomp profile), or add the engines' KV caches to the limit",
        )  # fmt: skip


def check_limits(config: Config, host: Host) -> Iterator[Diagnosis]:
    """Checks the limits of file descriptors, and of locked memory."""
    needed = config.limits.fds + DESCRIPTORS_BESIDE
    if 0 <= host.descriptors < needed:
        yield note(
            "file descriptors", f"at most {host.descriptors:,}; one user may ask for {needed:,}",
            f"set LimitNOFILE=65536 in the unit, --ulimit nofile=65536 for a container, or limits.fds = "
            f"{max(1, host.descriptors - DESCRIPTORS_BESIDE)}",
        )  # fmt: skip
    else:
        yield ok("file descriptors", "no limit" if host.descriptors < 0 else f"at most {host.descriptors:,}")
    allowed, most = worker_totals(host.root)["mappings"], mappings_max(host.root)
    if allowed < config.limits.fds:
        yield note(
            "mappings", f"engines may have {allowed:,} of the {most:,} that the kernel allows; one user may ask for "
            f"{config.limits.fds:,}",
            f"sysctl vm.max_map_count={most - allowed + config.limits.fds}, or lower limits.fds",
        )  # fmt: skip
    else:
        yield ok("mappings", f"engines may have {allowed:,} of the {most:,} that the kernel allows")
    locked = "no limit" if host.memlock_bytes < 0 else f"at most {format_bytes(host.memlock_bytes)}"
    rdma = config.remote.engine == "mooncake" and config.mooncake.protocol == "rdma"
    if rdma and 0 <= host.memlock_bytes < config.memory.capacity_bytes:
        yield problem(
            "locked memory", f"{locked}; mooncake.protocol = rdma locks the memory tier",
            "set LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1 for a container",
        )  # fmt: skip
    else:
        yield ok("locked memory", f"{locked}; {'enough for RDMA' if rdma else 'GPUs and shared memory do not need it'}")


def check_shm(host: Host) -> Iterator[Diagnosis]:
    """Checks /dev/shm, which holds engines' KV caches in shared memory."""
    place = host.root / "dev/shm"
    remedy = "mount -t tmpfs tmpfs /dev/shm; containers: --ipc=host, or --shm-size="
    try:
        found, mode = os.statvfs(place), place.stat().st_mode
    except OSError as error:
        yield problem("/dev/shm", f"can't be used: {error.strerror}", remedy)
        return
    total = found.f_blocks * found.f_frsize
    free = f"{format_bytes(found.f_bavail * found.f_frsize)} of {format_bytes(total)} are free"
    if found.f_flag & os.ST_RDONLY or not mode & stat.S_IWOTH:
        yield problem("/dev/shm", "is not writable by all users", "mount -o remount,rw,mode=1777 /dev/shm")
    elif total < SHM_BYTES_SMALL:
        yield note("/dev/shm", f"{free}: too small for a KV cache in shared memory", remedy)
    else:
        yield ok("/dev/shm", free)


def check_system_calls() -> Iterator[Diagnosis]:
    """Checks for sandboxes that refuse system calls which the daemon can't do without."""
    attempts: dict[str, Callable[[], int]] = {
        "memfd_create": lambda: os.memfd_create("kvoffloadd-doctor", os.MFD_ALLOW_SEALING),
        "pidfd_open": lambda: os.pidfd_open(os.getpid()),
        "socket(AF_UNIX)": lambda: socket.socket(socket.AF_UNIX).detach(),
    }
    refused = []
    for name, attempt in attempts.items():
        try:
            os.close(attempt())
        except OSError as error:
            refused.append(f"{name}: {errno.errorcode.get(error.errno or 0, '?')}")
    if refused:
        yield problem(
            "system calls", f"refused: {', '.join(refused)}", "allow them in the profile of the sandbox or of seccomp"
        )
    else:
        yield ok("system calls", "memfd_create, pidfd_open and Unix sockets are allowed")
