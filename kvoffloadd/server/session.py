"""One peer's session: each request is checked, carried out, and answered once. No socket here.

A handler returns the reply, or a coroutine that will; whatever it raises becomes the error reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import msgpack
import numpy as np

from kvoffloadd.cache.cache import Wanted
from kvoffloadd.cache.keys import has_duplicates, keys_array
from kvoffloadd.errors import (
    DrainingError,
    DuplicateError,
    ForbiddenError,
    LimitError,
    SchemaError,
    StateError,
    UnknownNameError,
    VersionError,
)
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import tag_of
from kvoffloadd.protocol.state import check_role
from kvoffloadd.server.jobs import Jobs
from kvoffloadd.server.pins import Answered, Pins, find_all
from kvoffloadd.server.registry import Registry
from kvoffloadd.server.verification import verify

if TYPE_CHECKING:
    from kvoffloadd.cache.namespace import Namespace, Space
    from kvoffloadd.config import Config, LimitsConfig
    from kvoffloadd.model import U64Array
    from kvoffloadd.server.context import Context
    from kvoffloadd.server.instance import Instance
    from kvoffloadd.server.outbox import Outbox
    from kvoffloadd.server.peer import Peer

Answer = m.Reply | Coroutine[Any, Any, m.Reply]


def fingerprint(spec: m.NamespaceSpec, uid: int) -> bytes:
    """16 bytes that name a namespace: all its fields and the owner's uid."""
    fields = [uid, spec.model, spec.revision, spec.dtype, spec.layout, spec.parallel, spec.salt, spec.key_bytes]
    return hashlib.blake2b(msgpack.packb(fields), digest_size=16).digest()


def _told(limits: LimitsConfig, config: Config) -> m.Limits:
    return m.Limits(
        frame_bytes=m.FRAME_BYTES_MAX,
        fds_per_frame=m.FDS_PER_FRAME_MAX,
        keys_per_request=limits.keys_per_request,
        jobs=limits.jobs_per_session,
        deadline_s=config.copy.deadline_max_s,
    )


