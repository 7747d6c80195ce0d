"""Each argument of an engine counts, except those that were found harmless; files count by what is in them."""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint
from kvoffloadd.integrations.sglang.arguments import ADAPTERS, COUNTED, FILES, HARMLESS, MODELS, NAMES_HARMLESS
from kvoffloadd.integrations.sglang.files import Source, look_at
from kvoffloadd.integrations.sglang.identity import from_elsewhere, identity_of, sources_of

ROOT = Path(__file__).parents[3]
ALL = sorted(COUNTED | NAMES_HARMLESS)
NONE: dict[str, Any] = dict.fromkeys(ALL)


def unnamed(_: Source) -> str:
    return ""


def identity(how: Fingerprint = Fingerprint.AUTO, **changed: Any) -> str:
    return repr(identity_of(NONE | changed, lambda source: look_at(source, how)))


def test_each_argument_is_judged_once() -> None:
    assert sum(len(group.names) for group in HARMLESS) == len(NAMES_HARMLESS)
    assert not COUNTED & NAMES_HARMLESS
    assert {ADAPTERS, *FILES} <= COUNTED
    assert set(MODELS) <= set(FILES)


@pytest.mark.parametrize("name", ALL)
def test_each_argument_counts_unless_it_is_harmless(name: str) -> None:
    found = {repr(identity_of(NONE | {name: value}, unnamed)) for value in (None, "one", "another")}
    if name in NAMES_HARMLESS:
        assert len(found) == 1
    elif name == ADAPTERS:
        assert len(found) == 2, "whether there are any"
    else:
        assert len(found) == 3


def test_one_that_nobody_knows_counts() -> None:
    found = {repr(identity_of(NONE | more, unnamed)) for more in ({}, {"new": 1}, {"new": 2}, {"newer": 1})}
    assert len(found) == 4


def test_harmless_ones_are_documented() -> None:
    text = (ROOT / "docs" / "SGLANG.md").read_text(encoding="utf-8")
    assert [name for name in sorted(NAMES_HARMLESS) if f"`{name}`" not in text] == []


class Choice(enum.Enum):
    ONE = "one"
    TWO = "two"


def test_values_are_told_apart_by_what_they_say() -> None:
    values = [
        *(None, "", True, False, 0, 1.5, "1", 2, "one", "{", '{"a": 1}', "[1]", '{"a": [1, 2]}'),
        *({"a": 2}, {"a": {"b": 1}}, ["a", 1], ["a", [1]], {1, 2}, {"1"}, [["a", 1]], Choice.TWO),
    ]
    found = [identity(moe_runner_backend=value) for value in values]
    assert len(set(found)) == len(found)
    assert identity(dtype=Choice.ONE) == identity(dtype="one")
    assert identity(deepep_config='{"b": 1, "a": 2}') == identity(deepep_config='{"a": 2, "b": 1}')
    assert identity(lora_target_modules={"q", "k", "v"}) == identity(lora_target_modules={"v", "k", "q"})


def test_sizes_of_graphs_do_not_count() -> None:
    """SGLang makes them of the memory that it finds."""
    graphs = {"decode": {"backend": "full", "bs": [1, 2], "max_bs": 2}, "prefill": {"backend": "disabled", "bs": None}}
    before = identity(cuda_graph_config=graphs)
    assert identity(cuda_graph_config=graphs | {"decode": {"backend": "full", "bs": [1, 4], "max_bs": 4}}) == before
    assert identity(cuda_graph_config=graphs | {"decode": {"backend": "none", "bs": [1, 2], "max_bs": 2}}) != before


def test_what_cannot_be_compared_is_in_doubt() -> None:
    """Its `repr` may be another in each process."""
    with pytest.raises(ContentsError, match="--forward-hooks has a value of function"):
        identity(forward_hooks=[unnamed])
    assert identity(custom_sigquit_handler=unnamed) == identity(), "nobody asks for it"


@pytest.mark.parametrize("how", Fingerprint)
@pytest.mark.parametrize("name", [*FILES, "model_loader_extra_config", "hisparse_config", "mm_process_config"])
def test_files_count_by_what_is_in_them(name: str, how: Fingerprint, tmp_path: Path) -> None:
    """Also of equal size and time, and also in what other arguments say of files."""
    file = tmp_path / "file.json"

    def write(content: str) -> None:
        file.write_text(content)
        os.utime(file, (1e9, 1e9))

    given: dict[str, Any] = {name: str(file)}
    if name == "model_loader_extra_config":
        given = {name: json.dumps({"path": str(file), "more": 1})}
    if name == "mm_process_config":
        given = {name: {"image": [str(file)]}}
    write("old")
    before = identity(how, **given)
    assert identity(how, **given) == before
    write("new")
    assert identity(how, **given) != before


@pytest.mark.parametrize("name", FILES)
def test_with_contents_equal_files_are_equal_wherever_they_are(name: str, tmp_path: Path) -> None:
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "modeling_own.py").write_text("x = 1")
    here, there = ({name: str(tmp_path / folder)} for folder in ("here", "there"))
    assert identity(Fingerprint.CONTENTS, **here) == identity(Fingerprint.CONTENTS, **there)
    assert identity(Fingerprint.AUTO, **here) != identity(Fingerprint.AUTO, **there)
    (tmp_path / "there" / "modeling_own.py").write_text("x = 2")
    assert identity(Fingerprint.CONTENTS, **here) != identity(Fingerprint.CONTENTS, **there)


def test_a_file_that_is_not_there_counts_by_its_name() -> None:
    assert identity(init_expert_location="trivial") != identity(init_expert_location="other")
    assert identity(hisparse_config="/not/there") != identity(hisparse_config="/not/here")


def test_which_files_are_asked_for(tmp_path: Path) -> None:
    given = NONE | {
        "model_path": "org/model",
        "revision": "main",
        "download_dir": "/d",
        "rl_quant_profile": "profile",
        "hisparse_config": "/absolute",
        "speculative_draft_model_path": "/draft",
        "hicache_storage_backend_extra_config": "/harmless",
    }
    model = Source("org/model", True, "main", "/d")
    assert sources_of(given) == {model, Source("profile"), Source("/absolute")}
    assert sources_of(NONE | {"forward_hooks": [unnamed], "model_path": "m"}) <= {Source("m", True)}


def test_weights_of_other_processes_are_not_those_of_files() -> None:
    assert from_elsewhere(NONE | {"load_format": "auto", "weight_cache_mode": "off"}) == ""
    assert "--load-format remote_instance" in from_elsewhere({"load_format": "remote_instance"})
    assert "--weight-cache-mode client" in from_elsewhere({"weight_cache_mode": "client"})


def test_code_of_other_repositories_is_not_that_of_files(tmp_path: Path) -> None:
    given = NONE | {"model_path": str(tmp_path), "trust_remote_code": True}
    assert from_elsewhere(given) == "", "it has no configuration"
    for auto_map, elsewhere in (
        ({"AutoModel": "modeling_own.Model"}, False),
        ({"AutoModel": "org/other--modeling.Model"}, True),
        ({"AutoTokenizer": ["org/other--tokenizing.Slow", None]}, True),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"auto_map": auto_map}))
        assert bool(from_elsewhere(given)) == elsewhere
    assert from_elsewhere(given | {"trust_remote_code": False}) == ""
    (tmp_path / "config.json").write_text("[]")
    assert from_elsewhere(given) == ""
    assert "takes code" in from_elsewhere(given | {"model_path": "org/not-in-the-cache"}), "nobody knows"
