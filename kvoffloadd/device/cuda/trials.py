"""What is tried with a GPU's driver that this process may not survive, written down before.

A call for many copies at once is something that the daemon can do without. Drivers are known in which one never ends
(vLLM issue 49276), and one that breaks the process would do so at each start. So a file beside the socket's lock
names each way of copying from before its first use until that has ended, and again if the process has to end because
copies that were made so never do. (An error that breaks a context later is not held against them: GPUs have many.)
A start that finds a way there copies without it. It is tried again when the file is removed, the driver is replaced,
or the host is booted (the file is then gone, in /run).

Ownership: `begin` and `end` are for any thread, and write; `blame` is for the event loop, at the process's end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

log = logging.getLogger(__name__)

WRITE_S = 1.0
"""How long the process's end waits for what is written."""
_DRIVER = Path("/proc/driver/nvidia/version")


class Way(StrEnum):
    """A way of copying, beside the one that always works: a call for each copy."""

    BATCH = "batch"
    RUNS = "runs"


CALLS = {Way.BATCH: "cuMemcpyBatchAsync", Way.RUNS: "cuMemcpy3DBatchAsync or cuMemcpy2DAsync"}


class Trials:
    """The file at `path`; None: nothing is written down. `left_out`: what it named at the start."""

    def __init__(self, path: Path | None = None, driver: Path = _DRIVER) -> None:
        """Blocks."""
        self._path = path
        self._release = _first_line(driver)
        self._lock = threading.Lock()
        self._named: set[Way] = set() if path is None else set(_ways(path, self._release))
        self._survived: set[Way] = set()
        self.left_out = frozenset(self._named)
        for way in sorted(self.left_out):
            log.warning(
                "copying without %s: an earlier daemon did not survive it. To try it again, remove %s and restart",
                CALLS[way], path,
            )  # fmt: skip

    def begin(self, way: Way) -> None:
        """Call before each use of a way; the first one is written down. Blocks for a moment."""
        if way not in self._survived:
            self._name(way, named=True)

    def end(self, way: Way) -> None:
        """Call when what was copied so has ended, well or not."""
        if way not in self._survived:
            self._survived.add(way)
            self._name(way, named=False)

    def blame(self, ways: Iterable[Way]) -> None:
        """The process has to end because copies that were made so do not. Takes at most `WRITE_S`."""
        thread = threading.Thread(target=self._blame, args=(list(ways),), name="kvo-blame", daemon=True)
        with contextlib.suppress(RuntimeError):  # there is no thread: the end of the process is more important
            thread.start()
            thread.join(WRITE_S)

    def _blame(self, ways: list[Way]) -> None:
        for way in ways:
            self._name(way, named=True)

    def _name(self, way: Way, *, named: bool) -> None:
        with self._lock:
            before = set(self._named)
            (self._named.add if named else self._named.discard)(way)
            if self._path is None or self._named == before:
                return
            try:
                self._write(self._path)
            except OSError as error:
                log.warning("%s can't be written, so a way of copying may be tried again: %s", self._path, error)

    def _write(self, path: Path) -> None:
        if not self._named:
            path.unlink(missing_ok=True)
            return
        new = path.with_name(f"{path.name}.new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.writelines(f"{way.value}\t{self._release}\n" for way in sorted(self._named))
        new.replace(path)


def _ways(path: Path, release: str) -> Iterable[Way]:
    """Those that a file names for this release of the driver."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, by = line.partition("\t")
        if by == release and name in CALLS:
            yield Way(name)


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
