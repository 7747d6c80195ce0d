"""Starting a storage: under the name of what was loaded, or under one that no other engine has."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.sglang.environment import HARMLESS
from kvoffloadd.integrations.sglang.hostpool import host_pools
from kvoffloadd.integrations.sglang.namespace import namespace_of
from kvoffloadd.integrations.sglang.pools import TpRank
from kvoffloadd.integrations.sglang.weights import WeightChanges
from tests.integrations.sglang.fakes import MHATokenToKVPoolHost
from tests.integrations.sglang.fakesglang import ADAPTER

NUMBER = 7


@pytest.fixture
def model(sglang: SimpleNamespace, tmp_path: Path) -> Path:
    """That the engine is about to load."""
    sglang.arguments["model_path"] = str(tmp_path / "model")
    (tmp_path / "model" / "shards").mkdir(parents=True)
    return write(tmp_path / "model", "old")


def write(model: Path, content: str) -> Path:
    for file in (model / "config.json", model / "shards" / "m.safetensors"):
        file.write_text(content)
        os.utime(file, (1e9, 1e9))
    return model


def begin(sglang: SimpleNamespace) -> None:
    """Begins as SGLang's scheduler does, before it loads anything."""
    importlib.import_module(f"{ADAPTER}.plugin").install()
    sglang.registry.hooks[-1][1]()


def named(number: int = NUMBER, how: Fingerprint = Fingerprint.AUTO) -> NamespaceSpec:
    """The namespace, where a storage is attached now."""
    start: Any = importlib.import_module(f"{ADAPTER}.start")
    pools = host_pools({"kv": MHATokenToKVPoolHost(4, 64, [4096, 4096])}, TpRank(0, 1), replicated=False)
    return namespace_of(start._computed(how, number), pools, 1)


@pytest.mark.parametrize("how", Fingerprint)
def test_engines_with_the_same_files_share(how: Fingerprint, sglang: SimpleNamespace, model: Path) -> None:
    begin(sglang)
    assert named(1, how) == named(2, how)


