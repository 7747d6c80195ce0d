"""Tests the identity of what an engine computes with: each field not shown to be harmless, and what is in each file."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common import contents
from kvoffloadd.integrations.common.contents import Fingerprint, model_of
from kvoffloadd.integrations.vllm import environment, identity
from kvoffloadd.integrations.vllm.fields import ELSEWHERE, HARMLESS, PARTS, SECTIONS, is_judged, is_part
from kvoffloadd.integrations.vllm.identity import IDENTITY, NamelessError, attached, canonical, fields_of, identity_of
from tests.integrations.vllm.configs import judged, model_config, section, vllm_config, with_files

ADRIFT = {"additional", "engram", "diffusion", "multimodal", "lora", "speculative", "engine"}
"""Sections that the standard engine of these tests does not have."""

WALKED = [
    f"{section}.{field}"
    for section in sorted(PARTS.keys() - ADRIFT)
    for field in judged(section)
    if field not in ("model_weights", "load_format", "hf_config_path", "model")  # places: see below
]
READ_ONCE_MORE = {"model.multimodal_config", "model.generation_config", "load.model_loader_extra_config"}


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file system the tests have: one on a disk of this host."""
    monkeypatch.setattr(contents, "_times", lambda *_: contents._Times.TELL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return with_files(tmp_path / "model")


def without_token(named: dict[str, Any]) -> dict[str, Any]:
    """What two engines must have in common."""
    assert not named["doubt"]
    return {name: value for name, value in named.items() if name != "token"}


def one(folder: Path, **values: Any) -> dict[str, Any]:
    return without_token(identity_of(vllm_config(folder, values)))


@pytest.mark.parametrize("name", WALKED)
def test_each_field_that_is_not_known_to_be_harmless_is_part(name: str, model: Path) -> None:
    """vLLM 0.32 and 0.33 have these fields; the tests with a real vLLM see to it that none is missing here."""
    of, _, field = name.partition(".")
    other = {"model.max_model_len": 8192, "model.generation_config": "vllm"}.get(name, {"another": 1})
    if name == "model.hf_config" or name == "model.hf_text_config":
        other = SimpleNamespace(model_type="llama", rope_parameters={}, architectures=["Llama"])
    found = [identity_of(vllm_config(model, {name: value})) for value in (other, other)]
    assert found[0]["fields"] == found[1]["fields"]
    standard = identity_of(vllm_config(model))
    differs = found[0]["fields"] != standard["fields"]
    assert differs is (is_part(of, field) or name in READ_ONCE_MORE)


def test_fields_that_nobody_knows_are_part(model: Path) -> None:
    """vLLM will have others; whatever they are, engines that differ in them share nothing."""
    for field in ("cache_config", "model_config"):
        config = vllm_config(model)
        known = getattr(config, field)
        other = dataclasses.make_dataclass("Later", [("new_option", int)], bases=(type(known),), frozen=False)
        values = {one.name: getattr(known, one.name) for one in dataclasses.fields(known)}
        made = [other(**values, new_option=value) for value in (1, 2)]
        found = [identity_of(dataclasses.replace(config, **{field: later}))["fields"] for later in made]
        assert found[0] != found[1]
    engines = [section("engine", new_config=value) for value in (None, {"a": 1})]
    for engine in engines:
        config = vllm_config(model)
        for each in dataclasses.fields(config):
            setattr(engine, each.name, getattr(config, each.name))
    assert fields_of(engines[0]) != fields_of(engines[1])


@pytest.mark.parametrize("field", sorted(set(judged("engine")) - {"kv_transfer_config", "lora_config"} - set(SECTIONS)))
def test_sections_that_are_left_out(field: str, model: Path) -> None:
    if field == "speculative_config":
        return
    assert one(model, **{f"engine.{field}": object()}) == one(model)


def test_every_judgement_has_a_reason_and_is_made_once() -> None:
    made = [(left.section, field) for left in (*HARMLESS, *ELSEWHERE) for field in left.fields]
    parts = [(of, field) for of, fields in PARTS.items() for field in fields]
    assert len({*made, *parts}) == len(made) + len(parts)
    assert all(len(left.reason) > 10 for left in (*HARMLESS, *ELSEWHERE))
    assert is_judged("cache", "cache_dtype") and is_judged("cache", "num_gpu_blocks")
    assert not is_judged("cache", "new_option") and is_part("cache", "new_option")


def harmless_table() -> str:
    """Returns the table as docs/VLLM.md has it: paste it there."""
    rows = ["| configuration | fields | why they are harmless |", "|---|---|---|"]
    for left in HARMLESS:
        section = "VllmConfig" if left.section == "engine" else left.section
        fields = ", ".join(f"`{field}`" for field in sorted(left.fields) if not field.startswith("_"))
        rows.append(f"| {section} | {fields} | {left.reason} |")
    return "\n".join(rows)


def test_harmless_fields_are_documented_with_their_reasons() -> None:
    document = Path(__file__).parents[3] / "docs" / "VLLM.md"
    assert harmless_table() in document.read_text(encoding="utf-8")


# --- values ---


class Colour(enum.Enum):
    RED = 1


class Count(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Inner:
    value: Any


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, "1"),
        (True, "True"),
        (None, "None"),
        (Colour.RED, 1),
        (Count.ONE, 1),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, [("a", 1)]),
        ([1, 2], [2, 1]),
        ({1, 2}, [1, 2]),
        (Inner(1), Inner(2)),
        (Inner([{"a": Colour.RED}]), Inner([{"a": None}])),
        (Inner, "Inner"),
        (b"a", "a"),
        ([["a"], "b"], [["a", "b"]]),
    ],
)
def test_values_that_differ_have_other_forms(value: object, other: object) -> None:
    assert repr(canonical(value, "x")) != repr(canonical(other, "x"))
    assert canonical(value, "x") == canonical(pickle.loads(pickle.dumps(value)), "x")


