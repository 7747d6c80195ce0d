"""What users set in `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.options import DEFAULT_SOCKET, seconds_of, socket_of

FLAG = "--hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Times in seconds. `socket`: where the daemon listens. `timeout_s`: for how long the answer to a lookup is waited
    for, before it counts as a miss. `job_deadline_s`: when the daemon gives a load or a store up.
    """

    socket: str = DEFAULT_SOCKET
    timeout_s: float = 1.0
    job_deadline_s: float = 60.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> StorageOptions:
        """Raises UsageError, naming the key, for a value that can't be."""
        if not extra_config.get("interface_v1"):
            raise UsageError(
                f'{FLAG} needs "interface_v1": 1: without it SGLang hands over copies of pages, one by one, which the '
                "daemon can't take"
            )
        standard = cls()
        return cls(
            socket=socket_of(extra_config, FLAG),
            timeout_s=seconds_of(extra_config, "timeout_s", standard.timeout_s, FLAG),
            job_deadline_s=seconds_of(extra_config, "job_deadline_s", standard.job_deadline_s, FLAG),
        )
