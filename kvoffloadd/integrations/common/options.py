"""Values that users set in an engine's command line. What can't be is refused by its key's name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvoffloadd.config import ServerConfig
from kvoffloadd.errors import UsageError

DEFAULT_SOCKET = str(ServerConfig().socket)


def socket_of(given: Mapping[str, Any], where: str) -> str:
    """The daemon's socket. `where`: the engine's option that has `given`. Raises UsageError."""
    socket = given.get("socket", DEFAULT_SOCKET)
    if not isinstance(socket, str | os.PathLike):
        raise UsageError(f"{where}: socket must be a path, not {socket!r}")
    return os.fspath(socket)


def seconds_of(given: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """Reads the seconds of a key. Raises UsageError as `socket_of` does."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise UsageError(f"{where}: {key} must be a number of seconds above 0, at most 3600, not {value!r}")
    return float(value)
