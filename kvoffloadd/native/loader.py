"""Loads the C code, which is optional: without a compiler, and with a build that is wrong, of another version or for
another machine, numpy and the kernel do its work, slower.
"""

from __future__ import annotations

import importlib
from typing import cast

from kvoffloadd.native.helper import Helper
from kvoffloadd.native.selftest import is_right
from kvoffloadd.native.xxh3 import Xxh3, find_xxh3


def load() -> tuple[Helper | None, Xxh3 | None]:
    """Returns the helper, and the functions with which it hashes payloads; None: there is no correct build."""
    try:
        # An import, not ctypes on its file: functions decide one by one whether they run without the GIL, and take
        # arrays as buffers, which stay where they are during the call.
        helper = cast(Helper, importlib.import_module("kvoffloadd.native._native"))
    except ImportError:  # not compiled, or for another machine
        return None, None
    for xxh3 in (find_xxh3(), None):
        if is_right(helper, xxh3):
            return helper, xxh3
    return None, None


HELPER, XXH3 = load()
"""The helper and functions that the daemon uses; see `load`."""
