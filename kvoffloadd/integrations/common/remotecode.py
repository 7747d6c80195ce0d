"""Finds code of a model that lies in another repository of the hub than the model itself: REPOSITORY--MODULE.CLASS.

transformers uses it for the classes that `auto_map` names, in each of a model's configs separately. A tokenizer's does
not count: it makes token ids, which are named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvoffloadd.integrations.common.naming import texts_in

_TOKENIZER = "tokenizer_config.json"


def code_elsewhere(folder: str) -> list[str]:
    """Returns the names in the configs of a model's folder. A config that can't be read, or is no JSON, names nothing:
    no loader reads it either.
    """
    found: list[str] = []
    for file in sorted(Path(folder).glob("*config.json")):
        if file.name == _TOKENIZER:
            continue
        try:
            config = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        found += names_in(config.get("auto_map") if isinstance(config, Mapping) else None)
    return list(dict.fromkeys(found))


def names_in(auto_map: object) -> list[str]:
    """Returns the names of one `auto_map` that are in another repository."""
    return [name for name in texts_in(auto_map) if "--" in name]
