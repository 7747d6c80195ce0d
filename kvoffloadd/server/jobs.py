"""Stores and loads of one session: checked whole, then started; exactly one completion each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvoffloadd.cache.disk.disktier import find_on_disk, keys_on_disk
from kvoffloadd.cache.disk.promotion import KeysOnDisk
from kvoffloadd.cache.jobs import Completion, CopyOptions, Job, LoadPlan
from kvoffloadd.cache.memory.cache import NO_ROWS, Cache
from kvoffloadd.cache.memory.keys import has_duplicates, keys_array, spans
from kvoffloadd.cache.memory.lease import WriteLease
from kvoffloadd.cache.memory.lookup import LookupResult
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.parttable import PartState
from kvoffloadd.cache.memory.wanted import Payloads, Reservation, Wanted
from kvoffloadd.cache.progress import Progress
from kvoffloadd.config import LimitsConfig
from kvoffloadd.deliveries import TURN_S
from kvoffloadd.device.overlap import Target, check_targets
from kvoffloadd.device.work import SMALL_DESCRIPTORS, BlockList, BlockWork
from kvoffloadd.errors import BlockIdError, DrainingError, DuplicateError, LeaseError, LimitError, UnknownNameError
from kvoffloadd.model import NO_BLOCK, BoolArray, Direction, I64Array, KeyState, Outcome, U32Array, U64Array
from kvoffloadd.protocol.messages import Accepted, Completed, GroupBlocks, Load, Push, Store
from kvoffloadd.server.account import Account
from kvoffloadd.server.context import Context
from kvoffloadd.server.instance import Instance
from kvoffloadd.server.outbox import Outbox
from kvoffloadd.server.registration import RegisteredGroup, Registration

_RESERVED, _HIT = int(KeyState.RESERVED), int(KeyState.HIT)
COMPLETION_BYTES = 512
"""A `completed` without its `failed` lists, at most."""
_KEY_BYTES, _PAYLOAD_BYTES, _DESCRIPTOR_BYTES = 40, 72, 24
"""What a job under way holds here of the daemon's own memory for each key, for each payload, beside its block ids, and
for each descriptor if it has so few that they are made at once.
"""


@dataclass(frozen=True, slots=True, eq=False)
class GroupJob:
    """One group's share of a job, checked. `keys`: (n, WORDS) u64; `blocks`: (n, blocks_per_key) u32."""

    keyspace: Keyspace
    group: RegisteredGroup
    keys: U64Array
    blocks: U32Array
    first: int


class Charge(NamedTuple):
    """Bytes that a job counts for until its end: of its completion, in the outbox; of what it holds, to its uid."""

    outbox_bytes: int
    job_bytes: int


@dataclass(slots=True, eq=False)
class SessionJob:
    """What a peer asked for, checked, and what its completion will say of it. `chosen[g]`: of each copied payload of
    list g the index of its key, as often as the rank holds parts of it; `lost[g]`: of the keys that never were copied.
    `job`: once it is under way; `numbers`: among the jobs of its namespace, and of all.
    """

    id: int
    registration: Registration
    options: CopyOptions
    charge: Charge
    chosen: list[I64Array]
    lost: list[I64Array]
    job: Job | None = None
    numbers: list[int] = field(default_factory=list)

    def failed(self, result: Completion) -> list[I64Array]:
        """Of each list the indices of the keys that were not stored or loaded."""
        if result.outcome not in (Outcome.DONE, Outcome.PARTIAL):
            return [np.union1d(chosen, lost) for chosen, lost in zip(self.chosen, self.lost, strict=True)]
        if not len(result.bad):
            return self.lost
        masks = np.split(result.bad, np.cumsum([len(at) for at in self.chosen])[:-1])
        return [np.union1d(at[m], lost) for at, lost, m in zip(self.chosen, self.lost, masks, strict=True)]


