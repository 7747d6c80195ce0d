"""Options that users set for the storage and for the linker, each in a separate place of SGLang's command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.options import EngineOptions, seconds_of
from kvoffloadd.sglangnames import STORAGE_FLAG

LINKER_FLAG = "--unified-cache-external-linker-config"


@dataclass(frozen=True, slots=True)
class StorageOptions(EngineOptions):
    """Holds the options of the HiCache storage, which makes lookups in a separate thread. `wait_s`: how long a lookup
    waits for pages that other hosts have stored.
    """

    wait_s: float = 1.0

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads the options. Raises UsageError, naming the key, for an invalid value."""
        if not extra_config.get("interface_v1"):
            raise UsageError(
                f'{STORAGE_FLAG} needs "interface_v1": 1: without it SGLang hands over copies of pages, one by one, '
                "which the daemon can't take"
            )
        common = cls.read(extra_config, STORAGE_FLAG)
        return replace(common, wait_s=seconds_of(extra_config, "wait_s", common.wait_s, STORAGE_FLAG))


@dataclass(frozen=True, slots=True)
class LinkerOptions(EngineOptions):
    """Holds the options of the linker, which makes lookups and loads while the scheduler waits. `overlap`: loads run
    during the forward, and one that fails fails its requests.
    """

    timeout_s: float = 0.2
    job_deadline_s: float = 10.0
    overlap: bool = False

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> Self:
        """Reads the options. Raises UsageError, naming the key, for an invalid value, and for keys that are not
        known.
        """
        where = f"linker_extra_config of {LINKER_FLAG}"
        unknown = sorted(set(extra_config) - {"socket", "timeout_s", "job_deadline_s", "overlap", "fingerprint"})
        if unknown:
            raise UsageError(f"{where}: {', '.join(unknown)}: not an option of kvoffloadd")
        overlap = extra_config.get("overlap", False)
        if not isinstance(overlap, bool):
            raise UsageError(f"{where}: overlap must be true or false, not {overlap!r}")
        return replace(cls.read(extra_config, where), overlap=overlap)
