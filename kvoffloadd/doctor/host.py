"""The facts about this host and this process that checks use. Tests describe other hosts."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

NAMESPACES_OF_THE_HOST = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD}
"""Inodes of the kernel's first namespaces, which are constants of its interface (include/linux/proc_ns.h)."""


@dataclass(frozen=True, slots=True)
class Host:
    """`root`: where proc, sys and dev are mounted. The limits are this process's hard ones; -1: none. `namespaces`:
    inodes of this process's namespaces, by kind.
    """

    root: Path = Path("/")
    uid: int = 0
    kernel: str = ""
    memlock_bytes: int = -1
    descriptors: int = -1
    namespaces: Mapping[str, int] = field(default_factory=lambda: NAMESPACES_OF_THE_HOST)
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Self:
        """Describes the host that this process runs on."""
        return cls(
            uid=os.geteuid(),
            kernel=os.uname().release,
            memlock_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[1],
            descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            namespaces={kind: _namespace(kind) for kind in NAMESPACES_OF_THE_HOST},
            environment=dict(os.environ),
        )

    @property
    def has_gpus(self) -> bool:
        """Returns whether NVIDIA's driver is loaded, or the container was given a GPU's device."""
        return (self.root / "proc/driver/nvidia/version").exists() or (self.root / "dev/nvidiactl").exists()

    def is_in_namespace_of_the_host(self, kind: str) -> bool:
        """Returns whether this process is in the host's namespace of this kind: False in a container with a separate
        one.
        """
        return self.namespaces.get(kind) in (NAMESPACES_OF_THE_HOST[kind], None)

    def text(self, path: str) -> str:
        """Returns the text of a small file of the kernel's; empty if this kernel has none."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return NAMESPACES_OF_THE_HOST[kind]  # a kernel without such namespaces has a single one
