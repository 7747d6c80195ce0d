"""What fio makes of the same disk: the same number of bytes, in requests of the same size, as many at once."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Load:
    """`jobs` threads, each of which has one request of `block_bytes` under way; `total_bytes` all together."""

    block_bytes: int
    jobs: int
    total_bytes: int

    @property
    def job_bytes(self) -> int:
        """Of each thread: whole requests, at least one."""
        return max(self.total_bytes // self.jobs // self.block_bytes, 1) * self.block_bytes


def fio_version() -> str:
    """Empty: there is no fio."""
    if shutil.which("fio") is None:
        return ""
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


def fio_bytes_per_s(path: Path, load: Load, *, write: bool) -> float:
    """Sequential, each thread in a stretch of its own of the file, which is there in full after the first write: space
    is allocated before, and every later write overwrites.
    """
    command = [
        "fio", "--name=beside", f"--filename={path}", f"--rw={'write' if write else 'read'}", "--ioengine=psync",
        "--direct=1", "--thread", f"--bs={load.block_bytes}", f"--numjobs={load.jobs}", f"--size={load.job_bytes}",
        f"--offset_increment={load.job_bytes}", f"--filesize={load.job_bytes * load.jobs}", "--fallocate=posix",
        "--overwrite=0", "--allow_file_create=1", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if write else "read"]
    return float(found["io_bytes"] / found["runtime"] * 1e3)
