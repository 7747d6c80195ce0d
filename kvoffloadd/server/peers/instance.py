"""Instances: an instance is one engine, the sessions that named the same token, and the leases that they share."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from kvoffloadd.cache.memory.lease import Holdings, Leases
from kvoffloadd.errors import ForbiddenError
from kvoffloadd.scheduling.lanes import Flow


@dataclass(slots=True, eq=False)
class Instance:
    """One engine, as long as it has sessions."""

    id: int  # public
    token: bytes  # secret: a session that names it may use the leases
    uid: int
    namespace: bytes | None  # fingerprint; None: only observers so far
    sessions: int = 0
    leases: Leases = field(default_factory=Leases)
    flow: Flow = field(init=False)  # its share of the lanes

    def __post_init__(self) -> None:
        self.flow = Flow(self.uid, self.id)


class Instances:
    """Instances by token, and ended ones that still have leases."""

    def __init__(self) -> None:
        self._by_token: dict[bytes, Instance] = {}
        self._gone: set[Instance] = set()
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_token)

    def join(self, token: bytes, uid: int, namespace: bytes | None) -> Instance:
        """Adds a session to its instance. Pair with `leave`. Raises ForbiddenError if the token is another uid's, or of
        an engine in another namespace.
        """
        instance = self._by_token.get(token)
        if instance is None:
            instance = self._by_token[token] = Instance(next(self._ids), token, uid, namespace)
        if instance.uid != uid:
            raise ForbiddenError("this instance belongs to another user")
        if instance.namespace is None:
            instance.namespace = namespace
        if namespace is not None and instance.namespace != namespace:
            raise ForbiddenError("all sessions of one instance must name the same namespace")
        instance.sessions += 1
        return instance

    def leave(self, instance: Instance) -> bool:
        """Removes a session. Returns True if it was the last: the instance has ended; end its leases, then `forget` it.
        A session that names its token meanwhile makes a new instance.
        """
        instance.sessions -= 1
        if instance.sessions:
            return False
        del self._by_token[instance.token]
        self._gone.add(instance)
        return True

    def forget(self, instance: Instance) -> None:
        """Removes an ended instance, which has no leases any more."""
        self._gone.remove(instance)

    def held(self, uid: int | None = None) -> Holdings:
        """Returns the holdings of all leases, including those of ended instances; with `uid` only this user's."""
        held = [i.leases.held for i in (*self._by_token.values(), *self._gone) if uid in (None, i.uid)]
        return Holdings(
            read=sum(h.read for h in held),
            keys=sum(h.keys for h in held),
            write=sum(h.write for h in held),
            parts=sum(h.parts for h in held),
        )
