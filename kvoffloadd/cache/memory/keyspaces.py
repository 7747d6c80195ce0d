"""The table of keyspaces by number, and the cap on the number of keyspaces of each user. Event loop only.

Rows, and the records that outlive them in a pool, name their keyspace by its number alone. So a number is reused only
when nothing refers to its former `Keyspace` any more: neither the table, which keeps a keyspace as long as it has rows,
nor a request that found it earlier, such as a pin that waits for the disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from weakref import WeakValueDictionary

import numpy as np

from kvoffloadd.cache.memory.emptied import Emptied
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.quotas import Quotas
from kvoffloadd.errors import LimitError
from kvoffloadd.model import GroupSchema, I64Array, U16Array

NUMBERS = 1 << 16
"""Numbers are below this limit, which a column of the index sets."""

NOBODY = -1


class Keyspaces(dict[int, Keyspace]):
    """Maps numbers to keyspaces. A keyspace is retired when its namespace is cleared or forgotten, and leaves the table
    when its last row is free, too. Until then it counts against the cap of its user, `groups_max`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.groups_max = NUMBERS
        self.widths: U16Array = np.zeros(NUMBERS, np.uint16)  # parts of a key, for each keyspace on the table
        self.pages: I64Array = np.zeros(NUMBERS, np.int64)  # of all slots of a key, as far as they are known
        self.uids: I64Array = np.full(NUMBERS, NOBODY, np.int64)  # of its user
        self.by_uid: Counter[int] = Counter()
        self.emptied = Emptied()
        self.quotas = Quotas()
        self._numbers: dict[int | None, I64Array] = {}
        self._referred: WeakValueDictionary[int, Keyspace] = WeakValueDictionary()
        self._next = 0

    def has(self, keyspace: Keyspace) -> bool:
        """Returns whether the keyspace is on the table."""
        return self.get(keyspace.id) is keyspace

    def has_room(self, uid: int, count: int) -> bool:
        """Returns whether a user may have this many more."""
        return self.by_uid[uid] + count <= self.groups_max

    def check_room(self, uid: int, count: int, *, cleared: bool = False) -> None:
        """Raises LimitError if a user may not have this many more. `cleared`: they replace others, which may be held
        for a while: a user at the cap can clear, but leases can't keep an unlimited number of cleared keyspaces.
        """
        cap = 2 * self.groups_max if cleared else self.groups_max
        if (held := self.by_uid[uid]) + count > cap:
            kept = "; what was cleared is held by leases" if cleared else "; clear namespaces that are out of use"
            raise LimitError(f"uid {uid} has {held} of {cap} groups; {count} more would exceed its cap{kept}")
        self.check_numbers(count)

    def check_numbers(self, count: int) -> None:
        """Raises LimitError if all users together can't have this many more."""
        if len(self._referred) + count > NUMBERS:
            raise LimitError(f"all users together have reached the maximum of {NUMBERS} groups")

    def add(
        self, namespace: Namespace, schema: GroupSchema, part_bytes: Sequence[int], number: int | None = None
    ) -> Keyspace:
        """Adds a current keyspace. `number` is the number that its slot records in the arena name. The caller has
        checked the user's cap.

        Raises LimitError if no number is left, ValueError if `number` belongs to another keyspace.
        """
        self.check_numbers(1)
        if number is None:
            while self._next in self._referred:
                self._next = (self._next + 1) % NUMBERS
            number, self._next = self._next, (self._next + 1) % NUMBERS
        elif number in self._referred:
            raise ValueError(f"number {number} is another space's")
        keyspace = self[number] = self._referred[number] = Keyspace(number, namespace, schema, list(part_bytes))
        self.by_uid[namespace.uid] += 1
        self.widths[number] = schema.parts
        self.uids[number] = namespace.uid
        self._forget_numbers(namespace.uid)
        self.count_pages(keyspace)
        self.quotas.join(keyspace)
        return keyspace

    def numbers_of(self, uid: int | None) -> I64Array:
        """Returns the numbers of a user's keyspaces on the table; None: of all users. The result is kept until
        keyspaces come or go.
        """
        numbers = self._numbers.get(uid)
        if numbers is None:
            numbers = np.flatnonzero(self.uids != NOBODY if uid is None else self.uids == uid)
            self._numbers[uid] = numbers
        return numbers

    def _forget_numbers(self, uid: int) -> None:
        for key in (uid, None):
            self._numbers.pop(key, None)

    def count_pages(self, keyspace: Keyspace) -> None:
        """Counts the pages of a keyspace again after the sizes of its parts have changed."""
        self.pages[keyspace.id] = keyspace.part_pages.sum()

    def retire(self, keyspace: Keyspace) -> None:
        """Retires a keyspace: no lookup finds its keys from now on, and none are added."""
        keyspace.retired = True
        self.let_go(keyspace)

    def let_go(self, keyspace: Keyspace) -> None:
        """Removes a retired keyspace without rows from the table. Called after it was retired, or rows of it were
        freed.
        """
        if keyspace.retired or not keyspace.rows:
            self.emptied.add(keyspace.namespace)
        if keyspace.retired and not keyspace.rows and self.has(keyspace):
            del self[keyspace.id]
            self.uids[keyspace.id] = NOBODY
            self.quotas.leave(keyspace)
            self._forget_numbers(keyspace.namespace.uid)
            if keyspace.queue is not None:
                keyspace.queue.leave(keyspace)
            uid = keyspace.namespace.uid
            self.by_uid[uid] -= 1
            if not self.by_uid[uid]:
                del self.by_uid[uid]
