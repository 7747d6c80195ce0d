"""Attached memory and registrations of one session, and the time of unmapping."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.config import LimitsConfig
from kvoffloadd.device.base import Allocation, Device, GpuMemory
from kvoffloadd.errors import (
    BusyError,
    ExtentError,
    ForbiddenError,
    LimitError,
    MessageError,
    StateError,
    UnknownNameError,
)
from kvoffloadd.model import HUGE_PAGE_BYTES, PAGE_BYTES
from kvoffloadd.protocol.messages import IPC_HANDLE_BYTES, AttachIpc, AttachVmm, Register
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import Account
from kvoffloadd.server.session.registration import (
    Attachment,
    Draft,
    Registration,
    build,
    check,
    cost,
    draft,
    named,
)

log = logging.getLogger(__name__)

AT_ONCE = 64
"""The number of allocations that are released together, and may end in the same turn of the loop."""


def tables_bytes(size_bytes: int) -> int:
    """Returns the size of the kernel's page tables for a fully touched mapping: a table of 4 KiB for each 2 MiB."""
    return -(-size_bytes // HUGE_PAGE_BYTES) * PAGE_BYTES


@dataclass(slots=True, eq=False)
class Registry:
    """A session's attached memory and registrations. An allocation is mapped from `attach` until the last registration
    that names it is unregistered, or the session ends.
    """

    context: Context
    account: Account
    limits: LimitsConfig
    attached: dict[int, Attachment] = field(default_factory=dict)
    registrations: dict[int, Registration] = field(default_factory=dict)
    _ending: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _closed: bool = False
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def mapped_bytes(self) -> int:
        """The bytes of the peer's memory that are mapped here."""
        return sum(entry.allocation.charged_bytes for entry in self.attached.values())

    @property
    def devices(self) -> list[str]:
        """The devices that have the attached memory."""
        return sorted({entry.device.kind for entry in self.attached.values()})

    def sizes_bytes(self, numbers: list[int]) -> list[int]:
        """Returns the sizes of newly attached allocations. Raises StateError if the session has ended since."""
        try:
            return [self.attached[number].allocation.size_bytes for number in numbers]
        except KeyError:
            raise StateError("the session has ended, or has detached this memory, meanwhile") from None

    def detach(self, numbers: list[int]) -> asyncio.Task[None]:
        """Releases allocations that no registration names, now or after the drafts that name them. The task unmaps
        them.

        Raises UnknownNameError, and then changes nothing.
        """
        for number in numbers:
            if number not in self.attached:
                raise UnknownNameError(f"this session has no allocation {number}")
        entries = {number: self.attached[number] for number in numbers}
        for entry in entries.values():
            entry.left = True
        idle = [number for number, entry in entries.items() if not (entry.uses or entry.drafts)]
        freed = [self.attached.pop(number) for number in idle]
        return self.context.spawn(self._release_all(freed), errors_are_handled=True)

    async def _release_all(self, entries: list[Attachment]) -> None:
        failed = await _in_shares([partial(self._release, entry) for entry in entries])
        if failed:
            raise failed[0]

    # --- shared memory ---

    def attach(self, fds: list[int]) -> asyncio.Task[list[int]]:
        """Maps all of them or none; the task returns allocation ids, or raises MemoryKindError or LimitError. The
        caller owns `fds`, which must be open at the call.

        Raises MemoryKindError, BusyError, LimitError.
        """
        sizes = [self.context.host.measure(fd, self.account.uid) for fd in fds]
        charges = [self._charge_of(size_bytes) for size_bytes in sizes]
        with contextlib.ExitStack() as charged:
            for charge in charges:
                charged.enter_context(self._charged(**charge))
            work = self._map_all(self._duplicates(fds), sizes)
        return self._to_the_end(work)

    async def _map_all(self, fds: list[int], sizes: list[int]) -> list[int]:
        """Maps allocations that are already charged."""
        host, uid = self.context.host, self.account.uid
        mapped: list[Allocation] = []
        try:
            for fd, size_bytes in zip(fds, sizes, strict=True):
                mapped.append(await host.map(fd, size_bytes, uid))
            self._check_open()
        except BaseException:
            for size_bytes in sizes[len(mapped) :]:
                self.account.refund(**self._charge_of(size_bytes))
            for allocation in mapped:
                self.context.spawn(self._release(Attachment(allocation, host)))
            raise
        finally:
            self.context.closer.close(uid, fds)
        return self._add(mapped, host)

    def _add(self, mapped: list[Allocation], device: Device) -> list[int]:
        numbers = [next(self._ids) for _ in mapped]
        self.attached.update({n: Attachment(allocation, device) for n, allocation in zip(numbers, mapped, strict=True)})
        return numbers

    @staticmethod
    def _charge_of(size_bytes: int) -> dict[str, int]:
        """Returns the charges for shared memory of this size."""
        tables = tables_bytes(size_bytes)
        return {"fds": 1, "mappings": 1, "mapped_bytes": size_bytes, "page_table_bytes": tables}

    def _refund(self, allocation: Allocation, device: Device) -> None:
        if device is self.context.host:
            self.account.refund(**self._charge_of(allocation.size_bytes))
        else:
            self.account.refund(fds=1, mapped_bytes=allocation.charged_bytes)

    # --- memory of GPUs ---

    def attach_ipc(self, message: AttachIpc) -> asyncio.Task[list[int]]:
        """Opens all handles or none; the task returns allocation ids, or raises PeerErrors, LimitError or DeviceError.

        Raises ForbiddenError, MessageError.
        """
        self._check_may_name_handles()
        whole, rest = divmod(len(message.handles), IPC_HANDLE_BYTES)
        if rest:
            raise MessageError(f"{len(message.handles)} bytes of handles; each has {IPC_HANDLE_BYTES}")
        handles = [message.handles[index * IPC_HANDLE_BYTES :][:IPC_HANDLE_BYTES] for index in range(whole)]
        return self._to_the_end(self._open_handles(message.device, handles))

    def _check_may_name_handles(self) -> None:
        """Checks the user's right to name handles. A handle proves nothing: the driver opens any process's handle for
        the daemon, no matter which process names it. The descriptors of `attach_vmm` prove that the peer has the
        memory.
        """
        uid, context = self.account.uid, self.context
        if uid not in context.trusted_uids and uid not in context.config.cuda.ipc_uids:
            raise ForbiddenError(
                f"uid {uid} may not name CUDA IPC handles, which do not prove whose memory it is: run the engine as "
                f"uid {context.own_uid}, as the daemon, or list uid {uid} in cuda.ipc_uids if all users in that list "
                "may read and write each other's GPU memory"
            )

    async def _open_handles(self, uuid: bytes, handles: list[bytes]) -> list[int]:
        device = await self.context.gpus.device(uuid)
        opened: list[Allocation] = []
        try:
            for handle in handles:
                opened.append(await self._open(device, handle))  # noqa: PERF401  as in `attach`
            self._check_open()
        except Exception:
            for allocation in opened:
                self._refund(allocation, device)
                await device.unmap(allocation)
            raise
        return self._add(opened, device)

    async def _open(self, device: GpuMemory, handle: bytes) -> Allocation:
        with self._charged(fds=1):
            allocation = await device.open_handle(handle)
            try:
                self.account.charge(mapped_bytes=allocation.charged_bytes)
            except LimitError:
                await device.unmap(allocation)
                raise
            return allocation

    def attach_vmm(self, message: AttachVmm, fds: list[int]) -> asyncio.Task[list[int]]:
        """Maps chunks; the task returns the id of their allocation, or raises PeerErrors, LimitError or DeviceError.
        The caller owns `fds`, which must be open at the call.

        Raises MessageError, BusyError.
        """
        if len(message.chunks) != 8 * len(fds):
            raise MessageError(f"{len(message.chunks)} bytes of chunk sizes for {len(fds)} chunks; each has 8")
        sizes = np.frombuffer(message.chunks, "<u8").tolist()
        return self._to_the_end(self._map_chunks(message, self._duplicates(fds), sizes))

    async def _map_chunks(self, message: AttachVmm, fds: list[int], sizes: list[int]) -> list[int]:
        try:
            device = await self.context.gpus.device(message.device)
            number = message.extends or await self._reserve(device, message.total_bytes)
            entry = self.attached.get(number)
            if entry is None or entry.device is not device or entry.allocation.whole:
                raise UnknownNameError(f"this session has no incomplete allocation {number} on this GPU")
            if entry.allocation.charged_bytes != message.total_bytes:
                raise ExtentError(f"allocation {number} was announced with {entry.allocation.charged_bytes} bytes")
            try:
                await device.add_chunks(entry.allocation, fds, sizes)
            except BaseException:
                if not message.extends:  # the peer does not learn its number
                    await self._unmap(number)
                raise
            self._check_open()
            return [number]
        finally:
            self.context.closer.close(self.account.uid, fds)

    def _duplicates(self, fds: list[int]) -> list[int]:
        """Duplicates descriptors, which count as held until the closer has closed them. Raises BusyError, and then
        makes none.
        """
        made: list[int] = []
        closer, uid = self.context.closer, self.account.uid
        try:
            made.extend(os.dup(fd) for fd in fds)
        except OSError as error:
            closer.hold(uid, len(made))
            closer.close(uid, made)
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise BusyError(
                f"the daemon has no descriptors left ({error.strerror}): try again, or raise its LimitNOFILE"
            ) from None
        closer.hold(uid, len(made))
        return made

    async def _reserve(self, device: GpuMemory, total_bytes: int) -> int:
        with self._charged(fds=1, mapped_bytes=total_bytes):
            allocation = await device.reserve_chunks(total_bytes)
            try:
                self._check_open()
            except StateError:
                await device.unmap(allocation)
                raise
            return self._add([allocation], device)[0]

    @contextlib.contextmanager
    def _charged(self, **amounts: int) -> Iterator[None]:
        """Charges for the block, and refunds if it raises. Raises LimitError."""
        self.account.charge(**amounts)
        try:
            yield
        except BaseException:
            self.account.refund(**amounts)
            raise

    def _to_the_end(self, work: Coroutine[Any, Any, list[int]]) -> asyncio.Task[list[int]]:
        """Runs the work to its end, so that its mappings are recorded, even if the request is cancelled."""
        return self.context.spawn(work, errors_are_handled=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the session has ended meanwhile")

    # --- registrations ---

    def register(self, namespace: Namespace, message: Register) -> int:
        """Returns the id of a new registration, which is not `is_large`. Raises PeerErrors and LimitError, and then
        changes nothing.
        """
        descriptors = self._descriptors(message)
        with self._charged(descriptors=descriptors):  # before any plan is made
            attached = named(message, self.attached)
            check(message, attached, self.context.cache, namespace)
            return self._build(namespace, message, draft(message, attached), descriptors)

    async def register_large(self, namespace: Namespace, message: Register) -> int:
        """Registers like `register`, but a thread makes the plans. Everything may have changed meanwhile, and `build`
        checks it again; but the memory that the message names stays mapped, even if other registrations of it end. The
        charge stays until the thread has finished, even if the request is cancelled.
        """
        descriptors = self._descriptors(message)
        attached = named(message, self.attached)
        check(message, attached, self.context.cache, namespace)
        self.account.charge(descriptors=descriptors)
        for entry in attached.values():
            entry.drafts += 1
        work = self._draft_and_build(namespace, message, attached, descriptors)
        return await asyncio.shield(self.context.spawn(work, errors_are_handled=True))

    async def _draft_and_build(
        self, namespace: Namespace, message: Register, attached: dict[int, Attachment], descriptors: int
    ) -> int:
        """Drafts and builds one registration of each user at a time: all users share the threads."""
        try:
            async with self.account.drafting:
                self._check_open()
                drafted = await self.context.loop.run_in_executor(None, draft, message, attached)
            self._check_open()
            for number, entry in attached.items():
                if self.attached.get(number) is not entry:
                    raise UnknownNameError(f"allocation {number} was unmapped while the registration was checked")
            return self._build(namespace, message, drafted, descriptors)
        except BaseException:
            self.account.refund(descriptors=descriptors)
            raise
        finally:
            for number, entry in attached.items():
                entry.drafts -= 1
                if entry.left and not entry.uses and not entry.drafts and self.attached.get(number) is entry:
                    del self.attached[number]  # at once, so that no registration names it before the task runs
                    self.context.spawn(self._release(entry))

    def _descriptors(self, message: Register) -> int:
        """Returns the number of descriptors of the message's plans. Raises LimitError if it has too many tensors."""
        cap = self.limits.tensors_per_registration
        if len(message.tensors) > cap:
            raise LimitError(f"{len(message.tensors)} tensors in one registration; the cap is {cap}")
        return cost(message)

    def _build(self, namespace: Namespace, message: Register, drafted: Draft, descriptors: int) -> int:
        number = next(self._ids)
        made = build(number, message, drafted, self.attached, self.context.cache, namespace)
        made.descriptors = descriptors
        for allocation in made.allocations:
            self.attached[allocation].uses += 1
        self.registrations[number] = made
        return number

    def registration(self, number: int) -> Registration:
        """Returns the registration. Raises UnknownNameError if this session has none of this number."""
        registration = self.registrations.get(number)
        if registration is None:
            raise UnknownNameError(f"this session has no registration {number}")
        return registration

    def unregister(self, number: int) -> asyncio.Task[None]:
        """Ends a registration, so that no further job can name it. The task waits for the jobs that name it, then
        unmaps memory that no other registration names. A second call meanwhile returns the same task. Raises
        UnknownNameError.
        """
        ending = self._ending.get(number)
        if ending is None:
            made = self.registration(number)
            del self.registrations[number]
            self.account.refund(descriptors=made.descriptors)
            ending = self._ending[number] = self.context.spawn(self._let_go(made), errors_are_handled=True)
            ending.add_done_callback(lambda _: self._ending.pop(number))
        return ending

    async def _let_go(self, made: Registration) -> None:
        copy, quarantine = self.context.config.copy, self.context.quarantine
        stuck_s = copy.deadline_max_s + copy.worker_drain_s
        if not await quarantine.end(self.account.uid, made.running, stuck_s, f"registration {made.id}"):
            await quarantine.until_ended(made.running)
        for number in made.allocations:
            entry = self.attached.get(number)
            if entry is not None:  # otherwise the session has ended meanwhile
                entry.uses -= 1
                entry.left = entry.uses == 0
                if entry.left and not entry.drafts:
                    await self._unmap(number)

    async def close(self) -> None:
        """Unmaps everything; the session's copies have ended."""
        self._closed = True
        for error in await asyncio.gather(*self._ending.values(), return_exceptions=True):
            if error is not None:
                log.error("a registration of an ended session can't be released: %s", error)
        for made in self.registrations.values():
            self.account.refund(descriptors=made.descriptors)
        self.registrations.clear()
        for error in await _in_shares([partial(self._unmap, number) for number in self.attached]):
            log.error("an allocation of an ended session can't be unmapped: %s", error)

    async def _unmap(self, number: int) -> None:
        entry = self.attached.pop(number, None)
        if entry is not None:
            await self._release(entry)

    async def _release(self, entry: Attachment) -> None:
        try:
            await entry.device.unmap(entry.allocation)
        finally:  # this task may be cancelled while it waits; the unmapping continues
            self._refund(entry.allocation, entry.device)


async def _in_shares(calls: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> list[BaseException]:
    """Makes all calls, some at a time: thousands that end at once would make one long turn of the loop. Returns their
    exceptions; calls after a failed one still run.
    """
    failed: list[BaseException] = []
    for begin in range(0, len(calls), AT_ONCE):
        ends = await asyncio.gather(*(call() for call in calls[begin : begin + AT_ONCE]), return_exceptions=True)
        failed += [end for end in ends if end is not None]
    return failed
