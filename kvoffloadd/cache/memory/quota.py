"""A quota: how much of a tier keys of one owner may take, and how much of it nobody else may take from them."""

from __future__ import annotations

from dataclasses import dataclass, field

UNBOUNDED = 1 << 62


@dataclass(slots=True, eq=False)
class Quota:
    """Counts what the keys of a user, or those of the namespaces that match a pattern, take of memory."""

    kind: str  # "user" or "namespace"
    name: str  # the user's id, or the pattern
    min_pages: int = 0
    max_pages: int = UNBOUNDED
    pages: int = 0  # of slots, reserved or committed
    numbers: set[int] = field(default_factory=set)  # of the keyspaces that it counts, retired ones included
    keys_evicted: int = 0  # to make room for others under this quota, since the start
    keys_refused: int = 0  # since the maximum left no room for them

    @property
    def room_pages(self) -> int:
        """Returns how many pages more its keys may take."""
        return max(0, self.max_pages - self.pages)

    @property
    def lacking_pages(self) -> int:
        """Returns how many pages its keys lack to the minimum."""
        return max(0, self.min_pages - self.pages)
