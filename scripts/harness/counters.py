"""What workers count, in a file that all of them map: a worker that is killed takes no count with it.

Each worker writes its own row alone, so that nothing needs a lock which a killed worker could leave held.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from kvoffloadd.model import I64Array
from scripts.harness.arrangement import RANDOM

VERIFIED_LAYOUTS = (RANDOM, "by-layer", "cross-layer", "heads-first", "kv-apart", "packed-pages", "packed-rows")


def verified_in(layout: str) -> str:
    """The name of a count."""
    return f"verified_loads, {layout}"


NAMES = (
    "wrong_bytes",  # found, stray ones among them
    "stray_bytes",  # in blocks that nothing had been asked to write
    "broken_promises",  # answers that contradict each other, or the protocol
    "stores",
    "loads",
    "verified_loads",  # loads whose every byte was compared and right
    *map(verified_in, VERIFIED_LAYOUTS),  # those of them into memory of that layout
    "verified_loads_from_disk",  # those of them with a key that was on disk alone when it was asked for
    "stored_keys",
    "loaded_keys",
    "loaded_keys_from_disk",  # at least
    "missed_keys",  # that a load was promised from disk, and that did not come
    "stored_bytes",
    "loaded_bytes",
    "moved_in_bytes",  # by all jobs, those that were cancelled or expired among them
    "moved_out_bytes",
    "store_busy_us",  # jobs' own time, admission to end
    "load_busy_us",
    "block_references",
    "block_hits",
    "block_pending",
    "block_promoting",  # pending ones that came from disk
    "jobs_open",  # now; not reset by a kill, but by the next worker in the row
    "cancelled",
    "expired",
    "lost",
    "leases_void",  # ended by a clear
    "reservations",
    "clears",
    "clears_not_everywhere",  # those of them that the remote store had not recorded yet
    "reregistrations",
    "reconnects",
    "calls_lost",  # calls that ended in an error of the connection
    "comparisons",  # of whole KV caches
    "holes",  # that an owner made in its registered memory
    "failed_jobs",  # which met such a hole
    "excused_bytes",  # of a load's blocks, not those of the key, which missed, or whose load failed or was lost
    "operations",
)
LATENCIES = ("store", "load", "pin")

_BUCKETS_PER_DECADE = 40
_DECADES = 8  # 1 us to 100 s
_BUCKETS = _BUCKETS_PER_DECADE * _DECADES
_WIDTH = 1 + len(NAMES) + len(LATENCIES) * _BUCKETS
_FIRST_S = 1e-6


class Counters:
    """All rows; `row` is the one that this process writes, -1: none (the main process)."""

    def __init__(self, path: Path, rows: int, row: int = -1) -> None:
        exists = path.exists()
        self._all: I64Array = np.memmap(path, np.int64, "r+" if exists else "w+", shape=(rows, _WIDTH))
        self._own_row = self._all[row]
        self._at = {name: 1 + index for index, name in enumerate(NAMES)}

    def add(self, name: str, amount: int = 1) -> None:
        self._own_row[self._at[name]] += amount

    def set(self, name: str, value: int) -> None:
        """Sets what is a state, not a count."""
        self._own_row[self._at[name]] = value

    def took(self, what: str, seconds: float) -> None:
        """Note how long one thing took."""
        bucket = int(math.log10(max(seconds, _FIRST_S) / _FIRST_S) * _BUCKETS_PER_DECADE)
        self._own_row[1 + len(NAMES) + LATENCIES.index(what) * _BUCKETS + min(bucket, _BUCKETS - 1)] += 1

    # --- the order to stop ---------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask all workers to end."""
        self._all[:, 0] = 1

    @property
    def stopping(self) -> bool:
        """Whether this worker is to end."""
        return bool(self._own_row[0])

    # --- reading -------------------------------------------------------------------------------------

    def get(self, row: int, name: str) -> int:
        return int(self._all[row, self._at[name]])

    def total(self, name: str) -> int:
        return int(self._all[:, self._at[name]].sum())

    def percentile_s(self, what: str, percent: float) -> float | None:
        """Returns a percentile to about 3 %; None: it never happened."""
        start = 1 + len(NAMES) + LATENCIES.index(what) * _BUCKETS
        counts = self._all[:, start : start + _BUCKETS].sum(axis=0)
        total = int(counts.sum())
        if total == 0:
            return None
        bucket = int(np.searchsorted(counts.cumsum(), percent / 100 * total))
        return float(_FIRST_S * 10 ** ((bucket + 0.5) / _BUCKETS_PER_DECADE))
