"""Runs a real vLLM engine in a separate process, with a deadline on each request to it."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvoffloadd.client import ClaimFigures, Client
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.vllm import ENVIRONMENT, transfer_config
from tests.enginechild import EngineChild
from tests.vllm.models import VOCABULARY

ANSWER_S = 400.0
OUTPUT_TOKENS = 8
COUNT = 12
ALL = [480] * COUNT
"""Cached tokens of prompts of 501 tokens, where every chunk of 32 was."""
MULTIPROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_RANKS = {**MULTIPROCESS, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Environments of engines whose scheduler and ranks have processes of their own."""
CONNECTED = "vllm:kvoffloadd_connected"

Prompts = list[list[int]]

_ENVIRONMENT = {
    **ENVIRONMENT,
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for functions that ranks of other processes call
    # Threads that spin while they wait would starve the daemon on a small machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}
_PATIENCE = {"timeout_s": 200.0, "wait_s": 60.0, "job_deadline_s": 200.0}
"""A slow machine is no reason for a miss."""


class Request(NamedTuple):
    """What became of a prompt. `cached`: tokens of it that were not computed; None: it was not begun."""

    tokens: list[int]
    cached: int | None
    reason: str


class VllmEngine(EngineChild):
    """Started by the constructor, which returns when it can be asked.

    `options`: of `vllm.LLM`, in addition to common ones. `connector`: a `KVTransferConfig` as a map. `python`: of a
    venv that has vLLM.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        **options: Any,
    ) -> None:
        given = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 640,
            "dtype": "float32",  # with fewer bits, the order of sums decides between tokens that are nearly equal
            "block_size": 32,
            "num_gpu_blocks_override": 80,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
            "connector": connector,
        } | options
        super().__init__("tests.vllm.engineprocess", given, log, {**_ENVIRONMENT, **(environment or {})}, python)

    # --- what may be asked ---

    def generate(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **given: Any) -> list[Request]:
        """All at once, to their ends. `given`: `salt`, `params` (`kv_transfer_params`), `hints` (actions of an
        envelope) and `adapter` of all, and `load_after`, the steps after which that is loaded in place.
        """
        self.begin(prompts, max_tokens, **given)
        return self.finish()

    def generate_anew(self, prompts: Prompts, **given: Any) -> list[Request]:
        """Does what `generate` does, after emptying the engine's own prefix cache: what is cached
        then, the daemon had.
        """
        self.reset(connector=False)
        return self.generate(prompts, **given)

    def begin(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **given: Any) -> None:
        """Does what `generate` does, without waiting: `finish` does."""
        self._say(do="generate", prompts=prompts, max_tokens=max_tokens, **given)

    def busy(self) -> bool:
        """Has what was begun not ended?"""
        return not self._has_answer()

    def finish(self) -> list[Request]:
        """What became of what was begun."""
        return _requests(self._answer(ANSWER_S))

    def abort(self, prompts: Prompts, after_steps: int, max_tokens: int = OUTPUT_TOKENS) -> list[Request]:
        """Does what `generate` does, but aborts every second request after `after_steps` steps."""
        self._say(do="abort", prompts=prompts, max_tokens=max_tokens, after_steps=after_steps)
        return _requests(self._answer(ANSWER_S))

    def reset(self, *, connector: bool) -> None:
        """The engine's own prefix cache, and with `connector` what the connector has."""
        self._say(do="reset", connector=connector)
        assert self._answer(ANSWER_S)["done"]

    def metrics(self) -> dict[str, float]:
        """Counters of vLLM, by name."""
        self._say(do="metrics")
        return self._answer(ANSWER_S)

    def await_transfers(self) -> None:
        """Waits until each rank has heard the end of all that it was asked to store and load."""
        self._say(do="await_transfers")
        self._answer(ANSWER_S)

    def await_connection(self) -> None:
        """Waits until the scheduler knows that the daemon is there: what it computes before that, it does not have
        stored. With vLLM's own offloading connector there is nothing to ask.
        """

        def is_connected() -> bool:
            self.generate(prompts(0, 1, 5))
            return self.metrics().get(CONNECTED, 1) == 1

        until(is_connected, "the scheduler is connected", ANSWER_S)

    def kill_before_load(self, pid: int) -> None:
        """SIGKILL a process when the next load has been promised and is about to be asked for."""
        self._say(do="kill_before_load", pid=pid)
        self._answer(ANSWER_S)

    def damage_loads(self, pid: int, which: str) -> None:
        """Makes the first load of each prompt from now on find one of its keys damaged in the memory of that daemon."""
        self._say(do="damage_loads", pid=pid, which=which)
        self._answer(ANSWER_S)


def _requests(answer: dict[str, Any]) -> list[Request]:
    return [Request(**request) for request in answer["requests"]]


def settle(daemon: Daemon, engine: VllmEngine) -> None:
    """What was stored last is sent with the next step; wait until it has arrived. Ranks may not even have begun while
    the daemon has no job.
    """
    engine.generate(prompts(0, 1, 33))
    engine.await_transfers()
    until(lambda: daemon.status()["running"]["jobs"] == 0, "all is stored", 60.0)


def claims(daemon: Daemon) -> list[ClaimFigures]:
    """All that are in force, the oldest first."""
    with Client(daemon.socket, namespace=None, role="observer") as observer:
        return observer.claims()


def prompts(seed: int, count: int = 12, length: int = 501) -> Prompts:
    """Random ones, equal for equal seeds."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]


def tokens(requests: Sequence[Request]) -> list[list[int]]:
    """What a round has brought forth; all of it must have come to its end."""
    assert all(request.reason == "length" for request in requests), requests
    return [request.tokens for request in requests]


def cached(requests: Sequence[Request]) -> list[int | None]:
    """Returns, for each request, tokens that were not computed."""
    return [request.cached for request in requests]


def by_spec(socket: Path, chunk: int = 32, **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config`: vLLM's own connector with our spec."""
    return transfer_config("spec", socket=str(socket), block_size=chunk, **_PATIENCE, **extra)


def by_connector(socket: Path, chunk: int = 32, **extra: Any) -> dict[str, Any]:
    """`kv_transfer_config`: our connector, which outlives the daemon."""
    return transfer_config("connector", socket=str(socket), block_size=chunk, **_PATIENCE, **extra)


def by_chunks(socket: Path, blocks: int) -> dict[str, Any]:
    """Does what `by_connector` does, with chunks of `blocks` blocks, whatever tokens these hold in each group."""
    config = by_connector(socket, blocks_per_chunk=blocks)
    del config["kv_connector_extra_config"]["block_size"]
    return config


ROUTES = {"spec": by_spec, "connector": by_connector}
