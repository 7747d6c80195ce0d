"""What this client has registered with the daemon, kept to be said again after a reconnect."""

from __future__ import annotations

from kvoffloadd.client.kvcache import KvCache
from kvoffloadd.errors import UsageError


class Registration:
    """A registered KV cache. The object stays the same over reconnects; its number does not.

    It holds the tensors, and with them their descriptors and memory, as long as it lives.
    """

    __slots__ = ("caches", "closed", "id")

    def __init__(self, caches: KvCache) -> None:
        self.caches = caches
        self.id: int | None = None
        self.closed = False

    def __repr__(self) -> str:
        state = "unregistered" if self.closed else f"id {self.id}"
        return f"<Registration {state}, {len(self.caches.tensors)} tensors, {len(self.caches.groups)} groups>"

    def named_id(self) -> int:
        """The daemon's number for it on the present connection. Raises UsageError if there is none."""
        if self.closed or self.id is None:
            raise UsageError("this registration was ended by `unregister`" if self.closed else "not registered here")
        return self.id
