"""Stores and loads of one session: each is checked completely, then started, and has exactly one completion."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvoffloadd.cache.jobs.job import Completion, CopyOptions, Job
from kvoffloadd.cache.jobs.loadplan import NO_PARTS, GroupLoad, LoadRequest, plan_load
from kvoffloadd.cache.lowertiers import GroupLookup
from kvoffloadd.cache.memory.cache import NO_ROWS
from kvoffloadd.cache.memory.keys import has_duplicates, keys_array
from kvoffloadd.cache.memory.lease import WriteLease
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.reservation import Reservation, Wanted, reserve_in_steps
from kvoffloadd.cache.memory.steppedlookup import find_in_steps
from kvoffloadd.config import LimitsConfig
from kvoffloadd.device.overlap import Target, check_targets
from kvoffloadd.device.work import SMALL_DESCRIPTORS, BlockList
from kvoffloadd.errors import (
    BlockIdError,
    DrainingError,
    DuplicateError,
    LeaseError,
    LimitError,
    StateError,
    UnknownNameError,
)
from kvoffloadd.model import NO_BLOCK, KeyState, U32Array, U64Array
from kvoffloadd.protocol.messages import Accepted, Completed, GroupBlocks, Load, Push, Store
from kvoffloadd.scheduling.steps import Steps
from kvoffloadd.server.context import Context
from kvoffloadd.server.peers.account import Account
from kvoffloadd.server.peers.instance import Instance
from kvoffloadd.server.peers.outbox import Outbox
from kvoffloadd.server.session.registration import RegisteredGroup, Registration
from kvoffloadd.server.session.sessionjob import Charge, GroupJob, SessionJob

T = TypeVar("T")

_MISS, _HIT, _PENDING, _RESERVED, _NO_SPACE = (
    int(state) for state in (KeyState.MISS, KeyState.HIT, KeyState.PENDING, KeyState.RESERVED, KeyState.NO_SPACE)
)
STEP_GROUPS = 64
"""The groups of a job that one step checks, in a millisecond or two."""
COMPLETION_BYTES = 512
"""The largest size of a `completed` without its `failed` lists."""
_KEY_BYTES, _PAYLOAD_BYTES, _DESCRIPTOR_BYTES = 40, 96, 24
"""The daemon's memory that a job under way takes in addition to its block ids: per key, per payload, and per descriptor
if there are few enough that all are made at once.
"""


@dataclass(slots=True, eq=False)
class SessionJobs:
    """The jobs of one session. `push` queues a message for the peer."""

    context: Context
    namespace: Namespace
    instance: Instance
    account: Account
    outbox: Outbox
    push: Callable[[Push], None]
    limits: LimitsConfig
    running: dict[int, SessionJob] = field(default_factory=dict)
    closed: bool = False  # no further job may begin
    jobs_max: int = field(init=False)  # the cap on jobs under way

    def __post_init__(self) -> None:
        self.jobs_max = self.limits.jobs_of_session

    # --- requests ---

    def store(self, message: Store, registration: Registration) -> Steps[Accepted]:
        """Reserves slots (or takes those of the named lease), and starts copying in. On failure, frees slots without a
        lease, and charges nothing.
        """
        groups = yield from self._check(message.groups, registration, distinct=True)
        options = self._options(message, registration)
        self._admit(message)
        for group in groups:
            if (group.blocks == NO_BLOCK).any():
                raise BlockIdError(f"group {group.registered.group}: a store needs all block ids of each key")
        cache, jobs = self.context.cache, self.context.jobs
        lease = self.instance.leases.write(message.lease) if message.lease else None
        reserved = self._leased(groups, lease) if lease else []
        charge = self._charge(groups)
        try:
            if lease is None:
                wanted = [
                    Wanted.from_first(group.keyspace, group.keys, group.registered.parts, group.first)
                    for group in groups
                ]
                reserved = yield from self.while_open(reserve_in_steps(cache, wanted))
            parts = np.concatenate([NO_PARTS, *(r.parts for r in reserved)])
            lists = [
                BlockList(group.registered.plans, group.blocks, r.keys, r.columns, r.addresses)
                for group, r in zip(groups, reserved, strict=True)
            ]
            request = SessionJob(message.job, registration, charge, _lacking(reserved))
            reply = Accepted(seq=message.seq, job=message.job, states=[r.states.tobytes() for r in reserved])
        except BaseException:
            for made in [] if lease else reserved:
                cache.abort(made.parts)
            self._refund(charge)
            raise
        if lease:
            self.instance.leases.fill(lease, parts)
            self.account.refund(leases=len(parts))
        self._begin(request, partial(jobs.store, parts, lists, options, partial(self._complete, request)))
        return reply

    def load(self, message: Load, registration: Registration) -> Steps[Accepted]:
        """Copies out the keys that hit; the completion names the others."""
        groups = yield from self._check(message.groups, registration)
        options = self._options(message, registration, urgent=message.expedited)
        self._admit(message)
        cache, jobs = self.context.cache, self.context.jobs
        charge = self._charge(groups)
        try:
            named = [(group.keyspace, group.keys) for group in groups]
            lookups = yield from self.while_open(find_in_steps(cache, named))
            below = self._find_below(groups, lookups, ask=not message.local)
            if message.lease:
                self._check_lease(message.lease, lookups)
            wanted = [lookup.hits for lookup in lookups]
            if below:
                wanted = [hits | group.below for hits, group in zip(wanted, below, strict=True)]
            states = [np.where(mask, np.uint8(_HIT), found.states) for mask, found in zip(wanted, lookups, strict=True)]
            request = SessionJob(message.job, registration, charge)
            reply = Accepted(seq=message.seq, job=message.job, states=[state.tobytes() for state in states])
            loads, targets, used = [], [], []
            for group, mask, lookup in zip(groups, wanted, lookups, strict=True):
                registered = group.registered
                loads.append(
                    GroupLoad(group.keyspace, group.keys, group.blocks, registered.parts, registered.plans, mask)
                )
                targets.append(Target(registered.group, registered.plans, group.blocks[mask]))
                used.append((group.keyspace, lookup, group.first))
            check_targets(registration.families, targets)
            if not message.lease:
                cache.uses.add(used)
            plan = plan_load(cache.entries, loads, lookups)
            cache.check_hold(self.instance.uid, plan.rows)
        except BaseException:
            self._refund(charge)
            raise
        later = LoadRequest(loads, below) if below else None
        self._begin(request, partial(jobs.load, plan, options, partial(self._complete, request), later))
        return reply

    def _find_below(self, groups: list[GroupJob], lookups: list[LookupResult], *, ask: bool) -> list[GroupLookup]:
        """Returns the groups' lookups in the tiers below, or an empty list if no key may come from there. `ask`:
        includes the store that hosts share.
        """
        if self.context.lower is None:
            return []
        named = [(group.keyspace, group.first, group.keys) for group in groups]
        below = self.context.lower.find(named, lookups, ask=ask)
        return below if any(group.below.any() for group in below) else []

    def cancel(self, job_id: int) -> None:
        """Cancels a job. Raises UnknownNameError unless the job is under way in this session."""
        request = self.running.get(job_id)
        if request is None or request.job is None:
            raise UnknownNameError(f"this session has no job {job_id} under way")
        request.job.cancel()

    def cancel_all(self) -> Steps[set[Job]]:
        """Cancels all jobs, and returns those that have not ended. No further job may begin."""
        self.closed = True
        jobs = {request.job for request in self.running.values() if request.job is not None}
        for job in jobs:
            job.cancel()
            yield
        return jobs

    def while_open(self, steps: Steps[T]) -> Steps[T]:
        """Runs the same steps. Raises StateError or DrainingError between two of them if no further job may begin."""
        with contextlib.closing(steps):
            try:
                while True:
                    next(steps)
                    yield
                    self.check_open()
            except StopIteration as end:
                result: T = end.value
                return result

    def slow(self, least_s: float) -> list[dict[str, Any]]:
        """Returns for `status` the jobs that have been under way for at least `least_s`, with the phase in which each
        waits.
        """
        now = self.context.loop.time()
        return [
            {
                "job": request.id,
                "direction": str(job.direction),
                "age_s": round(now - job.began_s, 3),
                "payloads": len(job.parts),
                "waits_for": job.phase.value,
            }
            for request in self.running.values()
            if (job := request.job) is not None and now - job.began_s >= least_s
        ]

    # --- checks without effects ---

    def _check(
        self, groups: Sequence[GroupBlocks], registration: Registration, *, distinct: bool = False
    ) -> Steps[list[GroupJob]]:
        """Checks the groups of a job. `distinct`: no key may be named twice. Raises PeerErrors, and, between steps, the
        errors of `check_open`.
        """
        if len({item.group for item in groups}) != len(groups):
            raise DuplicateError("a group is named twice in one job")
        named, key_bytes = [], self.namespace.key_bytes
        for item in groups:
            registered = registration.groups.get(item.group)
            if registered is None or not registered.held:
                raise UnknownNameError(
                    f"registration {registration.id} has no part of group {item.group}; it was registered with parts "
                    f"of {sorted(number for number, group in registration.groups.items() if group.held)}"
                )
            named.append((item, registered))
        # This check comes before all work in proportion to the number of keys.
        total, cap = sum(len(i.keys) // key_bytes * r.price for i, r in named), self.limits.keys_per_request
        if total > cap:
            raise LimitError(
                f"{total} keys in one request, counted for each part that is held; the cap is {cap}: ask in pieces"
            )
        checked = []
        for number, (item, registered) in enumerate(named):
            if number % STEP_GROUPS == STEP_GROUPS - 1:
                yield
                self.check_open()
            checked.append((item, registered, *self._arrays(item, registered, distinct=distinct)))
        # Looked up last: a group that was cleared during the steps continues in its new keyspace.
        spaces = self.namespace.keyspaces
        return [GroupJob(spaces[i.group], registered, keys, blocks, i.first) for i, registered, keys, blocks in checked]

    def _arrays(self, item: GroupBlocks, registered: RegisteredGroup, *, distinct: bool) -> tuple[U64Array, U32Array]:
        """Returns keys and block ids."""
        keys = keys_array(item.keys, self.namespace.key_bytes)
        if distinct and has_duplicates(keys):
            raise DuplicateError(f"group {item.group}: a key is stored twice in one job")
        per_key = registered.schema.blocks_per_key
        if len(item.blocks) != 4 * per_key * len(keys):
            raise BlockIdError(
                f"group {item.group}: {len(item.blocks)} bytes of block ids; {len(keys)} keys of {per_key} blocks "
                f"need {4 * per_key * len(keys)}"
            )
        blocks = np.frombuffer(item.blocks, "<u4").astype(np.uint32, copy=False).reshape(len(keys), per_key)
        if blocks.size and blocks.max() >= registered.num_blocks:
            outside = (blocks >= registered.num_blocks) & (blocks != NO_BLOCK)
            if outside.any():
                raise BlockIdError(
                    f"group {item.group}: block id {int(blocks[outside].max())}; "
                    f"the tensors have {registered.num_blocks} blocks"
                )
        return keys, blocks

    def check_open(self) -> None:
        """Raises StateError or DrainingError if no further job may begin."""
        if self.closed:
            raise StateError("the session has ended")
        if self.context.draining:
            raise DrainingError("the daemon is shutting down and takes no new jobs")

    def _admit(self, message: Store | Load) -> None:
        self.check_open()
        if message.job in self.running:
            raise DuplicateError(f"job id {message.job} is in use by a job under way")
        if len(self.running) >= self.jobs_max:
            raise LimitError(f"{len(self.running)} jobs are under way in this session, which is its cap")

    def _charge(self, groups: list[GroupJob]) -> Charge:
        """Charges the job until its end, and reserves room for its completion: the last checks that can refuse it. Pair
        with `_refund`. Raises LimitError or BusyError, and then charges nothing.
        """
        outbox_bytes = COMPLETION_BYTES + sum(8 + 4 * len(group.keys) for group in groups)
        descriptors = sum(len(group.keys) * group.registered.descriptors for group in groups)
        job_bytes = _DESCRIPTOR_BYTES * min(descriptors, SMALL_DESCRIPTORS)
        for group in groups:
            key_bytes = _KEY_BYTES + _PAYLOAD_BYTES * len(group.registered.held)
            job_bytes += group.blocks.nbytes + len(group.keys) * key_bytes
        self.outbox.reserve(outbox_bytes, job_bytes=job_bytes, jobs=1)
        return Charge(outbox_bytes, job_bytes)

    def _refund(self, charge: Charge) -> None:
        self.outbox.unreserve(charge.outbox_bytes, job_bytes=charge.job_bytes, jobs=1)

    def _check_lease(self, lease_id: int, lookups: list[LookupResult]) -> None:
        lease = self.instance.leases.read(lease_id)
        # A key that was cleared or found corrupt under its lease is a miss, as it would be without one.
        rows = np.concatenate([NO_ROWS, *(lookup.hit_rows for lookup in lookups)])
        if not lease.growing and not np.isin(rows, lease.rows).all():
            raise LeaseError(f"lease {lease_id} does not cover all keys of this load")

    def _leased(self, groups: list[GroupJob], lease: WriteLease) -> list[Reservation]:
        """Returns the parts of these groups that the lease has reserved. A key is stored only if the lease has all of
        its missing parts; otherwise it was never reserved, or is gone. A lease keeps slots, not keys: a key with all
        slots filled can be evicted before another rank names it, for a part that was stored before; and keys can be
        cleared or found corrupt. A key is pending if another request has reserved it, or another job fills it.
        """
        entries = self.context.cache.entries
        lookups = self.context.cache.find_all([(group.keyspace, group.keys) for group in groups])
        reserved = []
        for group, lookup in zip(groups, lookups, strict=True):
            held = np.flatnonzero(lookup.rows >= 0)
            parts = entries.records(lookup.rows[held], group.registered.parts)
            state = entries.parts.state[parts]
            leased = (state == PartState.RESERVED) & lease.has(parts)
            stored = state >= PartState.COMMITTED
            to_fill = leased & (leased | stored).all(axis=1)[:, None]
            others = ((state == PartState.RESERVED) & ~leased).any(axis=1)
            states = np.full(len(group.keys), _MISS, np.uint8)
            states[held[stored.all(axis=1)]] = _HIT
            states[held[others]] = _PENDING
            states[held[to_fill.any(axis=1)]] = _RESERVED
            which, columns = np.nonzero(to_fill)
            chosen = parts[which, columns]
            reserved.append(Reservation(chosen, entries.payload_addresses(chosen), held[which], columns, states))
        return reserved

    # --- plans ---

    def _options(self, message: Store | Load, registration: Registration, *, urgent: bool = False) -> CopyOptions:
        deadline = self.context.loop.time() + min(message.deadline_s, self.context.config.copy.deadline_max_s)
        ready = registration.ready(message.ready) if message.ready else None
        return CopyOptions(registration.device or self.context.host, deadline, urgent, ready, self.instance.flow)

    # --- the life of a job ---

    def _begin(self, request: SessionJob, start: Callable[[], Job]) -> None:
        """Adds the job, and starts it; its end comes later. A job that can't be started leaves no trace."""
        self.running[request.id] = request
        for progress in (self.namespace.jobs, self.context.jobs.progress):
            request.counted.append((progress, progress.begin()))
        try:
            request.job = start()
        except BaseException:
            self._remove(request)
            raise
        request.registration.running.add(request.job)

    def _remove(self, request: SessionJob) -> None:
        """Removes a job that has ended, or was never started, from all counts."""
        del self.running[request.id]
        self._refund(request.charge)
        for progress, number in request.counted:
            progress.end(number)

    def _complete(self, request: SessionJob, result: Completion) -> None:
        if request.job is not None:
            request.registration.running.discard(request.job)
            request.job = None  # breaks a reference cycle, which would wait for the garbage collector
        self._remove(request)
        completed = Completed(
            job=request.id,
            outcome=result.outcome.value,  # type: ignore[arg-type]  # LOST is the client library's alone
            bytes=result.bytes,
            seconds=result.seconds,
            failed=[indices.astype("<u4").tobytes() for indices in result.failed],
            reason=(result.reason or request.remark)[:200],
        )
        self.push(completed)


def _lacking(reserved: Sequence[Reservation]) -> str:
    """Returns a remark on how many of a store's keys got no space; empty: none."""
    lacking = sum(int(np.count_nonzero(reservation.states == _NO_SPACE)) for reservation in reserved)
    return (
        f"no space for {lacking} of {sum(len(reservation.states) for reservation in reserved)} keys" if lacking else ""
    )
