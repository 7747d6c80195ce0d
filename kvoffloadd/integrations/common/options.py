"""Options that users set in an engine's command line. An invalid value is refused with its key's name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.contents import Fingerprint


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that every engine has; times in seconds.

    `socket`: where the daemon listens; None: the client looks for it. `timeout_s`: how long to wait for the answer to a
    lookup before it counts as a miss. `job_deadline_s`: when the daemon gives a load or a store up. `fingerprint`: how
    the model's files are named.
    """

    socket: str | None = None
    timeout_s: float = 1.0
    job_deadline_s: float = 60.0
    fingerprint: Fingerprint = Fingerprint.AUTO

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str) -> Self:
        """Reads the options. `where`: the engine's option that has `given`. Raises UsageError, naming the key, for an
        invalid value.

        Options that an engine alone has keep their default values.
        """
        standard = cls()
        return cls(
            socket=_socket_of(given, where),
            timeout_s=seconds_of(given, "timeout_s", standard.timeout_s, where),
            job_deadline_s=seconds_of(given, "job_deadline_s", standard.job_deadline_s, where),
            fingerprint=Fingerprint.of(given.get("fingerprint", standard.fingerprint), where),
        )


def _socket_of(given: Mapping[str, Any], where: str) -> str | None:
    path = given.get("socket")
    if path is None:
        return None
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"{where}: socket must be a path, not {path!r}")
    return os.fspath(path)


def seconds_of(given: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """Reads the seconds of a key. `where`: as in `EngineOptions.read`. Raises UsageError."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise UsageError(f"{where}: {key} must be a number of seconds above 0, at most 3600, not {value!r}")
    return float(value)
