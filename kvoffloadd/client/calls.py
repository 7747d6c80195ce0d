"""Every operation of the clients: its request, and the meaning of the reply. Pure; shared by both clients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args

import numpy as np
from msgspec import UNSET

from kvoffloadd.client.arguments import (
    CURSORS_END,
    IDS_END,
    by_group,
    first_of,
    instance_of,
    integer,
    seconds_within,
    several,
)
from kvoffloadd.client.jobs import Job
from kvoffloadd.client.keys import BlockIds, Keys, pack_blocks, pack_keys, unpack_keys, unpack_states, unpack_u32
from kvoffloadd.client.memory.gpu import IpcMemory, VmmMemory
from kvoffloadd.client.memory.kvcache import Registration
from kvoffloadd.client.memory.timeline import Ready
from kvoffloadd.client.results import (
    Audit,
    Cleared,
    Deleted,
    Drained,
    Found,
    Lease,
    PrefetchedClaims,
    Promotion,
    Reserved,
    Retained,
)
from kvoffloadd.client.waiting import Waitable
from kvoffloadd.errors import KvOffloadError, MessageError, UsageError
from kvoffloadd.model import Direction, Tier, U8Array
from kvoffloadd.protocol import messages
from kvoffloadd.protocol.messages import ClaimFigures, GroupBlocks, GroupKeys, KeepHow, Message, Request

R = TypeVar("R")

PREFETCH_WAIT_S = 1.0
"""How long one request to prefetch claims waits for keys, before the next one goes on."""


class Call(Waitable, Generic[R]):
    """One request of one operation. When it is `done`, either `error` is set or `value` is what the operation returns.

    `build(seq)` returns the request. `parse(reply, boot_id)` returns the value; it raises MessageError where the reply,
    though well formed, does not fit the request; `boot_id` names the daemon's run. `repeatable`: a second request does
    no harm. `fds` go with the frame; `owner` keeps them open until it is sent. `undo(value)` returns the call that
    takes back a value that comes after its caller has given up. `job`: the job that it requests.
    """

    __slots__ = (
        "abandoned",
        "build",
        "error",
        "fds",
        "job",
        "owner",
        "parse",
        "repeatable",
        "reply_type",
        "sent",
        "undo",
        "unsent",
        "value",
    )

    def __init__(
        self,
        build: Callable[[int], Request],
        parse: Callable[[Any, bytes], R],
        *,
        repeatable: bool = False,
        fds: tuple[int, ...] = (),
        owner: object = None,
        undo: Callable[[R], Call[None] | None] | None = None,
        job: Job | None = None,
    ) -> None:
        super().__init__()
        self.build = build
        self.parse = parse
        self.repeatable = repeatable
        self.fds = fds
        self.owner = owner
        self.undo = undo
        self.job = job
        self.reply_type: type[Message] = Message
        self.unsent: memoryview | bytes = b""
        """The part of its frame that the kernel has not taken yet."""
        self.sent = False
        """At least one byte has gone to the kernel; the daemon never saw a call that was not sent."""
        self.abandoned = False
        """Its deadline passed; the reply, if it comes, still reports whether its job was admitted and what to undo."""
        self.value: Any = None
        self.error: KvOffloadError | None = None

    def again(self) -> Call[R]:
        """Returns the same operation as a new request."""
        return Call(self.build, self.parse, repeatable=self.repeatable, fds=self.fds, owner=self.owner, undo=self.undo)


Groups = Mapping[int, Keys]
First = int | Mapping[int, int]
Transfers = Mapping[int, tuple[Keys, BlockIds]]


def _nothing(_reply: messages.Done, _boot_id: bytes) -> None:
    return None


def _group_keys(groups: Groups, first: First, key_bytes: int) -> tuple[list[GroupKeys], tuple[int, ...]]:
    """Returns the packed lists, in the mapping's order, and their counts."""
    lists = []
    for group, keys in by_group(groups, "keys"):
        lists.append(GroupKeys(group=group, keys=pack_keys(keys, key_bytes), first=first_of(first, group)))
    return lists, tuple(len(group_keys.keys) // key_bytes for group_keys in lists)


def hello(role: Any, instance: bytes, namespace: messages.NamespaceSpec | None) -> Call[messages.Welcome]:
    """Opens the session; must be the first request."""

    def build(seq: int) -> Request:
        return messages.Hello(seq=seq, version=messages.VERSION, role=role, instance=instance, namespace=namespace)

    def parse(reply: messages.Welcome, _boot_id: bytes) -> messages.Welcome:
        if reply.version not in messages.VERSIONS:
            raise MessageError(f"the daemon's welcome has version {reply.version}, which was not offered")
        if reply.fds != 1:
            raise MessageError("the daemon's welcome has no pidfd, so the end of its copies could not be detected")
        return reply

    return Call(build, parse)


def ping() -> Call[None]:
    """Makes a round trip; answered at once."""
    return Call(lambda seq: messages.Ping(seq=seq), _nothing, repeatable=True)


def status() -> Call[dict[str, Any]]:
    """Requests counters and gauges."""
    return Call(lambda seq: messages.Status(seq=seq), lambda reply, _boot_id: dict(reply.status), repeatable=True)


def subscribe(tiers: Callable[[], bool]) -> Call[None]:
    """Subscribes to events from now on. `tiers()`: as `local` in `lookup`."""
    return Call(lambda seq: messages.Subscribe(seq=seq, tiers=tiers()), _nothing, repeatable=True)


def bye() -> Call[None]:
    """Ends the session; answered when the session's copies have ended."""
    return Call(lambda seq: messages.Bye(seq=seq), _nothing)


Undo = Callable[[list[int]], "Call[None]"] | None
"""Returns the `detach` of these numbers; None where the daemon does not know that request."""


def attach(fds: tuple[int, ...], owner: object, undo: Undo = None) -> Call[list[int]]:
    """Announces one frame's worth of shared memory; the value is the allocation ids."""

    def parse(reply: messages.Attached, _boot_id: bytes) -> list[int]:
        if len(reply.allocations) != len(fds) or len(reply.sizes_bytes) != len(fds):
            raise MessageError(
                f"{len(fds)} descriptors were attached, but the reply has {len(reply.allocations)} allocations"
            )
        return reply.allocations

    return Call(lambda seq: messages.Attach(seq=seq, kind="shm", fds=len(fds)), parse, fds=fds, owner=owner, undo=undo)


def attach_ipc(memory: IpcMemory, undo: Undo = None) -> Call[list[int]]:
    """Announces memory of a GPU by its handle; the value is one allocation id."""

    def build(seq: int) -> Request:
        return messages.AttachIpc(seq=seq, device=memory.uuid, handles=memory.handle)

    return Call(build, _one_allocation, undo=undo)


def attach_vmm(memory: VmmMemory, chunks: range, extends: int, undo: Undo = None) -> Call[list[int]]:
    """Announces some chunks of a GPU's memory; the value is the id of the allocation to which they belong.

    Raises UsageError where the driver gives no descriptors.
    """
    descriptors = memory.export(chunks.start, len(chunks))
    sizes = np.array(memory.chunks[chunks.start : chunks.stop], "<u8").tobytes()

    def build(seq: int) -> Request:
        return messages.AttachVmm(
            seq=seq,
            device=memory.uuid,
            fds=len(chunks),
            chunks=sizes,
            total_bytes=memory.size_bytes,
            extends=extends,
        )

    return Call(build, _one_allocation, fds=tuple(descriptors.fds), owner=descriptors, undo=undo)


def _one_allocation(reply: messages.Attached, _boot_id: bytes) -> list[int]:
    if len(reply.allocations) != 1:
        raise MessageError(f"one allocation was attached, but the reply has {len(reply.allocations)}")
    return reply.allocations


def detach(numbers: list[int]) -> Call[None]:
    """Takes back what was attached and is in no registration."""
    return Call(lambda seq: messages.Detach(seq=seq, allocations=numbers), _nothing)


def register(registration: Registration, allocations: Mapping[Hashable, int], *, composition: bool) -> Call[int]:
    """Names the tensors in `allocations` (identity of the memory -> id) and the groups; the value is the id.
    `composition`: see `Group.spec`.
    """
    caches = registration.caches
    signals = [allocations[timeline.allocation.identity] for timeline in caches.timelines]
    tensors = [tensor.spec(allocations[tensor.allocation.identity]) for tensor in caches.tensors]
    groups = [group.spec(composition=composition) for group in caches.groups]

    def build(seq: int) -> Request:
        return messages.Register(seq=seq, tensors=tensors, groups=groups, signals=signals)

    return Call(build, lambda reply, _boot_id: int(reply.registration), undo=_unregister_number)


def _unregister_number(number: int) -> Call[None]:
    return Call(lambda seq: messages.Unregister(seq=seq, registration=number), _nothing)


def _release_leased(value: Found | Reserved) -> Call[None] | None:
    return release(value.lease) if value.lease else None


def unregister(registration: Registration) -> Call[None]:
    """Ends a registration; answered when the memory is unmapped."""
    return Call(lambda seq: messages.Unregister(seq=seq, registration=registration.named_id()), _nothing)


def lookup(groups: Groups, first: First, key_bytes: int, local: Callable[[], bool]) -> Call[Found]:
    """Requests which keys hit and which prefixes can be restored. `local()` returns the request's `local` when it is
    sent.
    """
    return _find(lambda **fields: messages.Lookup(**fields, local=local()), groups, first, key_bytes, promotes=False)


def pin(groups: Groups, first: First, key_bytes: int, tiers: Callable[[], bool]) -> Call[Found]:
    """Requests a lookup, and a read lease on keys that hit or come from disk. `tiers()`: as `local` in `lookup`."""
    return _find(lambda **fields: messages.Pin(**fields, tiers=tiers()), groups, first, key_bytes)


def prefetch(groups: Groups, first: First, key_bytes: int, local: Callable[[], bool]) -> Call[Found]:
    """Requests a lookup that brings keys into memory. `local`: as in `lookup`."""
    return _find(lambda **fields: messages.Prefetch(**fields, local=local()), groups, first, key_bytes)


def _find(
    kind: Callable[..., Request], groups: Groups, first: First, key_bytes: int, promotes: bool = True
) -> Call[Found]:
    lists, counts = _group_keys(groups, first, key_bytes)

    def parse(reply: messages.Found, boot_id: bytes) -> Found:
        if reply.promoting and not promotes:
            raise MessageError(
                f"the reply to a lookup announces {reply.promoting} keys from disk; a lookup promotes no keys"
            )
        states, lease = unpack_states(reply.states, counts), Lease(reply.lease, boot_id)
        tiers = unpack_states(reply.tiers, counts) if reply.tiers is not UNSET else []
        promotion = Promotion(reply.seq, counts, lease, tiers) if reply.promoting else None
        return Found(states, unpack_u32(reply.boundaries, "boundaries"), lease, reply.promoting, tiers, promotion)

    return Call(lambda seq: kind(seq=seq, groups=lists), parse, repeatable=not promotes, undo=_release_leased)


def touch(groups: Groups, first: First, key_bytes: int) -> Call[None]:
    """Reports that keys were used."""
    lists, _counts = _group_keys(groups, first, key_bytes)
    return Call(lambda seq: messages.Touch(seq=seq, groups=lists), _nothing)


def keep(groups: Groups, how: KeepHow, first: First, key_bytes: int) -> Call[None]:
    """Announces when keys will be used again."""
    if how not in get_args(KeepHow):
        raise UsageError(f"how must be one of {', '.join(get_args(KeepHow))}, not {how!r:.80}")
    lists, _counts = _group_keys(groups, first, key_bytes)
    return Call(lambda seq: messages.Keep(seq=seq, groups=lists, how=how), _nothing)


def retain(
    groups: Groups, seconds: float, priority: int | None, name: str, number: int, first: First, key_bytes: int
) -> Call[Retained]:
    """Claims keys, or changes the claims of a name. Raises UsageError for bad arguments."""
    limit_s = seconds_within(seconds, "seconds", messages.RETAIN_S_MAX)
    rank = None if priority is None else integer(priority, "priority", messages.PRIORITY_MAX + 1)
    lists, _counts = _group_keys(groups, first, key_bytes)
    which = _claim_name(name), integer(number, "number", IDS_END)
    if lists and number:
        raise UsageError("a retain names keys, or a claim by its number, not both")
    if not lists and sum(map(bool, which)) != 1:
        raise UsageError("a retain needs keys, or the name of claims, or the number of one")

    def build(seq: int) -> Request:
        named, numbered = which
        return messages.Retain(seq=seq, groups=lists, seconds=limit_s, priority=rank, name=named, number=numbered)

    return Call(build, _retained)


def forget(name: str, number: int) -> Call[Retained]:
    """Ends claims. Raises UsageError unless there is a name or a number."""
    which = _claim_name(name), integer(number, "number", IDS_END)
    if sum(map(bool, which)) != 1:
        raise UsageError("a forget needs the name of claims, or the number of one")
    return Call(lambda seq: messages.Forget(seq=seq, name=which[0], number=which[1]), _retained)


def _claim_name(name: object) -> str:
    if len(text := instance_of(str, name, "name")) > messages.CLAIM_NAME_CHARS_MAX:
        raise UsageError(f"the name of a claim has at most {messages.CLAIM_NAME_CHARS_MAX} characters")
    return text


def claims(cursor: int) -> Call[tuple[list[ClaimFigures], int]]:
    """Requests some claims, and the cursor for the next request; 0: those were the last."""

    def parse(reply: messages.Claimed, _boot_id: bytes) -> tuple[list[ClaimFigures], int]:
        if 0 < reply.cursor <= cursor:
            raise MessageError(f"a listing of claims from {cursor} on goes on at {reply.cursor}")
        return reply.claims, reply.cursor

    return Call(lambda seq: messages.Claims(seq=seq, cursor=cursor), parse, repeatable=True)


def prefetch_claims(name: str, number: int, cursor: int) -> Call[tuple[PrefetchedClaims, int]]:
    """Has the daemon bring keys of claims, and returns the cursor for the next request; 0: those were the last. Raises
    UsageError unless there is a name or a number.
    """
    which = _claim_name(name), integer(number, "number", IDS_END)
    if sum(map(bool, which)) != 1:
        raise UsageError("a prefetch needs the name of claims, or the number of one")
    start = integer(cursor, "cursor", CURSORS_END)

    def build(seq: int) -> Request:
        return messages.PrefetchClaims(seq=seq, name=which[0], number=which[1], wait_s=PREFETCH_WAIT_S, cursor=start)

    def parse(reply: messages.PrefetchedClaims, _boot_id: bytes) -> tuple[PrefetchedClaims, int]:
        if 0 < reply.cursor < cursor:
            raise MessageError(f"a prefetch from {cursor} on goes on at {reply.cursor}")
        return PrefetchedClaims(reply.claims, reply.keys, reply.memory_keys), reply.cursor

    return Call(build, parse, repeatable=True)


def _retained(reply: messages.Retained, _boot_id: bytes) -> Retained:
    return Retained(reply.claims, reply.keys)


def release(lease: int) -> Call[None]:
    """Ends a lease."""
    number = integer(lease, "lease", IDS_END)
    return Call(lambda seq: messages.Release(seq=seq, lease=number), _nothing)


def reserve(groups: Groups, first: First, parts: Sequence[int] | None, key_bytes: int) -> Call[Reserved]:
    """Reserves slots for keys to store."""
    lists, counts = _group_keys(groups, first, key_bytes)
    named = None if parts is None else [integer(part, "a part") for part in several(parts, "parts")]

    def parse(reply: messages.Reserved, boot_id: bytes) -> Reserved:
        return Reserved(unpack_states(reply.states, counts), Lease(reply.lease, boot_id))

    return Call(lambda seq: messages.Reserve(seq=seq, groups=lists, parts=named), parse, undo=_release_leased)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Options of a job; see `Client.store` and `Client.load`."""

    first: First = 0
    lease: int = 0
    deadline_s: float = 60.0
    ready: Ready | None = None
    expedited: bool = False
    local: bool = False


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A store or load, packed and checked, before it is a job."""

    direction: Direction
    registration: Registration
    lists: list[GroupBlocks]
    counts: tuple[int, ...]
    options: JobOptions

    @property
    def lease(self) -> int:
        """The lease that it names; 0: none."""
        return self.options.lease


def transfer(
    direction: Direction, registration: Registration, groups: Transfers, key_bytes: int, options: JobOptions
) -> JobSpec:
    """Packs keys and block ids. Raises UsageError for requests that do not fit this registration."""
    caches = instance_of(Registration, registration, "registration").caches
    lists, counts = [], []
    for group, pair in by_group(groups, "keys and block ids"):
        both: list[Any] = several(pair, f"keys and block ids of group {group}")
        if len(both) != 2:
            raise UsageError(f"group {group} needs a pair of keys and block ids, not {len(both)} values")
        packed = pack_keys(both[0], key_bytes)
        count = len(packed) // key_bytes
        blocks = pack_blocks(both[1], count, caches.group(group).blocks_per_key)
        lists.append(GroupBlocks(group=group, keys=packed, blocks=blocks, first=first_of(options.first, group)))
        counts.append(count)
    checked = JobOptions(
        lease=options.lease if isinstance(options.lease, Lease) else Lease(integer(options.lease, "lease", IDS_END)),
        deadline_s=seconds_within(options.deadline_s, "a job's deadline_s", messages.DEADLINE_S_MAX),
        ready=options.ready,
        expedited=bool(options.expedited),
        local=bool(options.local),
    )
    if options.ready is not None:
        caches.ready_spec(options.ready)
    return JobSpec(direction, registration, lists, tuple(counts), checked)


def submit(spec: JobSpec, job: Job, local: Callable[[], bool]) -> Call[list[U8Array]]:
    """Requests `job`; the value is the key states at admission. `local`: as in `lookup`."""

    def build(seq: int) -> Request:
        options = spec.options
        common: dict[str, Any] = {
            "seq": seq,
            "job": job.id,
            "registration": spec.registration.named_id(),
            "groups": spec.lists,
            "lease": int(options.lease),
            "deadline_s": options.deadline_s,
            "ready": None if options.ready is None else spec.registration.caches.ready_spec(options.ready),
        }
        if spec.direction is Direction.STORE:
            return messages.Store(**common)
        return messages.Load(**common, expedited=options.expedited, local=local())

    def parse(reply: messages.Accepted, _boot_id: bytes) -> list[U8Array]:
        if reply.job != job.id:
            raise MessageError(f"the reply to job {job.id} accepts job {reply.job}")
        return unpack_states(reply.states, spec.counts)

    return Call(build, parse, job=job)


def cancel(job: Job) -> Call[None]:
    """Ends a job early."""
    return Call(lambda seq: messages.Cancel(seq=seq, job=job.id), _nothing)


def clear(
    everything: bool,
    namespaces: str | None,
    uid: int | None,
    wait_s: float,
    token: bytes,
    knows_tokens: Callable[[], bool],
) -> Call[Cleared]:
    """Drops keys. `knows_tokens()` returns whether the daemon that gets the request does. Raises UsageError for a bad
    `namespaces`, `uid`, `wait_s` or `token`.
    """
    user = None if uid is None else integer(uid, "uid", 1 << 32)
    if namespaces is not None and not (
        0 < len(instance_of(str, namespaces, "namespaces")) <= messages.PATTERN_CHARS_MAX
    ):
        raise UsageError(f"namespaces must be a pattern of 1 to {messages.PATTERN_CHARS_MAX} characters")
    if everything and (namespaces is not None or user is not None):
        raise UsageError("a clear is of everything, or of namespaces by their names or users, not both")
    if not 0 <= wait_s <= messages.CLEAR_WAIT_S_MAX:
        raise UsageError(f"a clear can be waited for 0 to {messages.CLEAR_WAIT_S_MAX} seconds, not {wait_s}")
    if len(instance_of(bytes, token, "token")) != messages.TOKEN_BYTES:
        raise UsageError(f"the token of a clear has {messages.TOKEN_BYTES} bytes, not {len(token)}")

    def build(seq: int) -> Request:
        # A daemon that does not know names refuses the request: without them it would clear another namespace.
        if namespaces is not None or user is not None or knows_tokens():
            return messages.Clear(
                seq=seq, everything=bool(everything), token=token, wait_s=wait_s, namespaces=namespaces, uid=user
            )
        return messages.Clear(seq=seq, everything=bool(everything))

    def parse(reply: messages.Cleared, _boot_id: bytes) -> Cleared:
        return Cleared(reply.keys, reply.bytes, tuple(reply.unrecorded), reply.namespaces, reply.left)

    return Call(build, parse, repeatable=True)


def delete(groups: Groups, wait_s: float, key_bytes: int) -> Call[Deleted]:
    """Deletes keys. A second request does no harm, unless they were stored anew. Raises UsageError for bad keys, or a
    bad `wait_s`.
    """
    if not 0 <= wait_s <= messages.CLEAR_WAIT_S_MAX:
        raise UsageError(f"a deletion can be waited for 0 to {messages.CLEAR_WAIT_S_MAX} seconds, not {wait_s}")
    lists, _counts = _group_keys(groups, 0, key_bytes)

    def parse(reply: messages.Deleted, _boot_id: bytes) -> Deleted:
        return Deleted(reply.keys, reply.bytes, reply.disk_keys, tuple(reply.unrecorded))

    return Call(lambda seq: messages.Delete(seq=seq, groups=lists, wait_s=wait_s), parse, repeatable=True)


def drain(everything: bool, deadline_s: float) -> Call[Drained]:
    """Has the daemon wait for jobs and seals."""
    limit_s = seconds_within(deadline_s, "a drain's deadline_s", messages.DEADLINE_S_MAX)
    return Call(
        lambda seq: messages.Drain(seq=seq, everything=bool(everything), deadline_s=limit_s),
        lambda reply, _boot_id: Drained(reply.jobs, reply.unsealed),
    )


def verify(payloads: bool, disk: bool, repair: bool) -> Call[Audit]:
    """Requests a self-audit. Raises UsageError for a repair of something that the audit does not examine."""
    if repair and not disk:
        raise UsageError("`repair` drops bad records on disk: it needs `disk`")
    return Call(
        lambda seq: messages.Verify(seq=seq, payloads=bool(payloads), disk=bool(disk), repair=bool(repair)),
        lambda reply, _boot_id: Audit(tuple(reply.findings), reply.slots, reply.payloads, reply.records),
    )


def snapshot(group: int, cursor: int, key_bytes: int, tier: Tier | None = None) -> Call[tuple[U8Array, int]]:
    """Requests some complete keys, u8 (keys, key_bytes), and the cursor for the next request; 0: those were the
    last. `tier`: where they are; None: anywhere on the host.
    """
    number, start = integer(group, "group"), integer(cursor, "cursor", CURSORS_END)
    where = None if tier is None else integer(tier, "tier", Tier.DISK + 1)

    def parse(reply: messages.Listing, _boot_id: bytes) -> tuple[U8Array, int]:
        return unpack_keys(reply.keys, key_bytes), reply.cursor

    return Call(lambda seq: messages.Snapshot(seq=seq, group=number, cursor=start, tier=where), parse, repeatable=True)


def join_pages(pages: list[U8Array], key_bytes: int) -> U8Array:
    """Returns one u8 (keys, key_bytes) of a snapshot's pages; each key once, even if memory and disk both named it."""
    keys = np.concatenate([np.empty((0, key_bytes), np.uint8), *pages])
    _, first = np.unique(keys.view(np.dtype((np.void, key_bytes))).ravel(), return_index=True)
    once: U8Array = keys[np.sort(first)]
    return once
