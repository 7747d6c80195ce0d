"""NUMA nodes: lists those of this machine, finds those near a GPU, and spreads memory over them.

The kernel's files are read below a `root`, where proc and sys are mounted.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.errors import ConfigError, ResourceError

log = logging.getLogger(__name__)

_NODES = Path("sys/devices/system/node")
_PCI_DEVICES = Path("sys/bus/pci/devices")
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}  # set_mempolicy, get_mempolicy: libc has neither
_DEFAULT, _INTERLEAVE = 0, 3
_NODES_MAX = 1024

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is online: its CPUs that are online, and its memory. It may lack either."""

    number: int
    cpus: frozenset[int]
    memory_bytes: int


def parse_list(text: str) -> tuple[int, ...]:
    """Parses numbers in the kernel's notation, such as "0-3,8"; ascending. Raises ValueError."""
    found: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """Returns all nodes that are online. None: this kernel has no NUMA support."""
    found = []
    for number in parse_list(_text(root / _NODES / "online")):
        folder = root / _NODES / f"node{number}"
        memory = re.search(r"MemTotal:\s+(\d+) kB", _text(folder / "meminfo"))
        cpus = frozenset(parse_list(_text(folder / "cpulist")))
        found.append(Node(number, cpus, int(memory[1]) << 10 if memory else 0))
    return tuple(found)


def memory_nodes(setting: str | tuple[int, ...], root: Path = Path("/")) -> tuple[int, ...]:
    """Returns the nodes to spread memory over. Empty: the kernel chooses. `setting`: "off", a list of nodes, or "auto":
    all with memory that this process may use. "auto" excludes nodes without CPUs: their memory is a GPU's, or slow
    (CXL).

    Raises:
        ConfigError: a requested node has no memory that this process may use.
    """
    if setting == "off":
        return ()
    found = re.search(r"^Mems_allowed_list:\s*(\S*)$", _text(root / "proc/self/status"), re.MULTILINE)
    allowed = parse_list(found[1]) if found else ()
    usable = [node for node in nodes(root) if node.memory_bytes and node.number in allowed]
    if isinstance(setting, str):
        near = tuple(node.number for node in usable if node.cpus)
        return near if len(near) > 1 else ()
    known = [node.number for node in usable]
    for number in setting:
        if number not in known:
            raise ConfigError(
                f"memory.numa = {list(setting)}: node {number} has no memory that this process may use; "
                f"these have: {', '.join(map(str, known)) or 'none'}"
            )
    return setting


def cpus_near(pci_address: str, allowed: Iterable[int], root: Path = Path("/")) -> frozenset[int]:
    """Returns the `allowed` CPUs on the node of a PCI device, like "0000:41:00.0". Empty: there are none, or the
    machine has one node, or the location of the device is unknown.
    """
    with_cpus = [node for node in nodes(root) if node.cpus]
    if len(with_cpus) < 2:
        return frozenset()
    number = _text(root / _PCI_DEVICES / pci_address / "numa_node").strip()
    near = [node.cpus for node in with_cpus if str(node.number) == number]
    return near[0] & frozenset(allowed) if near else frozenset()


def interleave(chosen: Iterable[int]) -> None:
    """Makes the kernel take pages from these nodes in turn from now on, for memory that this thread, and threads that
    it makes later, touch first.

    Raises:
        ResourceError: the kernel refuses.
    """
    mask = (ctypes.c_ulong * (_NODES_MAX // 64))()
    for number in chosen:
        mask[number // 64] |= 1 << number % 64
    _call(0, _INTERLEAVE, mask, ctypes.c_ulong(_NODES_MAX))


def has_policy() -> bool:
    """Returns whether the memory policy of this process was set when it was started, as with numactl.

    Raises:
        ResourceError: the kernel does not report it.
    """
    mode = ctypes.c_int()
    _call(1, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return mode.value != _DEFAULT


def place_memory(setting: str | tuple[int, ...]) -> None:
    """Applies `memory.numa` to the memory that this thread, and threads that it makes, touch first from now on."""
    chosen = memory_nodes(setting)
    if not chosen:
        return
    try:
        if setting == "auto" and has_policy():
            return  # numactl, or a unit's NUMAPolicy=, has chosen the nodes
        interleave(chosen)
    except ResourceError as error:
        log.warning("memory.numa: the kernel does not spread memory over NUMA nodes: %s", error)
    else:
        log.info("memory: spread over NUMA nodes %s", ", ".join(map(str, chosen)))


def _call(which: int, *arguments: object) -> None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise ResourceError(f"the number of the system call is not known for {platform.machine()}")
    if _libc.syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        raise ResourceError(os.strerror(ctypes.get_errno()))


def _text(path: Path) -> str:
    """Returns the text of a small file of the kernel's; empty if this kernel has none."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
