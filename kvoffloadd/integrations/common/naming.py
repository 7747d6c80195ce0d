"""What the names of a namespace are made of: texts that fit their fields."""

from __future__ import annotations

import hashlib

_FIELD_MAX = 512


def fitting(text: str) -> str:
    """The text, or its digest where a namespace's field has no room for it."""
    return text if len(text) <= _FIELD_MAX else "blake2b:" + digest_of(text)


def digest_of(value: object) -> str:
    """32 hexadecimal digits that name a value by its `repr`."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()
