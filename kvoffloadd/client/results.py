"""Values that the calls of both clients return: frozen, with arrays that are read-only views of received bytes; and the
handle of keys that are on their way from disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvoffloadd.client.keys import unpack_states, unpack_u32
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import ConnectionLostError, DeadlineError, MessageError
from kvoffloadd.model import U8Array, U32Array
from kvoffloadd.protocol import messages


class Lease(int):
    """A lease's number, which remembers the run of the daemon that granted it.

    It behaves as an int: a scheduler may send it to its workers as a plain number. A client that gets it back detects
    by `boot_id` when it is void, since a daemon that was started anew gives the same numbers again.
    """

    boot_id: bytes

    def __new__(cls, number: int = 0, boot_id: bytes = b"") -> Lease:
        """Makes a lease; 0 means no lease. `boot_id`: empty where it is not known."""
        made = super().__new__(cls, number)
        made.boot_id = boot_id
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """Answer to `lookup`, `pin` and `prefetch`.

    `states[g]`: u8 (keys,), `model.KeyState` per key of the g-th group of the request. `boundaries`: u32, prefix
    lengths in tokens that every group can serve, longest first. `lease`: 0 where none is held. `promoting`: how many of
    the PENDING keys are on their way from disk; above 0, the client's `wait_ready` returns a new answer once they are
    there. `promotion` is the handle for that; without this object the answer is dropped when it comes. `tiers[g]`: u8
    (keys,), `model.Tier` per key: from where it came, if it was not in memory when it was pinned. Empty where nothing
    is promoted, and with older daemons.
    """

    states: list[U8Array]
    boundaries: U32Array
    lease: Lease
    promoting: int = 0
    tiers: list[U8Array] = field(default_factory=list)
    promotion: Promotion | None = field(default=None, repr=False)

    @property
    def ready(self) -> bool:
        """Returns whether `wait_ready` would return or raise at once. A `Client` updates it while any call runs."""
        return self.promotion is None or self.promotion.done


class Promotion(Waitable):
    """The handle of keys on their way; `done` once its `ready` has come, or never will. `seq`: of the request and the
    `ready`.

    Its `Found` alone keeps it. The connection refers to it weakly, so that an answer without a reader is dropped.
    """

    __slots__ = ("__weakref__", "_counts", "_found", "_lease", "_lost", "_tiers", "seq")

    def __init__(self, seq: int, counts: tuple[int, ...], lease: Lease, tiers: list[U8Array]) -> None:
        super().__init__()
        self.seq = seq
        self._counts = counts
        self._lease = lease
        self._tiers = tiers
        self._found: Found | None = None
        self._lost = ""

    def outcome(self) -> Found:
        """Returns the new answer. Raises DeadlineError (it has not come) or ConnectionLostError (it never will)."""
        if self._found is not None:
            return self._found
        if self.done:
            raise ConnectionLostError(f"{self._lost}: the daemon will not report whether keys came from disk")
        raise DeadlineError("the keys have not come from disk in time")

    # --- called by the connection alone --------------------------------------------------------

    def fulfil(self, message: messages.Ready) -> None:
        """Takes the daemon's answer. Raises MessageError where that does not fit the request."""
        if message.lease not in (0, self._lease):
            raise MessageError(f"`ready` has lease {message.lease}, but `found` had {int(self._lease)}")
        states = unpack_states(message.states, self._counts)
        lease = Lease(message.lease, self._lease.boot_id)
        self._found = Found(states, unpack_u32(message.boundaries, "boundaries"), lease, tiers=self._tiers)
        self.settle()

    def lose(self, reason: str) -> None:
        """Ends the wait: the connection has ended."""
        self._lost = reason
        self.settle()


@dataclass(frozen=True, slots=True, eq=False)
class Reserved:
    """Answer to `reserve`: `states[g]` as in `Found`; the lease covers the keys in state RESERVED."""

    states: list[U8Array]
    lease: Lease


@dataclass(frozen=True, slots=True)
class Cleared:
    """Counts what a clear dropped from memory. It has taken effect: nothing that was stored before hits on this host.

    `unrecorded`: where the clear is not recorded yet: paths of disk roots, which could bring keys back after a restart,
    and `remote` for the store that hosts share, from which other hosts could get them. The daemon goes on until they
    have recorded it. An older daemon does so as well, but has one text for all of them, and no figures then.

    For a clear of namespaces by name, `namespaces` is how many were cleared. `left`: how many were not, since others
    have taken all groups that the daemon can have in the meantime.
    """

    keys: int
    bytes: int
    unrecorded: tuple[str, ...] = ()
    namespaces: int = 0
    left: int = 0


@dataclass(frozen=True, slots=True)
class Deleted:
    """Counts what a `delete` dropped: `keys` and `bytes` from memory, `disk_keys` from disk; 0 for keys that were in no
    tier. It has taken effect: no copy of the keys that was stored before hits on this host.

    `unrecorded`: where the deletion is not recorded yet: paths of disk roots, which could bring keys back after a
    restart, and `remote` if the store that hosts share may still have objects. The daemon goes on until all have
    recorded it; `delete` with the same keys tells whether they have. Other hosts keep their own copies: delete there,
    too.
    """

    keys: int
    bytes: int
    disk_keys: int
    unrecorded: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Retained:
    """Counts the claims that a `retain` made or changed, or a `forget` ended, and the keys that they name. 0 claims: a
    new one would have been the first to lapse.
    """

    claims: int
    keys: int


@dataclass(frozen=True, slots=True)
class PrefetchedClaims:
    """Counts claims, the keys that they name, and those of them that were in memory when the prefetch came to them. The
    others are in no tier, or found no room.
    """

    claims: int
    keys: int
    memory_keys: int


@dataclass(frozen=True, slots=True)
class Drained:
    """Counts what a drain left: 0 and 0 unless its deadline passed."""

    jobs: int
    unsealed: int


@dataclass(frozen=True, slots=True)
class Audit:
    """Lists what the daemon's self-audit found wrong (nothing: empty) and counts the slots, payloads and records on
    disk that it checked.
    """

    findings: tuple[str, ...]
    slots: int
    payloads: int
    records: int
