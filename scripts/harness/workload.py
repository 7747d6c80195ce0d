"""A worker of benchmarks: the same as in the trials of the package."""

from __future__ import annotations

from kvoffloadd.trial.workload import WAIT_S, Wanted, Workload

__all__ = ["WAIT_S", "Wanted", "Workload"]
