"""Makes texts that fit the fields of a namespace."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

_FIELD_MAX = 512


def fitting(text: str) -> str:
    """Returns the text, or its digest where a namespace's field has no room for it."""
    return text if len(text) <= _FIELD_MAX else "blake2b:" + digest_of(text)


def digest_of(value: object) -> str:
    """Returns 32 hexadecimal digits that name a value by its `repr`."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest()


def texts_in(value: object) -> Iterator[str]:
    """Yields all texts in a value of configurations: lists and mappings, except the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)