def test_functions_of_vllm_have_names() -> None:
    """One of them makes the options of a draft model."""

    def override(config: object) -> object:
        return config

    with pytest.raises(NamelessError):
        canonical(functools.partial(override, 1), "x")
    override.__module__ = "vllm.config.speculative"
    assert canonical(override, "x") == ("function", "vllm.config.speculative", override.__qualname__)
    assert canonical(functools.partial(override, 1), "x") == canonical(functools.partial(override, 1), "x")
    assert canonical(functools.partial(override, 1), "x") != canonical(functools.partial(override, 2), "x")


def test_the_order_of_maps_and_sets_is_nothing() -> None:
    assert canonical({"a": 1, "b": 2}, "x") == canonical({"b": 2, "a": 1}, "x")
    assert canonical({"a", "b", "c"}, "x") == canonical(frozenset(("c", "b", "a")), "x")


@pytest.mark.parametrize("value", [len, lambda: None, object(), {"deep": [object()]}])
def test_what_has_no_name_is_a_doubt(value: object, model: Path) -> None:
    """It can't be decided whether two functions do the same."""
    with pytest.raises(NamelessError, match=r"model\.hf_overrides"):
        canonical(value, "model.hf_overrides")
    found = identity_of(vllm_config(model, {"model.hf_overrides": value}))
    assert "model.hf_overrides" in found["doubt"]
    assert found["token"] != identity_of(vllm_config(model, {"model.hf_overrides": value}))["token"]


# --- lengths ---


LONG = {"rope_parameters": {"full_attention": {"rope_type": "longrope", "short_factor": [1.0]}}}