@dataclass(slots=True, eq=False)
class SessionLoad(SessionJob):
    """`wanted`: of each list the keys that hit, or are `on_disk`. What came meanwhile was not promised, and its blocks
    are not the job's to write. `founds`: where the keys stand now.
    """

    cache: Cache = field(kw_only=True)
    shares: list[GroupJob] = field(kw_only=True)
    wanted: list[BoolArray] = field(kw_only=True)
    founds: list[LookupResult] = field(kw_only=True)
    on_disk: list[KeysOnDisk] = field(kw_only=True)

    def resolve(self) -> LoadPlan:
        """What the job copies as things stand; notes what it does and does not. Called once more once what is on disk
        has come.
        """
        founds = self.founds or self.cache.find_all([(share.keyspace, share.keys) for share in self.shares])
        masks = [found.hits & mask for found, mask in zip(founds, self.wanted, strict=True)]
        self.lost = [np.flatnonzero(~mask) for mask in masks]
        taken = [
            _every_part(self.cache, share, np.flatnonzero(mask), found.rows)
            for share, mask, found in zip(self.shares, masks, founds, strict=True)
        ]
        self.chosen = [one.keys for one in taken]
        rows = [found.rows[one.keys].astype(np.uint32) for found, one in zip(founds, taken, strict=True)]
        groups = [(share.group, share.blocks) for share in self.shares]

        def build(good: BoolArray) -> BlockWork:
            masks = np.split(good, np.cumsum([len(one.keys) for one in taken])[:-1])
            mine = zip(groups, taken, masks, strict=True)
            return BlockWork([_block_list(self.cache, *group, one.only(mask)) for group, one, mask in mine])

        self.founds = []
        if not self.on_disk:
            self.shares = []  # nobody asks again, and a job that waits has no use for its keys
        self.on_disk = []
        return LoadPlan(np.concatenate(rows), np.concatenate([one.parts for one in taken]), build)


