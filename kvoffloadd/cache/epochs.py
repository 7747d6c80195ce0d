"""Epochs of namespaces: what was stored before a `clear` may never be served after it, restarts included."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Epochs:
    """A namespace's epoch is the number of the last clear that reached it. Numbers rise and are never used twice.

    `base`: the last clear of everything. `by_namespace`: later clears of single namespaces, by fingerprint.
    """

    base: int = 0
    last: int = 0
    by_namespace: dict[bytes, int] = field(default_factory=dict)

    def of(self, fingerprint: bytes) -> int:
        """The epoch of a namespace, whether it is open or not."""
        return self.by_namespace.get(fingerprint, self.base)

    def advance(self, fingerprint: bytes) -> None:
        """This namespace is cleared."""
        self.last += 1
        self.by_namespace[fingerprint] = self.last

    def advance_all(self) -> None:
        """Every namespace is cleared, open or not."""
        self.last += 1
        self.base = self.last
        self.by_namespace.clear()

    def merge(self, base: int, last: int, by_namespace: dict[bytes, int]) -> None:
        """Take over what a disk remembers: of every two numbers the later one holds."""
        self.base = max(self.base, base)
        self.last = max(self.last, last)
        for fingerprint, epoch in by_namespace.items():
            self.by_namespace[fingerprint] = max(epoch, self.by_namespace.get(fingerprint, 0))
        self.by_namespace = {name: epoch for name, epoch in self.by_namespace.items() if epoch > self.base}

    def forget(self, unknown: set[bytes]) -> None:
        """Namespaces of which nothing is left anywhere begin anew at `base`."""
        for fingerprint in unknown:
            self.by_namespace.pop(fingerprint, None)
