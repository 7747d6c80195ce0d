"""Derives from SGLang's server arguments what decides the bytes of a page, with files named by their contents."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvoffloadd.integrations.common.contents import ContentsError
from kvoffloadd.integrations.sglang.arguments import ADAPTERS, FILES, GRAPHS, MODELS, NAMES_HARMLESS, SIZES
from kvoffloadd.integrations.sglang.files import Source, takes_code_from_elsewhere

Named = Callable[[Source], str]

_ELSEWHERE = ("remote", "remote_instance", "ipc_cache")
"""Formats with weights that come from another process or host."""


def identity_of(arguments: Mapping[str, Any], named: Named) -> tuple[tuple[str, object], ...]:
    """Returns each argument that counts, with its value: equal for engines with equal pages.

    `arguments`: all of SGLang's, as resolved. `named`: names a file's contents, empty for a file that is not there.

    Raises:
        ContentsError: a file can't be named, or a value can't be compared.
    """
    return tuple(
        (name, _value_of(name, value, arguments, named))
        for name, value in sorted(arguments.items())
        if name not in NAMES_HARMLESS
    )


def sources_of(arguments: Mapping[str, Any]) -> frozenset[Source]:
    """Returns all files that `identity_of` would name."""
    found = set()

    def note(source: Source) -> str:
        found.add(source)
        return ""

    with suppress(ContentsError):  # raised again when the identity is computed
        identity_of(arguments, note)
    return frozenset(found)


def from_elsewhere(arguments: Mapping[str, Any]) -> str:
    """Returns why weights or code are not those of the model's files. Empty: they are."""
    if arguments.get("load_format") in _ELSEWHERE:
        return f"--load-format {arguments['load_format']} takes weights from another process"
    if arguments.get("weight_cache_mode") not in (None, "off"):
        return f"--weight-cache-mode {arguments['weight_cache_mode']} takes weights from another process"
    if arguments.get("trust_remote_code"):
        model = model_source(str(arguments.get("model_path")), arguments)
        if takes_code_from_elsewhere(model):
            return f"{model.path!r} takes code from another repository (auto_map in its configs)"
    return ""


def model_source(path: str, arguments: Mapping[str, Any]) -> Source:
    """Returns where SGLang takes a model of that path, or name on the hub, from."""
    return Source(path, True, arguments.get("revision") or None, arguments.get("download_dir") or None)


def _value_of(name: str, value: Any, arguments: Mapping[str, Any], named: Named) -> object:
    if name == ADAPTERS:
        return bool(value)
    if name == GRAPHS and isinstance(value, Mapping):
        value = {phase: _without_sizes(options) for phase, options in value.items()}
    if name in FILES and isinstance(value, str) and value:
        return named(_source(name, value, arguments)) or value
    return _comparable(name, value, named)


def _without_sizes(value: Any) -> Any:
    return {key: item for key, item in value.items() if key not in SIZES} if isinstance(value, Mapping) else value


def _source(name: str, value: str, arguments: Mapping[str, Any]) -> Source:
    return model_source(value, arguments) if name in MODELS else Source(value)


def _comparable(name: str, value: Any, named: Named) -> object:
    """Converts the value to a form with a `repr` that is the same in all processes."""
    if isinstance(value, enum.Enum):
        return _comparable(name, value.value, named)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        if os.path.isabs(value):
            return named(Source(value)) or value
        return _parsed(name, value, named) if value.startswith(("{", "[")) else value
    if isinstance(value, Mapping):
        return "a mapping", *sorted((repr(key), _comparable(name, item, named)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return "a list", *(_comparable(name, item, named) for item in value)
    if isinstance(value, set | frozenset):
        return "a set", *sorted(repr(_comparable(name, item, named)) for item in value)
    raise ContentsError(f"--{name.replace('_', '-')} has a value of {type(value).__name__}, which can't be compared")


def _parsed(name: str, text: str, named: Named) -> object:
    """Returns JSON as its value, any other text as it is."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return text
    return _comparable(name, parsed, named)
