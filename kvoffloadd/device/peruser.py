"""Keeps one object for each user, such as threads that touch the user's memory and that the user can thus block."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_ROOT_UID = 0


class PerUser(Generic[T]):
    """One object for each admitted user, and `common`: for root, the daemon's own user, and the daemon itself.

    `make(suffix)`: makes one; "" names the common one, "-UID" that of a user. `trusted`: the users that share the
    common one; None: root and the daemon's own user. The objects are never removed: there is no point in time at which
    a user is known to hold nothing.
    """

    def __init__(self, make: Callable[[str], T], trusted: Collection[int] | None = None) -> None:
        self._make = make
        self.trusted = frozenset((_ROOT_UID, os.geteuid()) if trusted is None else trusted)
        self.common = make("")
        self._by_uid: dict[int, T] = {}

    def admit(self, uid: int) -> None:
        """Makes one for this user, if there is none. Raises RuntimeError: no thread can be made."""
        if uid not in self.trusted and uid not in self._by_uid:
            self._by_uid[uid] = self._make(f"-{uid}")

    def of(self, uid: int) -> T:
        """Returns the user's object; the common one for a user that was not admitted and so has no session."""
        return self._by_uid.get(uid, self.common)

    def others(self) -> list[T]:
        """Returns all but the common one."""
        return list(self._by_uid.values())

    def __iter__(self) -> Iterator[T]:
        yield self.common
        yield from self._by_uid.values()
