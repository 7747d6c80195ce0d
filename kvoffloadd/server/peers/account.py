"""Accounts: each uid's use of the daemon's resources, and its caps. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Protocol

from kvoffloadd.config import LimitsConfig
from kvoffloadd.errors import BusyError, LimitError, ResourceError
from kvoffloadd.scheduling.shares import share_left

UNLIMITED: Final = 1 << 62
NO_TOTALS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Resource:
    """One uid's limits on a resource, the error that refuses more, and its advice. `total`: the cap for all users
    together; each user but root and the daemon's own has a share (see `shares`). `per_s`: the amount of charges that
    returns automatically each second; 0: only refunds return charges. `is_shown`: whether `status` lists it.
    """

    cap: int = UNLIMITED
    total: int = UNLIMITED
    error: Callable[[str], ResourceError] = LimitError
    advice: str = ""
    per_s: float = 0.0
    is_shown: bool = True


BUILT_IN: Final = {
    # Plans of registered groups take 40 bytes of the daemon's memory for each descriptor, and one frame can ask for
    # gigabytes. Real engines need some thousands a rank.
    "descriptors": Resource(1 << 23),
    # Drains, and clears that wait for their records: each takes a task and a timer, for every request that sessions may
    # have under way, and all of them may end at once.
    "clears": Resource(256),
    "drains": Resource(256),
    # Each accepted connection costs some tenths of a millisecond, and all users share the backlog of the socket. The
    # cap lets all engines of a machine connect to a new daemon at once.
    "connections": Resource(2000, per_s=500.0, is_shown=False),
    # Large frames that are partly received: sixteen of the largest. Without the cap, each session could make the daemon
    # hold the beginning of one.
    "frame_bytes": Resource(64 << 20, is_shown=False),
    # Mappings of workers' shared memory: the kernel caps the mappings of a process, and refuses those for the daemon's
    # tables as well beyond the cap.
    "mappings": Resource(advice=": raise vm.max_map_count"),
    # The kernel's page tables for workers' shared memory: 8 bytes a page, which can't be swapped out.
    "page_table_bytes": Resource(advice=": attach less of what is not used"),
    # Bytes that wait in all outboxes, or are promised there. Half of it is for frames that can be dropped or postponed.
    "outbox_bytes": Resource(128 << 20, error=BusyError, advice=": read, then ask again", is_shown=False),
}


def caps(limits: LimitsConfig) -> dict[str, int]:
    """Returns the limits that apply to all sessions of a uid together."""
    names = ("sessions", "jobs", "job_bytes", "mapped_bytes", "fds", "leases")
    return {name: getattr(limits, name) for name in names}


class Receiver(Protocol):
    """A connection that waits for room for its frame."""

    def __hash__(self) -> int: ...

    def go_on(self) -> None:
        """Continues with the room, which the receiver now has."""


@dataclass(slots=True, eq=False)
class Account:
    """One uid's use of shared resources, by name: those of `caps` and BUILT_IN."""

    uid: int
    resources: dict[str, Resource]
    clock: Callable[[], float] = time.monotonic
    by_all: Counter[str] = field(default_factory=Counter)  # use by all users, of resources with a total
    is_trusted: bool = True  # root and the daemon's own user may use up to the total
    used: dict[str, int] = field(default_factory=dict)
    unread_bytes: int = 0  # the waiting part of `outbox_bytes`; a frame in several outboxes counts once
    drafting: asyncio.Lock = field(default_factory=asyncio.Lock)  # allows one large registration at a time in a thread
    _returned_s: dict[str, float] = field(default_factory=dict)  # automatic returns are applied up to this time
    _holders: dict[int, int] = field(default_factory=dict)  # the number of outboxes in which a frame waits, by its id()
    _received: dict[Hashable, int] = field(default_factory=dict)
    _waiting: dict[Receiver, int] = field(default_factory=dict)

    def charge(self, **amounts: int) -> None:
        """Charges an amount of each of these resources, such as `jobs=1`; 0 is never too much. If a cap would be
        exceeded, charges nothing and raises LimitError, or the resource's error. Pair with `refund`.
        """
        for name, amount in amounts.items():
            resource = self.resources[name]
            if resource.per_s:
                self._return(name, resource.per_s)
            used = self.used.get(name, 0)
            if amount and used + amount > resource.cap:
                more = f"{amount} more would exceed its cap"
                raise resource.error(f"uid {self.uid} uses {used} of {resource.cap} {name}; {more}{resource.advice}")
            # The error does not reveal other users' figures.
            if resource.total < UNLIMITED and amount > self._left(name, resource.total):
                share = f"its share of the {resource.total} that all users may have"
                more = f"{amount} more would exceed {share}"
                raise resource.error(f"uid {self.uid} uses {used} {name}; {more}{resource.advice}")
        self._add(amounts, 1)

    def refund(self, **amounts: int) -> None:
        """Returns charged amounts."""
        self._add(amounts, -1)

    def _left(self, name: str, total: int) -> int:
        """Returns the amount of a shared resource that this user may still charge."""
        by_all = self.by_all[name]
        return total - by_all if self.is_trusted else share_left(total, by_all, self.used.get(name, 0))

    def _add(self, amounts: Mapping[str, int], sign: int) -> None:
        for name, amount in amounts.items():
            self.used[name] = self.used.get(name, 0) + sign * amount
            if self.resources[name].total < UNLIMITED:
                self.by_all[name] += sign * amount

    def _return(self, name: str, per_s: float) -> None:
        now = self.clock()
        whole = int((now - self._returned_s.setdefault(name, now)) * per_s)
        self.used[name] = max(self.used.get(name, 0) - whole, 0)
        self._returned_s[name] = self._returned_s[name] + whole / per_s if self.used[name] else now

    # --- frames that come: their receivers wait for room ---

    def receive(self, receiver: Receiver, frame_bytes: int) -> bool:
        """Charges one frame, until `received`. Returns False if there is no room; `receiver.go_on` is called when there
        is. A receiver that has room, or waits for it, keeps its place.
        """
        if receiver in self._received:
            return True
        self._waiting.setdefault(receiver, frame_bytes)
        if next(iter(self._waiting)) is not receiver:
            return False
        try:
            self.charge(frame_bytes=frame_bytes)
        except LimitError:
            return False
        self._received[receiver] = self._waiting.pop(receiver)
        return True

    def received(self, receiver: Receiver) -> None:
        """Ends the charge or the wait for a frame that is complete, or never will be. Does nothing for a receiver
        without room.
        """
        waited, size = self._waiting.pop(receiver, 0), self._received.pop(receiver, 0)
        if size:
            self.refund(frame_bytes=size)
        while (size or waited) and self._waiting:
            first, first_bytes = next(iter(self._waiting.items()))
            if not self.receive(first, first_bytes):
                return
            first.go_on()

    # --- frames that wait to be read ---

    def hold(self, frame: bytes) -> None:
        """Counts one more outbox in which the frame waits. It never refuses: the sender had room, or could not postpone
        the frame.
        """
        holders = self._holders.get(id(frame), 0)
        self._holders[id(frame)] = holders + 1
        if not holders:
            self.used["outbox_bytes"] = self.used.get("outbox_bytes", 0) + len(frame)
            self.unread_bytes += len(frame)

    def let_go(self, frame: bytes) -> None:
        """Counts one outbox less in which the frame waits."""
        self._holders[id(frame)] -= 1
        if not self._holders[id(frame)]:
            del self._holders[id(frame)]
            self.used["outbox_bytes"] -= len(frame)
            self.unread_bytes -= len(frame)

    @property
    def crowded(self) -> bool:
        """Whether the amount of unread data allows only necessary frames."""
        return self.unread_bytes > self.resources["outbox_bytes"].cap // 2


