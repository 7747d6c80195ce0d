"""A claim: which prompt a client wants kept, how much, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffloadd.cache.memory.namespace import Namespace


@dataclass(slots=True, eq=False)
class Claim:
    """A claim as its client has made it. Each tier has its own account of what it keeps of it: see `TierClaims`."""

    number: int  # later claims have higher numbers
    namespace: Namespace
    name: str  # chosen by the client; "": none
    priority: int
    ends_s: float  # by the monotonic clock
    tokens: int = 0  # of the prompt
    num_keys: int = 0
    num_tiers: int = 0  # that keep something of it; 0: it has ended
    hits: int = 0  # of earlier claims of this name
    restored: bool = False  # an earlier run made it, and this one has not changed it

    @property
    def is_in_force(self) -> bool:
        """Returns whether a tier keeps something of it."""
        return self.num_tiers > 0

    @property
    def rank(self) -> int:
        """Returns the rank of its priority in `ClaimedKeys`."""
        return self.priority + 1

    @property
    def order(self) -> tuple[int, int]:
        """Returns what claims are ordered by: the first one lapses first."""
        return self.priority, self.number
