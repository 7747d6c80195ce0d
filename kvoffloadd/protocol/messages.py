"""One frozen struct per message; the closed union; the protocol's version and limits.

Bulk data travels as packed little-endian arrays in `bin` fields: block ids and indices are u32, keys are `key_bytes`
wide, key states are u8 (`model.KeyState`). Every request carries a `seq` chosen by its sender, and gets exactly one
reply with the same `seq`. A test compares docs/PROTOCOL.md with this file.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from kvoffloadd.model import BLOCKS_PER_KEY_MAX, LAYERS_BYTES, PARTS_PER_KEY_MAX, TOKENS_PER_KEY_END, Dtype

VERSION = 1
VERSIONS = (1,)
"""The versions that this side can serve."""

FRAME_BYTES_MAX = 4 << 20
FDS_PER_FRAME_MAX = 64

SEQ_END = 1 << 32
Seq = Annotated[int, msgspec.Meta(ge=0, lt=SEQ_END)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
TOKEN_BYTES = 16
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
PATTERN_CHARS_MAX = 128
Pattern = Annotated[str, msgspec.Meta(max_length=PATTERN_CHARS_MAX)]
Uid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Packed = bytes  # an alias, for structs that have a field called bytes
DEADLINE_S_MAX = 86_400
Seconds = Annotated[float, msgspec.Meta(gt=0, le=DEADLINE_S_MAX)]
CLEAR_WAIT_S_MAX = 3600
WaitSeconds = Annotated[float, msgspec.Meta(ge=0, le=CLEAR_WAIT_S_MAX)]
Uuid = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Layers = Annotated[bytes, msgspec.Meta(min_length=LAYERS_BYTES, max_length=LAYERS_BYTES)]
KeepHow = Literal["soon", "drop"]
PRIORITY_MAX, PRIORITY_DEFAULT = 100, 50
Priority = Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
RETAIN_S_MAX = 30 * 86_400
RetainSeconds = Annotated[float, msgspec.Meta(gt=0, le=RETAIN_S_MAX)]
CLAIM_NAME_CHARS_MAX = 128
PREFETCH_WAIT_S_MAX = 60.0
ClaimName = Annotated[str, msgspec.Meta(max_length=CLAIM_NAME_CHARS_MAX)]

HostTier = Annotated[int, msgspec.Meta(ge=0, le=1)]

IPC_HANDLE_BYTES = 64
CHUNKS_BYTES_MAX = 8 * FDS_PER_FRAME_MAX
SIGNALS_MAX = 256


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A map inside a message."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Base class of all messages; each fills one frame."""


class Request(Message, frozen=True):
    """Sent by the client; gets exactly one reply of type `reply`, or an `error`."""

    reply: ClassVar[str] = "done"
    seq: Seq


class Reply(Message, frozen=True):
    """Sent by the daemon, once for each request."""

    seq: Seq


class Push(Message, frozen=True):
    """Sent by the daemon without a request."""


# --- maps inside messages ------------------------------------------------------------------------


class NamespaceSpec(Part, frozen=True):
    """Identifies the engines that share keys. The daemon adds the owner's uid and the epoch; every field is part of the
    fingerprint. The daemon knows only the sizes of the stored payloads, and the dtypes and layers that refs state.
    Therefore the fields must name everything else that determines the bytes, such as the order of heads and tokens
    (`layout`); otherwise engines that differ in it load each other's bytes as if they were theirs.
    """

    model: Text
    revision: Text = ""
    dtype: Text = ""
    layout: Text = ""
    parallel: Text = ""
    salt: Text = ""
    key_bytes: Annotated[int, msgspec.Meta(ge=8, le=32)] = 32


class TensorSpec(Part, frozen=True):
    """A canonical tensor: `num_blocks` rows of `page_bytes`, `stride_bytes` apart, starting at `offset` in an
    allocation.
    """

    allocation: Id
    offset: Count
    num_blocks: Annotated[int, msgspec.Meta(ge=1, lt=(1 << 32) - 1)]
    page_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    stride_bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class RefSpec(Part, frozen=True, omit_defaults=True):
    """A `model.Ref`: `tensor` indexes this registration's tensors. Daemons that list `composition` among their
    `features` also accept a description of the bytes: `dtype`, the type of their elements, and `layers`, a digest of
    the names of their layers (nil: not known).
    """

    tensor: Small
    offset: Count
    length: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]
    count: Annotated[int, msgspec.Meta(ge=1, lt=1 << 20)] = 1
    stride: Count = 0
    dtype: Dtype = ""
    layers: Layers | None = None


