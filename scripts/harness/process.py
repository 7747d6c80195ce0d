"""Child processes, their folders and logs: the same as in the trials of the package."""

from __future__ import annotations

from kvoffloadd.trial.process import (
    ROOT,
    DaemonError,
    bad_entries,
    end,
    mapped_memfds,
    memory_folder,
    module,
    obey_signals,
    open_fds,
    private_folder,
    rss_anon_bytes,
    search_path,
    spawn,
    status_bytes,
    tail,
    unmapped_within,
)

__all__ = [
    "ROOT",
    "DaemonError",
    "bad_entries",
    "end",
    "mapped_memfds",
    "memory_folder",
    "module",
    "obey_signals",
    "open_fds",
    "private_folder",
    "rss_anon_bytes",
    "search_path",
    "spawn",
    "status_bytes",
    "tail",
    "unmapped_within",
]
