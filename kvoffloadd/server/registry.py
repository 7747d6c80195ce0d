"""The memory of one session: what it attached, what it registered, and when that is unmapped."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvoffloadd.errors import LimitError, UnknownNameError
from kvoffloadd.server.registration import Attached, Registration, build, plan_descriptors

if TYPE_CHECKING:
    from kvoffloadd.cache.namespace import Namespace
    from kvoffloadd.device.base import Allocation
    from kvoffloadd.protocol.messages import GroupSpec, TensorSpec
    from kvoffloadd.server.account import Account
    from kvoffloadd.server.context import Context


@dataclass(slots=True, eq=False)
class Registry:
    """An allocation is mapped from `attach` until the last registration that names it is unregistered, or the end."""

    context: Context
    account: Account
    attached: dict[int, Attached] = field(default_factory=dict)
    registrations: dict[int, Registration] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the peer's memory that are mapped here."""
        return sum(entry.allocation.size_bytes for entry in self.attached.values())

    def attach(self, fds: list[int], peer_uid: int) -> list[int]:
        """Map all of them or none; returns allocation ids. `fds` stay the caller's.

        Raises MemoryKindError, LimitError.
        """
        mapped: list[Allocation] = []
        try:
            for fd in fds:
                mapped.append(self._map(fd, peer_uid))  # noqa: PERF401  those before a failure are to be unmapped
        except Exception:
            for allocation in mapped:
                self._unmap_soon(allocation)
            raise
        numbers = [next(self._ids) for _ in mapped]
        self.attached.update({n: Attached(allocation) for n, allocation in zip(numbers, mapped, strict=True)})
        return numbers

    def _map(self, fd: int, peer_uid: int) -> Allocation:
        self.account.charge("fds")
        try:
            allocation = self.context.devices["host"].map(fd, peer_uid)
        except Exception:
            self.account.refund("fds")
            raise
        try:
            self.account.charge("mapped_bytes", allocation.size_bytes)
        except LimitError:
            self.account.refund("fds")
            self.context.spawn(self.context.devices["host"].unmap(allocation))
            raise
        return allocation

    def _unmap_soon(self, allocation: Allocation) -> None:
        self._refund(allocation)
        self.context.spawn(self.context.devices["host"].unmap(allocation))

    def _refund(self, allocation: Allocation) -> None:
        self.account.refund("mapped_bytes", allocation.size_bytes)
        self.account.refund("fds")

    def register(self, namespace: Namespace, tensors: list[TensorSpec], groups: list[GroupSpec]) -> int:
        """The id of a new registration. Raises PeerErrors and LimitError, having changed nothing."""
        cap = self.context.config.limits.tensors_per_registration
        if len(tensors) > cap:
            raise LimitError(f"{len(tensors)} tensors in one registration; the cap is {cap}")
        descriptors = plan_descriptors(groups)
        self.account.charge("descriptors", descriptors)  # before any plan is made
        number = next(self._ids)
        try:
            made = build(number, tensors, groups, self.attached, self.context.cache, namespace)
        except Exception:
            self.account.refund("descriptors", descriptors)
            raise
        made.descriptors = descriptors
        for allocation in made.allocations:
            self.attached[allocation].uses += 1
        self.registrations[number] = made
        return number

    def registration(self, number: int) -> Registration:
        """Raises UnknownNameError if this session has no such registration."""
        found = self.registrations.get(number)
        if found is None:
            raise UnknownNameError(f"this session has no registration {number}")
        return found

    async def unregister(self, made: Registration) -> None:
        """From now on no job can name it; wait for those that do, then unmap what no other registration names."""
        if self.registrations.pop(made.id, None) is None:
            raise UnknownNameError(f"registration {made.id} is being unregistered already")
        self.account.refund("descriptors", made.descriptors)
        copy = self.context.config.copy
        if not await self.context.transfers.settle(made.running, copy.deadline_max_s + copy.worker_drain_s):
            self.context.fatal(f"copies of registration {made.id} do not end")
            return
        for number in made.allocations:
            entry = self.attached.get(number)
            if entry is not None:  # otherwise the session has ended meanwhile
                entry.uses -= 1
                if entry.uses == 0:
                    await self._unmap(number)

    async def close(self) -> None:
        """Unmap everything; the session's copies have ended."""
        for made in self.registrations.values():
            self.account.refund("descriptors", made.descriptors)
        self.registrations.clear()
        for number in list(self.attached):
            await self._unmap(number)

    async def _unmap(self, number: int) -> None:
        entry = self.attached.pop(number, None)
        if entry is not None:
            try:
                await self.context.devices["host"].unmap(entry.allocation)
            finally:  # who waits may be cancelled; the unmapping goes on
                self._refund(entry.allocation)
