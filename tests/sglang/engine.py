"""Runs a real SGLang engine in a separate process, on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.sglang import linker_options, storage_options
from tests.enginechild import ROOT, EngineChild

ANSWER_S = 500.0
OUTPUT_TOKENS = 8
LENGTH = 500
PAGE = 64
COUNT = 8
ALL = [448] * COUNT
"""Cached tokens of prompts of 500 tokens, where each page of 64 was."""
LINKED_TOKENS = 2048
"""In the pools of an engine with a linker: half of them may be under way to the daemon. All prompts need twice that."""
SESSIONS = 3
"""Of a rank with the daemon: for lookups, loads and stores."""

_SHIM = Path(__file__).parent / "shim"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "sglang_models",
    "PYTHONPATH": os.pathsep.join((str(_SHIM), str(ROOT))),
    "SGLANG_DISABLE_FUSED_MAMBA_SLOT_OPS": "1",
    "OMP_NUM_THREADS": "1",
    # Threads that spin while they wait would starve the daemon on a small machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
}
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
_PATIENCE = {"timeout_s": 60.0, "job_deadline_s": 200.0, "prefetch_threshold": PAGE}
"""A slow machine is no reason for a miss."""

VICTIM = "KVOFFLOADD_TEST_VICTIM"
"""For `killing`. Names a file with the pid of the daemon to be killed; the kill removes it."""
REWRITE = "KVOFFLOADD_TEST_REWRITE"
"""For `rewriting`. Folders, with a colon between: files of the first are put into the second."""
OPTIONS = {
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
"""Of SGLang's `Engine`, for all."""

Prompts = list[list[int]]


class StoredRequest(NamedTuple):
    """What became of a prompt. `cached`: tokens of it that were not computed; `stored`: of these, from the storage."""

    tokens: list[int]
    cached: int
    stored: int
    reason: str


class SglangEngine(EngineChild):
    """`options`: of SGLang's `Engine`, in addition to common ones. `storage`: whether its HiCache stores pages."""

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
        given = {"model_path": str(model), **OPTIONS}
        if storage is not None:
            given |= {"hicache_ratio": 1.5, **storage}
        super().__init__("tests.sglang.engineprocess", given | options, log, {**ENVIRONMENT, **(environment or {})})

    def generate(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **given: Any) -> list[StoredRequest]:
        """One after the other, or with `together` all at once, to their ends."""
        self.begin(prompts, max_tokens, **given)
        return self.finish()

    def ask(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **fields: Any) -> list[StoredRequest]:
        """Does what `generate` does, with any other fields of SGLang's requests."""
        self._say(do="ask", prompts=prompts, max_tokens=max_tokens, **fields)
        return self.finish()

    def begin(self, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **given: Any) -> None:
        """Does what `generate` does, without waiting: `finish` does."""
        self._say(do="generate", prompts=prompts, max_tokens=max_tokens, **given)

    def busy(self) -> bool:
        """Has what was begun not ended?"""
        return not self._has_answer()

    def finish(self) -> list[StoredRequest]:
        """What became of what was begun."""
        return [StoredRequest(**request) for request in self._answer(ANSWER_S)["requests"]]

    def start(self, prompts: Mapping[str, list[int]], max_tokens: int = OUTPUT_TOKENS) -> None:
        """Have the engine begin with prompts, by names. They go on while it is asked other things."""
        self.do("start", prompts=list(prompts.values()), names=list(prompts), max_tokens=max_tokens)

    def abort(self, name: str) -> StoredRequest:
        """Give up a prompt that was started: what became of it."""
        return StoredRequest(**self.do("abort", name=name)["requests"][0])

    def end(self, *names: str) -> list[StoredRequest]:
        """What became of prompts that were started, at their ends."""
        return [StoredRequest(**request) for request in self.do("end", names=names)["requests"]]

    def do(self, command: str, **given: Any) -> dict[str, Any]:
        """Any other command, to its end."""
        self._say(do=command, **given)
        return self._answer(ANSWER_S)

    def begin_flush(self) -> None:
        """Does what `flush` does, without waiting: `finish_flush` does."""
        self._say(do="flush", patience_s=ANSWER_S)

    def finish_flush(self) -> bool:
        """Whether it was done."""
        return bool(self._answer(ANSWER_S)["success"])

    def flush(self) -> None:
        """SGLang's own levels of cache are emptied, as soon as it has nothing under way."""
        self.begin_flush()
        assert self.finish_flush()


def stored_at(socket: Path, **options: Any) -> dict[str, Any]:
    """`storage` of an engine. `options`: of our storage, or of SGLang's `Engine` where they begin with `hicache_`."""
    engine = {name: value for name, value in options.items() if name.startswith("hicache_")}
    ours = {name: value for name, value in options.items() if name not in engine}
    return storage_options(socket=str(socket), **(_PATIENCE | ours)) | engine


def linked_to(socket: Path, name: str = "KVOffloaddLinker", module: str = "", **options: Any) -> dict[str, Any]:
    """Returns further arguments of an engine with a linker. `options`: of kvoffloadd's linker."""
    patience = {"timeout_s": 60.0, "job_deadline_s": 200.0}
    given = linker_options(socket=str(socket), **(patience | options))
    config = given["unified_cache_external_linker_config"] | {"linker": name}
    config |= {"linker_module_path": module} if module else {}
    return given | {"unified_cache_external_linker_config": config, "max_total_tokens": LINKED_TOKENS}


def settle(daemon: Daemon) -> None:
    """Waits until what was stored last has arrived: SGLang stores a prompt's pages some time after its answer."""
    seen: list[int] = []

    def is_quiet() -> bool:
        status = daemon.status()
        seen.append(status["cache"]["keys"])
        return status["running"]["jobs"] == 0 and len(seen) > 20 and len(set(seen[-20:])) == 1

    until(is_quiet, "all is stored", 120.0)


def tokens(requests: Sequence[StoredRequest]) -> list[list[int]]:
    """What a round has brought forth; all of it must have come to its end."""
    assert all(request.reason == "length" for request in requests), requests
    return [request.tokens for request in requests]


def cached(requests: Sequence[StoredRequest]) -> list[int]:
    """Returns, for each request, tokens that came from the storage."""
    return [request.stored for request in requests]


def linked(requests: Sequence[StoredRequest]) -> list[int]:
    """Returns, for each request, tokens that were not computed: SGLang does not distinguish a linker's from its own."""
    return [request.cached for request in requests]


class Seat(NamedTuple):
    """How an engine uses a daemon. `options`: of such an engine, for the daemon's socket and options of kvoffloadd's
    adapter; `found`: per request, tokens that it did not compute.
    """

    options: Callable[..., dict[str, Any]]
    found: Callable[[Sequence[StoredRequest]], list[int]]


SEATS = {
    "storage": Seat(lambda socket, **options: {"storage": stored_at(socket, **options)}, cached),
    "linker": Seat(linked_to, linked),
}
