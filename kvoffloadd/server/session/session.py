"""One peer's session: each request is checked, carried out, and answered once. No socket here.

A handler returns the reply; or steps that end with it, for a request that may be long; or a coroutine, if the reply has
to wait. An exception of the handler becomes the error reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, ClassVar

import msgpack

from kvoffloadd.cache.clearing import Matching
from kvoffloadd.cache.jobs.job import Job
from kvoffloadd.cache.memory.keys import keys_array
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import reserve_in_steps
from kvoffloadd.config import Config, LimitsConfig
from kvoffloadd.errors import (
    DrainingError,
    DuplicateError,
    ForbiddenError,
    LimitError,
    StateError,
    UnknownNameError,
    VersionError,
)
from kvoffloadd.model import U64Array
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Encoded, tag_of
from kvoffloadd.protocol.state import ROLE_MAY
from kvoffloadd.scheduling.steps import Steps, in_turns
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.clears import SessionClears
from kvoffloadd.server.peers.instance import Instance
from kvoffloadd.server.peers.outbox import Outbox
from kvoffloadd.server.peers.peer import Peer
from kvoffloadd.server.peers.subscription import Subscription
from kvoffloadd.server.session.claimprefetch import prefetch_claims
from kvoffloadd.server.session.claims import SessionClaims
from kvoffloadd.server.session.deletes import delete
from kvoffloadd.server.session.drains import drain
from kvoffloadd.server.session.jobs import SessionJobs
from kvoffloadd.server.session.pins import Lookups, PendingPins, find_all
from kvoffloadd.server.session.registration import is_large
from kvoffloadd.server.session.registry import Registry
from kvoffloadd.server.session.reserving import PendingWriteLease, check_distinct, wanted_of
from kvoffloadd.server.session.verification import verify
from kvoffloadd.server.status import describe, short_label

Later = Coroutine[Any, Any, m.Reply]
Answer = m.Reply | Steps[m.Reply] | Later

_MAY_SEND = {role: frozenset(m.REQUESTS[tag] for tag in tags) for role, tags in ROLE_MAY.items()}


def fingerprint(spec: m.NamespaceSpec, uid: int) -> bytes:
    """Returns 16 bytes that identify a namespace: a hash of all its fields and the owner's uid."""
    fields = [uid, spec.model, spec.revision, spec.dtype, spec.layout, spec.parallel, spec.salt, spec.key_bytes]
    return hashlib.blake2b(msgpack.packb(fields), digest_size=16).digest()


def _limits_of(limits: LimitsConfig, config: Config) -> m.Limits:
    return m.Limits(
        frame_bytes=m.FRAME_BYTES_MAX,
        fds_per_frame=m.FDS_PER_FRAME_MAX,
        keys_per_request=limits.keys_per_request,
        jobs=limits.jobs_of_session,
        deadline_s=config.copy.deadline_max_s,
    )


def _check_price(limits: LimitsConfig, keys: int) -> None:
    """Raises LimitError if a request counts as more keys than allowed."""
    if keys > (cap := limits.keys_per_request):
        raise LimitError(f"{keys} keys in one request, counted for parts as well; the cap is {cap}: ask in pieces")


