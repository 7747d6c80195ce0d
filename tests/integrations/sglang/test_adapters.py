"""Extra keys of requests: of an adapter's with what is in it, of all others with none that looks like one."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.integrations.sglang.adapters import LoadedAdapters
from tests.integrations.sglang.fakesglang import ADAPTER

IDS = ("0" * 32, "1" * 32)


def train(folder: Path, content: str) -> str:
    """Equal in size and time, whatever it learns."""
    folder.mkdir(exist_ok=True)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        (folder / name).write_text(content if name.endswith("safetensors") else "{}")
        os.utime(folder / name, (1e9, 1e9))
    return str(folder)


def key(path: str, lora_id: str = IDS[0], own: str = "") -> str | None:
    """Returns the extra key in a process that has loaded that adapter."""
    adapters = LoadedAdapters()
    with adapters.loading(lora_id, path):
        pass
    return adapters.extra_key(own + lora_id, lora_id)


def test_an_adapter_is_named_by_what_is_in_it(tmp_path: Path) -> None:
    path = train(tmp_path / "adapter", "old")
    old = key(path)
    assert key(path) == old, "another process, another host"
    assert key(train(tmp_path / "copy", "old")) == old
    assert key(train(tmp_path / "adapter", "new")) != old
    assert key(train(tmp_path / "adapter", "old")) == old
    assert key(path, own="user") != old
    assert key(path, IDS[1]) != old


def test_sglang_finds_the_adapters_id_where_it_looks_for_it(tmp_path: Path) -> None:
    """The last 32 characters (mem_cache/events.py)."""
    found = key(train(tmp_path / "adapter", "old"), own="user")
    assert found
    assert found.endswith(f"user{IDS[0]}")


def test_an_adapter_that_is_loaded_again_has_its_new_name(tmp_path: Path) -> None:
    adapters, path = LoadedAdapters(), train(tmp_path / "adapter", "old")
    keys = []
    for content in ("old", "new"):
        train(tmp_path / "adapter", content)
        with adapters.loading(IDS[0], path):
            pass
        keys.append(adapters.extra_key(IDS[0], IDS[0]))
    assert len(set(keys)) == 2


def test_one_that_changes_meanwhile_shares_with_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters, path = LoadedAdapters(), train(tmp_path / "adapter", "old")
    with adapters.loading(IDS[0], path):
        train(tmp_path / "adapter", "new")
    found = adapters.extra_key(IDS[0], IDS[0])
    assert found not in (key(path), key(train(tmp_path / "adapter", "old")))
    assert found == adapters.extra_key(IDS[0], IDS[0]), "the process itself finds its pages again"
    assert "has changed since SGLang began to load it" in caplog.text


def test_those_of_which_nothing_is_known_share_with_nobody(tmp_path: Path) -> None:
    """Neither two processes, nor one that loads it a second time."""
    adapters = LoadedAdapters()
    found = [LoadedAdapters().extra_key(IDS[0], IDS[0]), adapters.extra_key(IDS[0], IDS[0])]
    with adapters.loading(IDS[0], "s3://nobody/knows"):
        pass
    assert len({*found, adapters.extra_key(IDS[0], IDS[0])}) == 3


def test_tensors_are_named_by_their_load() -> None:
    """All ranks call them alike: SGLang gives each load an id that none has had."""
    ranks = [LoadedAdapters(), LoadedAdapters()]
    for rank in ranks:
        rank.received(IDS[0])
        rank.received(IDS[1])
    assert ranks[0].extra_key(IDS[0], IDS[0]) == ranks[1].extra_key(IDS[0], IDS[0])
    assert ranks[0].extra_key(IDS[0], IDS[0]) != ranks[0].extra_key(IDS[1], IDS[1])


parts = st.sampled_from(["", "-", "user", "kvoffloadd-adapter:", "kvoffloadd-adapter:-", *IDS]) | st.text(max_size=5)
requests = st.tuples(st.none() | st.lists(parts, max_size=4).map("".join), st.none() | st.sampled_from(IDS))


@given(one=requests, other=requests, echo=st.booleans())
def test_no_request_has_the_extra_key_of_another(
    one: tuple[str | None, str | None], other: tuple[str | None, str | None], echo: bool
) -> None:
    """Whatever users choose, also what they have seen as the key of another."""
    adapters = LoadedAdapters()
    for lora_id in IDS:
        adapters.received(lora_id)

    def made(own: str | None, lora_id: str | None) -> str | None:
        return adapters.extra_key(own if lora_id is None else (own or "") + lora_id, lora_id)

    if echo:
        other = (made(*one), other[1])
    alike = one[1] == other[1] and (one[0] == other[0] or (one[1] is not None and (one[0] or "") == (other[0] or "")))
    assert (made(*one) == made(*other)) == alike


def test_requests_without_adapters_are_left_as_they_are() -> None:
    adapters = LoadedAdapters()
    for own in (None, "", "user", IDS[0]):
        assert adapters.extra_key(own, None) == own


def test_sglang_is_watched(sglang: SimpleNamespace, tmp_path: Path) -> None:
    """It is watched from before it loads its first adapter."""
    plain = sglang.request("r", "user", IDS[0]).extra_key
    importlib.import_module(f"{ADAPTER}.plugin").install()
    sglang.registry.hooks[-1][1]()
    path = train(tmp_path / "adapter", "old")
    manager: Any = sglang.manager()
    assert manager._load_lora_adapter(SimpleNamespace(lora_id=IDS[0], lora_path=path)) == f"loaded {IDS[0]}"
    assert plain == f"user{IDS[0]}"
    assert sglang.request("r", "user", IDS[0]).extra_key == key(path, own="user")
    assert sglang.request("r", IDS[0]).extra_key == IDS[0]
    assert sglang.request("r").extra_key is None
    manager.meanwhile = lambda: train(tmp_path / "adapter", "new")
    manager._load_lora_adapter(SimpleNamespace(lora_id=IDS[0], lora_path=path))
    assert sglang.request("r", "user", IDS[0]).extra_key != key(path, own="user")
    ref = SimpleNamespace(lora_id=IDS[1], lora_path="__tensor__")
    assert manager._load_lora_adapter_from_tensors(ref, [], {}) == f"received {IDS[1]}"
    expected = LoadedAdapters()
    expected.received(IDS[1])
    assert sglang.request("r", None, IDS[1]).extra_key == expected.extra_key(IDS[1], IDS[1])
