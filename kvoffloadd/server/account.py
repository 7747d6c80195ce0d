"""Accounts: what each uid uses of the daemon's resources, and its caps."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvoffloadd.config import LimitsConfig
from kvoffloadd.errors import LimitError
from kvoffloadd.server.frameroom import FrameRoom
from kvoffloadd.server.outbox import Unread

BUILT_IN_CAPS = {"descriptors": 1 << 23, "clears": 256, "drains": 256}
"""Descriptors: plans of registered groups take 40 bytes of the daemon's own memory for each, and one frame can ask for
gigabytes. Real engines need some thousands a rank. Drains, and clears that wait to be recorded: each takes a task and a
timer, as often as sessions may have requests under way, and what all of them wait for may end at once.
"""


def caps(limits: LimitsConfig) -> dict[str, int]:
    """Those of the limits that hold for all sessions of a uid together."""
    names = ("sessions", "jobs", "job_bytes", "mapped_bytes", "fds", "leases")
    return {name: getattr(limits, name) for name in names}


@dataclass(slots=True, eq=False)
class Account:
    """One uid's use of shared resources, by name: those of `caps` and BUILT_IN_CAPS."""

    uid: int
    caps: dict[str, int]
    used: dict[str, int] = field(default_factory=dict)
    frame_room: FrameRoom = field(default_factory=FrameRoom)
    unread: Unread = field(default_factory=Unread)
    drafting: asyncio.Lock = field(default_factory=asyncio.Lock)  # one large registration at a time is in a thread

    def charge(self, **amounts: int) -> None:
        """Charge an amount of each of these resources, such as `jobs=1`. Raises LimitError, with nothing charged, if a
        cap would be exceeded. Pair with `refund`.
        """
        for name, amount in amounts.items():
            used, cap = self.used.get(name, 0), self.caps[name]
            if used + amount > cap:
                raise LimitError(f"uid {self.uid} uses {used} of {cap} {name}; {amount} more would exceed its cap")
        for name, amount in amounts.items():
            self.used[name] = self.used.get(name, 0) + amount

    def refund(self, **amounts: int) -> None:
        """Give back what was charged."""
        for name, amount in amounts.items():
            self.used[name] -= amount


class Accounts:
    """Accounts by uid, all with the same caps."""

    def __init__(self, caps: dict[str, int]) -> None:
        self._caps = {**BUILT_IN_CAPS, **caps}
        self._by_uid: dict[int, Account] = {}

    def change(self, caps: dict[str, int]) -> None:
        """Other caps from now on, for all. A user above a new cap keeps what is charged."""
        self._caps.update(caps)

    def of(self, uid: int) -> Account:
        return self._by_uid.setdefault(uid, Account(uid, self._caps))

    def figures(self) -> dict[str, dict[str, int]]:
        """Use by uid, zeros left out."""
        return {
            str(uid): {name: used for name, used in account.used.items() if used}
            for uid, account in self._by_uid.items()
            if any(account.used.values())
        }

    def leaks(self) -> list[str]:
        """What is still charged; called when no session is left."""
        unread = {uid: account.unread for uid, account in self._by_uid.items()}
        return [
            *(f"accounts: uid {uid} is still charged {used}" for uid, used in self.figures().items()),
            *(
                f"accounts: uid {uid}: {n.queued_bytes} bytes unread, {n.reserved_bytes} promised, and nobody is there"
                for uid, n in unread.items()
                if n.queued_bytes or n.reserved_bytes
            ),
        ]
