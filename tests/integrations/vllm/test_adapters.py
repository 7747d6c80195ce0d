"""An adapter is what is in its files: in block hashes, and in what a rank stores and loads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.vllm import adapters
from kvoffloadd.integrations.vllm.adapters import (
    AdapterNames,
    LoadedAdapter,
    contents_at,
    is_loaded,
    may_be_loaded,
    name_in_hashes,
    note_what_is_loaded,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return train(tmp_path / "adapter", b"old")


def train(folder: Path, weights: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def request(path: Path | str | None, number: int = 1, **changed: Any) -> Any:
    if path is None:
        return SimpleNamespace(lora_request=None)
    lora = {"lora_name": "mine", "lora_int_id": number, "lora_path": str(path), "is_3d_lora_weight": False}
    return SimpleNamespace(lora_request=SimpleNamespace(**lora | changed))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The two places in vLLM, as 0.32 and 0.33 have them; the tests with a real vLLM run the real ones."""
    hashes, manager = ModuleType("hashes"), ModuleType("manager")

    def extra_keys(request: Any) -> list[tuple[str, ...]]:
        lora = request.lora_request
        return [("lora", lora.lora_name, lora.lora_path)] if lora else []

    class WorkerLoRAManager:
        meanwhile: Callable[[], object] = staticmethod(lambda: None)

        def _load_adapter(self, lora_request: Any) -> str:
            self.meanwhile()
            return str(lora_request.lora_path)

    hashes._gen_lora_extra_hash_keys = extra_keys  # type: ignore[attr-defined]
    manager.WorkerLoRAManager = WorkerLoRAManager  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, adapters._HASHES, hashes)
    monkeypatch.setitem(sys.modules, adapters._LOADER, manager)
    monkeypatch.setattr(adapters, "_loaded", {})
    yield SimpleNamespace(hashes=hashes, manager=WorkerLoRAManager)


@pytest.mark.parametrize("how", list(Fingerprint))
def test_one_that_was_trained_again_has_other_hashes(how: Fingerprint, folder: Path, vllm: SimpleNamespace) -> None:
    """At its place, under its name; a request keeps what it began with."""
    name_in_hashes(AdapterNames(how, "rank 16"))
    first, again = request(folder), request(folder)
    keys = vllm.hashes._gen_lora_extra_hash_keys(first)
    assert keys[0] == ("lora", "mine", str(folder))
    assert keys == vllm.hashes._gen_lora_extra_hash_keys(again)
    train(folder, b"new")
    assert vllm.hashes._gen_lora_extra_hash_keys(first) == keys
    assert vllm.hashes._gen_lora_extra_hash_keys(request(folder)) != keys
    assert vllm.hashes._gen_lora_extra_hash_keys(request(None)) == []


def test_how_an_adapter_is_applied_is_in_the_hashes(folder: Path) -> None:
    one, other = (AdapterNames(Fingerprint.AUTO, settings) for settings in ("rank 16", "rank 8"))
    assert one.salt_of(request(folder)) == one.salt_of(request(folder, number=2)) != ""
    assert one.salt_of(request(folder)) != other.salt_of(request(folder))
    assert one.salt_of(request(folder)) != one.salt_of(request(folder, is_3d_lora_weight=True))


def test_by_contents_copies_share(folder: Path, tmp_path: Path) -> None:
    """All bytes are read once for each state of the files."""
    copy = train(tmp_path / "copy", b"old")
    for how, share in ((Fingerprint.AUTO, False), (Fingerprint.CONTENTS, True)):
        names = AdapterNames(how, "")
        assert (names.salt_of(request(folder)) == names.salt_of(request(copy))) is share


def test_hashes_are_wrapped_once(folder: Path, vllm: SimpleNamespace) -> None:
    """Also where one process has several engines, one after the other."""
    for settings in ("rank 16", "rank 8"):
        name_in_hashes(AdapterNames(Fingerprint.AUTO, settings))
    (_, named) = vllm.hashes._gen_lora_extra_hash_keys(request(folder))
    assert named == ("lora contents", AdapterNames(Fingerprint.AUTO, "rank 8").salt_of(request(folder)))


def test_one_that_is_not_known_is_as_vllm_has_it(vllm: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever has it neither stores nor loads; said once."""
    names = AdapterNames(Fingerprint.AUTO, "")
    name_in_hashes(names)
    unknown = [request("s3://nowhere/adapter") for _ in range(2)]
    for each in unknown:
        assert len(vllm.hashes._gen_lora_extra_hash_keys(each)) == 1
        assert names.adapter_of(each) == LoadedAdapter(1, "")
    assert caplog.text.count("nothing is stored or loaded for requests with the LoRA adapter") == 1
    assert not is_loaded(LoadedAdapter(1, "")) and not may_be_loaded(LoadedAdapter(1, ""))


def test_a_rank_knows_what_it_has_loaded(folder: Path, vllm: SimpleNamespace) -> None:
    note_what_is_loaded()
    note_what_is_loaded()
    old = LoadedAdapter(1, contents_at(str(folder)))
    assert not is_loaded(old) and may_be_loaded(old), "it will load it for the request"
    rank = vllm.manager()
    assert rank._load_adapter(request(folder).lora_request) == str(folder)
    assert is_loaded(old) and may_be_loaded(old)
    train(folder, b"new")  # nobody has loaded this
    new = LoadedAdapter(1, contents_at(str(folder)))
    assert is_loaded(old) and not is_loaded(new) and not may_be_loaded(new)
    rank._load_adapter(request(folder).lora_request)  # in place
    assert is_loaded(new) and not is_loaded(old) and not may_be_loaded(old)
    assert is_loaded(None) and may_be_loaded(None)


def test_one_that_is_written_while_it_is_loaded_is_not_known(folder: Path, vllm: SimpleNamespace) -> None:
    note_what_is_loaded()
    before = LoadedAdapter(1, contents_at(str(folder)))
    vllm.manager.meanwhile = staticmethod(lambda: train(folder, b"half of it"))
    vllm.manager()._load_adapter(request(folder).lora_request)
    for adapter in (before, LoadedAdapter(1, contents_at(str(folder)))):
        assert not is_loaded(adapter) and not may_be_loaded(adapter)


def test_one_that_can_not_be_loaded_is_not_known(folder: Path, vllm: SimpleNamespace) -> None:
    note_what_is_loaded()
    adapter = LoadedAdapter(1, contents_at(str(folder)))
    rank = vllm.manager()
    rank._load_adapter(request(folder).lora_request)

    def fail() -> None:
        raise OSError("half a file")

    vllm.manager.meanwhile = staticmethod(fail)
    with pytest.raises(OSError, match="half a file"):
        rank._load_adapter(request(folder).lora_request)
    assert not is_loaded(adapter)


def test_one_of_the_hub_is_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def snapshot_of(name: str, *, file: str) -> str | None:
        asked.append((name, file))
        return str(folder) if len(asked) > 1 else None

    monkeypatch.setattr(adapters, "snapshot_of", snapshot_of)
    assert contents_at("org/adapter") == "", "it was not fetched yet"
    assert contents_at("org/adapter") == contents_at(str(folder)) != ""
    assert asked == [("org/adapter", "adapter_config.json")] * 2
