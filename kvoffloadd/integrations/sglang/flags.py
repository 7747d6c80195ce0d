"""Completes arguments of SGLang that have one possible value with this storage. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvoffloadd.sglangnames import STORAGE, STORAGE_CLASS

_CONFIG: Final = "hicache_storage_backend_extra_config"
_LAYOUT: Final = "hicache_mem_layout"
READ: Final = ("hicache_storage_backend", _CONFIG, _LAYOUT)
"""Arguments that decide which are completed."""

_STANDARD_LAYOUT: Final = "page_first"
_KEYS: Final = {key: value for key, value in STORAGE.items() if key not in STORAGE_CLASS}


def completed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments to set, with their values. Leaves out engines without this storage, and arguments that the
    user has chosen otherwise: an unsupported one is refused later, by its name.
    """
    config = _config(arguments)
    if config is None:
        return {}
    found: dict[str, Any] = {}
    if _KEYS.keys() - config.keys():
        found[_CONFIG] = json.dumps(_KEYS | config)
    if arguments[_LAYOUT] == _STANDARD_LAYOUT:
        found |= {_LAYOUT: "page_first_direct", "hicache_io_backend": "direct"}
    return found


def _config(arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the configuration of this storage; None if the engine uses another one."""
    if arguments["hicache_storage_backend"] != "dynamic":
        return None
    try:
        config = json.loads(arguments[_CONFIG] or "")
    except ValueError:
        return None
    return config if isinstance(config, dict) and STORAGE_CLASS.items() <= config.items() else None