@pytest.mark.parametrize(
    ("changed", "harmless"),
    [
        ({}, True),
        ({"hf": {"model_type": "llama4_text"}}, False),
        ({"hf": {"model_type": "of tomorrow"}}, False),
        ({"hf": LONG}, False),
        ({"model_impl": "transformers"}, False),
        ({"model_class_overrides": {"Llama": "mine:Llama"}}, False),
    ],
)
def test_lengths_matter_unless_a_model_is_known_not_to_read_them(
    changed: dict[str, Any], harmless: bool, model: Path
) -> None:
    config = SimpleNamespace(
        **{"model_type": "llama", "rope_parameters": {}, "architectures": ["A"]} | changed.pop("hf", {})
    )
    values = {f"model.{name}": value for name, value in changed.items()} | {"model.hf_text_config": config}
    found = [one(model, **values, **{"model.max_model_len": length}) for length in (4096, 8192)]
    assert (found[0] == found[1]) is harmless


# --- files ---


@pytest.mark.parametrize("how", list(Fingerprint))
@pytest.mark.parametrize("name", ["model.safetensors", "deep/model-2.safetensors", "modeling_own.py", "new.json"])
def test_another_file_is_another_model(how: Fingerprint, name: str, model: Path) -> None:
    before = identity_of(vllm_config(model), how)["weights"]
    file = model / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"new")
    os.utime(file, (1e9, 1e9))
    assert identity_of(vllm_config(model), how)["weights"] != before


def test_by_contents_copies_share_wherever_they_are(model: Path, tmp_path: Path) -> None:
    copy = with_files(tmp_path / "elsewhere" / "copy")
    for how, share in ((Fingerprint.AUTO, False), (Fingerprint.CONTENTS, True)):
        found = [identity_of(vllm_config(folder), how) for folder in (model, copy)]
        assert (found[0]["weights"] == found[1]["weights"]) is share
        assert found[0]["model"] == found[1]["model"] == "Llama"
        assert found[0]["fields"] == found[1]["fields"]


def _scales(file: Path) -> Any:
    return section("multimodal", mm_encoder_fp8_scale_path=str(file))


def test_other_files_that_an_engine_reads(model: Path, tmp_path: Path) -> None:
    """A config elsewhere, scales, options of the loader, sampling defaults by which Llama 4 scales its queries."""
    config = with_files(tmp_path / "config")
    scales = tmp_path / "scales.json"
    scales.write_text("{}")
    cases = {
        "model.hf_config_path": str(config),
        "model.generation_config": str(config),
        "load.model_loader_extra_config": {"adapter": [str(scales)]},
        "model.multimodal_config": _scales(scales),
    }
    for name, value in cases.items():
        before = one(model, **{name: value})
        assert before != one(model)
        elsewhere = tmp_path / "elsewhere" / name
        shutil.copytree(config, elsewhere / "config")
        shutil.copy(scales, elsewhere)
        moved: Any = {"adapter": [str(elsewhere / "scales.json")]} if isinstance(value, dict) else None
        moved = moved or (str(elsewhere / "config") if isinstance(value, str) else _scales(elsewhere / "scales.json"))
        copies = [identity_of(vllm_config(model, {name: each}), Fingerprint.CONTENTS) for each in (value, moved)]
        found = [(each["fields"], each["weights"]) for each in copies]
        assert found[0] == found[1], "by contents, their places are nothing"
        extra: dict[str, Any] = {IDENTITY: identity_of(vllm_config(model, {name: value}))}
        for file in (scales, config / "config.json"):
            file.write_text(file.read_text() + " ")
        assert "have changed" in attached(extra)["doubt"]
        assert one(model, **{name: value}) != before


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"load.load_format": "tensorizer"}, "--load-format tensorizer"),
        ({"load.load_format": "ipc_cache"}, "--load-format ipc_cache"),
        ({"load.load_format": "of a plug-in"}, "of a plug-in"),
        ({"model.model_weights": "s3://bucket/model"}, "object storage, s3://bucket/model"),
        ({"model.model": "org/never-fetched"}, "neither a place on this host, nor in its Hugging Face cache"),
        ({"model.hf_config_path": "/nowhere/at/all"}, "neither a place"),
        ({"model.generation_config": "/nowhere/at/all"}, "neither a place"),
    ],
)
def test_weights_that_are_not_known_are_a_doubt(values: dict[str, Any], why: str, model: Path) -> None:
    found = identity_of(vllm_config(model, values))
    assert why in found["doubt"]
    assert attached({IDENTITY: found}) == found


