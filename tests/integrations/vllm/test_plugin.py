"""vLLM's entry point for plug-ins: in each of its processes, harmless whatever vLLM that is."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm import plugin
from kvoffloadd.integrations.vllm.config import INSIDE
from kvoffloadd.integrations.vllm.identity import IDENTITY

ROOT = Path(__file__).parents[3]
NAME, PACKAGE = "KVOffloaddConnector", "kvoffloadd.integrations.vllm"


class Factory:
    """Has as much of vLLM's KVConnectorFactory as a plug-in needs."""

    def __init__(self) -> None:
        self.registered: dict[str, tuple[str, str]] = {}

    def register_connector(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.registered:
            raise ValueError(f"Connector '{name}' is already registered.")
        self.registered[name] = (module_path, class_name)


class EngineArgs:
    """Makes configurations."""

    def create_engine_config(self) -> Any:
        return SimpleNamespace(kv_transfer_config=None)


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    """Makes the factory of a supported vLLM."""
    factory = Factory()
    arguments = type("EngineArgs", (EngineArgs,), {})  # of this test alone
    arguments.create_engine_config = EngineArgs.create_engine_config  # type: ignore[attr-defined]
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.33.0"},
        plugin._FACTORY: {"KVConnectorFactory": factory},
        plugin._ARGUMENTS: {"EngineArgs": arguments},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return factory


def test_the_package_names_it() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, name = package["entry-points"]["vllm.general_plugins"]["kvoffloadd"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_it_registers_the_connector_by_its_name(factory: Factory, caplog: pytest.LogCaptureFixture) -> None:
    """It does so each time vLLM calls it, and loads nothing of it."""
    loaded = set(sys.modules)
    for _ in range(2):
        plugin.install()
    assert factory.registered == {NAME: (PACKAGE, NAME)}
    assert f"{PACKAGE}.connector" not in set(sys.modules) - loaded
    made = sys.modules[plugin._ARGUMENTS].EngineArgs.create_engine_config
    assert made.kvoffloadd
    assert not hasattr(made.__wrapped__, "kvoffloadd"), "it is watched once"
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.0.0"])
@pytest.mark.parametrize("is_child", [False, True])
def test_a_release_that_is_not_supported_is_told_once_an_engine(
    factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    is_child: bool,
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if is_child else None)
    plugin.install()
    assert factory.registered == {}
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (not is_child)
    assert all(f"supports vLLM 0.32.x, 0.33.x; installed is {version}" in one for one in warnings)


def test_what_vllm_has_changed_ends_no_engine(
    factory: Factory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of other connectors run all the same."""
    monkeypatch.delattr(Factory, "register_connector")
    plugin.install()
    (error,) = (record for record in caplog.records if record.levelno >= logging.ERROR)
    assert error.exc_info is not None


def test_without_vllm_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.install()


def test_what_is_inside_a_multiconnector_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the policy that vLLM follows; whatever is nested, and nothing of others."""
    monkeypatch.setattr(plugin, "identity_of", lambda _config, _how: {"token": "t"})
    ours: dict[str, Any] = {"kv_connector": NAME, "kv_load_failure_policy": "fail"}
    spec: dict[str, Any] = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"spec_name": "KVOffloaddSpec"},
    }
    other: dict[str, Any] = {"kv_connector": "NixlConnector"}
    without: dict[str, Any] = {"kv_connector": NAME, "kv_connector_extra_config": None}
    nested = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [ours]}}
    transfer = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": [other, spec, nested, without]},
    )
    plugin.note(SimpleNamespace(kv_transfer_config=transfer))
    assert other == {"kv_connector": "NixlConnector"}
    for one in (ours, spec, without):
        assert one["kv_load_failure_policy"] == "recompute"
        assert one["kv_connector_extra_config"][IDENTITY] == {"token": "t"}
        assert one["kv_connector_extra_config"][INSIDE] is True
    assert transfer.kv_load_failure_policy == "recompute"
    alone = SimpleNamespace(kv_connector=NAME, kv_load_failure_policy="recompute", kv_connector_extra_config={})
    plugin.note(SimpleNamespace(kv_transfer_config=alone))
    assert alone.kv_connector_extra_config == {IDENTITY: {"token": "t"}}


def policy_of(connector: str, **extra: Any) -> str:
    """The policy that vLLM follows with this connector, if nothing or its default was chosen."""
    transfer = SimpleNamespace(kv_connector=connector, kv_load_failure_policy="fail", kv_connector_extra_config=extra)
    plugin.note(SimpleNamespace(kv_transfer_config=transfer))
    return str(transfer.kv_load_failure_policy)


def test_requests_whose_loads_fail_are_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer policy counts in a MultiConnector; one entry that opts out is enough to leave it."""
    monkeypatch.setattr(plugin, "identity_of", lambda _config, _how: {"token": "t"})
    spec = {"spec_name": "KVOffloaddSpec"}
    other = {"kv_connector": "NixlConnector"}
    ours = {"kv_connector": NAME, "kv_role": "kv_both"}
    out = {"kv_connector": NAME, "kv_connector_extra_config": {"recompute_failed_loads": False}}
    assert policy_of(NAME) == policy_of(NAME, recompute_failed_loads=True) == "recompute"
    assert policy_of(NAME, recompute_failed_loads=False) == "fail"
    assert policy_of("MultiConnector", connectors=[other, ours]) == "recompute"
    assert ours["kv_load_failure_policy"] == "recompute"
    assert policy_of("MultiConnector", connectors=[other, out]) == "fail"
    assert policy_of("MultiConnector", connectors=[ours, out]) == "fail"
    assert policy_of("MultiConnector", connectors=[other]) == policy_of("NixlConnector") == "fail"
    assert policy_of("OffloadingConnector", **spec) == "fail", "vLLM's own asserts that no load fails"
    with pytest.raises(UsageError, match="recompute_failed_loads must be true or false, not 'no'"):
        policy_of(NAME, recompute_failed_loads="no")
