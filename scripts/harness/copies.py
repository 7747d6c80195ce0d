"""The ways in which a daemon copies to and from a GPU: settings that force one of them, and what its status has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WAYS: Mapping[str, Mapping[str, str]] = {
    "dma": {"cuda.pitched_row_bytes": "0"},
    "pitched": {"cuda.pitched_row_bytes": "1GiB"},
}
"""Settings of a daemon. Without them it is by size, so that each has some of the rows."""

COUNTERS: Mapping[str, tuple[str, ...]] = {"dma": (), "pitched": ("pitched_copies",)}
"""Of a way, what the daemon counts of it for each GPU. The others' stay 0."""


def counted(status: Mapping[str, Any]) -> dict[str, int]:
    """Those of all ways, of all GPUs together, by a daemon's status."""
    gpus = [device for kind, device in status["devices"].items() if kind.startswith("cuda:")]
    names = [name for counters in COUNTERS.values() for name in counters]
    return {name: sum(int(gpu[name]) for gpu in gpus) for name in names}
