"""A real SGLang engine in a process of its own, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.harness.daemon import Daemon
from scripts.harness.wait import until
from scripts.sglang import storage_options
from tests.enginechild import ROOT, EngineChild

ANSWER_S = 500.0
OUTPUT_TOKENS = 8
LENGTH = 500
PAGE = 64
COUNT = 8
ALL = [448] * COUNT
"""Cached tokens of prompts of 500 tokens, where each page of 64 was."""
SESSIONS = 3
"""Of a rank with the daemon: for lookups, loads and stores."""

_SHIM = Path(__file__).parent / "shim"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_models",
    "PYTHONPATH": os.pathsep.join((str(_SHIM), str(ROOT))),
    "OMP_NUM_THREADS": "1",
    # Threads that spin while they wait would starve the daemon on a small machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
_PATIENCE = {"timeout_s": 60.0, "job_deadline_s": 200.0, "prefetch_threshold": PAGE}
"""A slow machine is no reason for a miss."""

Prompts = list[list[int]]


class Request(NamedTuple):
    """What became of a prompt. `cached`: tokens of it that were not computed; `stored`: of these, from the storage."""

    tokens: list[int]
    cached: int
    stored: int
    reason: str


class Engine(EngineChild):
    """`options`: of SGLang's `Engine`, beside those that all have. `storage`: whether its HiCache stores pages."""

    start_s = 600.0

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        storage: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        given = {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "disable_cuda_graph": True,
            "max_total_tokens": 1536,
            "context_length": 1024,
            "dtype": "float32",  # with fewer bits, the order of sums decides between tokens that are nearly equal
            "page_size": PAGE,
            "mem_fraction_static": 0.1,
            "max_running_requests": 2,
            "random_seed": 0,
            "log_level": "info",
        }
        if storage is not None:
            given |= {"hicache_ratio": 1.5, **storage}
        super().__init__("tests.sglang.engineprocess", given | options, log, {**_ENVIRONMENT, **(environment or {})})

    def generate(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **given: Any) -> list[Request]:
        """One after the other, or with `together` all at once, to their ends."""
        self.begin(prompts, max_tokens, **given)
        return self.finish()

    def begin(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **given: Any) -> None:
        """As `generate`, without waiting: `finish` does."""
        self._say(do="generate", prompts=prompts, max_tokens=max_tokens, **given)

    def busy(self) -> bool:
        """Has what was begun not ended?"""
        return not self._has_answer()

    def finish(self) -> list[Request]:
        """What became of what was begun."""
        return [Request(**request) for request in self._answer(ANSWER_S)["requests"]]

    def do(self, command: str, **given: Any) -> dict[str, Any]:
        """Any other command, to its end."""
        self._say(do=command, **given)
        return self._answer(ANSWER_S)

    def flush(self) -> None:
        """SGLang's own levels of cache are emptied, as soon as it has nothing under way: until then it refuses."""
        until(lambda: self.do("flush")["success"], "SGLang is idle")


def stored_at(socket: Path, **options: Any) -> dict[str, Any]:
    """`storage` of an engine. `options`: of our storage, or of SGLang's `Engine` where they begin with `hicache_`."""
    engine = {name: value for name, value in options.items() if name.startswith("hicache_")}
    ours = {name: value for name, value in options.items() if name not in engine}
    return storage_options(socket=str(socket), **(_PATIENCE | ours)) | engine


def settle(daemon: Daemon) -> None:
    """Until what was stored last has arrived: SGLang stores a prompt's pages some time after its answer."""
    seen: list[int] = []

    def is_quiet() -> bool:
        status = daemon.status()
        seen.append(status["cache"]["keys"])
        return status["running"]["jobs"] == 0 and len(seen) > 20 and len(set(seen[-20:])) == 1

    until(is_quiet, "all is stored", 120.0)


def tokens(requests: Sequence[Request]) -> list[list[int]]:
    """What a round has brought forth; all of it must have come to its end."""
    assert all(request.reason == "length" for request in requests), requests
    return [request.tokens for request in requests]


def cached(requests: Sequence[Request]) -> list[int]:
    """Per request, tokens that came from the storage."""
    return [request.stored for request in requests]
