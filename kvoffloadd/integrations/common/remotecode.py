"""Code of a model that lies in another repository of the hub than the model itself: REPOSITORY--MODULE.CLASS.

transformers takes it for what `auto_map` names, in each of a model's configs by itself. A tokenizer's does not count:
it makes token ids, which are named.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

_TOKENIZER = "tokenizer_config.json"


def code_elsewhere(folder: str) -> list[str]:
    """What the configs in a model's folder name. What can't be read, or is no JSON, names nothing: no loader reads it
    either.
    """
    found: list[str] = []
    for file in sorted(Path(folder).glob("*config.json")):
        if file.name == _TOKENIZER:
            continue
        try:
            config = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        found += names_in(config.get("auto_map") if isinstance(config, Mapping) else None)
    return list(dict.fromkeys(found))


def names_in(auto_map: object) -> Iterator[str]:
    """Of one `auto_map`: what is in another repository."""
    if isinstance(auto_map, str):
        if "--" in auto_map:
            yield auto_map
    elif isinstance(auto_map, Mapping):
        for one in auto_map.values():
            yield from names_in(one)
    elif isinstance(auto_map, list | tuple):
        for one in auto_map:
            yield from names_in(one)