def test_a_model_of_the_hub_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it was fetched, and under whichever of its names the engine has it."""
    commits = "0123456789abcdef0123456789abcdef01234567", "f" * 40
    folders = [with_files(tmp_path / host / f"models--org--m/snapshots/{commits[0]}") for host in ("a", "b")]
    other = with_files(tmp_path / f"a/models--org--m/snapshots/{commits[1]}")
    for folder in (*folders, other):
        blob = folder.parents[1] / "blobs" / hashlib.sha256(b"old").hexdigest()
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(b"old")
        for file in folder.iterdir():
            file.unlink()
            file.symlink_to(blob)
    (folders[1] / "README.txt").symlink_to(folders[1].parents[1] / "blobs" / hashlib.sha256(b"old").hexdigest())
    found = [one(folder) for folder in (*folders, other)]
    assert [each.pop("places") for each in found] == [[str(folder)] for folder in (*folders, other)]
    assert found[0] == found[1] != found[2]
    assert found[0]["weights"] == f"hub:org--m@{commits[0]}"
    assert found[0]["model"] == "org/m"
    monkeypatch.setattr(identity, "snapshot_of", lambda name, *_: str(folders[0]) if name == "org/m" else None)
    by_name = one(tmp_path, **{"model.model": "org/m"})
    by_name.pop("places")
    assert by_name == found[0]
    (folders[0] / "own.py").write_text("changed by hand")
    assert one(folders[0])["weights"] != found[0]["weights"]


def test_the_commit_of_a_branch_is_the_one_that_vllm_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process fetches the branch meanwhile, and the cache has another commit of it."""

    class Resolved(str):
        resolved = "0123456789" * 4

    asked = []

    def snapshot_of(*given: Any) -> str:
        asked.append(given)
        return str(with_files(tmp_path / "snapshot"))

    monkeypatch.setattr(identity, "snapshot_of", snapshot_of)
    config = vllm_config(tmp_path, {"model.model": "org/m", "model.revision": Resolved("main")})
    assert not identity_of(config)["doubt"]
    config.model_config.hf_config_path = "org/config"
    config.model_config._hf_config_revision = Resolved("v2")
    assert not identity_of(config)["doubt"]
    assert asked[0] == asked[1] == ("org/m", Resolved.resolved, "config.json")
    assert asked[2] == ("org/config", Resolved.resolved, "config.json")


