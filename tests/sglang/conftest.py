"""Fixtures of the tests with a real SGLang: `make test-sglang`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from scripts.harness.daemon import Daemon
from tests.sglang.engine import COUNT, LENGTH, SEATS, Prompts, Seat, SglangEngine, tokens
from tests.vllm import models
from tests.vllm.engine import prompts

StartDaemon = Callable[..., Daemon]
StartEngine = Callable[..., SglangEngine]
Reference = Callable[..., list[list[int]]]


@pytest.fixture(scope="session", autouse=True)
def needs_sglang() -> None:
    """Skip unless SGLang is found. It is not imported: engines are separate processes."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed; `make test-sglang` has it")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder for models and logs."""
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def model(folder: Path) -> Callable[[str], Path]:
    """`model(kind)` -> the folder of the model of that kind; the same for all tests."""
    return lambda kind: models.write(kind, folder)


@pytest.fixture
def asked() -> Prompts:
    """8 prompts of 500 tokens: more than SGLang's own two levels hold."""
    return prompts(2, COUNT, LENGTH)


@pytest.fixture(params=SEATS)
def seat(request: pytest.FixtureRequest) -> Seat:
    """Each of the two, one after the other."""
    return SEATS[request.param]


@pytest.fixture(scope="session")
def reference(folder: Path, model: Callable[[str], Path]) -> Reference:
    """`reference(kind, prompts)` -> what an engine without storage answers."""
    answers: dict[str, list[list[int]]] = {}
    logs = (folder / f"reference-{number}.log" for number in count())

    def ask(kind: str, prompts: Prompts) -> list[list[int]]:
        name = repr((kind, prompts))
        if name not in answers:
            with SglangEngine(model(kind), next(logs)) as engine:
                answers[name] = tokens(engine.generate(prompts))
        return answers[name]

    return ask


@pytest.fixture
def start_engine(start_daemon: StartDaemon, tmp_path: Path, model: Callable[[str], Path]) -> Iterator[StartEngine]:
    """`start_engine(kind, storage=..., **options)` -> an engine of the test's own, ended before its daemons are."""
    logs = (tmp_path / f"engine-{number}.log" for number in count())
    with ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(SglangEngine(model(kind), next(logs), **options))