class Session:
    """One peer's session, from its hello to the end of its last copy. `push` queues a message for the peer."""

    _ids = itertools.count(1)

    def __init__(self, context: Context, peer: Peer, outbox: Outbox, push: Callable[[m.Push | Encoded], None]) -> None:
        self.id = next(self._ids)
        self.peer = peer
        self.role = ""
        self.leaving = False
        self.requests = 0
        self._context = context
        self._outbox = outbox
        self._push = push
        self._account = context.accounts.of(peer.uid)
        self._limits = context.config.limits  # fixed: the welcome has announced them
        self._instance: Instance | None = None
        self._namespace: Namespace | None = None
        self._jobs: SessionJobs | None = None
        self._pins: PendingPins | None = None
        self._registry = Registry(context, self._account, self._limits)
        self._clears = SessionClears(context.clearings, context.requested_clears, self._account)
        self._closing: asyncio.Task[None] | None = None
        self._subscription = Subscription(outbox, push, self._limits.events_per_session)

    # --- dispatch ---

    def handle(self, message: m.Message, fds: list[int]) -> Answer:
        """Carries out one request. A KvOffloadError means that the request failed and changed nothing. The caller owns
        `fds` and keeps them open until the answer is there. If the answer is steps, the next request waits for their
        end.
        """
        if isinstance(message, m.Hello):
            return self._hello(message)
        if type(message) not in _MAY_SEND[self.role]:
            raise ForbiddenError(f"a session of role {self.role} may not send {tag_of(message)!r}")
        self.requests += 1
        if isinstance(message, m.Attach):
            return self._attach(message, fds)
        if isinstance(message, m.AttachVmm):
            return self._attach_vmm(message, fds)
        return (self._HANDLERS.get(type(message)) or self._LATER[type(message)])(self, message)

    @classmethod
    def waits(cls, message: m.Message) -> bool:
        """Returns whether `handle` returns a coroutine for this request, which may have begun by then."""
        if isinstance(message, m.Register):
            return is_large(message)
        return isinstance(message, m.Attach | m.AttachVmm) or type(message) in cls._LATER

    @property
    def privileged(self) -> bool:
        """Whether the peer is root, or the daemon's own user."""
        return self.peer.uid in self._context.trusted_uids

    @property
    def instance_id(self) -> int:
        """The number of its instance; 0 before its hello and after its end."""
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
            self._jobs = SessionJobs(
                context, namespace, instance, self._account, self._outbox, self._push, self._limits
            )
            self._pins = PendingPins(context, instance, self._outbox, self._push)
        return m.Welcome(
            seq=message.seq,
            version=message.version,
            boot_id=context.boot_id,
            session=self.id,
            namespace=name or b"",
            epoch=self._namespace.epoch if self._namespace else 0,
            limits=_limits_of(self._limits, context.config),
            features=context.features(),
        )

    def _attach(self, message: m.Attach, fds: list[int]) -> Later:
        return self._finish_attach(message.seq, self._registry.attach(fds))

    def _attach_ipc(self, message: m.AttachIpc) -> Later:
        return self._finish_attach(message.seq, self._registry.attach_ipc(message))

    def _attach_vmm(self, message: m.AttachVmm, fds: list[int]) -> Later:
        return self._finish_attach(message.seq, self._registry.attach_vmm(message, fds))

    async def _finish_attach(self, seq: int, mapping: asyncio.Task[list[int]]) -> m.Reply:
        numbers = await asyncio.shield(mapping)
        return m.Attached(seq=seq, allocations=numbers, sizes_bytes=self._registry.sizes_bytes(numbers))

    async def _detach(self, message: m.Detach) -> m.Reply:
        """Begins like a large registration, and therefore after one that was requested before."""
        await asyncio.shield(self._registry.detach(message.allocations))
        return m.Done(seq=message.seq)

    def _register(self, message: m.Register) -> Answer:
        if is_large(message):
            return self._finish_register(message)
        number = self._registry.register(self._own_namespace(), message)
        return m.Registered(seq=message.seq, registration=number)

    async def _finish_register(self, message: m.Register) -> m.Reply:
        number = await self._registry.register_large(self._own_namespace(), message)
        return m.Registered(seq=message.seq, registration=number)

    def _unregister(self, message: m.Unregister) -> Later:
        return self._finish_unregister(message.seq, self._registry.unregister(message.registration))

    async def _finish_unregister(self, seq: int, ending: asyncio.Task[None]) -> m.Reply:
        await asyncio.shield(ending)
        return m.Done(seq=seq)

    # --- keys ---

    def _lookup(self, message: m.Lookup) -> m.Reply:
        answer = self._find(message.groups, local=message.local)
        return m.Found(seq=message.seq, states=answer.states, boundaries=answer.boundaries)

    def _pin(self, message: m.Pin) -> m.Reply:
        return self._own_pins().pin(message.seq, self._find(message.groups, ask=True), tell_tiers=message.tiers)

    def _prefetch(self, message: m.Prefetch) -> m.Reply:
        return self._own_pins().prefetch(
            message.seq, self._find(message.groups, ask=not message.local, local=message.local)
        )

    def _touch(self, message: m.Touch) -> m.Reply:
        groups, cache = self._find(message.groups).groups, self._context.cache
        cache.uses.add([(group.keyspace, group.lookup, group.first) for group in groups])
        cache.counters.keys_touched += sum(group.lookup.num_hits for group in groups)
        if self._context.lower is not None:
            self._context.lower.touch(groups)
        return m.Done(seq=message.seq)

    def _keep(self, message: m.Keep) -> m.Reply:
        named = [(keyspace, keys) for keyspace, _, keys in self._keys_of(message.groups)]
        self._context.cache.keep(named, soon=message.how == "soon")
        return m.Done(seq=message.seq)

    def _claim(self, message: m.Retain | m.Forget | m.Claims) -> Answer:
        return self._own_claims().answer(message, self._keys_of, self._space)

    def _prefetch_claims(self, message: m.PrefetchClaims) -> Later:
        claims, flow = self._own_claims().named(message.name, message.number), self._own_instance().flow
        return prefetch_claims(message, claims, self._context, self._account, flow)

    def _own_claims(self) -> SessionClaims:
        retention, uid = self._context.cache.retention, None if self.privileged else self.peer.uid
        return SessionClaims(retention, self._namespace, uid, self.role)

    def _find(self, groups: list[m.GroupKeys], *, ask: bool = False, local: bool = False) -> Lookups:
        found = find_all(self._context.cache, self._context.lower, self._keys_of(groups), ask=ask)
        if local:
            found.leave_out_elsewhere()
        return found

    def _keys_of(self, groups: list[m.GroupKeys]) -> list[tuple[Keyspace, int, U64Array]]:
        namespace = self._own_namespace()
        if len(groups) > 1 and len({item.group for item in groups}) != len(groups):
            raise DuplicateError("a group is named twice in one request")
        keys_of = [(self._space(item.group), item.first, keys_array(item.keys, namespace.key_bytes)) for item in groups]
        _check_price(self._limits, sum(len(keys) * keyspace.schema.price(1) for keyspace, _, keys in keys_of))
        return keys_of

    def _reserve(self, message: m.Reserve) -> Steps[m.Reply]:
        if self._context.draining:
            raise DrainingError("the daemon is shutting down and takes no new reservations")
        self._clears.last = None  # the next clear must reach keys that are stored now
        wanted = wanted_of(message, self._keys_of(message.groups))
        _check_price(self._limits, sum(len(one.keys) * one.keyspace.schema.price(len(one.parts)) for one in wanted))
        check_distinct(wanted)
        with PendingWriteLease(self._own_instance(), self._account, wanted) as lease:
            reserved = yield from self._own_jobs().while_open(reserve_in_steps(self._context.cache, wanted))
            return lease.grant(message.seq, reserved)

    def _release(self, message: m.Release) -> Steps[m.Reply]:
        yield from self._context.end_lease(self._own_instance(), message.lease)
        return m.Done(seq=message.seq)

    # --- jobs ---

    def _store(self, message: m.Store) -> Steps[m.Reply]:
        self._clears.last = None  # the next clear must reach keys that are stored now
        return self._own_jobs().store(message, self._registry.registration(message.registration))

    def _load(self, message: m.Load) -> Steps[m.Reply]:
        return self._own_jobs().load(message, self._registry.registration(message.registration))

    def _cancel(self, message: m.Cancel) -> m.Reply:
        self._own_jobs().cancel(message.job)
        return m.Done(seq=message.seq)

    # --- the namespace, the daemon ---

    def _clear(self, message: m.Clear) -> Later:
        matching = message.namespaces is not None or message.uid is not None
        self._check_scope(message.everything or matching)
        if matching:
            return self._clears.clear(message, Matching(message.namespaces, message.uid))
        own = None if message.everything else frozenset([self._own_namespace().fingerprint])
        return self._clears.clear(message, own)

    def _drain(self, message: m.Drain) -> Later:
        self._check_scope(message.everything)
        jobs = self._context.jobs.progress if message.everything else self._own_namespace().jobs
        whose = None if self.privileged else self.peer.uid
        return drain(message, self._context.jobs, self._account, jobs, jobs.last, whose)

    def _check_scope(self, others: bool) -> None:
        """Raises ForbiddenError if this session may act only on its own namespace and `others` is set."""
        if others and not self.privileged:
            raise ForbiddenError("only root and the daemon's own user may act on all namespaces, or on others")

    def _status(self, message: m.Status) -> Steps[m.Reply]:
        status = yield from describe(self._context, None if self.privileged else self.peer.uid)
        return m.Report(seq=message.seq, status=status)

    def _verify(self, message: m.Verify) -> Later:
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
        self._context.events.join(self._own_namespace(), self._subscription, tiers=message.tiers)
        return m.Done(seq=message.seq)

    def _snapshot(self, message: m.Snapshot) -> m.Reply:
        self._outbox.check_crowd()
        keys, cursor = self._context.cache.snapshot(self._space(message.group), message.cursor, message.tier)
        return m.Listing(seq=message.seq, keys=keys, cursor=cursor)

    # --- the end ---

    def _bye(self, message: m.Bye) -> Later:
        self.leaving = True
        return self._finish_bye(message.seq)

    async def _finish_bye(self, seq: int) -> m.Reply:
        await self.close()
        return m.Done(seq=seq)

    async def close(self) -> None:
        """Ends the session's copies first, then its leases if it was its instance's last session, then unmaps its
        memory.

        May be called more than once; all calls return when everything is done. Memory stays mapped while a copy of it
        does not end: see `Quarantine`.
        """
        if self._closing is None:
            self._closing = self._context.spawn(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        context, instance = self._context, self._instance
        if instance is None:
            return  # the session had no hello
        copy = context.config.copy
        # Each callback runs even if an earlier one fails: those in `ends` from the last to the first, then `memory`.
        async with contextlib.AsyncExitStack() as memory, contextlib.AsyncExitStack() as ends:
            ends.callback(self._leave_namespace)
            ends.push_async_callback(self._leave_instance, instance)
            if self._pins is not None:
                ends.callback(self._pins.close)
            running = await in_turns(self._jobs.cancel_all()) if self._jobs else set()
            if not await context.quarantine.end(self.peer.uid, running, copy.worker_drain_s, f"session {self.id}"):
                context.counters.drains_late += 1
                context.spawn(self._close_memory_late(running))
                return
            memory.push_async_callback(self._registry.close)  # only now does no copy use it

    async def _close_memory_late(self, running: set[Job]) -> None:
        await self._context.quarantine.until_ended(running)
        await self._registry.close()

    async def _leave_instance(self, instance: Instance) -> None:
        self._instance = None
        if self._context.instances.leave(instance):
            await self._context.end_leases(instance)

    def _leave_namespace(self) -> None:
        if self._namespace is not None:
            self._context.events.leave(self._namespace, self._subscription)
            self._context.cache.close_namespace(self._namespace)

    def figures(self) -> dict[str, Any]:
        """Returns the figures for `status`."""
        return {
            "session": self.id,
            "instance": self.instance_id,
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "role": self.role,
            "namespace": short_label(self._namespace.label) if self._namespace else "",
            "requests": self.requests,
            "jobs": len(self._jobs.running) if self._jobs else 0,
            "registrations": len(self._registry.registrations),
            "mapped_bytes": self._registry.mapped_bytes,
            "devices": self._registry.devices,
        }

    def slow_jobs(self, least_s: float) -> list[dict[str, Any]]:
        """Returns for `status` the session's jobs that have been under way for at least `least_s`."""
        slow = self._jobs.slow(least_s) if self._jobs else []
        return [{"session": self.id, "pid": self.peer.pid, **job} for job in slow]

    # --- the session's resources; StateError if they are missing ---

    def _own_namespace(self) -> Namespace:
        if self._namespace is None:
            raise StateError("this session named no namespace in its hello")
        return self._namespace

    def _own_instance(self) -> Instance:
        if self._instance is None:
            raise StateError("this session has ended")
        return self._instance

    def _own_jobs(self) -> SessionJobs:
        if self._jobs is None:
            raise StateError("this session named no namespace in its hello")
        return self._jobs

    def _own_pins(self) -> PendingPins:
        if self._pins is None:
            raise StateError("this session named no namespace in its hello")
        return self._pins

    def _space(self, group: int) -> Keyspace:
        keyspace = self._own_namespace().keyspaces.get(group)
        if keyspace is None:
            raise UnknownNameError(f"group {group} is not registered in this namespace")
        return keyspace

    _HANDLERS: ClassVar[dict[type[m.Message], Callable[[Session, Any], Answer]]] = {
        m.Ping: _ping,
        m.Register: _register,
        m.Lookup: _lookup,
        m.Pin: _pin,
        m.Prefetch: _prefetch,
        m.Touch: _touch,
        m.Keep: _keep,
        m.Retain: _claim,
        m.Forget: _claim,
        m.Claims: _claim,
        m.Release: _release,
        m.Reserve: _reserve,
        m.Store: _store,
        m.Load: _load,
        m.Cancel: _cancel,
        m.Status: _status,
        m.Subscribe: _subscribe,
        m.Snapshot: _snapshot,
    }
    _LATER: ClassVar[dict[type[m.Message], Callable[[Session, Any], Later]]] = {
        m.AttachIpc: _attach_ipc,
        m.Detach: _detach,
        m.Unregister: _unregister,
        m.Clear: _clear,
        m.Delete: lambda self, message: delete(message, self._own_namespace(), self._context.deletions, self._account),
        m.Drain: _drain,
        m.PrefetchClaims: _prefetch_claims,
        m.Verify: _verify,
        m.Bye: _bye,
    }
