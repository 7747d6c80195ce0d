"""An engine of `bench_serving`, in a separate process, which serves requests as they come.

Usage: `-m scripts.vllm.serving.engine OPTIONS`, JSON of `EngineOptions`. It reads one `Asked` a line from standard
input, until its end, and writes one `Answered` a line to standard output, after an empty line when it can be asked.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, TextIO

_YIELD_S = 0.001


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`engine`: of `vllm.LLM`. `connector`: `kv_transfer_config`; None: the engine has no connector."""

    engine: dict[str, Any]
    connector: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Asked:
    """`salt`: prompts of another salt are other prompts for every cache. `params`: `kv_transfer_params`."""

    name: str
    prompt: list[int]
    max_tokens: int
    salt: str
    params: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Answered:
    """Times are of the clock that all processes have (`time.monotonic`). `cached`: prompt tokens that were not
    computed. `params`: what the engine that goes on must get.
    """

    name: str
    first_s: float
    end_s: float
    tokens: list[int]
    cached: int
    params: dict[str, Any] | None


class Served:
    """The engine, and the loop that steps it."""

    def __init__(self, options: EngineOptions, source: TextIO, answers: TextIO) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._params = SamplingParams
        connector = None if options.connector is None else KVTransferConfig(**options.connector)
        self._engine = LLM(kv_transfer_config=connector, **options.engine).llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._has_executed = False
        self._post_step = core.post_step
        core.post_step = self._note_step
        self._firsts: dict[str, float] = {}
        self._asked: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._source, self._answers = source, answers
        threading.Thread(target=self._read, name="asked", daemon=True).start()

    def run(self) -> None:
        """Runs until no more requests come."""
        self._answers.write("\n")
        self._answers.flush()
        while True:
            while not self._asked.empty() or not self._scheduler.has_requests():
                request = self._asked.get()
                if request is None:
                    self._engine.engine_core.shutdown()
                    return
                self._add(request)
            self._step()

    def _read(self) -> None:
        for line in self._source:
            self._asked.put(Asked(**json.loads(line)))
        self._asked.put(None)

    def _add(self, request: Asked) -> None:
        extra = None if request.params is None else {"kv_transfer_params": request.params}
        params = self._params(
            temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, extra_args=extra
        )
        prompt = {"prompt_token_ids": request.prompt, "cache_salt": request.salt}
        self._engine.add_request(request.name, prompt, params)

    def _step(self) -> None:
        outputs = self._engine.step()
        now_s = time.monotonic()
        for output in outputs:
            (completion,) = output.outputs
            first_s = self._firsts.setdefault(output.request_id, now_s)
            if output.finished:
                del self._firsts[output.request_id]
                tokens, cached = list(completion.token_ids), output.num_cached_tokens or 0
                answered = Answered(output.request_id, first_s, now_s, tokens, cached, output.kv_transfer_params)
                self._answers.write(json.dumps(asdict(answered)) + "\n")
                self._answers.flush()
        if not self._has_executed and self._scheduler.has_requests():
            time.sleep(_YIELD_S)  # as vLLM does in a separate engine process, for the threads of connectors

    def _note_step(self, model_executed: bool) -> None:
        self._has_executed = model_executed
        self._post_step(model_executed=model_executed)


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)  # for what libraries print
        Served(EngineOptions(**json.loads(sys.argv[1])), sys.stdin, stream).run()
    # Not by way of the interpreter: threads of torch and of vLLM can hang there.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