class GroupSpec(Part, frozen=True):
    """A group: the schema that the whole namespace shares, and one part that this rank holds, with its refs (without
    refs: the rank holds no part). A registration has one spec for each part.
    """

    group: Small
    kind: Literal["full", "sliding", "chunked", "mamba"]
    tokens_per_key: Annotated[int, msgspec.Meta(ge=1, lt=TOKENS_PER_KEY_END)]
    window_keys: Small = 0
    blocks_per_key: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_KEY_MAX)] = 1
    parts: Annotated[int, msgspec.Meta(ge=1, le=PARTS_PER_KEY_MAX)] = 1
    part: Small = 0
    refs: list[RefSpec] = []


class GroupKeys(Part, frozen=True):
    """Consecutive keys of one prompt. `first` is the index of the first key; the engine holds the keys before it
    locally.
    """

    group: Small
    keys: bytes
    first: Small = 0


class GroupBlocks(Part, frozen=True):
    """Keys with `blocks_per_key` block ids each (u32; 0xFFFFFFFF: this block of the key is not wanted)."""

    group: Small
    keys: bytes
    blocks: bytes
    first: Small = 0


class ReadySpec(Part, frozen=True):
    """The condition under which a job's blocks are final: the u64 at `offset` of the registration's signal number
    `signal`, read as little-endian, is at least `value`.
    """

    signal: Small
    offset: Count
    value: Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class ClaimFigures(Part, frozen=True):
    """Describes a claim that is in force. `name`: empty if it has none. `left_s`: until it ends. `tokens`: the length
    of the prompt that it keeps. `keys`: in all its groups. `memory_keys` and `disk_keys` of them are kept in these
    tiers now; their bytes count for each claim that names them. `hits`: how often the key with which it ends was used
    since it is claimed.
    """

    number: Id
    name: str
    namespace: str
    uid: Count
    priority: Small
    left_s: float
    tokens: Count
    keys: Count
    memory_keys: Count
    memory_bytes: Count
    disk_keys: Count
    disk_bytes: Count
    hits: Count


class Limits(Part, frozen=True):
    """The limits that the daemon applies to this session."""

    frame_bytes: Count
    fds_per_frame: Count
    keys_per_request: Count
    jobs: Count
    deadline_s: float


