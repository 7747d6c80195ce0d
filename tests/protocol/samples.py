"""One message of every type, and random ones, made from the types themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.protocol.state import ProtocolState

EVERY: dict[str, type[m.Message]] = {**m.FROM_CLIENT, **m.FROM_DAEMON}
PATHS = {
    ProtocolState.HELLO: (),
    ProtocolState.GREETING: ("hello",),
    ProtocolState.READY: ("hello", "welcome"),
    ProtocolState.LEAVING: ("hello", "welcome", "bye"),
}
"""What is said to come to a state."""

_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
    str: st.text(st.characters(codec="utf-8"), max_size=20),
}
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | _PLAIN[str],
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_PLAIN[str], inner, max_size=3),
    max_leaves=6,
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    return _MAKERS[type(kind)](kind)


def _integers(kind: msgspec.inspect.IntType) -> st.SearchStrategy[int]:
    least = -(1 << 63) if kind.ge is None else kind.ge
    most = (1 << 63) - 1 if kind.le is None else kind.le
    return st.integers(least, most if kind.lt is None else kind.lt - 1)


def _floats(kind: msgspec.inspect.FloatType) -> st.SearchStrategy[float]:
    least = kind.ge if kind.gt is None else kind.gt + 0.001
    return st.floats(least, kind.le, allow_nan=False, allow_infinity=kind.le is None)


_MAKERS: dict[type[Any], Callable[[Any], st.SearchStrategy[Any]]] = {
    msgspec.inspect.IntType: _integers,
    msgspec.inspect.FloatType: _floats,
    msgspec.inspect.BytesType: lambda kind: st.binary(min_size=kind.min_length or 0, max_size=kind.max_length or 64),
    msgspec.inspect.StrType: lambda _kind: _PLAIN[str],
    msgspec.inspect.BoolType: lambda _kind: st.booleans(),
    msgspec.inspect.NoneType: lambda _kind: st.none(),
    msgspec.inspect.LiteralType: lambda kind: st.sampled_from(kind.values),
    msgspec.inspect.ListType: lambda kind: st.lists(values(kind.item_type), max_size=4),
    msgspec.inspect.UnionType: lambda kind: st.one_of(*map(values, kind.types)),
    msgspec.inspect.StructType: lambda kind: structs(kind.cls),
    msgspec.inspect.DictType: lambda _kind: st.dictionaries(_PLAIN[str], _ANY, max_size=4),
}


def structs(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Instances of a message or of a map in one."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return st.builds(cls, **{field.name: values(field.type) for field in info.fields})


def messages_of(known: Mapping[str, type[m.Message]]) -> st.SearchStrategy[m.Message]:
    """Any message of these types."""
    return st.sampled_from(sorted(known)).flatmap(lambda tag: structs(known[tag]))


_KEYS = m.GroupKeys(group=1, keys=b"k" * 64, first=2)
_BLOCKS = m.GroupBlocks(group=1, keys=b"k" * 64, blocks=b"\1\0\0\0\2\0\0\0")
_SPEC = m.NamespaceSpec(model="m")
_REF = m.RefSpec(tensor=0, offset=0, length=8, dtype="bfloat16", layers=b"layers 0")
_GROUP = m.GroupSpec(group=0, kind="full", tokens_per_key=16, refs=[_REF])
_TENSOR = m.TensorSpec(allocation=1, offset=0, num_blocks=4, page_bytes=8, stride_bytes=8)
_CLAIM = m.ClaimFigures(
    number=1, name="agent", namespace="m#0", uid=0, priority=9, left_s=1.5, tokens=16, keys=1, memory_keys=1,
    memory_bytes=4096, disk_keys=0, disk_bytes=0, hits=2,
)  # fmt: skip
_LIMITS = m.Limits(frame_bytes=1, fds_per_frame=1, keys_per_request=1, jobs=1, deadline_s=1.0)

SAMPLES: dict[str, dict[str, Any]] = {
    "hello": {"version": 1, "role": "worker", "instance": b"i" * 16, "namespace": _SPEC},
    "attach": {"kind": "shm", "fds": 1},
    "attach_ipc": {"device": b"d" * 16, "handles": b"h" * 64},
    "attach_vmm": {"device": b"d" * 16, "fds": 1, "chunks": b"c" * 8, "total_bytes": 8},
    "detach": {"allocations": [1, 2]},
    "register": {"tensors": [_TENSOR], "groups": [_GROUP]},
    "unregister": {"registration": 1},
    **{tag: {"groups": [_KEYS]} for tag in ("lookup", "prefetch", "touch", "reserve")},
    "pin": {"groups": [_KEYS], "tiers": True},
    **{tag: {"job": 1, "registration": 1, "groups": [_BLOCKS]} for tag in ("store", "load")},
    "keep": {"groups": [_KEYS], "how": "drop"},
    "retain": {"groups": [_KEYS], "seconds": 60.0, "priority": 9, "name": "agent"},
    "forget": {"name": "agent"},
    "prefetch_claims": {"name": "agent", "wait_s": 0.5, "cursor": 3},
    "prefetched_claims": {"claims": 1, "keys": 4, "memory_keys": 2, "cursor": 4},
    "retained": {"claims": 1, "keys": 2},
    "claimed": {"claims": [_CLAIM], "cursor": 0},
    "release": {"lease": 1},
    "cancel": {"job": 1},
    "clear": {"token": b"t" * 16, "wait_s": 0.5, "namespaces": "m*"},
    "delete": {"groups": [_KEYS], "wait_s": 0.5},
    "snapshot": {"group": 0},
    "error": {"code": "busy", "message": "later", "fault": "client", "retryable": True},
    "welcome": {
        "version": 1, "boot_id": b"b" * 16, "session": 1, "namespace": b"n", "epoch": 0, "limits": _LIMITS,
        "features": ["a"],
    },
    "attached": {"allocations": [1], "sizes_bytes": [4096]},
    "registered": {"registration": 1},
    "found": {"states": [b"\1"], "boundaries": b"\1\0\0\0", "tiers": [b"\0"]},
    "reserved": {"states": [b"\1"]},
    "accepted": {"job": 1, "states": [b"\1"]},
    "cleared": {"keys": 1, "bytes": 2, "unrecorded": ["/disk", "remote"], "namespaces": 3, "left": 1},
    "deleted": {"keys": 1, "bytes": 2, "disk_keys": 3, "unrecorded": ["/disk", "remote"]},
    "drained": {"jobs": 0, "unsealed": 0},
    "report": {"status": {"a": [1, {"b": 2.5}]}},
    "verified": {"findings": ["x"], "slots": 1, "payloads": 1},
    "listing": {"keys": b"k" * 32, "cursor": 0},
    "completed": {"job": 1, "outcome": "done", "bytes": 1, "seconds": 0.5, "failed": [b""]},
    "ready": {"seq": 7, "states": [b"\1"], "boundaries": b"\1\0\0\0", "lease": 1},
    "events": {"group": 0, "added": b"k" * 32, "removed": b""},
}  # fmt: skip
"""Fields, but for `seq`, of a message of each type that needs any."""


def sample(tag: str, **changed: Any) -> m.Message:
    """A valid message of that type."""
    cls = EVERY[tag]
    seq = {} if issubclass(cls, m.Push) else {"seq": 7}
    return cls(**{**seq, **SAMPLES.get(tag, {}), **changed})


def fields(tag: str) -> dict[str, Any]:
    """A valid message as the map that travels."""
    found: dict[str, Any] = msgspec.to_builtins(sample(tag), builtin_types=(bytes,))
    return found


def in_state(state: ProtocolState, *, daemon: bool) -> Connection:
    """One side's connection in that state."""
    connection = Connection(daemon=daemon)
    peer = Connection(daemon=not daemon)
    for tag in PATHS[state]:
        speaker, hearer = (connection, peer) if (tag in m.FROM_CLIENT) != daemon else (peer, connection)
        hearer.receive_data(speaker.send(sample(tag)), [99] * fds_of(tag))
        assert hearer.next_message() is not None
    assert connection.state is peer.state is state
    return connection


def fds_of(tag: str) -> int:
    """Descriptors that a sample of that type states."""
    return int(getattr(sample(tag), "fds", 0))
