"""What the check runs on, and what the kernel and the driver have to say at its end.

Needs nothing but Python's own library.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("torch", "cuda-bindings", "cuda-pathfinder", "numpy", "msgspec", "msgpack",
            "uvloop", "pytest")  # fmt: skip
_ASKED = ("name", "driver_version", "compute_mode", "mig.mode.current", "pcie.link.gen.max", "pcie.link.gen.current",
          "pcie.link.width.current", "memory.total", "memory.used")  # fmt: skip
_COMMAND_S = 20.0


def machine() -> list[tuple[str, str]]:
    """What it runs on, by name."""
    found = [
        ("kernel", platform.release()),
        ("processors", str(os.cpu_count())),
        ("memory", meminfo()),
        ("python", platform.python_version()),
        ("uid", str(os.getuid())),
        *((name, _version(name)) for name in PACKAGES),
    ]
    lines = output_of("nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader").splitlines()
    for line in lines:
        values = line.split(", ")
        found += zip(_ASKED, values, strict=True) if len(values) == len(_ASKED) else [("GPU", line)]
    return found


def said_at_the_end() -> list[tuple[str, list[str]]]:
    """What the kernel's log has of the driver, and all that nvidia-smi knows: lines by command."""
    kernel = [line for line in output_of("dmesg").splitlines() if re.search(r"NVRM|Xid|dmesg:", line)]
    return [
        ("dmesg, lines with NVRM or Xid", kernel[-40:]),
        ("nvidia-smi -q", output_of("nvidia-smi", "-q").splitlines()),
    ]


@contextlib.contextmanager
def held_open() -> Iterator[int | None]:
    """Keeps the GPU initialised, which a driver without persistence otherwise does anew for each process, in 1 to 3 s.
    Yields the id of the child that does; None: there is no nvidia-smi. It ends by itself, too, after a quarter of an
    hour.
    """
    try:
        child = subprocess.Popen(
            ("nvidia-smi", "dmon", "-d", "60", "-c", "15"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError:
        yield None
        return
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def meminfo() -> str:
    """Returns what the kernel reports of the host's memory now."""
    names = ("MemTotal", "MemAvailable", "HugePages_Total")
    found = re.findall(rf"^({'|'.join(names)}):\s+(\d+)( kB)?$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return ", ".join(
        f"{name} {int(value) / (1 << 20):.1f} GiB" if kib else f"{name} {value}" for name, value, kib in found
    )


def available_bytes() -> int:
    """Returns the available memory of the host as the kernel estimates it; 0: it does not report it."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def output_of(*command: str) -> str:
    """What a command prints, or why it prints nothing."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return ended.stdout.strip() or f"{command[0]}: {ended.stderr.strip() or 'it says nothing'}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"
