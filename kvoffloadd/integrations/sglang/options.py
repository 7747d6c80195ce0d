"""What users set for the storage and for the linker, each in its own place of SGLang's command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.common.options import DEFAULT_SOCKET, seconds_of, socket_of

STORAGE_FLAG = "--hicache-storage-backend-extra-config"
LINKER_FLAG = "--unified-cache-external-linker-config"


@dataclass(frozen=True, slots=True)
class SeatOptions:
    """Times in seconds. `socket`: where the daemon listens. `timeout_s`: for how long the answer to a lookup is waited
    for, before it counts as a miss. `job_deadline_s`: when the daemon gives a load or a store up. `fingerprint`: how
    the files of the model are named.
    """

    socket: str = DEFAULT_SOCKET
    timeout_s: float = 1.0
    job_deadline_s: float = 60.0
    fingerprint: Fingerprint = Fingerprint.AUTO


@dataclass(frozen=True, slots=True)
class StorageOptions(SeatOptions):
    """Holds the options of the HiCache storage, whose lookups wait in a separate thread. `wait_s`: for how long a
    lookup waits for what other hosts have stored.
    """

    wait_s: float = 1.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises UsageError, naming the key, for a value that can't be."""
        if not extra_config.get("interface_v1"):
            raise UsageError(
                f'{STORAGE_FLAG} needs "interface_v1": 1: without it SGLang hands over copies of pages, one by one, '
                "which the daemon can't take"
            )
        standard = cls()
        return cls(
            socket=socket_of(extra_config, STORAGE_FLAG),
            timeout_s=seconds_of(extra_config, "timeout_s", standard.timeout_s, STORAGE_FLAG),
            job_deadline_s=seconds_of(extra_config, "job_deadline_s", standard.job_deadline_s, STORAGE_FLAG),
            wait_s=seconds_of(extra_config, "wait_s", standard.wait_s, STORAGE_FLAG),
            fingerprint=Fingerprint.of(extra_config.get("fingerprint", standard.fingerprint), STORAGE_FLAG),
        )


@dataclass(frozen=True, slots=True)
class LinkerOptions(SeatOptions):
    """Holds the options of the linker, whose lookups and loads the scheduler waits for. `overlap`: loads run during the
    forward, and one that fails fails its requests.
    """

    timeout_s: float = 0.2
    job_deadline_s: float = 10.0
    overlap: bool = False

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Raises UsageError, naming the key, for a value that can't be, and for keys that are not known."""
        where = f"linker_extra_config of {LINKER_FLAG}"
        standard = cls()
        unknown = sorted(set(extra_config) - {"socket", "timeout_s", "job_deadline_s", "overlap", "fingerprint"})
        if unknown:
            raise UsageError(f"{where}: {', '.join(unknown)}: not an option of kvoffloadd")
        overlap = extra_config.get("overlap", standard.overlap)
        if not isinstance(overlap, bool):
            raise UsageError(f"{where}: overlap must be true or false, not {overlap!r}")
        return cls(
            socket=socket_of(extra_config, where),
            timeout_s=seconds_of(extra_config, "timeout_s", standard.timeout_s, where),
            job_deadline_s=seconds_of(extra_config, "job_deadline_s", standard.job_deadline_s, where),
            overlap=overlap,
            fingerprint=Fingerprint.of(extra_config.get("fingerprint", standard.fingerprint), where),
        )
