"""SGLang's entry point for plug-ins: in each of its processes, harmless where there is nothing to do."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integrations.sglang.fakesglang import ADAPTER, HookType

ROOT = Path(__file__).parents[3]


def plugin() -> SimpleNamespace:
    found: SimpleNamespace = importlib.import_module(f"{ADAPTER}.plugin")  # type: ignore[assignment]
    return found


def test_the_package_names_it() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = package["entry-points"]["sglang.srt.plugins"]["kvoffloadd"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_weights_are_watched_from_before_they_are_loaded(sglang: SimpleNamespace) -> None:
    plugin().install()
    ((target, hook, kind),) = sglang.registry.hooks
    assert (target, kind) == ("sglang.srt.managers.scheduler.Scheduler.__init__", HookType.BEFORE)
    weights = importlib.import_module(f"{ADAPTER}.weights").WEIGHTS
    assert hook(object(), "arguments") is None, "it leaves them as they are"
    hook(object())
    told: list[str] = []
    follower = SimpleFollower(told)
    weights.follow(follower)
    sglang.updater().update_weights_from_disk()
    assert told == ["suspend"], "once, however often it was asked to watch"
    sglang.tree().reset()
    assert told == ["suspend", "renew", "clear"]


@pytest.mark.parametrize(
    "change",
    [
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
        "receive_weights_from_distributed",
        "load_weights_from_distributed",
        "begin_weight_update",
    ],
)
def test_each_way_to_change_weights_is_watched(change: str, sglang: SimpleNamespace) -> None:
    """tests/sglang/test_arguments.py knows that there are no others."""
    plugin().install()
    sglang.registry.hooks[0][1]()
    told: list[str] = []
    follower = SimpleFollower(told)
    importlib.import_module(f"{ADAPTER}.weights").WEIGHTS.follow(follower)
    getattr(sglang.updater(), change)()
    assert told == ["suspend"]
    sglang.tree().reset()
    if change == "begin_weight_update":
        assert told == ["suspend"], "not before its end"
        sglang.updater().end_weight_update()
    assert told == ["suspend", "renew", "clear"]


def test_a_storage_that_comes_after_a_change_has_other_names(sglang: SimpleNamespace) -> None:
    plugin().install()
    sglang.registry.hooks[0][1]()
    sglang.updater().update_weights_from_disk()
    sglang.tree().reset()
    told: list[str] = []
    importlib.import_module(f"{ADAPTER}.weights").WEIGHTS.follow(SimpleFollower(told))
    assert told == ["renew"]


class SimpleFollower:
    """Notes what it is told."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def suspend(self) -> None:
        self._told.append("suspend")

    def renew(self, generation: int) -> None:
        assert generation
        self._told.append("renew")

    def clear(self) -> None:
        self._told.append("clear")


def test_other_releases_and_other_processes_are_left_alone(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.24")
    plugin().install()
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23")
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    plugin().install()
    assert sglang.registry.hooks == []


def test_it_loads_nothing_heavy() -> None:
    heavy = "numpy", "torch", "sglang", "kvoffloadd.client"
    code = f"import sys, {ADAPTER}.plugin as p; p.install(); print([n for n in {heavy} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
