"""Which vLLM is taken, and which engines may sleep."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm import versions
from kvoffloadd.integrations.vllm.versions import refuse_sleep


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.parametrize(("version", "tells"), [("0.32.0+cpu", False), ("0.33.0", True), ("0.33.1rc1", True)])
def test_a_known_release(monkeypatch: pytest.MonkeyPatch, version: str, tells: bool) -> None:
    install(monkeypatch, version)
    assert versions.check().number == versions.release(version)
    assert versions.version() == version
    assert versions.check().tells_of_sleep is tells


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3", "1.33.0", "dev"])
def test_an_unknown_release_is_told_which_are_known(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(ImportError, match=rf"0\.32\.x, 0\.33\.x; installed is {version}"):
        versions.check()


def engine(**options: bool) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"enable_sleep_mode": False, "enable_cumem_allocator": False, **options})
    )


def test_an_engine_that_could_sleep_is_refused() -> None:
    refuse_sleep(engine(), "why")
    with pytest.raises(UsageError, match=r"--enable-sleep-mode.*: why"):
        refuse_sleep(engine(enable_sleep_mode=True, enable_cumem_allocator=True), "why")
    with pytest.raises(UsageError, match="--enable-cumem-allocator"):
        refuse_sleep(engine(enable_cumem_allocator=True), "why")