class Session:
    """From hello to the end of its last copy. `push` queues a message for the peer."""

    _ids = itertools.count(1)

    def __init__(self, context: Context, peer: Peer, outbox: Outbox, push: Callable[[m.Push], None]) -> None:
        self.id = next(self._ids)
        self.peer = peer
        self.role = ""
        self.leaving = False
        self.requests = 0
        self._context = context
        self._outbox = outbox
        self._push = push
        self._account = context.accounts.of(peer.uid)
        self._limits = context.config.limits  # for good: the peer is told them once
        self._instance: Instance | None = None
        self._namespace: Namespace | None = None
        self._jobs: Jobs | None = None
        self._pins: Pins | None = None
        self._registry = Registry(context, self._account, self._limits)
        self._closing: asyncio.Task[None] | None = None
        self._listening = False
        self._events_missed = False

    # --- dispatch ---

    def handle(self, message: m.Message, fds: list[int]) -> Answer:
        """Carry out one request. Raises KvOffloadError: the request failed and changed nothing. `fds` stay the
        caller's, who keeps them open until the answer is there.
        """
        if isinstance(message, m.Hello):
            return self._hello(message)
        check_role(self.role, tag_of(message))
        self.requests += 1
        if isinstance(message, m.Attach):
            return self._attach(message, fds)
        if isinstance(message, m.AttachVmm):
            return self._attach_vmm(message, fds)
        return self._HANDLERS[type(message)](self, message)

    @property
    def privileged(self) -> bool:
        """Root, or the daemon's own user."""
        return self.peer.uid in (0, self._context.own_uid)

    @property
    def instance_id(self) -> int:
        """Its engine's number; 0 before its hello and after its end."""
        return self._instance.id if self._instance else 0

    # --- hello, memory, registration ---

    def _hello(self, message: m.Hello) -> m.Reply:
        context = self._context
        if message.version not in m.VERSIONS:
            raise VersionError(
                f"protocol version {message.version} can't be served; this daemon serves {list(m.VERSIONS)}"
            )
        if message.namespace is None and message.role != "observer":
            raise StateError(f"a {message.role} must name its namespace")
        if context.draining:
            raise DrainingError("the daemon is shutting down and takes no new sessions")
        name = fingerprint(message.namespace, self.peer.uid) if message.namespace else None
        instance = context.instances.join(message.instance, self.peer.uid, name)
        self._instance, self.role = instance, message.role
        if message.namespace is not None and name is not None:
            spec = message.namespace
            namespace = context.cache.open_namespace(name, self.peer.uid, spec.model, spec.key_bytes)
            self._namespace = namespace
            self._jobs = Jobs(context, namespace, instance, self._account, self._outbox, self._push, self._limits)
            self._pins = Pins(context, instance, self._account, self._outbox, self._push)
        return m.Welcome(
            seq=message.seq,
            version=message.version,
            boot_id=context.boot_id,
            session=self.id,
            namespace=name or b"",
            epoch=self._namespace.epoch if self._namespace else 0,
            limits=_told(self._limits, context.config),
            features=context.features(),
        )

    def _attach(self, message: m.Attach, fds: list[int]) -> m.Reply:
        return self._attached(message.seq, self._registry.attach(fds, self.peer.uid))

    async def _attach_ipc(self, message: m.AttachIpc) -> m.Reply:
        return self._attached(message.seq, await self._registry.attach_ipc(message))

    async def _attach_vmm(self, message: m.AttachVmm, fds: list[int]) -> m.Reply:
        return self._attached(message.seq, await self._registry.attach_vmm(message, fds))

    def _attached(self, seq: int, numbers: list[int]) -> m.Reply:
        sizes = [self._registry.attached[number].allocation.size_bytes for number in numbers]
        return m.Attached(seq=seq, allocations=numbers, sizes_bytes=sizes)

    def _register(self, message: m.Register) -> m.Reply:
        number = self._registry.register(self._own_namespace(), message)
        return m.Registered(seq=message.seq, registration=number)

    def _unregister(self, message: m.Unregister) -> Answer:
        return self._finish_unregister(message.seq, message.registration)

    async def _finish_unregister(self, seq: int, number: int) -> m.Reply:
        await asyncio.shield(self._registry.unregister(number))
        return m.Done(seq=seq)

    # --- keys ---

    def _lookup(self, message: m.Lookup) -> m.Reply:
        answer = self._find(message.groups)
        return m.Found(seq=message.seq, states=answer.states, boundaries=answer.boundaries)

    def _pin(self, message: m.Pin) -> m.Reply:
        return self._own_pins().pin(message.seq, self._find(message.groups))

    def _prefetch(self, message: m.Prefetch) -> m.Reply:
        return self._own_pins().prefetch(message.seq, self._find(message.groups))

    def _touch(self, message: m.Touch) -> m.Reply:
        for share in self._find(message.groups).shares:
            self._context.cache.use(share.space, share.found, share.first)
        return m.Done(seq=message.seq)

    def _find(self, groups: list[m.GroupKeys]) -> Answered:
        return find_all(self._context.cache, self._keys_of(groups))

    def _keys_of(self, groups: list[m.GroupKeys]) -> list[tuple[Space, int, U64Array]]:
        namespace = self._own_namespace()
        asked = [(self._space(item.group), item.first, keys_array(item.keys, namespace.key_bytes)) for item in groups]
        if len({space.id for space, _, _ in asked}) != len(asked):
            raise DuplicateError("a group is named twice in one request")
        if (total := sum(len(keys) for _, _, keys in asked)) > self._limits.keys_per_request:
            raise LimitError(f"{total} keys in one request; the cap is {self._limits.keys_per_request}")
        return asked

    def _reserve(self, message: m.Reserve) -> m.Reply:
        if self._context.draining:
            raise DrainingError("the daemon is shutting down and takes no new reservations")
        asked = self._keys_of(message.groups)
        plans = []
        for space, first, keys in asked:
            wanted = sorted(set(range(space.schema.parts) if message.parts is None else message.parts))
            if not wanted or wanted[-1] >= space.schema.parts:
                raise SchemaError(f"group {space.schema.group} has parts 0 to {space.schema.parts - 1}, not {wanted}")
            if not all(space.part_bytes[p] for p in wanted):
                raise SchemaError(f"group {space.schema.group}: not all of parts {wanted} are registered yet")
            if has_duplicates(keys):
                raise DuplicateError(f"group {space.schema.group}: a key is reserved twice in one request")
            plans.append(Wanted.from_first(space, keys, np.array(wanted, np.uint16), first))
        most = sum(len(plan.keys) * len(plan.parts) for plan in plans)
        self._account.charge("leases", most)
        reserved = self._context.cache.reserve_all(plans)
        parts = np.concatenate([np.zeros(0, np.int64), *(r.parts for r in reserved)])
        self._account.refund("leases", most - len(parts))
        lease = self._own_instance().leases.add_write(parts).id if len(parts) else 0
        return m.Reserved(seq=message.seq, states=[r.states.tobytes() for r in reserved], lease=lease)

    def _release(self, message: m.Release) -> m.Reply:
        self._context.end_leases([self._own_instance().leases.pop(message.lease)], self.peer.uid)
        return m.Done(seq=message.seq)

    # --- jobs ---

    def _store(self, message: m.Store) -> m.Reply:
        return self._own_jobs().store(message, self._registry.registration(message.registration))

    def _load(self, message: m.Load) -> m.Reply:
        return self._own_jobs().load(message, self._registry.registration(message.registration))

    def _cancel(self, message: m.Cancel) -> m.Reply:
        self._own_jobs().cancel(message.job)
        return m.Done(seq=message.seq)

    # --- the namespace, the daemon ---

    def _clear(self, message: m.Clear) -> Answer:
        scope = self._scope(message.everything)
        return self._finish_clear(message.seq, None if message.everything else {scope[0].fingerprint})

    async def _finish_clear(self, seq: int, names: set[bytes] | None) -> m.Reply:
        keys, held_bytes = await asyncio.shield(self._context.clear(names))
        return m.Cleared(seq=seq, keys=keys, bytes=held_bytes)

    def _drain(self, message: m.Drain) -> Answer:
        scope = set(map(id, self._scope(message.everything)))
        jobs = {
            transfer
            for session in self._context.sessions
            if id(session._namespace) in scope
            for transfer in session.transfers()
        }
        return self._finish_drain(message, jobs)

    async def _finish_drain(self, message: m.Drain, jobs: set[Any]) -> m.Reply:
        settled = await self._context.transfers.settle(jobs, message.deadline_s, sealed=True)
        left = sum(not job.finished for job in jobs)
        sealing = self._context.transfers.sealing
        unsealed = sealing.unsealed if self.privileged else sealing.by_uid[self.peer.uid]
        return m.Drained(seq=message.seq, jobs=left, unsealed=0 if settled else unsealed)

    def _scope(self, everything: bool) -> list[Namespace]:
        if not everything:
            return [self._own_namespace()]
        if not self.privileged:
            raise ForbiddenError("only root and the daemon's own user may act on all namespaces")
        return list(self._context.cache.namespaces.values())

    def _status(self, message: m.Status) -> m.Reply:
        return m.Report(seq=message.seq, status=self._context.status(None if self.privileged else self.peer.uid))

    def _verify(self, message: m.Verify) -> Answer:
        if not self.privileged:
            raise ForbiddenError("only root and the daemon's own user may ask for the self-audit")
        return self._finish_verify(message)

    async def _finish_verify(self, message: m.Verify) -> m.Reply:
        audit = await verify(self._context, payloads=message.payloads, disk=message.disk, repair=message.repair)
        return m.Verified(seq=message.seq, **asdict(audit))

    def _ping(self, message: m.Ping) -> m.Reply:
        return m.Done(seq=message.seq)

    # --- events ---

    def _subscribe(self, message: m.Subscribe) -> m.Reply:
        if not self._listening:
            self._own_namespace().listeners += 1
            self._listening = True
            self._context.subscribed.set()
        return m.Done(seq=message.seq)

    def _snapshot(self, message: m.Snapshot) -> m.Reply:
        keys, cursor = self._context.cache.snapshot(self._space(message.group), message.cursor)
        return m.Listing(seq=message.seq, keys=keys, cursor=cursor)

    def tell(self, namespace: Namespace, group: int, added: bytes, removed: bytes) -> None:
        """An event of a namespace; dropped, with a `gap`, when the peer reads too slowly."""
        if not self._listening or namespace is not self._namespace:
            return
        if self._room_for_event(len(added) + len(removed)):
            self.tell_gap()
            self._push(m.Events(group=group, added=added, removed=removed))
        else:
            self._events_missed = True

    def miss_events(self) -> None:
        """Events were lost before they reached any session."""
        self._events_missed = self._listening

    def tell_gap(self) -> None:
        """If events were dropped and the peer reads again, say so."""
        if self._events_missed and self._room_for_event(0):
            self._events_missed = False
            self._push(m.Gap())

    def _room_for_event(self, size: int) -> bool:
        waiting = len(self._outbox.frames)
        return waiting < self._limits.events_per_session and self._outbox.room(size + 256)

    # --- the end ---

    def _bye(self, message: m.Bye) -> Answer:
        self.leaving = True
        return self._finish_bye(message.seq)

    async def _finish_bye(self, seq: int) -> m.Reply:
        await self.close()
        return m.Done(seq=seq)

    async def close(self) -> None:
        """End what this session holds: its copies first, then its leases if it was its instance's last, then memory.

        May be called by several; all return when it is done. If copies do not end, the process does: a mapping in use
        can't be released.
        """
        if self._closing is None:
            self._closing = self._context.spawn(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        context, instance = self._context, self._instance
        if instance is None:
            return  # it never said hello
        copy = context.config.copy
        # Each of these, whatever fails before it: what is in `ends` from the last to the first, then its memory.
        async with contextlib.AsyncExitStack() as memory:
            with contextlib.ExitStack() as ends:
                ends.callback(self._leave_namespace)
                ends.callback(self._leave_instance, instance)
                if self._pins is not None:
                    ends.callback(self._pins.close)
                running = await self._jobs.cancel_all() if self._jobs else set()
                if not await context.transfers.end(running, copy.worker_drain_s):
                    context.counters.drains_late += 1
                    context.fatal(f"copies of session {self.id} do not end within {copy.worker_drain_s} s")
                    return
                memory.push_async_callback(self._registry.close)  # only now: no copy uses it any more

    def _leave_instance(self, instance: Instance) -> None:
        self._instance = None
        if self._context.instances.leave(instance):
            self._context.end_leases(instance.leases.pop_all(), self.peer.uid)

    def _leave_namespace(self) -> None:
        if self._namespace is not None:
            self._namespace.listeners -= self._listening
            self._context.cache.close_namespace(self._namespace)

    def transfers(self) -> set[Any]:
        """Its copies under way."""
        return self._jobs.transfers() if self._jobs else set()

    def figures(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "session": self.id,
            "instance": self.instance_id,
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "role": self.role,
            "namespace": self._namespace.label if self._namespace else "",
            "requests": self.requests,
            "jobs": len(self._jobs.running) if self._jobs else 0,
            "registrations": len(self._registry.registrations),
            "mapped_bytes": self._registry.mapped_bytes,
            "devices": self._registry.devices,
        }

    def slow_jobs(self, least_s: float) -> list[dict[str, Any]]:
        """For `status`: its jobs that have been under way for longer."""
        slow = self._jobs.slow(least_s) if self._jobs else []
        return [{"session": self.id, "pid": self.peer.pid, **job} for job in slow]

    # --- what a session has ---

    def _own_namespace(self) -> Namespace:
        if self._namespace is None:
            raise StateError("this session named no namespace in its hello")
        return self._namespace

    def _own_instance(self) -> Instance:
        if self._instance is None:
            raise StateError("this session has ended")
        return self._instance

    def _own_jobs(self) -> Jobs:
        if self._jobs is None:
            raise StateError("this session named no namespace in its hello")
        return self._jobs

    def _own_pins(self) -> Pins:
        if self._pins is None:
            raise StateError("this session named no namespace in its hello")
        return self._pins

    def _space(self, group: int) -> Space:
        space = self._own_namespace().spaces.get(group)
        if space is None:
            raise UnknownNameError(f"group {group} is not registered in this namespace")
        return space

    _HANDLERS: ClassVar[dict[type[m.Message], Callable[[Session, Any], Answer]]] = {
        m.Ping: _ping,
        m.AttachIpc: _attach_ipc,
        m.Register: _register,
        m.Unregister: _unregister,
        m.Lookup: _lookup,
        m.Pin: _pin,
        m.Prefetch: _prefetch,
        m.Touch: _touch,
        m.Release: _release,
        m.Reserve: _reserve,
        m.Store: _store,
        m.Load: _load,
        m.Cancel: _cancel,
        m.Clear: _clear,
        m.Drain: _drain,
        m.Status: _status,
        m.Verify: _verify,
        m.Subscribe: _subscribe,
        m.Snapshot: _snapshot,
        m.Bye: _bye,
    }
