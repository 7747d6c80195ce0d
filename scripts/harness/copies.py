"""The ways in which a daemon copies to and from a GPU: settings that force one of them, and what it says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffloadd.device.cuda.device import THREADS
from kvoffloadd.model import Direction

MIXED = "mixed"
_NEVER = {"cuda.pitched_row_bytes": "0", "cuda.kernel_row_bytes": "0"}
_KERNEL = {"cuda.kernel_chunk_bytes": "1B", "cuda.staging_bytes": "1MiB"}
WAYS: Mapping[str, Mapping[str, str]] = {
    "dma": _NEVER,
    "pitched": {**_NEVER, "cuda.pitched_row_bytes": "1GiB"},
    "kernel": {**_NEVER, **_KERNEL, "cuda.kernel_row_bytes": "1GiB"},
    MIXED: {
        **_KERNEL,
        "cuda.kernel_chunk_bytes": "64KiB",
        "cuda.kernel_row_bytes": "2KiB",
        "cuda.pitched_row_bytes": "8KiB",
    },
}
"""Settings of a daemon. MIXED: by size, so that all of them have some of the rows."""

COUNTERS: Mapping[str, tuple[str, ...]] = {
    "dma": (),
    "pitched": ("pitched_copies",),
    "kernel": ("kernel_chunks",),
    MIXED: ("pitched_copies", "kernel_chunks"),
}
"""Of a way, what the daemon counts of it for each GPU. The others' stay 0."""


def counted(status: Mapping[str, Any]) -> dict[str, int]:
    """Those of all ways, of all GPUs together, by a daemon's status."""
    gpus = [device for kind, device in status["devices"].items() if kind.startswith("cuda:")]
    return {name: sum(int(gpu[name]) for gpu in gpus) for name in COUNTERS[MIXED]}


def staging_descriptors(status: Mapping[str, Any], way: str) -> int:
    """What a daemon keeps open on the software driver, whose memories are memfds, once the kernel has moved rows: two
    for each staging buffer, of which each thread has one each way, on each GPU.
    """
    gpus = sum(kind.startswith("cuda:") for kind in status["devices"])
    return 2 * THREADS * len(Direction) * gpus if "kernel_chunks" in COUNTERS.get(way, ()) else 0
