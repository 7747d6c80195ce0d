"""The checks of a `reserve` request, and the lease on the reserved parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from kvoffloadd.cache.memory.keys import has_duplicates
from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import Reservation, Wanted
from kvoffloadd.errors import DuplicateError, SchemaError
from kvoffloadd.model import U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.peers.account import Account
from kvoffloadd.server.peers.instance import Instance


def wanted_of(message: m.Reserve, groups: Sequence[tuple[Keyspace, int, U64Array]]) -> list[Wanted]:
    """Returns the parts that a request wants. `groups`: the keys of the message, each group from a position on. Raises
    SchemaError for parts that do not exist.
    """
    found = []
    for keyspace, first, keys in groups:
        wanted = sorted(set(range(keyspace.schema.parts) if message.parts is None else message.parts))
        if not wanted or wanted[-1] >= keyspace.schema.parts:
            raise SchemaError(f"group {keyspace.schema.group} has parts 0 to {keyspace.schema.parts - 1}, not {wanted}")
        if not all(keyspace.part_bytes[p] for p in wanted):
            raise SchemaError(f"group {keyspace.schema.group}: not all of parts {wanted} are registered yet")
        found.append(Wanted.from_first(keyspace, keys, np.array(wanted, np.uint16), first))
    return found


def check_distinct(request: Sequence[Wanted]) -> None:
    """Raises DuplicateError if a key is named twice."""
    for wanted in request:
        if has_duplicates(wanted.keys):
            raise DuplicateError(f"group {wanted.keyspace.schema.group}: a key is reserved twice in one request")


@dataclass(slots=True, eq=False)
class PendingWriteLease:
    """A context manager that charges for all wanted parts on entry, and keeps only the charge for granted parts on
    exit.
    """

    instance: Instance
    account: Account
    request: Sequence[Wanted]
    _kept: int = 0

    def __enter__(self) -> Self:
        """Charges for all wanted parts. Raises LimitError."""
        self.account.charge(leases=self._most)
        return self

    def __exit__(self, *_: object) -> None:
        self.account.refund(leases=self._most - self._kept)

    @property
    def _most(self) -> int:
        return LEASE_KEYS + sum(len(wanted.keys) * len(wanted.parts) for wanted in self.request)

    def grant(self, seq: int, reserved: Sequence[Reservation]) -> m.Reserved:
        """Returns the reply, with a lease on the reserved parts, if there are any."""
        parts = np.concatenate([np.zeros(0, np.int64), *(r.parts for r in reserved)])
        lease = 0
        if len(parts):
            self._kept = LEASE_KEYS + len(parts)
            lease = self.instance.leases.add_write(parts).id
        return m.Reserved(seq=seq, states=[r.states.tobytes() for r in reserved], lease=lease)
