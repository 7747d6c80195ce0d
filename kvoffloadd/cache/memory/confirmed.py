"""Records since when a shared store has confirmed that no other host has cleared the local keys. Event loop only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UNCONFIRMED_MAX_S: Final = 30 * 24 * 3600
"""Keys that were not confirmed for this long are void: the store has forgotten older clears."""


@dataclass(slots=True)
class Confirmed:
    """Keeps the time of the last confirmation. `required`: there is a shared store. `at_s`: the time at which all local
    keys were confirmed, in seconds since 1970; 0: not in this run.
    """

    required: bool = False
    at_s: int = 0

    def is_over(self, at_s: int, now_s: float) -> bool:
        """Returns whether keys that were last confirmed at `at_s` (0: at an unknown time) are void."""
        return self.required and 0 < at_s < now_s - UNCONFIRMED_MAX_S