@dataclass(slots=True, eq=False)
class SessionJobs:
    """All jobs of one session. `push` queues a message for the peer."""

    context: Context
    namespace: Namespace
    instance: Instance
    account: Account
    outbox: Outbox
    push: Callable[[Push], None]
    limits: LimitsConfig
    running: dict[int, SessionJob] = field(default_factory=dict)

    # --- requests ---

    def store(self, message: Store, registration: Registration) -> Accepted:
        """Reserve (or take reserved slots of the named lease), and start copying in."""
        shares = self._check(message.groups, registration)
        options = self._options(message, registration)
        self._admit(message)
        for share in shares:
            if (share.blocks == NO_BLOCK).any():
                raise BlockIdError(f"group {share.group.group}: a store needs all block ids of each key")
            if has_duplicates(share.keys):
                raise DuplicateError(f"group {share.group.group}: a key is stored twice in one job")
        lease = self.instance.leases.write(message.lease) if message.lease else None
        leased = self._leased(shares, lease) if lease else None
        with self._charged(shares) as charge:
            taken = leased or self._reserve(shares)
            parts = np.concatenate([np.zeros(0, np.int64), *(one.parts for one in taken)])
            cache = self.context.cache
            work = BlockWork([_block_list(cache, s.group, s.blocks, one) for s, one in zip(shares, taken, strict=True)])
            if lease:
                self.instance.leases.fill(lease, parts)
                self.account.refund("leases", len(parts))
            nothing = [np.zeros(0, np.int64)] * len(shares)
            request = SessionJob(message.job, registration, options, charge, [one.keys for one in taken], nothing)
            on_end, jobs = partial(self._complete, request), self.context.jobs
            if len(parts):
                self._add(request, jobs.store(parts, work, options, on_end))
            else:
                self._add(request, jobs.finish(Direction.STORE, options, on_end))
        return Accepted(seq=message.seq, job=message.job, states=[one.states.tobytes() for one in taken])

    def load(self, message: Load, registration: Registration) -> Accepted:
        """Copy out what hits; what does not is named in the completion."""
        shares = self._check(message.groups, registration)
        options = self._options(message, registration, urgent=message.expedited)
        self._admit(message)
        founds, disk_hits = self._find(shares)
        if message.lease:
            self._check_lease(message.lease, founds)
        wanted = [found.hits | hits for found, hits in zip(founds, disk_hits, strict=True)]
        on_disk = [
            keys_on_disk(share.keyspace, share.keys, share.first, hits)
            for share, hits in zip(shares, disk_hits, strict=True)
            if hits.any()
        ]
        check_targets(
            registration.families,
            [
                Target(share.group.group, [held.plan for held in share.group.held], share.blocks[mask])
                for share, mask in zip(shares, wanted, strict=True)
            ],
        )
        with self._charged(shares) as charge:
            cache, jobs = self.context.cache, self.context.jobs
            if not message.lease:
                used = zip(shares, founds, strict=True)
                cache.use_all([(share.keyspace, found, share.first) for share, found in used])
            states = [np.where(mask, np.uint8(_HIT), found.states) for mask, found in zip(wanted, founds, strict=True)]
            nothing = [np.zeros(0, np.int64)] * len(shares)
            request = SessionLoad(
                message.job, registration, options, charge, nothing, [np.arange(len(share.keys)) for share in shares],
                cache=cache, shares=shares, wanted=wanted, founds=[] if on_disk else founds, on_disk=on_disk,
            )  # fmt: skip
            on_end = partial(self._complete, request)
            if any(mask.any() for mask in wanted):
                self._add(request, jobs.load(request, options, on_end))
            else:
                self._add(request, jobs.finish(Direction.LOAD, options, on_end))
        return Accepted(seq=message.seq, job=message.job, states=[state.tobytes() for state in states])

    def _find(self, shares: list[GroupJob]) -> tuple[list[LookupResult], list[BoolArray]]:
        """What is in memory, and which keys are on disk."""
        cache = self.context.cache
        asked = [(share.keyspace, share.keys) for share in shares]
        founds = cache.find_all(asked)
        if self.context.disk is None:
            return founds, [np.zeros(len(share.keys), bool) for share in shares]
        return founds, find_on_disk(self.context.disk, asked, founds)

    def cancel(self, job_id: int) -> None:
        """Raises UnknownNameError unless the job is under way in this session."""
        request = self.running.get(job_id)
        if request is None or request.job is None:
            raise UnknownNameError(f"this session has no job {job_id} under way")
        request.job.cancel()

    async def cancel_all(self) -> set[Job]:
        """Drop what has not begun, over several turns of the loop; returns what still has to end. No job is begun
        meanwhile.
        """
        jobs = {request.job for request in self.running.values() if request.job is not None}
        turn_ends = time.monotonic() + TURN_S
        for job in jobs:
            job.cancel()
            if time.monotonic() >= turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.monotonic() + TURN_S
        return jobs

    def slow(self, least_s: float) -> list[dict[str, Any]]:
        """For `status`: jobs that have been under way for longer, and what each waits for."""
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

    # --- checks, none of which changes anything ---

    def _check(self, groups: Sequence[GroupBlocks], registration: Registration) -> list[GroupJob]:
        shares = []
        if len({item.group for item in groups}) != len(groups):
            raise DuplicateError("a group is named twice in one job")
        for item in groups:
            group = registration.group(item.group)
            keys = keys_array(item.keys, self.namespace.key_bytes)
            per_key = group.schema.blocks_per_key
            if len(item.blocks) != 4 * per_key * len(keys):
                raise BlockIdError(
                    f"group {item.group}: {len(item.blocks)} bytes of block ids; {len(keys)} keys of {per_key} blocks "
                    f"need {4 * per_key * len(keys)}"
                )
            blocks = np.frombuffer(item.blocks, "<u4").astype(np.uint32, copy=False).reshape(len(keys), per_key)
            if blocks.size and blocks.max() >= group.num_blocks:
                outside = (blocks >= group.num_blocks) & (blocks != NO_BLOCK)
                if outside.any():
                    raise BlockIdError(
                        f"group {item.group}: block id {int(blocks[outside].max())}; "
                        f"the tensors have {group.num_blocks} blocks"
                    )
            shares.append(GroupJob(self.namespace.keyspaces[item.group], group, keys, blocks, item.first))
        total = sum(len(share.keys) * share.group.price for share in shares)
        cap = self.limits.keys_per_request
        if total > cap:
            raise LimitError(f"{total} keys in one request, counted for each part that is held; the cap is {cap}")
        return shares

    def _admit(self, message: Store | Load) -> None:
        if self.context.draining:
            raise DrainingError("the daemon is shutting down and takes no new jobs")
        if message.job in self.running:
            raise DuplicateError(f"job id {message.job} is in use by a job under way")
        if len(self.running) >= self.limits.jobs_per_session:
            raise LimitError(f"{len(self.running)} jobs are under way in this session, which is its cap")

    @contextmanager
    def _charged(self, shares: list[GroupJob]) -> Iterator[Charge]:
        """Caps and room for the completion: the last things that can refuse the job, which counts for them until its
        end. Raises LimitError.
        """
        outbox_bytes = COMPLETION_BYTES + sum(8 + 4 * len(share.keys) for share in shares)
        job_bytes = _DESCRIPTOR_BYTES * min(sum(len(s.keys) * s.group.descriptors for s in shares), SMALL_DESCRIPTORS)
        for share in shares:
            job_bytes += share.blocks.nbytes + len(share.keys) * (_KEY_BYTES + _PAYLOAD_BYTES * len(share.group.held))
        with ExitStack() as undone:
            self.outbox.reserve(outbox_bytes)
            undone.callback(self.outbox.unreserve, outbox_bytes)
            self.account.charge("job_bytes", job_bytes)
            undone.callback(self.account.refund, "job_bytes", job_bytes)
            self.account.charge("jobs")
            undone.callback(self.account.refund, "jobs")
            yield Charge(outbox_bytes, job_bytes)
            undone.pop_all()

    def _check_lease(self, lease_id: int, founds: list[LookupResult]) -> None:
        lease = self.instance.leases.read(lease_id)
        # A key that was cleared or found corrupt under its lease is a miss, as it would be without one.
        rows = np.concatenate([NO_ROWS, *(found.hit_rows for found in founds)])
        if not lease.growing and not np.isin(rows, lease.rows).all():
            raise LeaseError(f"lease {lease_id} does not cover all keys of this load")

    def _leased(self, shares: list[GroupJob], lease: WriteLease) -> list[Reservation]:
        entries = self.context.cache.entries
        founds = self.context.cache.find_all([(share.keyspace, share.keys) for share in shares])
        if any((found.rows < 0).any() for found in founds):
            raise LeaseError(f"lease {lease.id} does not cover all keys of this store")
        parts = [entries.records(found.rows, share.group.parts) for share, found in zip(shares, founds, strict=True)]
        every = np.concatenate([np.zeros(0, np.int64), *(some.ravel() for some in parts)])
        state = entries.parts.state[every]
        mine = np.isin(every, lease.parts) & (state == PartState.RESERVED)
        there = state >= PartState.COMMITTED  # stored before the reservation, which took the key's other parts
        if not (mine | there).all():
            raise LeaseError(f"lease {lease.id} does not cover all keys of this store")
        taken = []
        for some, at in zip(parts, spans(some.size for some in parts), strict=True):
            filled = mine[at].reshape(some.shape)
            keys, columns = np.nonzero(filled)
            states = np.where(filled.any(axis=1), _RESERVED, _HIT).astype(np.uint8)
            taken.append(Reservation(some[keys, columns], keys, columns, states))
        return taken

    # --- plans ---

    def _reserve(self, shares: list[GroupJob]) -> list[Reservation]:
        wanted = [Wanted.from_first(share.keyspace, share.keys, share.group.parts, share.first) for share in shares]
        return self.context.cache.reserve_all(wanted)

    def _options(self, message: Store | Load, registration: Registration, *, urgent: bool = False) -> CopyOptions:
        deadline = self.context.loop.time() + min(message.deadline_s, self.context.config.copy.deadline_max_s)
        ready = registration.ready(message.ready) if message.ready else None
        return CopyOptions(registration.device or self.context.host, deadline, urgent, ready, self.instance.flow)

    # --- the life of a job ---

    def _add(self, request: SessionJob, job: Job) -> None:
        """It is under way; its end comes later."""
        request.job = job
        self.running[request.id] = request
        request.registration.running.add(job)
        request.numbers = [progress.begin() for progress in self._counted_in]

    @property
    def _counted_in(self) -> tuple[Progress, Progress]:
        return self.namespace.jobs, self.context.jobs.progress

    def _complete(self, request: SessionJob, result: Completion) -> None:
        del self.running[request.id]
        if request.job is not None:
            request.registration.running.discard(request.job)
        for progress, number in zip(self._counted_in, request.numbers, strict=True):
            progress.end(number)
        self.account.refund("jobs")
        self.account.refund("job_bytes", request.charge.job_bytes)
        self.outbox.unreserve(request.charge.outbox_bytes)
        failed = request.failed(result)
        outcome = result.outcome
        if outcome is Outcome.DONE and any(map(len, failed)):
            outcome = Outcome.PARTIAL
        self.push(
            Completed(
                job=request.id,
                outcome=outcome.value,  # type: ignore[arg-type]  # LOST is the client library's alone
                bytes=result.bytes,
                seconds=result.seconds,
                failed=[indices.astype("<u4").tobytes() for indices in failed],
                reason=result.reason[:200],
            )
        )


def _every_part(cache: Cache, share: GroupJob, at: I64Array, rows: I64Array) -> Payloads:
    """What this rank holds of the keys at these places."""
    parts = cache.entries.records(rows[at], share.group.parts)
    many, width = parts.shape
    return Payloads(parts.ravel(), np.repeat(at, width), np.tile(np.arange(width), many))


def _block_list(cache: Cache, group: RegisteredGroup, blocks: U32Array, taken: Payloads) -> BlockList:
    addresses = cache.payload_addresses(taken.parts)
    return BlockList(tuple(held.plan for held in group.held), blocks, taken.keys, taken.columns, addresses)
