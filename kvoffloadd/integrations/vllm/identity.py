"""The identity of an engine: the fields of vLLM's configuration that decide the bytes of a KV cache, the environment
variables that do, and the contents of the files that they name.

It is read when the engine's configuration is made, before weights are loaded (`plugin`), and travels with the
configuration to all of the engine's processes. Each of them checks the files once more when it attaches to the daemon:
files that have changed meanwhile may have been loaded half old, half new. Where anything is in doubt the engine shares
with no other, and gives the reason.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import logging
import os
import secrets
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, Final

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint, hub_name, model_of, snapshot_of
from kvoffloadd.integrations.common.naming import digest_of, texts_in
from kvoffloadd.integrations.common.remotecode import code_elsewhere, names_in
from kvoffloadd.integrations.vllm.environment import VARIABLES
from kvoffloadd.integrations.vllm.fields import ANY_LENGTH, SECTIONS, is_part

logger = logging.getLogger("vllm.kvoffloadd")

IDENTITY = "kvoffloadd_identity"
"""Key of extra_config under which the plug-in puts the engine's identity."""

OPTION = "fingerprint"
"""Key of extra_config with which users choose how files are named."""

_OF_MODEL: Final = frozenset(
    (
        *("auto", "hf", "dummy", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt"),
        *("runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"),
    )
)
"""`load_format`s with loaders in vLLM that read the model's own files, and no others."""
_WITHOUT_MODEL: Final = frozenset(("ngram", "ngram_gpu", "suffix"))
"""Methods of speculative decoding that have no draft model."""


class NamelessError(UsageError):
    """Raised for a field's value that no other process could name."""


def identity_of(vllm_config: Any, how: Fingerprint = Fingerprint.AUTO) -> dict[str, Any]:
    """Returns the identity of a VllmConfig as it goes into extra_config: texts, numbers and lists alone.

    `model`, `dtype`, `hash`: as users know them. `weights`: the contents of the model's files. `fields`: the rest.
    `adapters`: how adapters are applied; empty without any. `drafts`: the draft model; empty without one. `layers`: how
    many the model has. `places`, `seen`: the files, and their state; `draft_places`, `draft_seen`: the draft's.
    `token`: unique to the engine. `doubt`: why it shares with no other; empty: it shares.
    """
    model = vllm_config.model_config
    identity: dict[str, Any] = {
        "model": _display_name(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "layers": int(model.get_total_num_hidden_layers()),
        "token": secrets.token_hex(8),
        **dict.fromkeys(("weights", "fields", "adapters", "drafts", "seen", "draft_seen", "doubt"), ""),
        "places": [],
        "draft_places": [],
    }
    if vllm_config.lora_config is not None:
        identity["adapters"] = identity["token"]  # unless it has a name
    try:
        identity["fields"] = digest_of(fields_of(vllm_config, how))
        identity["adapters"] = _adapters(vllm_config)
        identity["places"] = _places(vllm_config.model_config, vllm_config.load_config)
        identity["seen"] = seen(identity["places"])
        identity["weights"] = named(identity["places"], how)
    except (NamelessError, ContentsError) as error:
        identity["doubt"] = str(error)
    if _has_drafts(vllm_config):
        try:
            identity |= _drafts(vllm_config, how)
        except (NamelessError, ContentsError) as error:
            identity |= _own_drafts(identity, str(error))
    return identity


def attached(extra_config: dict[str, Any]) -> dict[str, Any]:
    """Returns the identity in an engine's extra_config, once its weights are loaded: with a doubt where files have
    changed.

    Raises UsageError where the plug-in has not run.
    """
    identity = extra_config.get(IDENTITY)
    if identity is None:
        raise UsageError(
            "kvoffloadd does not know what this engine computes with: its plug-in for vLLM had not run when the "
            "engine's configuration was made. Install the package kvoffloadd in vLLM's environment (to have it on "
            "PYTHONPATH is not enough), and name kvoffloadd in VLLM_PLUGINS where that is set"
        )
    if not identity["doubt"]:
        try:
            if seen(identity["places"]) != identity["seen"]:
                identity = identity | {"doubt": "the model's files have changed since the engine was started"}
        except ContentsError as error:
            identity = identity | {"doubt": str(error)}
    if identity["draft_places"]:
        try:
            if seen(identity["draft_places"]) != identity["draft_seen"]:
                identity = identity | _own_drafts(identity, "its files have changed since the engine was started")
        except ContentsError as error:
            identity = identity | _own_drafts(identity, str(error))
    if identity["doubt"]:
        logger.warning(
            "kvoffloadd: this engine shares with no other, and nothing will hit after its restart: %s",
            identity["doubt"],
        )
    extra_config[IDENTITY] = identity
    return dict(identity)


def seen(places: Iterable[str]) -> str:
    """Names the state of these places, for comparison with a second look. Raises ContentsError where nothing is."""
    return named(places, None)


def named(places: Iterable[str], how: Fingerprint | None) -> str:
    """Names the contents of these places as `contents_of` does. Raises ContentsError where nothing is."""
    return "+".join(_named(place, how) for place in places)


def fields_of(vllm_config: Any, how: Fingerprint = Fingerprint.AUTO) -> list[tuple[str, object]]:
    """Returns name and value of each field that is part of the identity, and the environment's. Raises NamelessError,
    ContentsError.
    """
    found: list[tuple[str, object]] = []
    for field in dataclasses.fields(vllm_config):
        if not is_part("engine", field.name):
            continue
        value = getattr(vllm_config, field.name)
        section = SECTIONS.get(field.name, field.name)
        found += _section(section, value)
    found += _model(vllm_config.model_config)
    found += _loader(vllm_config.load_config, how)
    found.append(("environment", canonical(_environment(how), "environment")))
    return sorted(found, key=lambda item: item[0])


def canonical(value: object, where: str) -> object:
    """Converts equal values to equal ones in all processes. Raises NamelessError for values without such a form:
    functions that are not vLLM's, and objects that equal only themselves.
    """
    if value is None or (isinstance(value, bool | int | float | str | bytes) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, Mapping):
        return "map", tuple(sorted((str(key), canonical(item, f"{where}.{key}")) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return "set", tuple(sorted(repr(canonical(item, where)) for item in value))
    if isinstance(value, list | tuple):
        return "list", tuple(canonical(item, where) for item in value)
    if isinstance(value, functools.partial):
        return "partial", canonical((value.func, value.args, value.keywords), where)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return _class_name(type(value)), tuple((name, canonical(item, f"{where}.{name}")) for name, item in fields)
    return _name_of(value, where)


def _name_of(value: object, where: str) -> object:
    """Returns the name of a value that has one."""
    if isinstance(value, enum.Enum):
        return "enum", _class_name(type(value)), canonical(value.value, where)
    if isinstance(value, type):
        return "class", _class_name(value)
    if isinstance(value, PurePath):
        return "path", str(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return "torch", str(value)
    if isinstance(value, types.FunctionType) and value.__module__.startswith("vllm.") and not value.__closure__:
        return "function", value.__module__, value.__qualname__  # vLLM's release is in the namespace
    raise NamelessError(f"{where} is {type(value).__name__}, which has no name that another engine would know")


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _section(section: str, config: Any) -> Iterator[tuple[str, object]]:
    """Yields the fields of a section; for one that is no dataclass, or is not there, the value itself."""
    if not dataclasses.is_dataclass(config):
        yield section, canonical(config, section)
        return
    for field in dataclasses.fields(config):
        if is_part(section, field.name):
            name = f"{section}.{field.name}"
            yield name, canonical(getattr(config, field.name, None), name)


def _model(model: Any) -> Iterator[tuple[str, object]]:
    """Yields the attributes of a ModelConfig that are no fields."""
    yield from _section("multimodal", model.multimodal_config)
    yield "model.generation", _generation(model) or "elsewhere"
    if not _any_length(model):
        yield "model.max_model_len", int(model.max_model_len)


def _generation(model: Any) -> str:
    """Returns the generation config's source; empty where it is a place."""
    given = str(model.generation_config)
    return given if given in ("auto", "vllm") else ""


def _any_length(model: Any) -> bool:
    config = model.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    known = getattr(config, "model_type", "") in ANY_LENGTH and str(model.model_impl) in ("auto", "vllm")
    return known and not model.model_class_overrides and "longrope" not in repr(rope)


def _loader(load: Any, how: Fingerprint) -> Iterator[tuple[str, object]]:
    yield "load.extra", canonical(_with_contents(load.model_loader_extra_config, how), "load.extra")


def _environment(how: Fingerprint) -> list[tuple[str, object]]:
    """Returns the variables that are set, and count. The value of one may be a file."""
    variables = VARIABLES.counted(os.environ)
    return [(name, _with_contents(value, how) if os.path.isfile(value) else value) for name, value in variables]


def _with_contents(value: object, how: Fingerprint) -> object:
    """Replaces the names of files that exist, wherever they stand, by their contents."""
    if isinstance(value, str) and os.path.isabs(value) and os.path.lexists(value):
        return _named(value, how)
    if isinstance(value, Mapping):
        return {key: _with_contents(item, how) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_contents(item, how) for item in value]
    return value


def _adapters(vllm_config: Any) -> str:
    lora = vllm_config.lora_config
    return "" if lora is None else digest_of(list(_section("lora", lora)))


def _has_drafts(vllm_config: Any) -> bool:
    drafting = vllm_config.speculative_config
    return drafting is not None and str(drafting.method) not in _WITHOUT_MODEL


def _drafts(vllm_config: Any, how: Fingerprint) -> dict[str, Any]:
    """Describes the draft model. Raises NamelessError, ContentsError."""
    drafting = vllm_config.speculative_config
    model, load = drafting.draft_model_config, drafting.draft_load_config or vllm_config.load_config
    found = [*_section("speculative", drafting), *_section("load", load), *_loader(load, how)]
    places: list[str] = []
    if model is not None:
        places = _places(model, load)
        found += [*_section("model", model), *_model(model), ("dtype", str(model.dtype))]
    elif drafting.model:
        places = [_place(str(drafting.model), drafting.revision)]
    as_seen = seen(places)
    found.append(("files", named(places, how)))
    drafts = digest_of(sorted(found, key=lambda item: item[0]))
    return {"drafts": drafts, "draft_places": places, "draft_seen": as_seen}


def _own_drafts(identity: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Describes a draft model that is in doubt. The target's keys are shared all the same."""
    logger.warning("kvoffloadd: this engine shares what its draft model computes with no other: %s", why)
    return {"drafts": identity["token"], "draft_places": []}


def _places(model: Any, load: Any) -> list[str]:
    """Returns the places of a model's files. Raises ContentsError where they are not known."""
    if str(load.load_format) not in _OF_MODEL:
        raise ContentsError(f"with --load-format {load.load_format} weights do not come from the model's files")
    if model.model_weights:
        raise ContentsError(f"the weights are in an object storage, {model.model_weights}")
    places = [_place(str(model.model), model.revision)]
    if model.hf_config_path:
        revision = getattr(model, "_hf_config_revision", None) or model.revision
        places.append(_place(str(model.hf_config_path), revision))
    if model.trust_remote_code:
        code = [*names_in(getattr(model.hf_config, "auto_map", None)), *itertools.chain(*map(code_elsewhere, places))]
        for name in dict.fromkeys(code):
            repository, _, module = name.rpartition("--")
            places.append(_place(repository, model.code_revision, f"{module.partition('.')[0]}.py"))
    if not _generation(model):
        places.append(_place(str(model.generation_config), None, "generation_config.json"))
    scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    places += [os.path.abspath(scales)] if scales else []
    places += [
        text for text in texts_in(load.model_loader_extra_config) if os.path.isabs(text) and os.path.lexists(text)
    ]
    return list(dict.fromkeys(places))


def _place(name: str, revision: str | None, file: str = "config.json") -> str:
    if os.path.exists(os.path.expanduser(name)):
        return os.path.abspath(os.path.expanduser(name))
    # vLLM has resolved a branch to a commit of the hub, and loads that one, even if the branch changes meanwhile.
    folder = snapshot_of(name, getattr(revision, "resolved", revision), file)
    if folder is None:
        raise ContentsError(f"{name} is neither a place on this host, nor in its Hugging Face cache")
    return folder


def _named(place: str, how: Fingerprint | None) -> str:
    found = model_of(place, how)
    if not found:
        raise ContentsError(f"nothing is at {place}")
    return found


def _display_name(model: Any) -> str:
    """Returns the hub's name. For a local model, which may have another path on each host, returns the kind of
    model.
    """
    name = str(model.model)
    if not os.path.exists(os.path.expanduser(name)):
        return name
    kinds = getattr(model.hf_config, "architectures", None) or ["model"]
    return hub_name(name) or str(kinds[0])
