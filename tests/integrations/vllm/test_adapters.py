"""An adapter is what ranks have loaded of its files: in block hashes, and in what a rank stores and loads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.vllm import adapters
from kvoffloadd.integrations.vllm.adapters import (
    AdapterNames,
    LoadedAdapter,
    RankAdapters,
    contents_at,
    name_adapters,
    note_what_is_loaded,
    state_at,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return train(tmp_path / "adapter", b"old")


def train(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def lora(path: Path | str, number: int = 1, **changed: Any) -> Any:
    """A LoRARequest."""
    given = {"lora_name": "mine", "lora_int_id": number, "lora_path": str(path), "is_3d_lora_weight": False}
    return SimpleNamespace(**given | {"load_inplace": False} | changed)


class FakeRequest:
    """Has one block, whose hash is its extra keys."""

    def __init__(self, lora_request: Any) -> None:
        self.lora_request = lora_request
        self.block_hashes: list[Any] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(tuple(sys.modules[adapters._HASHES]._gen_lora_extra_hash_keys(self)))


def extra_keys(request: Any) -> list[tuple[str, ...]]:
    given = request.lora_request
    return [("lora", given.lora_name, given.lora_path)] if given else []


class WorkerLoRAManager:
    """A rank's. `meanwhile`: what happens while it reads an adapter's files."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}

    def add_adapter(self, given: Any) -> bool:
        if given.lora_int_id not in self.loaded or given.load_inplace:
            self.loaded[given.lora_int_id] = self._load_adapter(given)
        return True

    def _load_adapter(self, given: Any) -> str:
        weights = (Path(given.lora_path) / "adapter_model.safetensors").read_text()
        self.meanwhile()
        return weights


