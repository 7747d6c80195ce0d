"""Engines of `bench_serving` as child processes, and who sends requests to a pair of them, as a router does."""

from __future__ import annotations

import itertools
import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from kvoffloadd.testing.process import DaemonError, module, spawn, tail
from scripts.vllm import ENVIRONMENT
from scripts.vllm.serving.engine import Answered, Asked, EngineOptions
from scripts.vllm.serving.figures import RequestSample

START_S = 400.0
ANSWER_S = 300.0
STOP_S = 30.0

_ENVIRONMENT = {
    **ENVIRONMENT,
    "OMP_NUM_THREADS": "1",  # a core for each engine, of a machine that has two
    # Threads that spin while they wait would starve the daemon on a small machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}
_PREFILL = {"do_remote_decode": True}
_TOLD = "remote_prefill_cached_tokens"
"""vLLM reports that as what the second engine had cached, in place of what it had."""

Prompt = list[int]


class EngineProcess:
    """Launched by the constructor, which does not wait. As a context it ends with it."""

    def __init__(self, folder: Path, name: str, options: EngineOptions) -> None:
        self._name, self._log = name, folder / f"{name}.log"
        command = module("scripts.vllm.serving.engine", json.dumps(asdict(options)))
        environment = {**_ENVIRONMENT, "TMPDIR": str(folder)}
        self._child = spawn(command, self._log, stdin=subprocess.PIPE, stdout=subprocess.PIPE, environment=environment)
        if self._child.stdin is None or self._child.stdout is None:
            raise DaemonError(f"the engine {name} has no pipes")
        self._requests, self._answers = self._child.stdin.fileno(), self._child.stdout.fileno()
        self._rest = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def fileno(self) -> int:
        """Readable when `answers` returns at once."""
        return self._answers

    def await_start(self) -> None:
        """Waits until it can be asked. Raises DaemonError."""
        await_any([self], START_S)
        self._lines()

    def ask(self, request: Asked) -> float:
        """Returns when that was. Raises DaemonError."""
        line = json.dumps(asdict(request)).encode() + b"\n"
        now_s = time.monotonic()
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except BrokenPipeError:
            raise self.failed("is gone") from None
        return now_s

    def answers(self) -> list[Answered]:
        """What has been answered; waits if nothing has. Raises DaemonError."""
        return [Answered(**json.loads(line)) for line in self._lines()]

    def failed(self, what: str) -> DaemonError:
        """Makes an error for the caller to raise."""
        return DaemonError(f"the engine {self._name} {what}:\n{tail(self._log)}")

    def _lines(self) -> list[bytes]:
        more = os.read(self._answers, 1 << 20)
        if not more:
            raise self.failed("has ended")
        *lines, self._rest = (self._rest + more).split(b"\n")
        return lines


def await_any(engines: Sequence[EngineProcess], deadline_s: float) -> list[EngineProcess]:
    """Those that have answered something. Raises DaemonError at the deadline."""
    ready: list[EngineProcess] = select.select(engines, [], [], deadline_s)[0]
    if not ready:
        raise engines[0].failed(f"has not answered within {deadline_s:.0f} s")
    return ready


@dataclass(slots=True)
class _Open:
    """A request on its way. `asked_s`: when the decode engine was."""

    number: int
    begun_s: float
    asked_s: float
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A decode engine, and the prefill engine before it; None: the decode engine computes prompts itself."""

    decode: EngineProcess
    prefill: EngineProcess | None

    def serve(self, prompts: Sequence[Prompt], answer_tokens: int, salt: str, clients: int) -> list[RequestSample]:
        """Each client sends a request when it has the answer to its last one. In the order of the prompts.

        Raises DaemonError.
        """
        engines = [engine for engine in (self.decode, self.prefill) if engine is not None]
        todo = iter(enumerate(prompts))
        flying = {str(number): self._begin(number, prompt, answer_tokens, salt)
                  for number, prompt in itertools.islice(todo, clients)}  # fmt: skip
        done: dict[int, RequestSample] = {}
        while flying:
            for engine in await_any(engines, ANSWER_S):
                for answered in engine.answers():
                    one = flying[answered.name]
                    if engine is self.prefill:
                        one.prefill_s = answered.end_s - one.begun_s
                        params = {word: value for word, value in (answered.params or {}).items() if word != _TOLD}
                        request = Asked(answered.name, prompts[one.number], answer_tokens, salt, params)
                        one.asked_s = self.decode.ask(request)
                        continue
                    done[one.number] = _sample(one, answered)
                    del flying[answered.name]
                    for number, prompt in itertools.islice(todo, 1):
                        flying[str(number)] = self._begin(number, prompt, answer_tokens, salt)
        return [done[number] for number in range(len(prompts))]

    def _begin(self, number: int, prompt: Prompt, answer_tokens: int, salt: str) -> _Open:
        if self.prefill is None:
            now_s = self.decode.ask(Asked(str(number), prompt, answer_tokens, salt, None))
        else:
            now_s = self.prefill.ask(Asked(str(number), prompt, 1, salt, _PREFILL))
        return _Open(number, begun_s=now_s, asked_s=now_s)


def _sample(one: _Open, answered: Answered) -> RequestSample:
    return RequestSample(
        ttft_s=answered.first_s - one.asked_s,
        whole_s=answered.first_s - one.begun_s,
        prefill_s=one.prefill_s,
        token_s=(answered.end_s - answered.first_s) / (len(answered.tokens) - 1),
        cached=answered.cached,
        answer=tuple(answered.tokens),
    )