def test_code_of_another_repository(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = with_files(tmp_path / "code")
    asked = []

    def snapshot_of(*given: Any) -> str | None:
        asked.append(given)
        return str(code)

    monkeypatch.setattr(identity, "snapshot_of", snapshot_of)
    config = SimpleNamespace(auto_map={"AutoModel": "org/code--modeling_own.Own"}, architectures=["Own"])
    values = {"model.hf_config": config, "model.code_revision": "v2"}
    assert len(one(model, **values, **{"model.trust_remote_code": False})["places"]) == 1
    assert one(model, **values, **{"model.trust_remote_code": True})["places"] == [str(model), str(code)]
    assert asked == [("org/code", "v2", "modeling_own.py")]
    (model / "preprocessor_config.json").write_text('{"auto_map": {"AutoProcessor": "org/eyes--processing.Own"}}')
    assert one(model, **values, **{"model.trust_remote_code": False})["places"] == [str(model)]
    one(model, **values, **{"model.trust_remote_code": True})
    assert asked[1:] == [("org/code", "v2", "modeling_own.py"), ("org/eyes", "v2", "processing.py")]


# --- environment ---


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", ("", '{"dtype": "int4"}')),
        ("VLLM_MARLIN_INPUT_DTYPE", ("int8", "fp8")),
        ("VLLM_PP_LAYER_PARTITION", ("1,3", "3,1")),
        ("VLLM_OF_TOMORROW", ("0", "1")),
    ],
)
def test_variables_that_are_not_known_to_be_harmless_are_part(
    name: str, values: tuple[str, str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [one(model)]
    for value in values:
        monkeypatch.setenv(name, value)
        found += [one(model), one(model)]
    assert found[1] == found[2] and found[3] == found[4]
    assert len({each["fields"] for each in found}) == 3


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_HOST_IP", "VLLM_LOGGING_LEVEL", "VLLM_CACHE_ROOT", "VLLM_PLUGINS", "VLLM_ENGINE_READY_TIMEOUT_S"),
        *("VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_USE_MODELSCOPE", "HOME", "CUDA_VISIBLE_DEVICES", "MY_VLLM_NAME"),
        *("VLLM_PORT", "VLLM_SERVICE_HOST", "VLLM_SERVICE_PORT_HTTP", "VLLM_PORT_8000_TCP", "VLLM_QWEN_SERVICE_HOST"),
        *("VLLM_QWEN_PORT", "VLLM_QWEN_PORT_8000_TCP_ADDR", "VLLM_QWEN_PORT_53_UDP_PROTO"),
    ],
)
def test_variables_in_which_engines_may_differ(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes' variables are among them, which describe services whose names begin with vllm."""
    before = one(model)
    monkeypatch.setenv(name, "another")
    assert one(model) == before


def test_a_variable_may_name_a_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, text in (("a", "{}"), ("b", "{}"), ("b", "[]")):
        file = tmp_path / name / "quantization.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", str(file))
        found.append(identity_of(vllm_config(model), Fingerprint.CONTENTS)["fields"])
    assert found[0] == found[1] != found[2]


