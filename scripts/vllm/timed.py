"""An engine of `bench_vllm`, in a separate process: prompts one after the other, and the time that its scheduler
spends in the connector for each.

Usage: `-m scripts.vllm.timed OPTIONS RESULT`, JSON of `TimedOptions` and the file that a list of `ConnectorSample` goes
to.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 512
_FIRST_TOKEN = 3
_BESIDE_TOKENS = 4
_ANSWER_TOKENS = 2
_STEPS_MAX = 5000
_SETTLE_S = 60.0
_WHOLE = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "has_pending_push_work",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "get_kv_connector_stats",
)
"""What vLLM's scheduler calls of a connector."""


@dataclass(frozen=True, slots=True)
class TimedOptions:
    """`engine`: of `vllm.LLM`. `connector`: `kv_transfer_config`. `fresh`: prompts that were not asked before.
    `again`: how often one of the last `rotation` of them is asked once more. `socket`: of the daemon, if there is one.
    """

    engine: dict[str, Any]
    connector: dict[str, Any]
    tokens: int
    step_s: float
    fresh: int
    again: int
    rotation: int
    seed: int
    socket: str = ""


@dataclass(slots=True)
class ConnectorSample:
    """Holds the times of one request, in seconds; `answer_s`: from the first lookup to the answer.

    `connector_s` is all of the connector's scheduler side, the four before it included; `processor_s` what that took of
    the processor: without waits for the interpreter's lock, or for a processor that others use.
    """

    fresh: bool
    lookups: int = 0
    lookup_s: float = 0.0
    step_end_s: float = 0.0
    alloc_s: float = 0.0
    prepare_store_s: float = 0.0
    connector_s: float = 0.0
    processor_s: float = 0.0
    answer_s: float = 0.0
    hit_tokens: int = 0


@dataclass(slots=True, eq=False)
class ConnectorTimer:
    """Adds up what is called while a request is the one measured."""

    name: str = ""
    sample: ConnectorSample | None = None
    _asked_at: float = 0.0
    _depth: int = 0

    def begin(self, name: str, sample: ConnectorSample) -> None:
        """Begins to measure."""
        self.name, self.sample, self._asked_at = name, sample, 0.0

    def add(self, owner: Any, method: str, figure: str) -> None:
        """Let the calls of `owner.method` count for that figure."""
        inner = getattr(owner, method)

        def call(*arguments: Any, **named: Any) -> Any:
            begun = time.perf_counter()
            try:
                return inner(*arguments, **named)
            finally:
                if self.sample is not None:
                    spent = time.perf_counter() - begun
                    setattr(self.sample, figure, getattr(self.sample, figure) + spent)

        setattr(owner, method, call)

    def add_whole(self, owner: Any, method: str) -> None:
        """Does what `add` does, for calls that may call one another: the outermost counts."""
        inner = getattr(owner, method)

        def call(*arguments: Any, **named: Any) -> Any:
            self._depth += 1
            begun, begun_thread = time.perf_counter(), time.thread_time()
            try:
                return inner(*arguments, **named)
            finally:
                self._depth -= 1
                if self.sample is not None and not self._depth:
                    self.sample.connector_s += time.perf_counter() - begun
                    self.sample.processor_s += time.thread_time() - begun_thread

        setattr(owner, method, call)

    def add_lookups(self, owner: Any) -> None:
        """Adds the lookups of the measured request alone."""
        inner = owner.get_num_new_matched_tokens

        def call(request: Any, num_computed_tokens: int) -> Any:
            sample = self.sample
            if sample is None or not request.request_id.startswith(self.name):
                return inner(request, num_computed_tokens)
            if num_computed_tokens:
                raise SystemExit("the engine's own cache had the prompt")
            begun = time.perf_counter()
            found = inner(request, num_computed_tokens)
            ended = time.perf_counter()
            self._asked_at = self._asked_at or begun
            sample.lookups += 1
            sample.lookup_s += ended - begun
            if found[0] is not None:
                sample.answer_s, sample.hit_tokens = ended - self._asked_at, found[0]
            return found

        owner.get_num_new_matched_tokens = call


