"""The C functions of xxh3 that the Python package `xxhash` exports, for this project's own C code to call."""

from __future__ import annotations

import ctypes
import importlib

_library: ctypes.CDLL | None
try:
    _library = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
except (ImportError, OSError, AttributeError):  # a package that is built otherwise
    _library = None


def find_function(*names: str) -> int | None:
    """The address of the first of these functions that the package exports; None: it exports none of them.

    Names that end in `_dispatch` choose the processor's widest vectors; only builds for x86 have them.
    """
    for name in names:
        try:
            return ctypes.cast(getattr(_library, name), ctypes.c_void_p).value
        except AttributeError:
            continue
    return None