def test_models_of_modelscope_are_a_doubt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's cache may have another model of that name."""
    hub = SimpleNamespace(try_to_load_from_cache=lambda *_, **__: str(model / "config.json"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    config = vllm_config(model, {"model.model": "org/m"})
    assert not identity_of(config)["doubt"]
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert "neither a place" in identity_of(config)["doubt"]
    assert not identity_of(vllm_config(model))["doubt"], "a place is a place"


def test_every_variable_is_judged_once() -> None:
    names = [name for left in (*environment.HARMLESS, *environment.ELSEWHERE) for name in left.names]
    assert len(set(names)) == len(names)
    assert all(len(left.reason) > 10 for left in (*environment.HARMLESS, *environment.ELSEWHERE))


def harmless_variables_table() -> str:
    """Returns the table as docs/VLLM.md has it: paste it there."""
    rows = ["| variables, without `VLLM_` | why they are harmless |", "|---|---|"]
    for left in environment.HARMLESS:
        names = ", ".join(f"`{name}`" for name in sorted(left.names))
        rows.append(f"| {names} | {left.reason} |")
    return "\n".join(rows)


def test_harmless_variables_are_documented_with_their_reasons() -> None:
    document = Path(__file__).parents[3] / "docs" / "VLLM.md"
    assert harmless_variables_table() in document.read_text(encoding="utf-8")


# --- attaching ---


def test_files_that_change_while_they_are_loaded_are_a_doubt(model: Path) -> None:
    extra: dict[str, Any] = {IDENTITY: identity_of(vllm_config(model))}
    before = dict(extra[IDENTITY])
    assert attached(extra) == before
    (model / "model.safetensors").write_bytes(b"new")
    assert "have changed since the engine was started" in attached(extra)["doubt"]
    assert extra[IDENTITY]["doubt"], "the namespace is made of it"
    assert extra[IDENTITY]["token"] == before["token"]


def test_files_that_are_gone_are_a_doubt(model: Path) -> None:
    extra: dict[str, Any] = {IDENTITY: identity_of(vllm_config(model))}
    model.rename(model.with_name("away"))
    assert "nothing is at" in attached(extra)["doubt"]


def test_all_bytes_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds by contents, too: the file system shows whether files have changed meanwhile."""
    extra: dict[str, Any] = {IDENTITY: identity_of(vllm_config(model), Fingerprint.CONTENTS)}
    asked: list[Fingerprint | None] = []

    def named(place: str, how: Fingerprint | None) -> str:
        asked.append(how)
        return model_of(place, how)

    monkeypatch.setattr(identity, "model_of", named)
    assert not attached(extra)["doubt"]
    assert asked == [None]
    (model / "config.json").write_bytes(b"new")
    assert attached(extra)["doubt"]


def test_without_the_plug_in_an_engine_does_not_start() -> None:
    with pytest.raises(UsageError, match="its plug-in for vLLM had not run"):
        attached({})


# --- drafts and adapters ---


def drafting(folder: Path, **values: Any) -> Any:
    draft = {name: values.pop(name) for name in list(values) if name.startswith("model.")}
    inner = model_config(folder, **{name.removeprefix("model."): value for name, value in draft.items()})
    return section("speculative", **{"method": "eagle", "draft_model_config": inner} | values)


def test_a_draft_model_is_named_apart(model: Path, tmp_path: Path) -> None:
    """The target is what it was; the draft is its files and its options."""
    drafts = [with_files(tmp_path / name) for name in ("one", "two")]
    found = [
        without_token(identity_of(vllm_config(model, speculative_config=each)))
        for each in (
            drafting(drafts[0]),
            drafting(drafts[0]),
            drafting(drafts[1]),
            drafting(drafts[0], quantization="fp8"),
            drafting(drafts[0], **{"model.hf_overrides": {"a": 1}}),
        )
    ]
    for each in found:
        del each["draft_places"], each["draft_seen"]
    names = [each.pop("drafts") for each in found]
    assert names[0] == names[1]
    assert len(set(names)) == 4 and all(names)
    assert all(each == found[0] for each in found)
    nothing: dict[str, Any] = {"drafts": "", "draft_places": [], "draft_seen": ""}
    assert found[0] | nothing == one(model)


def test_a_draft_that_changes_while_it_is_loaded_is_the_engines_own(model: Path, tmp_path: Path) -> None:
    """The target is not in doubt."""
    draft = with_files(tmp_path / "draft")
    for change in (lambda: (draft / "config.json").write_bytes(b"new"), lambda: draft.rename(tmp_path / "away")):
        extra: dict[str, Any] = {IDENTITY: identity_of(vllm_config(model, speculative_config=drafting(draft)))}
        before = attached(extra)
        assert before["drafts"] != before["token"]
        change()
        after = attached(extra)
        assert (after["drafts"], after["doubt"]) == (before["token"], "")
        assert attached(extra) == after


def test_drafts_without_a_model(model: Path) -> None:
    for method in ("ngram", "suffix"):
        ngram = section("speculative", method=method)
        assert one(model) == without_token(identity_of(vllm_config(model, speculative_config=ngram)))


def test_a_draft_in_doubt_is_the_engines_own(model: Path) -> None:
    config = vllm_config(model, speculative_config=drafting(Path("/nowhere/at/all")))
    found = [identity_of(config) for _ in range(2)]
    assert found[0]["drafts"] != found[1]["drafts"]
    assert without_token(found[0]) | {"drafts": ""} == one(model)


def test_how_adapters_are_applied_is_named_apart(model: Path) -> None:
    found = [
        without_token(identity_of(vllm_config(model, lora_config=section("lora", **values))))
        for values in ({"max_loras": 1}, {"max_loras": 8}, {"lora_dtype": "float16"})
    ]
    names = [each.pop("adapters") for each in found]
    assert names[0] == names[1] != names[2]
    assert found[0] | {"adapters": ""} == one(model)


def test_adapters_count_as_applied_where_all_else_is_in_doubt(model: Path) -> None:
    """`refuse_adapters` goes by it."""
    for values in ({"model.hf_overrides": len}, {"load.load_format": "tensorizer"}):
        config = vllm_config(model, values, lora_config=section("lora"))
        assert identity_of(config)["adapters"]
