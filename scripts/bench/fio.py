"""fio, to know what the disk itself can do."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 300.0


def has_fio() -> bool:
    """Whether it is installed."""
    return shutil.which("fio") is not None


@dataclass(frozen=True, slots=True)
class Fio:
    """Sequential reads and writes of `payload_bytes` by `threads` at once, each in its share of one preallocated file,
    past the page cache.
    """

    file: Path
    total_bytes: int
    payload_bytes: int

    def bytes_per_s(self, direction: str, threads: int) -> float:
        """`direction`: read or write. Raises RuntimeError if fio fails."""
        share = self.total_bytes // threads // self.payload_bytes * self.payload_bytes
        command = [
            "fio", "--name=limit", f"--filename={self.file}", f"--rw={direction}", f"--bs={self.payload_bytes}",
            f"--numjobs={threads}", f"--size={share}", f"--offset_increment={share}", "--direct=1",
            "--ioengine=psync", "--thread", "--fallocate=posix", "--group_reporting", "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stderr.strip()[:500]}")
        figures = json.loads(done.stdout[done.stdout.index("{") :])
        return float(figures["jobs"][0][direction]["bw_bytes"])
