"""Daemons of tests: what they have in common, and the driver of their GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from scripts.harness.copies import WAYS
from scripts.harness.daemon import Daemon
from tests import softcuda
from tests.e2e import gpu_rank

COPIES_VARIABLE = "KVOFFLOADD_TEST_COPIES"
"""The way in which daemons copy on GPUs, one of WAYS, where tests don't say: for runs of all tests by each of them."""

PATIENT = {"copy.worker_drain_s": "600", "cuda.stuck_s": "600"}
"""However long a test holds copies, the daemon takes none of them for one that never ends."""


class Hold:
    """Copies of daemons that were started with `fault` stay under way, without a byte moved, within `with hold:`."""

    def __init__(self, path: Path) -> None:
        self.fault = f"hold={path}"
        self._path = path

    def __enter__(self) -> Self:
        self._path.touch()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let them go on before the end."""
        self._path.unlink(missing_ok=True)


def make_daemon(
    folder: Path,
    *settings: str,
    memory: str = "32MiB",
    faults: str = "",
    driver: Mapping[str, Any] | None = None,
    **options: Any,
) -> Daemon:
    """A daemon that is started, with small slabs. `settings`: "section.key=value"; `options`: see `Daemon`.

    `driver`: of its GPUs, arguments of `softcuda.environment`. Where ranks are on GPUs, planted delays and
    `hold` are theirs, too.
    """
    daemon = Daemon(
        folder,
        memory,
        {
            "memory.slab_bytes": "1MiB",
            **WAYS.get(_way(), {}),
            **(PATIENT if "hold=" in faults else {}),
            **chosen(*settings),
        },
        faults,
        environment=_driver(faults, driver),
        **options,
    )
    try:
        daemon.start()
    except BaseException:
        daemon.destroy()
        raise
    return daemon


def chosen(*settings: str) -> dict[str, str]:
    """Settings by their names."""
    return dict(setting.split("=", 1) for setting in settings)


def gpu_mappings(daemon: Daemon) -> int:
    """Returns the number of mappings of workers' GPU memory, which the software driver keeps in separate memfds."""
    gpu_rank.needs_soft("counting mappings")
    return Path(f"/proc/{daemon.pid}/maps").read_text(encoding="utf-8", errors="replace").count("/memfd:softcuda-")


def _way() -> str:
    return os.environ.get(COPIES_VARIABLE, "")


def _driver(faults: str, driver: Mapping[str, Any] | None) -> dict[str, str]:
    if driver is None and gpu_rank.device() == "host":
        return {}
    asked = dict(driver or {})
    planted = [one for one in [asked.pop("faults", "")] if one]
    planted += [f"delay_copies_ns={round(float(delay) * 1e9)}" for delay in re.findall(r"delay_s=([\d.]+)", faults)]
    if held := re.search(r"hold=([^,]+)", faults):
        asked["hold"] = held[1]
    if planted or asked:
        gpu_rank.needs_soft("what is planted")
    return softcuda.environment(",".join(planted), **asked) if gpu_rank.is_soft() else {}
