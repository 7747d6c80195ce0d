"""The C functions of xxh3 that the Python package `xxhash` exports, for this project's own C code to call."""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass

import numpy as np

from kvoffloadd.model import U64Array


@dataclass(frozen=True, slots=True, eq=False)
class Xxh3:
    """Addresses of functions. `whole` hashes the bytes of one buffer. `streaming`, u64 `(5,)`, hash bytes that come in
    pieces: they create, free, reset, update and read a state, in this order.
    """

    whole: int
    streaming: U64Array


def find_xxh3() -> Xxh3 | None:
    """Returns the functions. None: the package is built otherwise, and does not export them."""
    try:
        library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    except (ImportError, OSError, AttributeError):
        return None
    # Names that end in `_dispatch` choose the processor's widest vectors; only builds for x86 have them.
    whole = _find(library, "XXH3_128bits_dispatch", "XXH3_128bits")
    streaming = [
        _find(library, "XXH3_createState"),
        _find(library, "XXH3_freeState"),
        _find(library, "XXH3_128bits_reset"),
        _find(library, "XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
        _find(library, "XXH3_128bits_digest"),
    ]
    found = [address for address in streaming if address is not None]
    if whole is None or len(found) < len(streaming):
        return None
    return Xxh3(whole, np.array(found, np.uint64))


def _find(library: ctypes.CDLL, *names: str) -> int | None:
    """Returns the address of the first of these functions that exists."""
    for name in names:
        try:
            return ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None
