"""Since when a shared store has confirmed that what is here was not cleared by another host. Event loop only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

UNCONFIRMED_MAX_S: Final = 30 * 24 * 3600
"""What was not confirmed for so long is void: the store has forgotten clears that are older."""


@dataclass(slots=True)
class Confirmed:
    """`required`: there is a shared store. `at_s`: when all that is here was confirmed, in seconds since 1970;
    0: not in this run.
    """

    required: bool = False
    at_s: int = 0

    def is_over(self, at_s: int, now_s: float) -> bool:
        """Whether what was last confirmed at `at_s` (0: nobody knows) is void."""
        return self.required and 0 < at_s < now_s - UNCONFIRMED_MAX_S
