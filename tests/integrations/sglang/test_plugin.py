"""SGLang's entry point for plug-ins: in each of its processes, harmless where there is nothing to do."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.sglang.files import Source
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
    _, (target, hook, kind) = sglang.registry.hooks
    assert (target, kind) == ("sglang.srt.managers.scheduler.Scheduler.__init__", HookType.BEFORE)
    weights = importlib.import_module(f"{ADAPTER}.weights").WEIGHTS
    assert hook(object(), "arguments") is None, "it leaves them as they are"
    hook(object())
    calls: list[str] = []
    follower = SimpleFollower(calls)
    weights.follow(follower, Fingerprint.AUTO)
    sglang.updater().update_weights_from_disk("model", None)
    assert calls == ["suspend"], "once, however often it was asked to watch"
    sglang.tree().reset()
    assert calls == ["suspend", "renew", "clear"]


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
    sglang.registry.hooks[-1][1]()
    calls: list[str] = []
    follower = SimpleFollower(calls)
    importlib.import_module(f"{ADAPTER}.weights").WEIGHTS.follow(follower, Fingerprint.AUTO)
    given = ("model", None) if change == "update_weights_from_disk" else ()
    getattr(sglang.updater(), change)(*given)
    assert calls == ["suspend"]
    sglang.tree().reset()
    if change == "begin_weight_update":
        assert calls == ["suspend"], "not before its end"
        sglang.updater().end_weight_update()
    assert calls == ["suspend", "renew", "clear"]


@pytest.mark.parametrize("ours", [False, True])
def test_arguments_are_completed_in_the_process_that_starts_the_others(
    ours: bool, sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    plugin().install()
    ((_, hook, kind),) = sglang.registry.hooks
    assert kind is HookType.BEFORE
    config = json.dumps({"module_path": ADAPTER if ours else "another", "class_name": "KVOffloaddStorage"})
    given = SimpleNamespace(
        hicache_storage_backend="dynamic",
        hicache_storage_backend_extra_config=config,
        hicache_mem_layout="page_first",
        declared=[],
    )
    assert hook(given) is None
    assert [source for source, _ in given.declared] == ["kvoffloadd"] * ours
    assert all(fields["hicache_mem_layout"] == "page_first_direct" for _, fields in given.declared)


@pytest.mark.parametrize("by", ["files", "a filter", "format", "tp_size", "pp_size"])
def test_weights_from_files_are_named_by_them(by: str, sglang: SimpleNamespace, tmp_path: Path) -> None:
    """They are not if only some of them are loaded, if they are not from there, or if several ranks load them, each of
    which may find other files.
    """
    if by in sglang.arguments:
        sglang.arguments[by] = 2
    plugin().install()
    sglang.registry.hooks[-1][1]()
    weights = importlib.import_module(f"{ADAPTER}.weights")
    (tmp_path / "m.safetensors").write_text("weights")
    load_format = "remote" if by == "format" else "auto"
    given = {"weight_name_filter": bool} if by == "a filter" else {}
    seen = []
    for number in range(2):
        engine = weights.WeightChanges()
        vars(weights.WEIGHTS).update(vars(engine))
        weights.WEIGHTS.number_engine(partial(int, number))
        weights.WEIGHTS.follow(follower := SimpleFollower([]), Fingerprint.AUTO)
        done = sglang.updater().update_weights_from_disk(str(tmp_path), load_format, recapture_cuda_graph=True, **given)
        assert done == (True, f"{tmp_path} {load_format} True")
        sglang.tree().reset()
        seen.append(follower.generation)
    assert (seen[0] == seen[1]) == (by == "files")


def test_names_on_the_hub_are_of_the_default_cache(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang looks for weights that come later there alone, wherever those of the start came from."""
    sglang.arguments |= {"download_dir": "/models", "revision": "main"}
    plugin().install()
    sglang.registry.hooks[-1][1]()
    weights = importlib.import_module(f"{ADAPTER}.weights")
    weights.WEIGHTS.follow(SimpleFollower([]), Fingerprint.AUTO)
    looked: list[Source] = []
    monkeypatch.setattr(weights.FilesAtStart, "look", lambda _, sources: looked.extend(sources))
    sglang.updater().update_weights_from_disk("org/model", "auto")
    assert looked == [Source("org/model", True, "main", None)]


def test_a_storage_that_comes_after_a_change_has_other_names(sglang: SimpleNamespace) -> None:
    plugin().install()
    sglang.registry.hooks[-1][1]()
    sglang.updater().update_weights_from_disk("model", None)
    sglang.tree().reset()
    calls: list[str] = []
    importlib.import_module(f"{ADAPTER}.weights").WEIGHTS.follow(SimpleFollower(calls), Fingerprint.AUTO)
    assert calls == ["renew"]


class SimpleFollower:
    """Notes the calls that it gets."""

    def __init__(self, calls: list[str]) -> None:
        self._told = calls
        self.generation = 0

    def suspend(self) -> None:
        self._told.append("suspend")

    def renew(self, generation: int) -> None:
        assert generation
        self.generation = generation
        self._told.append("renew")

    def clear(self, token: bytes) -> None:
        assert token
        self._told.append("clear")


def test_other_releases_and_other_processes_are_left_alone(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.24")
    plugin().install()
    assert sglang.registry.hooks == []
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23")
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    plugin().install()
    assert [target.rpartition(".")[2] for target, _, _ in sglang.registry.hooks] == ["handle_hicache"]


def test_it_loads_nothing_heavy() -> None:
    heavy = "numpy", "torch", "sglang", "kvoffloadd.client"
    code = f"import sys, {ADAPTER}.plugin as p; p.install(); print([n for n in {heavy} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
