"""The other end of `worker.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvoffloadd.testing.worker import WorkerProcess
from scripts.harness.gpumemory import Rows

START_S, ANSWER_S = 45.0, 45.0


class WorkerError(Exception):
    """A command failed: "Class: message" of the worker's exception."""


class GpuWorker:
    """A worker process. `variables`: of its environment, set before anything of CUDA is loaded. `uid` 0: this user."""

    def __init__(self, socket: Path, log: Path, *, variables: Mapping[str, str] | None = None, uid: int = 0) -> None:
        options = {"socket": str(socket), "variables": dict(variables or {}), "uid": uid}
        self._child = WorkerProcess("scripts.gpu.worker", options, log)
        self._child.answer(START_S)

    def call(self, name: str, **arguments: Any) -> Any:
        """A method of `worker.Worker`. Raises WorkerError; DaemonError: it does not answer."""
        self._child.ask({"call": name, **arguments})
        answer = self._child.answer(ANSWER_S)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def begin(self, kind: str, size_bytes: int, tensors: Sequence[Rows], **options: Any) -> None:
        """Memory, and a connection."""
        self.call("begin", kind=kind, size_bytes=size_bytes, tensors=[list(one) for one in tensors], **options)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._child.kill()
        self._child.reap()

    close = kill

    def end(self) -> int:
        """Ends the worker in order, and returns its exit status."""
        return self._child.end()
