"""What the manager counts, for vLLM's Prometheus endpoint. vLLM asserts that every name it is given was defined."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

CONNECTED = "vllm:kvoffloadd_connected"
LOOKED_UP = "vllm:kvoffloadd_looked_up_keys"
HIT = "vllm:kvoffloadd_hit_keys"
TIMED_OUT = "vllm:kvoffloadd_lookup_timeouts"
FAILED_LOADS = "vllm:kvoffloadd_failed_loads"
RECOMPUTED = "vllm:kvoffloadd_recomputed_tokens"


def definitions() -> dict[str, Any]:
    """Name -> what it is."""
    return {
        CONNECTED: OffloadingGaugeMetadata("1 if the scheduler's line to the daemon is up."),
        LOOKED_UP: OffloadingCounterMetadata("Keys that the daemon was asked for."),
        HIT: OffloadingCounterMetadata("Keys that were there, and pinned."),
        TIMED_OUT: OffloadingCounterMetadata("Requests that gave up waiting for keys."),
        FAILED_LOADS: OffloadingCounterMetadata("Requests whose load failed, and was recomputed."),
        RECOMPUTED: OffloadingCounterMetadata("Tokens that were to be loaded, and were recomputed."),
    }
