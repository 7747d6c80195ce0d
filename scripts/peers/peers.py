"""The systems that are compared, and a session with one of them: a separate process that is asked by a pipe."""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.process import ROOT, private_folder
from kvoffloadd.testing.worker import WorkerProcess
from scripts.peers.system import ModelGeometry, NotOfferedError

ANSWER_S = 300.0
_SHARED_MEMORY = Path("/dev/shm")
_CALM = {"OMP_NUM_THREADS": "{threads}", "GLOG_minloglevel": "1", "DO_NOT_TRACK": "1", "CUDA_VISIBLE_DEVICES": ""}
_LMCACHE = "build/peers-lmcache-venv"
_VLLM = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}


class PeerError(Exception):
    """A system answered with its own error."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`module` and `factory` name what makes its `System` from a `SystemSetting` and `arguments`. `venv`: below the
    repository; none: this Python. `environment`: more variables. `verifiable`: it has checksums, off by default.
    """

    name: str
    title: str
    module: str
    factory: str
    venv: str = ""
    arguments: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    verifiable: bool = False

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return ROOT / self.venv / "bin" / "python" if self.venv else Path(sys.executable)


PEERS = (
    Peer("kvoffloadd", "kvoffloadd", f"{__package__}.kvoffloadd", "Kvoffloadd", verifiable=True),
    Peer("lmcache", "LMCache, engine copies", f"{__package__}.lmcache", "LMCache", _LMCACHE, {"copies": "engine"}),
    Peer("lmcache-server", "LMCache, server copies", f"{__package__}.lmcache", "LMCache", _LMCACHE,
         {"copies": "server"}),
    Peer("vllm", "vLLM tiering", f"{__package__}.vllm", "VLLM", "build/vllm-venv", environment=_VLLM),
    Peer("mooncake", "Mooncake Store", f"{__package__}.mooncake", "Mooncake", "build/peers-mooncake-venv",
         verifiable=True),
)  # fmt: skip


def clean_up(pid: int) -> None:
    """Remove shared memory that an engine's process has left, which systems name by its process id. Some leave theirs
    where they are killed, and LMCache's client where its interpreter does not come to its own end.
    """
    names = re.compile(rf"(lmcache_kv_|bench-peers-|vllm_offload_bench-peers-){pid}(\D|$)")
    for path in _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ():
        if names.match(path.name):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Has the fields of `SystemSetting` that are the same for all systems of a run."""

    memory_bytes: int
    disk_bytes: int
    threads: int
    verified: bool = False


class PeerSession:
    """One system with its own folders, from its start to its end. Calls raise NotOfferedError, PeerError, and
    DaemonError where its process has ended or does not answer.
    """

    def __init__(self, peer: Peer, geometry: ModelGeometry, sizes: Sizes, *, disk: Path | None, on_disk: bool) -> None:
        self._folder = private_folder()
        self._disk: tempfile.TemporaryDirectory[str] | None = disk_folder(disk) if on_disk else None
        options = {
            "module": peer.module,
            "factory": peer.factory,
            "arguments": peer.arguments,
            "geometry": asdict(geometry),
            "folder": self._folder.name,
            "disk": None if self._disk is None else self._disk.name,
            "sizes": asdict(sizes),
        }
        variables = {name: value.format(threads=sizes.threads) for name, value in (_CALM | peer.environment).items()}
        log = Path(self._folder.name) / "child.log"
        self._child = WorkerProcess("scripts.peers.child", options, log, peer.python, variables)
        self._is_lost = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_lost:
            self._child.kill()
            self._child.reap()
        else:
            self._child.end()
        for folder in filter(None, (self._folder, self._disk)):
            folder.cleanup()
        clean_up(self.pid)

    @property
    def pid(self) -> int:
        """Returns the pid of its process."""
        return self._child.pid

    def ask(self, what: str, **given: Any) -> Any:
        """The value of its answer."""
        self._is_lost = True  # until it has answered
        self._child.ask({"do": what, **given})
        answer = self._child.answer(ANSWER_S)
        self._is_lost = False
        if "not_offered" in answer:
            raise NotOfferedError(answer["not_offered"])
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["value"]
