"""Accounts: what each uid uses of the daemon's resources, and its caps. Event loop only."""

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
    """What one uid may use of something; which error refuses more, and what it advises. `total`: what all users may use
    together, of which each but root and the daemon's own has a share (see `shares`). `per_s`: so much of what was
    charged comes back by itself each second; 0: what is refunded alone. `is_shown`: whether `status` has it.
    """

    cap: int = UNLIMITED
    total: int = UNLIMITED
    error: Callable[[str], ResourceError] = LimitError
    advice: str = ""
    per_s: float = 0.0
    is_shown: bool = True


BUILT_IN: Final = {
    # Plans of registered groups take 40 bytes of the daemon's own memory for each, and one frame can ask for gigabytes.
    # Real engines need some thousands a rank.
    "descriptors": Resource(1 << 23),
    # Drains, and clears that wait to be recorded: each takes a task and a timer, as often as sessions may have requests
    # under way, and what all of them wait for may end at once.
    "clears": Resource(256),
    "drains": Resource(256),
    # One that is let in costs some tenths of a millisecond, and all users share the backlog of the socket. At once: all
    # engines of a machine that come back to a new daemon.
    "connections": Resource(2000, per_s=500.0, is_shown=False),
    # Large frames that have begun to come: sixteen of the largest. Otherwise each session could make the daemon hold
    # the beginning of one.
    "frame_bytes": Resource(64 << 20, is_shown=False),
    # Of workers' shared memory: the kernel allows a process so many, and refuses its own tables as well beyond that.
    "mappings": Resource(advice=": raise vm.max_map_count"),
    # What the kernel may need to keep track of workers' shared memory: 8 bytes a page, and it can't be swapped out.
    "page_table_bytes": Resource(advice=": attach less of what is not used"),
    # What waits in all outboxes, and is promised there. Half of it is for what can be dropped, or put off.
    "outbox_bytes": Resource(128 << 20, error=BusyError, advice=": read, then ask again", is_shown=False),
}


def caps(limits: LimitsConfig) -> dict[str, int]:
    """Those of the limits that hold for all sessions of a uid together."""
    names = ("sessions", "jobs", "job_bytes", "mapped_bytes", "fds", "leases")
    return {name: getattr(limits, name) for name in names}


class Receiver(Protocol):
    """A connection that waits for room for its frame."""

    def __hash__(self) -> int: ...

    def go_on(self) -> None:
        """There is room now, and it is the receiver's."""


@dataclass(slots=True, eq=False)
class Account:
    """One uid's use of shared resources, by name: those of `caps` and BUILT_IN."""

    uid: int
    resources: dict[str, Resource]
    clock: Callable[[], float] = time.monotonic
    by_all: Counter[str] = field(default_factory=Counter)  # of resources with a total: what all users use
    is_trusted: bool = True  # root, and the daemon's own user: up to the total
    used: dict[str, int] = field(default_factory=dict)
    unread_bytes: int = 0  # of `outbox_bytes`, what waits; a frame that waits in several outboxes counts once
    drafting: asyncio.Lock = field(default_factory=asyncio.Lock)  # one large registration at a time is in a thread
    _returned_s: dict[str, float] = field(default_factory=dict)  # until when what comes back by itself has done so
    _holders: dict[int, int] = field(default_factory=dict)  # in how many outboxes a frame waits, by its id()
    _received: dict[Hashable, int] = field(default_factory=dict)
    _waiting: dict[Receiver, int] = field(default_factory=dict)

    def charge(self, **amounts: int) -> None:
        """Charge an amount of each of these resources, such as `jobs=1`; 0 is never too much. Raises LimitError, or
        what else the resource says, with nothing charged, if a cap would be exceeded. Pair with `refund`.
        """
        for name, amount in amounts.items():
            resource = self.resources[name]
            if resource.per_s:
                self._return(name, resource.per_s)
            used = self.used.get(name, 0)
            if amount and used + amount > resource.cap:
                more = f"{amount} more would exceed its cap"
                raise resource.error(f"uid {self.uid} uses {used} of {resource.cap} {name}; {more}{resource.advice}")
            if resource.total < UNLIMITED and amount > self._left(name, resource.total):  # no word of others' use
                share = f"its share of the {resource.total} that all users may have"
                more = f"{amount} more would exceed {share}"
                raise resource.error(f"uid {self.uid} uses {used} {name}; {more}{resource.advice}")
        self._add(amounts, 1)

    def refund(self, **amounts: int) -> None:
        """Give back what was charged."""
        self._add(amounts, -1)

    def _left(self, name: str, total: int) -> int:
        """How much more of what all users share this one may have."""
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
        """Charge one frame, until `received`. False: there is no room; `receiver.go_on` is called when there is. A
        receiver that has room, or waits for it, keeps its place.
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
        """The frame has come whole, or never will. Does nothing for a receiver without room."""
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
        """It waits in one outbox more, whatever else does: who wrote it had room, or could not put it off."""
        holders = self._holders.get(id(frame), 0)
        self._holders[id(frame)] = holders + 1
        if not holders:
            self.used["outbox_bytes"] = self.used.get("outbox_bytes", 0) + len(frame)
            self.unread_bytes += len(frame)

    def let_go(self, frame: bytes) -> None:
        """It waits in one outbox less."""
        self._holders[id(frame)] -= 1
        if not self._holders[id(frame)]:
            del self._holders[id(frame)]
            self.used["outbox_bytes"] -= len(frame)
            self.unread_bytes -= len(frame)

    @property
    def crowded(self) -> bool:
        """So much is unread that nothing is added which need not be."""
        return self.unread_bytes > self.resources["outbox_bytes"].cap // 2


class Accounts:
    """Accounts by uid, all with the same caps. `totals`: of what all users share; `trusted`: whom no share bounds."""

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
        """Other caps from now on, for all. A user above a new cap keeps what is charged."""
        for name, cap in caps.items():
            self._resources[name] = replace(self._resources.get(name, Resource()), cap=cap)

    def of(self, uid: int) -> Account:
        account = self._by_uid.get(uid)
        if account is None:
            account = Account(uid, self._resources, by_all=self._by_all, is_trusted=uid in self._trusted)
            self._by_uid[uid] = account
        return account

    def figures(self) -> dict[str, dict[str, int]]:
        """Use by uid, zeros left out, of what `status` shows."""
        return self._used(lambda resource: resource.is_shown)

    def _used(self, counts: Callable[[Resource], bool]) -> dict[str, dict[str, int]]:
        used = {
            str(uid): {name: some for name, some in account.used.items() if some and counts(self._resources[name])}
            for uid, account in self._by_uid.items()
        }
        return {uid: some for uid, some in used.items() if some}

    def leaks(self) -> list[str]:
        """What is still charged; called when no session is left."""
        charged = self._used(lambda resource: not resource.per_s)
        return [f"accounts: uid {uid} is still charged {used}" for uid, used in charged.items()]
