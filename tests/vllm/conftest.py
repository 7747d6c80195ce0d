"""Fixtures of the tests with a real vLLM: `make test-vllm`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from scripts.harness.daemon import Daemon
from tests.vllm import models
from tests.vllm.engine import COUNT, OUTPUT_TOKENS, Prompts, VllmEngine, prompts, tokens

StartDaemon = Callable[..., Daemon]
StartEngine = Callable[..., VllmEngine]
Reference = Callable[..., list[list[int]]]

TRAITS: Mapping[str, dict[str, Any]] = {
    "dense": {},
    models.OTHER: {},
    "one-head": {},
    "hybrid": {},
    # vLLM's CPU kernels for MLA answer otherwise for several requests at once than for one, with and without connector;
    # they want blocks of 16 tokens. Where the processor has AMX, vLLM prefers others, which take no float32.
    "mla": {"max_num_seqs": 1, "num_gpu_blocks_override": 160, "attention_backend": "CPU_MLA"},
    # bfloat16, as vLLM's CPU kernel wants it; and other batches, other last bits, as with MLA. Only with AVX-512 BF16
    # does vLLM keep states in float32 unasked, and the size of states decides that of blocks.
    "linear": {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "max_num_seqs": 1},
    "packs": {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "max_num_seqs": 1},
    "conv": {"max_num_seqs": 1},
}
"""Options that a kind of model needs."""


@pytest.fixture(scope="session", autouse=True)
def needs_vllm() -> None:
    """Skip unless vLLM is found. It is not imported: engines are separate processes."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; `make test-vllm` has it")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder for models and logs."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(folder: Path) -> Callable[[str], Path]:
    """`model(kind)` -> the folder of the model of that kind; the same for all tests."""
    return lambda kind: models.write(kind, folder)


@pytest.fixture
def asked() -> Prompts:
    """12 prompts of 501 tokens."""
    return prompts(2, COUNT)


@pytest.fixture(scope="session")
def reference(folder: Path, model: Callable[[str], Path]) -> Iterator[Reference]:
    """`reference(kind, prompts, max_tokens=8, **options)` -> what an engine without connector answers."""
    answers: dict[str, list[list[int]]] = {}
    logs = (folder / f"reference-{number}.log" for number in count())
    engines: dict[str, VllmEngine] = {}  # the last one alone: more would take memory, and spin when the machine stalls
    with ExitStack() as running:

        def ask(kind: str, prompts: Prompts, max_tokens: int = OUTPUT_TOKENS, **options: Any) -> list[list[int]]:
            name = repr((kind, sorted(options.items())))
            asked = repr((name, max_tokens, prompts))
            if asked not in answers:
                if name not in engines:
                    engines.clear()
                    running.close()
                    engines[name] = running.enter_context(
                        VllmEngine(model(kind), next(logs), **{**TRAITS[kind], **options})
                    )
                answers[asked] = tokens(engines[name].generate(prompts, max_tokens))
            return answers[asked]

        yield ask


@pytest.fixture
def start_engine(start_daemon: StartDaemon, tmp_path: Path, model: Callable[[str], Path]) -> Iterator[StartEngine]:
    """`start_engine(kind, connector=..., **options)` -> an engine of the test's own, ended before its daemons are."""
    started: list[VllmEngine] = []
    with ExitStack() as stack:

        def start(kind: str, **options: Any) -> VllmEngine:
            log = tmp_path / f"engine-{len(started)}.log"
            started.append(stack.enter_context(VllmEngine(model(kind), log, **{**TRAITS[kind], **options})))
            return started[-1]

        yield start