def test_files_written_again_before_the_storage_came(
    sglang: SimpleNamespace, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was loaded may be neither the old files nor the new ones."""
    begin(sglang)
    before = named()
    write(model, "new")
    doubtful = named(1)
    assert doubtful not in (before, named(2)), "it shares with nobody"
    assert doubtful == named(1), "it finds its own pages"
    assert "this engine shares with no other: " in caplog.text
    assert "has changed since SGLang began to load it" in caplog.text
    begin_again(sglang)
    assert named() not in (before, doubtful)
    assert named(1) == named(2)


def begin_again(sglang: SimpleNamespace) -> None:
    """Begins as another engine."""
    files: Any = importlib.import_module(f"{ADAPTER}.files")
    identity: Any = importlib.import_module(f"{ADAPTER}.identity")
    files.FILES.look(identity.sources_of(sglang.arguments))


def test_without_the_plug_in_an_engine_shares_with_nobody(
    sglang: SimpleNamespace, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert named(1) != named(2)
    assert "plug-in did not run" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        {"model_path": "s3://bucket/model"},
        {"load_format": "remote"},
        {"weight_cache_mode": "client"},
        {"forward_hooks": [object()]},
        {"quantization_param_path": "link to nowhere"},
    ],
)
def test_what_nobody_knows_is_shared_with_nobody(
    changed: dict[str, Any], sglang: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model)
    Path("link to nowhere").symlink_to("nowhere")
    sglang.arguments |= {"model_path": str(model / "config.json")} | changed
    begin(sglang)
    assert named(1) != named(2)


def test_a_rank_that_is_sure_goes_with_one_that_is_not(
    sglang: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else they would call the parts of a key by two names, and none would ever be whole."""
    begin(sglang)
    asked: list[bool] = []

    def another_is_not(good: bool) -> bool:
        """It has begun to start, as this one has."""
        asked.append(good)
        return len(asked) % 2 == 1

    monkeypatch.setattr(importlib.import_module(f"{ADAPTER}.engine"), "all_agree", another_is_not)
    assert named(1) != named(2)
    assert asked == [True] * 4
    assert "another rank is in doubt" in caplog.text


@pytest.mark.parametrize("name", ["SGLANG_MAMBA_SSM_DTYPE", "SGLANG_HUMMING_ONLINE_QUANT_CONFIG", "SGLANG_OF_TOMORROW"])
def test_variables_that_are_not_known_to_be_harmless_are_part(
    name: str, sglang: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(sglang)
    found = [named()]
    for value in ("a", "b"):
        monkeypatch.setenv(name, value)
        assert named(1) == named(2)
        found.append(named())
    assert len({one.salt for one in found}) == 3


@pytest.mark.parametrize(
    "name", ["SGLANG_RUN_ID", "SGLANG_PORT", "SGLANG_CACHE_DIR", "SGLANG_PLUGINS", "SGLANG_SERVICE_HOST", "VLLM_X"]
)
def test_variables_in_which_engines_may_differ(
    name: str, sglang: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(sglang)
    before = named()
    monkeypatch.setenv(name, "another")
    assert named() == before


def test_ranks_of_other_variables_share_with_nobody(
    sglang: SimpleNamespace, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would compute parts of one key in two ways."""
    begin(sglang)
    monkeypatch.setattr(importlib.import_module(f"{ADAPTER}.engine"), "agreed", lambda number: number + 1)
    assert named(1) != named(2)
    assert "its ranks have other environment variables" in caplog.text


def harmless_table() -> str:
    """Returns the table as docs/SGLANG.md has it: paste it there."""
    rows = ["| variables, without `SGLANG_` | why they are harmless |", "|---|---|"]
    names = [", ".join(f"`{name}`" for name in sorted(left.names)) for left in HARMLESS]
    rows += [f"| {each} | {left.reason} |" for each, left in zip(names, HARMLESS, strict=True)]
    return "\n".join(rows)


def test_harmless_variables_are_documented_with_their_reasons() -> None:
    document = Path(__file__).parents[3] / "docs" / "SGLANG.md"
    assert harmless_table() in document.read_text(encoding="utf-8")
    names = [name for left in HARMLESS for name in left.names]
    assert len(set(names)) == len(names)


def test_weights_taken_from_another_model_in_place(sglang: SimpleNamespace, model: Path, tmp_path: Path) -> None:
    """SGLang then reports this as its model; a storage that comes afterwards shares with no other engine."""
    begin(sglang)
    (tmp_path / "other" / "shards").mkdir(parents=True)
    sglang.arguments["model_path"] = str(write(tmp_path / "other", "new"))
    assert named(1) != named(2)


def test_states_lie_otherwise_with_amx(sglang: SimpleNamespace, model: Path) -> None:
    begin(sglang)
    without = named()
    sglang.amx.append(True)
    assert named() != without
    sglang.arguments["device"] = "cuda"
    with_gpu = named()
    sglang.amx.clear()
    assert named() == with_gpu, "a GPU's states are what they are"


@pytest.mark.parametrize("name", ["speculative_draft_model_path", "speculative_draft_model_revision"])
def test_engines_that_differ_in_the_draft_share(name: str, sglang: SimpleNamespace, model: Path) -> None:
    """No pool of a draft is ever stored: test_hostpool.py and test_devicepool.py have them refused."""
    begin(sglang)
    before = named()
    sglang.arguments[name] = "another"
    assert named() == before
    sglang.arguments["speculative_algorithm"] = "EAGLE3"
    assert named() != before


# --- ranks that can't start ---


class AgreeingRank:
    """One of two, with what it asks of the other one, in order. The other one fails at the call `fails_at`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, socket: Path) -> None:
        self.asked: list[str] = []
        self.fails_at = -1
        self._start: Any = importlib.import_module(f"{ADAPTER}.start")
        monkeypatch.setattr(self._start, "WEIGHTS", WeightChanges())
        monkeypatch.setattr(self._start.engine, "agreed", self._agreed)
        monkeypatch.setattr(self._start.engine, "all_agree", self._all_agree)
        self._config = SimpleNamespace(
            tp_rank=0, tp_size=2, pp_size=1, attn_cp_size=1, dcp_size=1, is_mla_model=False,
            enable_storage_metrics=False, extra_config={"interface_v1": 1, "socket": str(socket)},
        )  # fmt: skip

    def _agreed(self, number: int) -> int:
        self.asked.append("agreed")
        return number

    def _all_agree(self, good: bool) -> bool:
        self.asked.append("all_agree")
        return good and len(self.asked) - 1 != self.fails_at

    def attach(self) -> list[str]:
        """Attaches as SGLang does, which reports an error to its user, and goes on. Returns what was asked of the other
        rank.
        """
        self.asked = []
        made = importlib.import_module(ADAPTER).KVOffloaddStorage(self._config, {})
        made.register_mem_pool_host(MHATokenToKVPoolHost(4, 64, [4096, 4096]))
        try:
            made.on_host_pools_registered()
        finally:
            made.close()
        return self.asked


@pytest.mark.parametrize(
    "where",
    ["storage.host_pools", "start.from_elsewhere", "start.identity_of", "start.namespace_of", "start.PageStore"],
)
def test_a_rank_that_can_not_start_leaves_no_other_waiting(
    where: str, sglang: SimpleNamespace, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither then nor at the next attach: all ranks ask each other the same, in the same order."""
    begin(sglang)
    module, name = where.split(".")
    with monkeypatch.context() as patched:
        bad = AgreeingRank(patched, tmp_path / "none.sock")
        with patched.context() as broken:

            def no_memory(*_: Any, **__: Any) -> None:
                raise MemoryError("no memory")

            broken.setattr(importlib.import_module(f"{ADAPTER}.{module}"), name, no_memory)
            with pytest.raises(MemoryError):
                bad.attach()
        asked_first, asked_then = bad.asked, bad.attach()
    good = AgreeingRank(monkeypatch, tmp_path / "none.sock")
    good.fails_at = len(asked_first) - 1
    with pytest.raises(UsageError, match="another rank"):
        good.attach()
    assert good.asked == asked_first
    assert not [thread.name for thread in threading.enumerate() if thread.name == "kvoffloadd-lines"], "it is closed"
    good.fails_at = -1
    assert good.attach() == asked_then