class Accounts:
    """Accounts by uid, all with the same caps. `totals`: caps of resources that all users share; `trusted`: uids that
    no share bounds.
    """

    def __init__(
        self, caps: dict[str, int], totals: Mapping[str, int] = NO_TOTALS, trusted: Collection[int] = ()
    ) -> None:
        self._resources = dict(BUILT_IN)
        for name, total in totals.items():
            self._resources[name] = replace(self._resources[name], total=total)
        self._trusted = frozenset(trusted)
        self._by_all = Counter[str]()
        self._by_uid: dict[int, Account] = {}
        self.change(caps)

    def change(self, caps: dict[str, int]) -> None:
        """Sets new caps for all users. A user above a new cap keeps its charges."""
        for name, cap in caps.items():
            self._resources[name] = replace(self._resources.get(name, Resource()), cap=cap)

    def of(self, uid: int) -> Account:
        account = self._by_uid.get(uid)
        if account is None:
            account = Account(uid, self._resources, by_all=self._by_all, is_trusted=uid in self._trusted)
            self._by_uid[uid] = account
        return account

    def figures(self) -> dict[str, dict[str, int]]:
        """Returns use by uid, without zeros, of the resources that `status` lists."""
        return self._used(lambda resource: resource.is_shown)

    def _used(self, counts: Callable[[Resource], bool]) -> dict[str, dict[str, int]]:
        used = {
            str(uid): {
                name: amount for name, amount in account.used.items() if amount and counts(self._resources[name])
            }
            for uid, account in self._by_uid.items()
        }
        return {uid: amount for uid, amount in used.items() if amount}

    def leaks(self) -> list[str]:
        """Reports the remaining charges; called when no session is left."""
        charged = self._used(lambda resource: not resource.per_s)
        return [f"accounts: uid {uid} is still charged {used}" for uid, used in charged.items()]
