"""What the names of a namespace are made of: texts that fit their fields, and the files of a model."""

from __future__ import annotations

import hashlib
import os

_FIELD_MAX = 512
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")


def files_of(model: str) -> str:
    """Names weights in a local directory by their files' sizes and times: there, nobody else notes a new revision.

    Empty for a name that is no directory.
    """
    try:
        entries = [entry for entry in os.scandir(model) if entry.is_file() and entry.name.endswith(_WEIGHTS)]
        said = [(entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries]
    except OSError:
        return ""
    return "files:" + digest_of(sorted(said))


def fitting(text: str) -> str:
    """The text, or its digest where a namespace's field has no room for it."""
    return text if len(text) <= _FIELD_MAX else "blake2b:" + digest_of(text)


def digest_of(value: object) -> str:
    """32 hexadecimal digits that name a value by its `repr`."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
