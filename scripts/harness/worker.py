"""A worker as a child process that answers questions: the same as in the trials of the package."""

from __future__ import annotations

from kvoffloadd.trial.worker import END_S, WorkerProcess

__all__ = ["END_S", "WorkerProcess"]