class Timed:
    """The engine, with another request that decodes, so that there is something to do in every step."""

    def __init__(self, options: TimedOptions) -> None:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._params = SamplingParams
        llm = LLM(kv_transfer_config=KVTransferConfig(**options.connector), **options.engine)
        self._engine = llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._connector = core.scheduler.connector
        self._options = options
        self._rng = random.Random(options.seed)
        self.clock = ConnectorTimer()
        self._has_work = self._connector.has_pending_push_work
        manager = self._connector.connector_scheduler.manager
        self.clock.add_lookups(self._connector)
        self.clock.add(self._connector, "update_state_after_alloc", "alloc_s")
        self.clock.add(manager, "on_schedule_end", "step_end_s")
        self.clock.add(manager, "prepare_store", "prepare_store_s")
        for method in _WHOLE:
            self.clock.add_whole(self._connector, method)
        _last(core.model_executor, "execute_model", options.step_s)
        _without_attention()
        self._asked = 0

    def prompt(self) -> list[int]:
        """A new one."""
        return [self._rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(self._options.tokens)]

    def ask(self, prompt: list[int], *, fresh: bool) -> ConnectorSample:
        """Asks a prompt to its end, and until the connector is done with it."""
        beside = self._add([self._rng.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(_BESIDE_TOKENS)], 20_000)
        self._steps_until(lambda ended: True)
        sample = ConnectorSample(fresh)
        name = self._add(prompt, _ANSWER_TOKENS)
        self.clock.begin(name, sample)
        self._steps_until(lambda ended: name in ended)
        until = time.monotonic() + _SETTLE_S
        for _ in range(2):  # what a step has computed is sent with the next one
            self._steps_until(lambda ended: not self._has_work() or time.monotonic() > until)
        self.clock.sample = None
        self._engine.abort_request([beside])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return sample

    def _add(self, prompt: list[int], answer: int) -> str:
        self._asked += 1
        name = f"r{self._asked}-"
        params = self._params(temperature=0.0, max_tokens=answer, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _steps_until(self, is_done: Callable[[set[str]], bool]) -> None:
        for _ in range(_STEPS_MAX):
            ended = {output.request_id for output in self._engine.step() if output.finished}
            if is_done(ended):
                return
        raise SystemExit("the engine does not come to an end")


def _last(owner: Any, method: str, seconds: float) -> None:
    """A step takes at least so long, without the interpreter's lock, as it does where a GPU is waited for."""
    inner = getattr(owner, method)

    def call(*arguments: Any, **named: Any) -> Any:
        until = time.monotonic() + seconds
        found = inner(*arguments, **named)
        time.sleep(max(until - time.monotonic(), 0))
        return found

    setattr(owner, method, call)


def _without_attention() -> None:
    """What a model answers is not asked here, and attention over 32k tokens takes a CPU seconds."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    def forward(*arguments: Any, output: Any = None, **named: Any) -> Any:
        found = output if output is not None else arguments[7]
        return found.zero_()

    CPUAttentionBackendImpl.forward = forward


def _settled(socket: str) -> None:
    """Waits until the daemon has written to disk all that it will."""
    from kvoffloadd.client import Client

    with Client(socket, namespace=None, role="observer") as observer:
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until:
            status = observer.status()
            disk = status["disk"]
            if not (status["cache"]["unsealed"] or disk["backlog_bytes"] or any(r["writing"] for r in disk["roots"])):
                return
            time.sleep(0.05)


def measure(options: TimedOptions) -> list[ConnectorSample]:
    """Fresh prompts, then the last of them again and again."""
    engine = Timed(options)
    prompts: list[list[int]] = []
    samples = []
    for _ in range(options.fresh):
        prompts.append(engine.prompt())
        samples.append(engine.ask(prompts[-1], fresh=True))
        if options.socket:
            _settled(options.socket)
    prompts = prompts[-options.rotation :]
    samples += [engine.ask(prompts[number % len(prompts)], fresh=False) for number in range(options.again)]
    return samples


if __name__ == "__main__":
    found = measure(TimedOptions(**json.loads(sys.argv[1])))
    Path(sys.argv[2]).write_text(json.dumps([asdict(sample) for sample in found]), encoding="utf-8")
    # Not by way of the interpreter: threads of torch and of vLLM can hang there.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
