"""What a daemon holds for others: as the trials of the package look for it."""

from __future__ import annotations

from kvoffloadd.trial.leaks import (
    DISK_FDS_MAX,
    OBSERVER_ALONE,
    STAYS,
    UID,
    Used,
    held,
    in_use,
    leaks,
    more_than,
    unreturned_slots,
)

__all__ = [
    "DISK_FDS_MAX",
    "OBSERVER_ALONE",
    "STAYS",
    "UID",
    "Used",
    "held",
    "in_use",
    "leaks",
    "more_than",
    "unreturned_slots",
]
