"""Epochs of namespaces: a key that was stored before a `clear` is never served after it, even if a record of the clear
was lost or an old copy was put back.

Manifests of roots, pools and running daemons each remember some clears, and meet again in any combination.
docs/DISK_FORMAT.md, "What was cleared stays cleared", has the full argument for this design.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvoffloadd.errors import LimitError
from kvoffloadd.model import EPOCH_MAX

REMEMBERED_MAX = 4096
"""The number of clears that are remembered one by one for namespaces that have nothing left. Manifests and the saved
state list them all.
"""

LEAP_US = 1 << 16
"""While the clock is behind the last clear, numbers rise by a random step below this."""


AHEAD_MAX_US: Final = 366 * 24 * 3600 * 10**6
"""The limit by which a clear of another host may be ahead of this host's clock."""

RECALLED_MAX_US: Final = 2 * AHEAD_MAX_US
"""The same limit for clears that this host's disks and memory remember: a number that was believed once is recalled
even if the clock was set back since.
"""


def unix_time_us() -> int:
    """Returns the current time in microseconds. It is exact in a double until the year 2255, for JSON readers that have
    no other numbers.
    """
    return time.time_ns() // 1000


@dataclass(slots=True)
class Epochs:
    """Keeps the epochs of all namespaces. A namespace's epoch is the number of the last clear that reached it, 0 if
    none did. Only keys that were stored in exactly this epoch are valid.

    The number of a clear is the time at which it happened. So clears have an order even where they are remembered in
    places that never met, and no number is used twice, even by a daemon that has forgotten its clears.

    Numbers from outside are merged only if they are not too far ahead of the clock (`believes`, `recalls`), so that
    there is always a next number.
    """

    base: int = 0  # the epoch of namespaces that `by_namespace` does not list
    last: int = 0  # the highest number known to have been used
    by_namespace: dict[bytes, int] = field(default_factory=dict)  # by fingerprint
    clock: Callable[[], int] = field(default=unix_time_us, compare=False)
    rising: Epochs | None = field(default=None, compare=False)
    """The result of a merge that is under way. The merge has to walk over memory before the epochs rise."""
    began: int = field(
        default_factory=unix_time_us, compare=False
    )  # a later clear by another daemon was during this run

    def believes(self, epoch: int) -> bool:
        """Returns whether another host may have used this number."""
        return epoch <= max(self.clock() + AHEAD_MAX_US, self.last)

    def recalls(self, *numbers: int) -> bool:
        """Returns whether a disk or the memory of an earlier run may remember these numbers."""
        return max(numbers, default=0) <= max(self.clock() + RECALLED_MAX_US, self.last)

    def of(self, fingerprint: bytes) -> int:
        """Returns the epoch of a namespace, whether it is open or not."""
        return self.by_namespace.get(fingerprint, self.base)

    def is_rising(self, fingerprint: bytes) -> bool:
        """Returns whether a merge is under way that ends this namespace's epoch: no more keys are brought there."""
        return self.rising is not None and self.rising.of(fingerprint) > self.of(fingerprint)

    def advance(self, *names: bytes) -> None:
        """Records that these namespaces (fingerprints) are cleared. Raises LimitError: no number is left; nothing was
        changed.
        """
        self.by_namespace |= dict.fromkeys(names, self._next())

    def advance_all(self) -> None:
        """Records that every namespace is cleared, open or not. Raises LimitError as `advance`."""
        self.base = self._next()
        self.by_namespace = {}  # a new dict: a manifest may still be made from the old one

    def follow(self, fingerprint: bytes, epoch: int) -> None:
        """Records that another host has cleared this namespace, by this number."""
        self.merge(0, epoch, {fingerprint: epoch})

    def merge(self, base: int, last: int, by_namespace: Mapping[bytes, int]) -> None:
        """Merges clears that a manifest or saved state remembers: each namespace's later epoch holds. The caller has
        checked the numbers with `recalls` or `believes`.
        """
        names = self.by_namespace.keys() | by_namespace.keys()
        later = {name: max(self.of(name), by_namespace.get(name, base)) for name in names}
        self.base = max(self.base, base)
        self.last = max(self.last, last, self.base, *later.values())
        self.by_namespace = {name: epoch for name, epoch in later.items() if epoch != self.base}

    def merged(self, base: int, last: int, by_namespace: Mapping[bytes, int]) -> Epochs:
        """Returns a copy after `merge`."""
        copy = replace(self)
        copy.merge(base, last, by_namespace)
        return copy

    def forget(self, kept: Collection[bytes]) -> None:
        """If there are too many clears of namespaces that are not `kept`, replaces them by one number: these and all
        unknown namespaces begin anew in an epoch in which nothing was stored yet. If a root with keys of theirs comes
        back, its keys are void. The namespaces that are `kept` stay in their epochs.
        """
        if len(self.by_namespace.keys() - set(kept)) > REMEMBERED_MAX:
            epochs = {fingerprint: self.of(fingerprint) for fingerprint in kept}
            self.base = self._next()
            self.by_namespace = epochs

    def _next(self) -> int:
        now = self.clock()
        # The clock was set back: a random step keeps two daemons that go on from the same number from using equal
        # numbers.
        number = now if now > self.last else self.last + 1 + secrets.randbelow(LEAP_US)
        if number > EPOCH_MAX:
            raise LimitError("no number is left for a clear: set this host's clock, and remove what it wrote meanwhile")
        self.last = number
        return number