class EngineCore:
    """Has one rank, in the same process, as vLLM's uniprocess executor has it."""

    is_sleeping = False

    def __init__(self) -> None:
        self.rank: Any = sys.modules[adapters._LOADER].WorkerLoRAManager()
        self.model_executor = self
        self.added: list[FakeRequest] = []

    def collective_rpc(self, method: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        return [method(self.rank, *args)]

    def add_lora(self, lora_request: Any) -> bool:
        return bool(self.rank.add_adapter(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        return self.rank.loaded.pop(lora_id, None) is not None

    def add_request(self, request: FakeRequest, request_wave: int = 0) -> None:
        self.added.append(request)

    def ask(self, given: Any) -> FakeRequest:
        """A request comes, and a step runs it."""
        request = FakeRequest(given)
        self.add_request(request)
        if given is not None:
            self.rank.add_adapter(given)
        return request


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The places in vLLM, as 0.32 and 0.33 have them; the tests with a real vLLM run the real ones."""
    hashes, loader, engine = ModuleType("hashes"), ModuleType("loader"), ModuleType("engine")
    hashes._gen_lora_extra_hash_keys = extra_keys  # type: ignore[attr-defined]
    loader.WorkerLoRAManager = type("Manager", (WorkerLoRAManager,), {})  # type: ignore[attr-defined]
    loader.WorkerLoRAManager._load_adapter = WorkerLoRAManager._load_adapter
    engine.EngineCore = type("Core", (EngineCore,), {})  # type: ignore[attr-defined]
    for name, module in ((adapters._HASHES, hashes), (adapters._LOADER, loader), (adapters._ENGINE, engine)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(adapters, "RANK", RankAdapters())
    return SimpleNamespace(hashes=hashes, manager=loader.WorkerLoRAManager, engine=engine.EngineCore)


@pytest.fixture
def engine(vllm: SimpleNamespace) -> Any:
    return started(vllm)


def started(vllm: SimpleNamespace, how: Fingerprint = Fingerprint.AUTO, settings: str = "rank 16") -> Any:
    """A new engine, which has loaded nothing."""
    adapters.RANK = RankAdapters()
    name_adapters(names := AdapterNames(how, settings))
    note_what_is_loaded()
    core = vllm.engine()
    core.names = names
    return core


def shares(request: Any) -> bool:
    """Whether the scheduler has the request load and store, and the rank does."""
    named = request.kvoffloadd_adapter
    return bool(named.is_shared) and adapters.RANK.is_loaded(named.loaded)


# --- names ---


@pytest.mark.parametrize("how", list(Fingerprint))
def test_a_request_is_named_by_what_is_loaded(how: Fingerprint, folder: Path, vllm: SimpleNamespace) -> None:
    """And not by what lies at its place: until that is loaded, requests share what the loaded adapter has computed."""
    engine = started(vllm, how)
    first, again = engine.ask(lora(folder)), engine.ask(lora(folder))
    assert first.block_hashes == again.block_hashes
    assert len(first.block_hashes) == 1
    assert first.block_hashes[0][0] == ("lora", "mine", str(folder))
    assert len(first.block_hashes[0]) == 2
    train(folder, b"new")
    between = engine.ask(lora(folder))
    assert between.block_hashes == first.block_hashes
    assert shares(between)
    engine.add_lora(lora(folder, load_inplace=True))
    assert engine.rank.loaded == {1: "new"}
    new = engine.ask(lora(folder))
    assert new.block_hashes != first.block_hashes
    assert shares(new)
    assert not shares(between), "what is left of it is computed with the new adapter"
    assert engine.ask(None).block_hashes == [()]


def test_an_engine_that_loads_adapters_in_its_own_way_shares_nothing(folder: Path, vllm: SimpleNamespace) -> None:
    """And goes on: a subclass need not call vLLM's `add_lora`."""
    engine = started(vllm)
    engine.add_lora = engine.rank.add_adapter
    assert not shares(engine.ask(lora(folder)))
    assert not shares(engine.ask(lora(folder)))
    assert engine.rank.loaded == {1: "old"}


def test_engines_that_have_loaded_the_same_share(folder: Path, vllm: SimpleNamespace) -> None:
    one = started(vllm).ask(lora(folder, number=7))
    other = started(vllm).ask(lora(folder))
    assert one.block_hashes == other.block_hashes
    for unlike in ({"settings": "rank 8"}, {"how": Fingerprint.CONTENTS}):
        assert started(vllm, **unlike).ask(lora(folder)).block_hashes != other.block_hashes
    assert started(vllm).ask(lora(folder, is_3d_lora_weight=True)).block_hashes != other.block_hashes


def test_by_contents_copies_share(folder: Path, tmp_path: Path, vllm: SimpleNamespace) -> None:
    copy = train(tmp_path / "copy", b"old")
    for how, share in ((Fingerprint.AUTO, False), (Fingerprint.CONTENTS, True)):
        salts = [started(vllm, how).ask(lora(path)).kvoffloadd_adapter.salt for path in (folder, copy)]
        assert (salts[0] == salts[1]) is share


def test_files_that_are_written_while_their_bytes_are_read_name_nothing(
    folder: Path, vllm: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes read may be those of the next adapter, which is not loaded."""
    engine, read = started(vllm, Fingerprint.CONTENTS), adapters.contents_at

    def slow(path: str, how: Fingerprint = Fingerprint.AUTO) -> str:
        if how is Fingerprint.CONTENTS:
            train(folder, b"new")
        return read(path, how)

    monkeypatch.setattr(adapters, "contents_at", slow)
    early = engine.ask(lora(folder))
    monkeypatch.setattr(adapters, "contents_at", read)
    assert not shares(early)
    engine.add_lora(lora(folder, load_inplace=True))
    late = engine.ask(lora(folder))
    assert shares(late)
    assert late.block_hashes != early.block_hashes


def test_a_request_that_was_made_before_a_load_and_comes_after_it(folder: Path, engine: Any) -> None:
    """vLLM makes requests in a separate thread."""
    old = engine.ask(lora(folder))
    made = FakeRequest(lora(folder))
    assert made.block_hashes == old.block_hashes
    train(folder, b"new")
    engine.add_lora(lora(folder, load_inplace=True))
    engine.add_request(made)
    assert made.block_hashes == engine.ask(lora(folder)).block_hashes != old.block_hashes


def test_a_request_that_comes_while_the_engine_sleeps(folder: Path, engine: Any) -> None:
    """The memory that adapters are loaded into is gone."""
    engine.is_sleeping = True
    engine.add_request(asleep := FakeRequest(lora(folder)))
    assert engine.rank.loaded == {}
    assert not shares(asleep)
    engine.is_sleeping = False
    awake = engine.ask(lora(folder))
    assert shares(awake)
    assert awake.block_hashes != asleep.block_hashes


def test_requests_that_load_in_place_are_named_by_what_they_load(folder: Path, engine: Any) -> None:
    old = engine.ask(lora(folder, load_inplace=True))
    assert engine.ask(lora(folder, load_inplace=True)).block_hashes == old.block_hashes
    train(folder, b"new")
    new = engine.ask(lora(folder, load_inplace=True))
    assert new.block_hashes != old.block_hashes
    assert shares(new)
    assert not shares(old)


def test_loading_what_is_loaded_changes_no_name(folder: Path, engine: Any) -> None:
    """vLLM loads nothing then, whatever lies there now."""
    old = engine.ask(lora(folder))
    train(folder, b"new")
    engine.add_lora(lora(folder))
    assert engine.rank.loaded == {1: "old"}
    assert engine.ask(lora(folder)).block_hashes == old.block_hashes
    assert shares(old)


@pytest.mark.parametrize("informed", [True, False])
def test_one_that_vllm_has_dropped(informed: bool, folder: Path, engine: Any) -> None:
    """It is dropped by order, or for want of room, and is loaded again for the next request, from other files."""
    old = engine.ask(lora(folder))
    if informed:
        engine.remove_lora(1)
    else:
        engine.rank.loaded.clear()
    train(folder, b"new")
    new = engine.ask(lora(folder))
    assert engine.rank.loaded == {1: "new"}
    assert new.block_hashes != old.block_hashes
    assert shares(new)
    assert not shares(old)


def test_one_that_ranks_have_loaded_unlike_names_nothing(folder: Path, engine: Any) -> None:
    engine.collective_rpc = lambda method, args: [method(engine.rank, *args), "another state"]
    one, other = engine.ask(lora(folder)), engine.ask(lora(folder))
    assert not shares(one)
    assert one.block_hashes == other.block_hashes, "in vLLM's own prefix cache"


def test_one_that_is_not_known_is_shared_with_nobody(
    folder: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log warns once."""
    monkeypatch.setattr(adapters, "contents_at", lambda path, how=Fingerprint.AUTO: "")
    first = engine.ask(lora(folder))
    assert engine.ask(lora(folder)).block_hashes == first.block_hashes
    train(folder, b"new")
    engine.add_lora(lora(folder, load_inplace=True))
    assert engine.ask(lora(folder)).block_hashes != first.block_hashes
    assert not any(shares(request) for request in engine.added)
    assert caplog.text.count("nothing is stored or loaded for requests with the LoRA adapter") == 1


def test_one_that_can_not_be_loaded_is_vllms_to_tell(
    folder: Path, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The request comes to where vLLM itself would have loaded it."""
    request = FakeRequest(lora("/nowhere"))
    engine.add_request(request)
    assert engine.added == [request]
    assert not shares(request)
    assert "the LoRA adapter at /nowhere can't be loaded" in caplog.text


def test_a_load_in_place_that_fails_leaves_what_is_loaded(folder: Path, vllm: SimpleNamespace, engine: Any) -> None:
    old = engine.ask(lora(folder))

    def fail() -> None:
        raise OSError("half a file")

    vllm.manager.meanwhile = staticmethod(fail)
    train(folder, b"half")
    with pytest.raises(OSError, match="half a file"):
        engine.add_lora(lora(folder, load_inplace=True))
    assert not shares(old), "another rank may have loaded it"
    again = engine.ask(lora(folder))
    assert engine.rank.loaded == {1: "old"}
    assert again.block_hashes == old.block_hashes
    assert shares(again)


def test_vllm_is_wrapped_once(folder: Path, vllm: SimpleNamespace) -> None:
    """Also where one process has several engines, one after the other."""
    started(vllm, settings="rank 16")
    engine = started(vllm, settings="rank 8")
    (hashed,) = engine.ask(lora(folder)).block_hashes
    assert hashed[1:] == (("lora loaded", engine.names._named[1].salt),)


# --- ranks ---


def test_a_request_that_spans_a_load_stays_unlike(folder: Path, vllm: SimpleNamespace, engine: Any) -> None:
    """It was computed with both; vLLM hands the stores of a step to ranks in the next one, after the load."""
    spanning = engine.ask(lora(folder))
    name = spanning.kvoffloadd_adapter.loaded
    assert adapters.RANK.is_loaded(name)
    old = folder.rename(folder.with_name("kept"))
    train(folder, b"new")
    engine.rank.add_adapter(lora(folder, load_inplace=True))
    assert not adapters.RANK.is_loaded(name)
    folder.rename(folder.with_name("new"))
    old.rename(folder)
    engine.add_lora(lora(folder, load_inplace=True))
    assert engine.rank.loaded == {1: "old"}
    assert state_at(lora(folder)) == name.state
    assert not adapters.RANK.is_loaded(name), "it is back, but not in what was computed between"
    again = engine.ask(lora(folder))
    assert not shares(again)
    assert again.block_hashes != spanning.block_hashes, "nor in vLLM's own prefix cache"


def test_a_rank_tells_what_it_has_replaced_by_itself(folder: Path, engine: Any) -> None:
    """It does so in the middle of a step, for an adapter that it had dropped."""
    old = engine.ask(lora(folder))
    train(folder, b"new")
    engine.rank.loaded.clear()
    engine.rank.add_adapter(lora(folder))
    assert not shares(old)
    replaced = adapters.RANK.tell()
    assert replaced == {old.kvoffloadd_adapter.loaded.state}
    assert adapters.RANK.tell() == set()
    assert old.kvoffloadd_adapter.is_shared
    engine.names.replaced(replaced)
    assert not old.kvoffloadd_adapter.is_shared
    new = engine.ask(lora(folder))
    assert new.block_hashes != old.block_hashes
    assert shares(new)
    engine.names.replaced(replaced)
    assert shares(engine.ask(lora(folder))), "that was of another"


def test_what_a_rank_loads_by_itself_others_may_load_a_moment_later(folder: Path, engine: Any) -> None:
    """This lasts until the scheduler has asked them all."""
    old = engine.ask(lora(folder))
    engine.rank.loaded.clear()
    engine.rank.add_adapter(lora(folder))
    assert shares(old)
    train(folder, b"new")  # another rank reads this
    assert not shares(old)
    assert adapters.RANK.tell() == {old.kvoffloadd_adapter.loaded.state}


def test_one_that_is_written_while_it_is_loaded_is_not_known(folder: Path, vllm: SimpleNamespace, engine: Any) -> None:
    vllm.manager.meanwhile = staticmethod(lambda: train(folder, b"half of it"))
    assert not shares(engine.ask(lora(folder)))
    assert adapters.RANK.state_of(1) == ""
    assert not adapters.RANK.is_loaded(LoadedAdapter(1, ""))
    assert adapters.RANK.is_loaded(None)


def test_one_of_the_hub_is_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def snapshot_of(name: str, *, file: str) -> str | None:
        asked.append((name, file))
        return str(folder) if len(asked) > 1 else None

    monkeypatch.setattr(adapters, "snapshot_of", snapshot_of)
    assert contents_at("org/adapter") == "", "it was not fetched yet"
    assert contents_at("org/adapter") == contents_at(str(folder)) != ""
    assert asked == [("org/adapter", "adapter_config.json")] * 2
