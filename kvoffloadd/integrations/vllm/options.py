"""What users set in `kv_connector_extra_config`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffloadd.config import ServerConfig
from kvoffloadd.errors import UsageError

DEFAULT_SOCKET = str(ServerConfig().socket)


@dataclass(frozen=True, slots=True)
class Options:
    """Times in seconds.

    `socket`: where the daemon listens. `timeout_s`: for how long the answer to a lookup is waited for, before it counts
    as a miss. `wait_s`: for how long a request waits for keys on their way from disk, or being stored by others.
    `job_deadline_s`: when the daemon gives a load or a store up.
    """

    socket: str = DEFAULT_SOCKET
    timeout_s: float = 1.0
    wait_s: float = 10.0
    job_deadline_s: float = 60.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Options:
        """Raises UsageError, naming the key, for a value that can't be."""
        socket = extra_config.get("socket", DEFAULT_SOCKET)
        if not isinstance(socket, str | os.PathLike):
            raise UsageError(f"kv_connector_extra_config: socket is a path, not {socket!r}")
        standard = cls()
        return cls(
            socket=os.fspath(socket),
            timeout_s=_seconds(extra_config, "timeout_s", standard.timeout_s),
            wait_s=_seconds(extra_config, "wait_s", standard.wait_s),
            job_deadline_s=_seconds(extra_config, "job_deadline_s", standard.job_deadline_s),
        )


def _seconds(extra_config: Mapping[str, Any], key: str, default: float) -> float:
    value = extra_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise UsageError(
            f"kv_connector_extra_config: {key} is a number of seconds above 0, at most 3600, not {value!r}"
        )
    return float(value)
