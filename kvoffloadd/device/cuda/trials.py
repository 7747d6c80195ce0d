"""Records the driver calls that this process may not survive, before they are made.

The daemon can do without calls for many copies at once. Some drivers have one that never ends (vLLM issue 49276), and
one that breaks the process would do so at each start. So a file next to the socket's lock names each way of copying: as
trying before its first use with this driver, as working once that has ended, and as failed if the process has to end
because copies made that way never do. (An error that breaks a context later does not count against a way: GPUs have
many.) A start that finds a way there that does not work copies without it. The way is tried again when the file is
removed, the driver is replaced, or the host is booted (which removes the file in /run). A way that has worked is not
tried again: a daemon that is killed for other reasons meanwhile loses no way.

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
"""How long the end of the process waits for the file."""
_DRIVER = Path("/proc/driver/nvidia/version")


class Way(StrEnum):
    """A way of copying, in addition to a call for each copy, which always works."""

    BATCH = "batch"
    RUNS = "runs"


class _State(StrEnum):
    """Represents the state of a way with the driver's present release. It only advances, in this order."""

    TRYING = "trying"
    WORKS = "works"
    FAILED = "failed"


CALLS = {Way.BATCH: "cuMemcpyBatchAsync", Way.RUNS: "cuMemcpy3DBatchAsync or cuMemcpy2DAsync"}


class Trials:
    """The file at `path`; None: nothing is recorded. `left_out`: the ways that an earlier process did not survive."""

    def __init__(self, path: Path | None = None, driver: Path = _DRIVER) -> None:
        """Reads the file. Blocks."""
        self._path = path
        self._release = _first_line(driver)
        self._lock = threading.Lock()
        self._states: dict[Way, _State] = {} if path is None else dict(_states(path, self._release))
        self.left_out = frozenset(way for way, state in self._states.items() if state is _State.FAILED)
        for way in sorted(self.left_out):
            log.warning(
                "copying without %s: an earlier daemon did not survive it. To try it again, remove %s and restart",
                CALLS[way], path,
            )  # fmt: skip

    def begin(self, way: Way) -> None:
        """Must be called before each use of a way; the first one is recorded. Blocks for a moment."""
        # a record that another thread is writing is waited for
        if self._states.get(way, _State.TRYING) is _State.TRYING:
            self._note(way, _State.TRYING)

    def end(self, way: Way) -> None:
        """Must be called when the copies made in this way have ended, well or not."""
        if self._states.get(way) is _State.TRYING:
            self._note(way, _State.WORKS)

    def blame(self, ways: Iterable[Way]) -> None:
        """Records a way as failed: the process must end because copies made in this way do not. Takes at most
        `WRITE_S`.
        """
        thread = threading.Thread(target=self._blame, args=(list(ways),), name="kvo-blame", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be made: the end of the process is more important
            thread.start()
            thread.join(WRITE_S)

    def _blame(self, ways: list[Way]) -> None:
        for way in ways:
            self._note(way, _State.FAILED)

    def _note(self, way: Way, state: _State) -> None:
        with self._lock:
            order, known = list(_State), self._states.get(way)
            if known is not None and order.index(state) <= order.index(known):
                return
            self._states[way] = state
            if self._path is None:
                return
            try:
                self._write(self._path)
            except OSError as error:
                log.warning("%s can't be written, so a way of copying may be tried again: %s", self._path, error)

    def _write(self, path: Path) -> None:
        new = path.with_name(f"{path.name}.new")
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            file.writelines(f"{way}\t{self._release}\t{state}\n" for way, state in sorted(self._states.items()))
        new.replace(path)


def _states(path: Path, release: str) -> Iterable[tuple[Way, _State]]:
    """Yields the states that a file has for this release of the driver; a way with any state but working has failed."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition("\t")
        by, _, state = rest.partition("\t")
        if by == release and name in CALLS:
            yield Way(name), _State.WORKS if state == _State.WORKS else _State.FAILED


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    except OSError:
        return ""
