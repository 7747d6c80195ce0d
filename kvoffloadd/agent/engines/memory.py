"""A store for tests: objects are files in a directory, which several agents share. A switch file adds faults at run
time.

Settings: `directory`; `capacity_bytes` (0: any): the oldest objects go first, except kept ones; `faults`: path of the
switch file, see `parse_engine_faults`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat as stat_bits
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from kvoffloadd.agent.engines.base import EngineError, Memory, ObjectTransfer
from kvoffloadd.agent.engines.sidebyside import Readers
from kvoffloadd.agentwire.frames import HEADER_BYTES, Code, Presence
from kvoffloadd.units import parse_seconds

OPERATIONS = ("start", "exists", "get", "put", "read", "write", "renew", "remove", "sweep")
_DELAY = "_delay_s"
_POLL_S = 0.005
_LATE_EVERY_S = 0.002
_STOP_S = 1.0  # within this time all threads have stopped
_READERS = 8
_READ_S = 1.0
_SWEPT = 100  # objects of one step

Faults = dict[str, str | float]


def parse_engine_faults(text: str) -> Faults:
    """Returns faults from lines like "get=hang" and "exists_delay_s=0.5", for the operations of `Engine`.

    For each: `hang` (for as long as the line is there), `raise`, `crash` (SIGSEGV), `stop` (SIGSTOP), or the name of a
    `Code`. For `exists`: `all`, `none`, `unknown`. For `get`: `late` (FAILED, and writing goes on for as long as the
    process lives), `flip` and `flip_header` (one bit), `shorter` and `longer` (the object's size is wrong), `swap`
    (another object's bytes, of the requested ones). For `put`: `lost` (a success without an object). For `read`: any
    fault and a text, only for names that contain this text.
    """
    faults: Faults = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, _, value = (part.strip() for part in line.partition("="))
        if name.removesuffix(_DELAY) not in OPERATIONS:
            raise EngineError(f"faults: unknown {name!r}", fault="operator")
        faults[name] = parse_seconds(value) if name.endswith(_DELAY) else value
    return faults


class MemoryEngine:
    """Behaves like engines with transfers that go on after they are given up."""

    stops_at_once: ClassVar[bool] = False

    def start(self, settings: Mapping[str, Any], memory: Memory) -> None:
        """See `Engine`."""
        self._memory = memory
        self._readers = Readers(_READERS)
        self._directory = Path(str(settings["directory"]))
        self._capacity_bytes = int(settings.get("capacity_bytes", 0))
        self._switch = Path(str(settings["faults"])) if settings.get("faults") else None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EngineError(f"directory: {error}", fault="operator") from error
        if isinstance(code := self._plant("start"), Code):
            raise EngineError(f"planted: {code.name}", fault="store")

    def about(self) -> str:
        """See `Engine`."""
        return f"memory, Python {sys.version.split()[0]}"

    def exists(self, names: Sequence[str]) -> list[int]:
        """See `Engine`."""
        fault = self._plant("exists")
        everywhere = {"all": Presence.YES, "none": Presence.NO, "unknown": Presence.UNKNOWN}.get(str(fault))
        if everywhere is not None:
            return [everywhere] * len(names)
        return [Presence.YES if self._path(name).exists() else Presence.NO for name in names]

    def get(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """See `Engine`."""
        fault = self._plant("get")
        if isinstance(fault, Code):
            return [fault] * len(transfers)
        if fault == "late":
            if not self.stops_at_once:
                threading.Thread(target=self._write_late, args=(transfers,), daemon=True).start()
            return [Code.FAILED] * len(transfers)
        sources = [transfer.name for transfer in transfers]
        if fault == "swap":
            sources = sources[1:] + sources[:1]
        codes = [self._get(name, transfer) for name, transfer in zip(sources, transfers, strict=True)]
        for index, transfer in enumerate(transfers):
            if codes[index] >= 0:
                codes[index] = _spoil(transfer, str(fault))
        return codes

    def put(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """See `Engine`."""
        fault = self._plant("put")
        if isinstance(fault, Code):
            return [fault] * len(transfers)
        if fault == "lost":
            return [transfer.size_bytes for transfer in transfers]
        return [self._put(t.name, [_view(*piece) for piece in t.pieces], if_absent=True) for t in transfers]

    def read(self, names: Sequence[str]) -> list[bytes | int | None]:
        """Reads each name separately, as each may hang."""
        if isinstance(fault := self._plant("read"), Code):
            return [fault] * len(names)
        lots = {name: [name] for name in names}
        found = self._readers.read(lots, lambda lot: [self._read(name) for name in lot], time.monotonic() + _READ_S)
        return [found[name] for name in names]

    def _read(self, name: str) -> bytes | int | None:
        if isinstance(fault := self._plant("read", name), Code):
            return fault
        try:
            return self._path(name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, value: bytes, *, if_absent: bool, kept_s: float | None) -> int:
        """See `Engine`."""
        fault = self._plant("write")
        if isinstance(fault, Code):
            return fault
        return self._put(name, [memoryview(value)], if_absent=if_absent, kept_s=kept_s)

    def renew(self, names: Sequence[str], kept_s: float) -> list[int]:
        """See `Engine`."""
        fault = self._plant("renew")
        if isinstance(fault, Code):
            return [fault] * len(names)
        for path in self._directory.iterdir():
            _remove_if_over(path)
        return [_keep(self._path(name), kept_s) for name in names]

    def remove(self, names: Sequence[str]) -> list[int]:
        """See `Engine`."""
        fault = self._plant("remove")
        if isinstance(fault, Code):
            return [fault] * len(names)
        return [_remove(self._path(name)) for name in names]

    def sweep(self, prefix: str, after: str) -> tuple[int, str]:
        """Removes some at a time, of the present objects."""
        fault = self._plant("sweep")
        if isinstance(fault, Code):
            return fault, ""
        begin = quote(prefix, safe="")
        found = [path for path in self._directory.iterdir() if path.name.startswith(begin)]
        return sum(map(_remove, found[:_SWEPT])), "more" if len(found) > _SWEPT else ""

    def close(self) -> None:
        """See `Engine`."""

    # --- objects ---

    def _path(self, name: str) -> Path:
        """Returns the object's path, after removing an expired object."""
        path = self._directory / quote(name, safe="")
        _remove_if_over(path)
        return path

    def _get(self, name: str, transfer: ObjectTransfer) -> int:
        try:
            with open(self._path(name), "rb") as file:
                if os.fstat(file.fileno()).st_size != transfer.size_bytes:
                    return Code.SIZE
                return os.preadv(file.fileno(), [_view(*piece) for piece in transfer.pieces], 0)
        except FileNotFoundError:
            return Code.MISS

    def _put(self, name: str, pieces: Sequence[memoryview], *, if_absent: bool, kept_s: float | None = None) -> int:
        """Writes a temporary file, then links it: no reader ever sees a part of it."""
        size_bytes = sum(map(len, pieces))
        if self._capacity_bytes and size_bytes > self._capacity_bytes // 4:
            return Code.NO_SPACE
        aside = self._directory / f".{os.getpid()}.{threading.get_native_id()}"
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.writev(fd, pieces)
        finally:
            os.close(fd)
        if kept_s is not None:
            _keep(aside, kept_s)
        path = self._path(name)
        if not if_absent:
            aside.rename(path)
        else:
            try:
                os.link(aside, path)
            except FileExistsError:
                if kept_s is not None:
                    _keep(path, kept_s)
            aside.unlink()
        self._evict()
        return size_bytes

    def _evict(self) -> None:
        if not self._capacity_bytes:
            return
        found = []
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append((path.stat(), path))
        used = sum(stat.st_size for stat, _ in found)
        for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if used <= self._capacity_bytes:
                return
            if not _is_kept(stat) and not path.name.startswith("."):
                _remove(path)
                used -= stat.st_size

    # --- faults ---

    def _plant(self, operation: str, name: str = "") -> Code | str:
        """Waits or ends as the switch file demands; then returns any other fault, or nothing. `name`: the only name
        requested, for faults of certain names.
        """
        began = time.monotonic()
        while True:
            faults = self._faults()
            fault, _, name_part = str(faults.get(operation, "")).partition(" ")
            if bool(name) != bool(name_part) or name_part not in name:
                fault = ""
            late_s = float(faults.get(operation + _DELAY, 0.0)) + began - time.monotonic()
            if fault != "hang" and late_s <= 0:
                break
            time.sleep(_POLL_S)
        if fault == "raise":
            raise RuntimeError("planted")
        if fault in ("crash", "stop"):
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV if fault == "crash" else signal.SIGSTOP)
            time.sleep(_STOP_S)
        return Code[fault] if fault in Code.__members__ else fault

    def _faults(self) -> Faults:
        try:
            return parse_engine_faults(self._switch.read_text(encoding="utf-8")) if self._switch else {}
        except FileNotFoundError:
            return {}

    def _write_late(self, transfers: Sequence[ObjectTransfer]) -> None:
        while True:
            for transfer in transfers:
                self._get(transfer.name, transfer)
            time.sleep(_LATE_EVERY_S)


class StoppingMemoryEngine(MemoryEngine):
    """Behaves like engines with transfers that end when they are given up."""

    stops_at_once: ClassVar[bool] = True


def _is_kept(stat: os.stat_result) -> bool:
    """Returns whether the object is kept: such files are read-only, and their time is the end of being kept."""
    return not stat.st_mode & stat_bits.S_IWUSR


def _keep(path: Path, kept_s: float) -> int:
    """Marks an object as kept. Returns 1, or 0 if it is absent."""
    until_s = time.time() + kept_s
    try:
        os.utime(path, (until_s, until_s))
        path.chmod(stat_bits.S_IRUSR)
    except FileNotFoundError:
        return 0
    return 1


def _remove_if_over(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if _is_kept(stat := path.stat()) and stat.st_mtime < time.time():
            path.unlink()


def _remove(path: Path) -> int:
    try:
        path.unlink()
    except FileNotFoundError:
        return 0
    return 1


def _view(address: int, size_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _spoil(transfer: ObjectTransfer, fault: str) -> int:
    """Returns the answer, after spoiling the received bytes with the fault."""
    if fault == "flip_header":
        _view(*transfer.pieces[0])[HEADER_BYTES // 2] ^= 0x10
    elif fault == "flip":
        _view(*transfer.pieces[-1])[-1] ^= 0x10
    return transfer.size_bytes + {"shorter": -1, "longer": 1}.get(fault, 0)