# --- requests ---------------------------------------------------------------------------------------


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a session. Only an observer can omit `namespace`."""

    reply: ClassVar[str] = "welcome"
    version: Small
    role: Literal["worker", "scheduler", "observer"]
    instance: Token
    namespace: NamespaceSpec | None = None


class Ping(Request, frozen=True, tag="ping"):
    """The reply comes at once."""


class Attach(Request, frozen=True, tag="attach"):
    """Announces shared memory. The frame carries `fds` descriptors; each of them becomes an allocation."""

    reply: ClassVar[str] = "attached"
    kind: Literal["shm"]
    fds: Annotated[int, msgspec.Meta(ge=1, le=FDS_PER_FRAME_MAX)]


class AttachIpc(Request, frozen=True, tag="attach_ipc"):
    """Announces memory of a GPU by CUDA IPC handles of 64 bytes each; each of them becomes an allocation. `device`: the
    GPU's UUID.
    """

    reply: ClassVar[str] = "attached"
    device: Uuid
    handles: Annotated[bytes, msgspec.Meta(min_length=IPC_HANDLE_BYTES, max_length=IPC_HANDLE_BYTES * 64)]


class AttachVmm(Request, frozen=True, tag="attach_vmm"):
    """Announces memory of a GPU that was made in chunks (cuMemCreate). The frame carries a descriptor for each chunk,
    in the order of their addresses; together they become one allocation. `chunks`: the sizes of the chunks, u64 each.
    `extends`: 0 for a new allocation, which will have `total_bytes` when complete; otherwise the allocation that these
    chunks continue. An allocation can't be registered until it is complete.
    """

    reply: ClassVar[str] = "attached"
    device: Uuid
    fds: Annotated[int, msgspec.Meta(ge=1, le=FDS_PER_FRAME_MAX)]
    chunks: Annotated[bytes, msgspec.Meta(min_length=8, max_length=CHUNKS_BYTES_MAX)]
    total_bytes: Count
    extends: Id = 0


class Detach(Request, frozen=True, tag="detach"):
    """Ends allocations that were attached and have not been registered. The reply comes when they are unmapped. An
    allocation that registrations name stays until the last of them is unregistered. Daemons that support it list
    `detach` among their `features`.
    """

    allocations: list[Id]


class Register(Request, frozen=True, tag="register"):
    """Names tensors in attached memory, all on one device, and groups. A scheduler registers groups without refs.
    `signals`: attached shared memory in which this worker signals that the blocks of its jobs are final (`ready`).
    """

    reply: ClassVar[str] = "registered"
    tensors: list[TensorSpec]
    groups: list[GroupSpec]
    signals: Annotated[list[Id], msgspec.Meta(max_length=SIGNALS_MAX)] = []


class Unregister(Request, frozen=True, tag="unregister"):
    """Ends a registration. The reply comes when no copy uses it any more and its memory is unmapped. A second
    `unregister` in the meantime is answered at the same time.
    """

    registration: Id


class Lookup(Request, frozen=True, tag="lookup", omit_defaults=True):
    """Reports which keys hit, and which prefixes can be restored. It changes nothing and waits for nothing. `local`:
    only keys on this host's disks are pending.
    """

    reply: ClassVar[str] = "found"
    groups: list[GroupKeys]
    local: bool = False


class Pin(Request, frozen=True, tag="pin", omit_defaults=True):
    """A lookup that also takes a read lease on every key that hits. Keys on disk are brought into memory and join the
    lease. With `tiers`, the reply names the tier of each key (only to daemons with the feature `tiers`).
    """

    reply: ClassVar[str] = "found"
    groups: list[GroupKeys]
    tiers: bool = False


class Prefetch(Request, frozen=True, tag="prefetch", omit_defaults=True):
    """A lookup that also brings keys on disk into memory, after keys that are pinned or loaded. `local`: as in a
    lookup, and the daemon requests nothing from the store that hosts share.
    """

    reply: ClassVar[str] = "found"
    groups: list[GroupKeys]
    local: bool = False


class Touch(Request, frozen=True, tag="touch"):
    """Reports that keys were used without being loaded: an engine had them in its local cache. This counts as a use in
    the eviction order, and in the choice of what the tiers below memory keep and accept.
    """

    groups: list[GroupKeys]


class Keep(Request, frozen=True, tag="keep"):
    """Announces that keys of a prompt will be used again soon (`soon`), or not at all (`drop`). This does not count as
    a use, guarantees nothing, and holds until the next use of each key. Daemons that support it list `keep` among their
    `features`.
    """

    groups: list[GroupKeys]
    how: KeepHow


class Retain(Request, frozen=True, tag="retain", omit_defaults=True):
    """Claims keys of a prompt, whether they are stored yet or not: for so many seconds they are evicted after all keys
    that nobody has claimed, of the lowest `priority` (0 to 100, nil: 50) first. The claim that had this `name` in the
    namespace ends, whether the new one is made or not. Without `groups`, the claims of this name, or the claim of this
    `number`, get another end, and another priority unless it is nil. A claim guarantees nothing: what the claims of a
    user keep is bounded, and beyond that the claim of the lowest priority lapses, of several the oldest. An observer
    may name claims, but no keys. Daemons that support it list `retain` among their `features`.
    """

    reply: ClassVar[str] = "retained"
    groups: list[GroupKeys]
    seconds: RetainSeconds
    priority: Priority | None = None
    name: ClaimName = ""
    number: Id = 0


class Forget(Request, frozen=True, tag="forget", omit_defaults=True):
    """Ends the claims of this name, or the claim of this number: in the session's namespace, or for an observer without
    one in all namespaces of its user (root and the daemon's uid: of all users). Only to daemons with the feature
    `retain`.
    """

    reply: ClassVar[str] = "retained"
    name: ClaimName = ""
    number: Id = 0


class Claims(Request, frozen=True, tag="claims"):
    """Lists claims that are in force, of the same namespaces as `forget`, some at a time: those with numbers from
    `cursor` on. Start with `cursor` 0, and stop when the reply has `cursor` 0. Only to daemons with the feature
    `retain`.
    """

    reply: ClassVar[str] = "claimed"
    cursor: Count = 0


class PrefetchClaims(Request, frozen=True, tag="prefetch_claims", omit_defaults=True):
    """Brings the keys of claims into memory, from disk and from the store that hosts share, as far as memory keeps
    them: of the claims of this name, or of the claim of this number, of the same namespaces as `forget`. The reply
    comes when all that can come is there, or after `wait_s`; then it has a `cursor`, with which the next request
    goes on. Only to daemons with the feature `prefetch_claims`.
    """

    reply: ClassVar[str] = "prefetched_claims"
    name: ClaimName = ""
    number: Id = 0
    wait_s: Annotated[float, msgspec.Meta(gt=0, le=PREFETCH_WAIT_S_MAX)] = 10.0
    cursor: Count = 0


class Release(Request, frozen=True, tag="release"):
    """Ends a lease. Keys under a read lease can be evicted again; reserved slots that no job fills are freed."""

    lease: Id


class Reserve(Request, frozen=True, tag="reserve"):
    """Reserves slots for keys to store, for all parts of each key or for the named parts."""

    reply: ClassVar[str] = "reserved"
    groups: list[GroupKeys]
    parts: list[Small] | None = None


class Store(Request, frozen=True, tag="store"):
    """A job that copies from worker memory to the daemon. `lease` 0: the job reserves this rank's parts itself.
    `ready`: the daemon reads nothing before that signal.
    """

    reply: ClassVar[str] = "accepted"
    job: Id
    registration: Id
    groups: list[GroupBlocks]
    lease: Id = 0
    deadline_s: Seconds = 60.0
    ready: ReadySpec | None = None


class Load(Request, frozen=True, tag="load", omit_defaults=True):
    """A job that copies from the daemon to worker memory. `lease` 0: the job holds the keys while it runs. Keys on disk
    are read first. `ready`: the daemon writes nothing before that signal. `local`: the job does not wait for a store
    that hosts share; keys that this host does not have are not loaded.
    """

    reply: ClassVar[str] = "accepted"
    job: Id
    registration: Id
    groups: list[GroupBlocks]
    lease: Id = 0
    deadline_s: Seconds = 60.0
    expedited: bool = False
    ready: ReadySpec | None = None
    local: bool = False


class Cancel(Request, frozen=True, tag="cancel"):
    """Ends a job early. Its `completed` comes after the last access to its blocks."""

    job: Id


class Clear(Request, frozen=True, tag="clear", omit_defaults=True):
    """Drops all keys of the session's namespace, of all namespaces (`everything`), or of each namespace with a name, as
    `status` shows it, that matches the shell pattern `namespaces` (only to daemons with the feature `clear_namespaces`)
    and that belongs to the user `uid` (only to daemons with the feature `clear_user`). Either of these two can be nil;
    both need a token, and go without `everything`. All but the first are only for root and the daemon's uid. `token`
    and `wait_s` only to daemons with the feature `clear_token`: a token that was sent before stands for the same clear,
    and the reply waits up to `wait_s` until the disks and the remote store have recorded the clear.
    """

    reply: ClassVar[str] = "cleared"
    everything: bool = False
    token: Token | None = None
    wait_s: WaitSeconds = 10.0
    namespaces: Pattern | None = None
    uid: Uid | None = None


class Delete(Request, frozen=True, tag="delete"):
    """Deletes keys of the session's namespace in all tiers of this host, and their objects in the remote store. Keys
    that are in no tier do no harm, and a group need not be registered. At most 1,024 keys, counted for parts as well,
    and each group as at least 16. The reply waits up to `wait_s` until all places have recorded it. Only to daemons
    with the feature `delete`.
    """

    reply: ClassVar[str] = "deleted"
    groups: list[GroupKeys]
    wait_s: WaitSeconds = 10.0


class Drain(Request, frozen=True, tag="drain"):
    """Waits for jobs. The reply comes when the jobs that were admitted before it have ended and everything that they
    stored is sealed, or at the deadline. Up to 256 drains of each user can wait; further ones are answered `busy`.
    """

    reply: ClassVar[str] = "drained"
    everything: bool = False
    deadline_s: Seconds = 60.0


class Status(Request, frozen=True, tag="status"):
    """Requests counters and gauges; keys are stable (docs/STATUS.md)."""

    reply: ClassVar[str] = "report"


class Verify(Request, frozen=True, tag="verify"):
    """Runs the self-audit. With `payloads`, every sealed slot is hashed again, and keys with wrong payloads are
    dropped. With `disk`, every record on disk is read and checked. With `repair`, bad records are dropped, too. Only
    for root and the daemon's uid.
    """

    reply: ClassVar[str] = "verified"
    payloads: bool = False
    disk: bool = False
    repair: bool = False


class Subscribe(Request, frozen=True, tag="subscribe", omit_defaults=True):
    """Starts to push `events` of the session's namespace. With `tiers` (only to daemons with the feature
    `event_tiers`), they report for each tier of this host which keys come and go. Otherwise they report a key when the
    first tier has it, and when the last one has it no more.
    """

    tiers: bool = False


class Snapshot(Request, frozen=True, tag="snapshot", omit_defaults=True):
    """Lists some of the complete keys of a group of the session's namespace. Start with `cursor` 0, and stop when the
    reply has `cursor` 0. A key that is both in memory and on disk is listed twice. With `tier` (0: memory, 1: disk;
    only to daemons with the feature `event_tiers`), lists the keys in that tier alone.
    """

    reply: ClassVar[str] = "listing"
    group: Small
    cursor: Count = 0
    tier: HostTier | None = None


class Bye(Request, frozen=True, tag="bye"):
    """Ends the session in order. The reply comes when the session's copies have ended; then the daemon closes the
    socket.
    """


# --- replies ----------------------------------------------------------------------------------------


class Done(Reply, frozen=True, tag="done"):
    """Reports success, without further data."""


class Error(Reply, frozen=True, tag="error"):
    """The request failed and changed nothing. `seq` is 0 if the daemon could not identify the request."""

    code: str
    message: str
    fault: str
    retryable: bool


class Welcome(Reply, frozen=True, tag="welcome"):
    """Opens the session. The frame carries `fds` = 1 descriptor: a pidfd of the daemon, which is readable when the
    daemon is dead.
    """

    version: Small
    boot_id: Token
    session: Id
    namespace: bytes
    epoch: Id
    limits: Limits
    features: list[str]
    fds: Annotated[int, msgspec.Meta(ge=0, le=FDS_PER_FRAME_MAX)] = 1


class Attached(Reply, frozen=True, tag="attached"):
    """Returns ids and true sizes of the allocations, in the order of the descriptors."""

    allocations: list[Id]
    sizes_bytes: list[Count]


class Registered(Reply, frozen=True, tag="registered"):
    """Returns the id for use in jobs."""

    registration: Id


class Found(Reply, frozen=True, tag="found"):
    """`states[g]`: u8 per key of group list g. `boundaries`: u32 prefix lengths in tokens, longest first. `lease` 0: no
    lease is held. `promoting`: the number of pending keys that are being read from disk or requested from the store
    that hosts share; if it is above 0, one `ready` follows. `tiers[g]`: u8 per key, the tier that it comes from: 1
    disk, 2 the store that hosts share, 0 for all others. Only in answers to a `pin` with `tiers`, and only if
    `promoting` is above 0.
    """

    states: list[bytes]
    boundaries: bytes
    lease: Id = 0
    promoting: Count = 0
    tiers: list[bytes] | msgspec.UnsetType = msgspec.UNSET


class Retained(Reply, frozen=True, tag="retained"):
    """Returns the number of claims that were made, changed or ended, and of the keys that they name. A `retain` with 0
    claims made none, since the new one would have been the first to lapse.
    """

    claims: Count
    keys: Count


class Claimed(Reply, frozen=True, tag="claimed"):
    """Lists claims by their numbers. `cursor` 0: the listing is complete."""

    claims: list[ClaimFigures]
    cursor: Count


class PrefetchedClaims(Reply, frozen=True, tag="prefetched_claims"):
    """Returns the number of claims, and of keys that they name. `memory_keys`: of the keys that this request has come
    to, those that are in memory now. `cursor`: one more than the number of keys that were come to; 0: these were
    all.
    """

    claims: Count
    keys: Count
    memory_keys: Count
    cursor: Count = 0


class Reserved(Reply, frozen=True, tag="reserved"):
    """`states[g]`: u8 per key: reserved, hit (already stored), pending (another session is storing it), no_space."""

    states: list[bytes]
    lease: Id = 0


class Accepted(Reply, frozen=True, tag="accepted"):
    """The job is admitted and will end in one `completed`. A store copies the keys in state reserved. A load copies the
    keys in state hit, which may have to be read from disk first.
    """

    job: Id
    states: list[bytes]


class Cleared(Reply, frozen=True, tag="cleared", omit_defaults=True):
    """The clear has taken effect. `keys` and `bytes`: the amounts that it dropped from memory. Keys under a read lease
    no longer hit, and are dropped when the lease ends. `unrecorded`: the places that have not recorded it yet: paths of
    disk roots, and `remote` for the store that hosts share. The daemon continues until they have recorded it. Only in
    answers to requests with a token. `namespaces`: the number of cleared namespaces, and `left`: the number of
    namespaces that match, too, and were not cleared, since others have meanwhile taken all groups that the daemon can
    have. Only in answers to requests with a pattern.
    """

    keys: Count
    bytes: Count
    unrecorded: list[str] = []
    namespaces: Count = 0
    left: Count = 0


class Deleted(Reply, frozen=True, tag="deleted"):
    """The deletion has taken effect: no copy of the keys that was stored before hits on this host. `keys` and `bytes`:
    what it dropped from memory; slots under a read lease are freed when the lease ends. `disk_keys`: the number of keys
    that were on disk. `unrecorded`: the places that have not recorded it yet: paths of disk roots, and `remote` if the
    store may still have objects. The daemon continues until they have.
    """

    keys: Count
    bytes: Count
    disk_keys: Count
    unrecorded: list[str]


class Drained(Reply, frozen=True, tag="drained"):
    """`jobs` and `unsealed` are 0 unless the deadline passed."""

    jobs: Count
    unsealed: Count


class Report(Reply, frozen=True, tag="report"):
    """Returns a map of plain values."""

    status: dict[str, Any]


class Verified(Reply, frozen=True, tag="verified"):
    """Lists the problems that the self-audit found (none: an empty list), and how much it checked."""

    findings: list[str]
    slots: Count
    payloads: Count
    records: Count = 0


class Listing(Reply, frozen=True, tag="listing"):
    """Returns packed keys. `cursor` 0: the listing is complete."""

    keys: bytes
    cursor: Count


# --- pushes -----------------------------------------------------------------------------------------


class Completed(Push, frozen=True, tag="completed"):
    """Reports the end of a job: its blocks belong to the client again. `failed[g]`: u32 indices into the job's key list
    g. For a load, these are the keys with blocks that are not valid; for a store, the keys that this job had reserved
    and did not store. `bytes`: the bytes copied, including those of keys that the copy itself found wrong. `reason`:
    for people, why the job is not done, or how many keys of a store got no space.
    """

    job: Id
    outcome: Literal["done", "partial", "failed", "cancelled", "expired"]
    bytes: Count
    seconds: float
    failed: list[Packed]
    reason: str = ""


class Ready(Push, frozen=True, tag="ready"):
    """The promotions of the `pin` or `prefetch` with this `seq` have ended; this is its new answer. Promoted keys now
    hit, and are in the pin's `lease` (0: for a prefetch, or if the lease was released meanwhile). Other keys are a
    miss, or pending if another session is storing them.
    """

    seq: Seq
    states: list[Packed]
    boundaries: Packed
    lease: Id = 0


class Events(Push, frozen=True, tag="events", omit_defaults=True):
    """Lists keys that became complete or were dropped, packed. `tier`: where, 0 in memory, 1 on disk; only to sessions
    that have subscribed with `tiers`. Then memory and disk are independent of each other: a key may be in both.
    """

    group: Small
    added: bytes
    removed: bytes
    tier: HostTier | None = None


class Gap(Push, frozen=True, tag="gap"):
    """Events were lost: there were too many, or the client read too slowly. The client should request a snapshot."""


def _tagged(base: type[Message]) -> dict[str, type[Any]]:
    return {str(cls.__struct_config__.tag): cls for cls in base.__subclasses__()}


REQUESTS: dict[str, type[Request]] = _tagged(Request)
REPLIES: dict[str, type[Reply]] = _tagged(Reply)
PUSHES: dict[str, type[Push]] = _tagged(Push)
FROM_CLIENT: dict[str, type[Message]] = {**REQUESTS}
FROM_DAEMON: dict[str, type[Message]] = {**REPLIES, **PUSHES}
