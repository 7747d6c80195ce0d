"""The options of a soak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """The command line. `workers`: of each host; `memory_bytes`: of each daemon; `store_bytes`: of what they share."""

    seconds: float
    engine: str
    workers: int
    memory_bytes: int
    store_bytes: int
    working_set_bytes: int
    seed: int
