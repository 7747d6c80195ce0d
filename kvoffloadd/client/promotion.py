"""Keys on their way from disk for one `pin` or `prefetch`, and the answer anew once they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffloadd.client.keys import unpack_states, unpack_u32
from kvoffloadd.client.results import Found, Lease
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import ConnectionLostError, DeadlineError, MessageError

if TYPE_CHECKING:
    from kvoffloadd.protocol import messages


class Promotion(Waitable):
    """`done` once its `ready` has come, or never will. `seq`: of the request, and so of the `ready`.

    Its `Found` alone keeps it. The connection refers to it weakly: what nobody can ask for any more is dropped.
    """

    __slots__ = ("__weakref__", "_counts", "_found", "_lease", "_lost", "seq")

    def __init__(self, seq: int, counts: tuple[int, ...], lease: Lease) -> None:
        super().__init__()
        self.seq = seq
        self._counts = counts
        self._lease = lease
        self._found: Found | None = None
        self._lost = ""

    def outcome(self) -> Found:
        """The answer anew. Raises DeadlineError (it has not come) or ConnectionLostError (it never will)."""
        if self._found is not None:
            return self._found
        if self.done:
            raise ConnectionLostError(f"{self._lost}: whether keys came from disk will not be told")
        raise DeadlineError("the keys have not come from disk in time")

    # --- called by the link alone --------------------------------------------------------------

    def fulfil(self, message: messages.Ready) -> None:
        """The daemon says what came of it. Raises MessageError where that does not fit what was asked."""
        if message.lease not in (0, self._lease):
            raise MessageError(f"`ready` with lease {message.lease}, `found` had {int(self._lease)}")
        states = unpack_states(message.states, self._counts)
        lease = Lease(message.lease, self._lease.boot_id)
        self._found = Found(states, unpack_u32(message.boundaries, "boundaries"), lease)
        self.settle()

    def lose(self, reason: str) -> None:
        """Its connection has ended."""
        self._lost = reason
        self.settle()
