"""Runs a real inference engine in a separate process, with a deadline on each request to it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
STOP_S = 30.0
LOG_TAIL = 6000


class EngineError(AssertionError):
    """The engine did not do what it was asked; the message ends with its log."""


class EngineChild:
    """Started by the constructor, which returns when it can be asked.

    `start_s`: how long it may take to start. `program`: a module that ends in
    `enginecommands.main`; `options`: what that is given. `environment`: variables to add to those of this process.
    `python`: the interpreter whose packages it has.
    """

    start_s = 240.0

    def __init__(
        self,
        program: str,
        options: Mapping[str, Any],
        log: Path,
        environment: Mapping[str, str],
        python: str = sys.executable,
    ) -> None:
        self.log_path = log
        answers, theirs = os.pipe()
        with log.open("ab") as stream:
            self.child = subprocess.Popen(
                [python, "-m", program, json.dumps(options), str(theirs)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                pass_fds=(theirs,),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        os.close(theirs)
        self._answers = answers
        self._rest = b""
        try:
            self._answer(self.start_s)
        except EngineError:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- its life ---

    @property
    def alive(self) -> bool:
        return self.child.poll() is None

    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def close(self) -> None:
        """End it in order, with its children; nothing if it has ended."""
        if self.child.stdin is not None:
            with suppress(BrokenPipeError):
                self.child.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(STOP_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, with all processes that it has started: they share its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(STOP_S)
        if self.child.stdin is not None:
            with suppress(BrokenPipeError):
                self.child.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    # --- lines ---

    def _has_answer(self) -> bool:
        """Whether `_answer` would return at once."""
        return b"\n" in self._rest or bool(select.select([self._answers], [], [], 0)[0])

    def _say(self, **command: Any) -> None:
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps(command).encode() + b"\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise EngineError(f"the engine is gone:\n{self.log()[-LOG_TAIL:]}") from None

    def _answer(self, deadline_s: float) -> dict[str, Any]:
        end = time.monotonic() + deadline_s
        while b"\n" not in self._rest:
            if not select.select([self._answers], [], [], max(end - time.monotonic(), 0))[0]:
                raise EngineError(f"no answer within {deadline_s} s:\n{self.log()[-LOG_TAIL:]}")
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise EngineError(f"the engine has ended:\n{self.log()[-LOG_TAIL:]}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{answer['error']}\n{self.log()[-LOG_TAIL:]}")
        return answer
