"""One message of every type, and random ones, made from the types themselves."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.protocol.state import State

EVERY: dict[str, type[m.Message]] = {**m.FROM_CLIENT, **m.FROM_DAEMON}
PATHS = {
    State.HELLO: (),
    State.GREETING: ("hello",),
    State.READY: ("hello", "welcome"),
    State.LEAVING: ("hello", "welcome", "bye"),
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


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Values that a field of this type may have."""
    match kind:
        case msgspec.inspect.IntType(ge=low, lt=end, le=high):
            top = (1 << 63) - 1 if end is None and high is None else (end - 1 if end is not None else high)
            return st.integers(low if low is not None else -(1 << 63), top)
        case msgspec.inspect.FloatType(gt=above, le=high):
            return st.floats(
                0.001 if above is not None else None, high, allow_nan=False, allow_infinity=high is None
            )
        case msgspec.inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=64 if most is None else most)
        case msgspec.inspect.StrType():
            return _PLAIN[str]
        case msgspec.inspect.BoolType():
            return _PLAIN[bool]
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case msgspec.inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=4)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*map(values, types))
        case msgspec.inspect.StructType(cls=cls):
            return structs(cls)
        case msgspec.inspect.DictType():
            return st.dictionaries(_PLAIN[str], _ANY, max_size=4)
    raise AssertionError(f"a type that tests can't make: {kind}")


def structs(cls: type[Any]) -> st.SearchStrategy[Any]:
    """Instances of a message or of a map in one."""
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    return st.builds(cls, **{field.name: values(field.type) for field in info.fields})


def messages_of(known: typing.Mapping[str, type[m.Message]]) -> st.SearchStrategy[m.Message]:
    """Any message of these types."""
    return st.sampled_from(sorted(known)).flatmap(lambda tag: structs(known[tag]))


_KEYS = m.GroupKeys(group=1, keys=b"k" * 64, first=2)
_BLOCKS = m.GroupBlocks(group=1, keys=b"k" * 64, blocks=b"\1\0\0\0\2\0\0\0")
_SPEC = m.NamespaceSpec(model="m")
_GROUP = m.GroupSpec(group=0, kind="full", tokens_per_key=16, refs=[m.RefSpec(tensor=0, offset=0, length=8)])
_TENSOR = m.TensorSpec(allocation=1, offset=0, num_blocks=4, page_bytes=8, stride_bytes=8)
_LIMITS = m.Limits(frame_bytes=1, fds_per_frame=1, keys_per_request=1, jobs=1, deadline_s=1.0)

SAMPLES: dict[str, dict[str, Any]] = {
    "hello": {"version": 1, "role": "worker", "instance": b"i" * 16, "namespace": _SPEC},
    "attach": {"kind": "shm", "fds": 1},
    "register": {"tensors": [_TENSOR], "groups": [_GROUP]},
    "unregister": {"registration": 1},
    **{tag: {"groups": [_KEYS]} for tag in ("lookup", "pin", "prefetch", "touch", "reserve")},
    **{tag: {"job": 1, "registration": 1, "groups": [_BLOCKS]} for tag in ("store", "load")},
    "release": {"lease": 1},
    "cancel": {"job": 1},
    "snapshot": {"group": 0},
    "error": {"code": "busy", "message": "later", "fault": "client", "retryable": True},
    "welcome": {
        "version": 1, "boot_id": b"b" * 16, "session": 1, "namespace": b"n", "epoch": 0, "limits": _LIMITS,
        "features": ["a"],
    },
    "attached": {"allocations": [1], "sizes_bytes": [4096]},
    "registered": {"registration": 1},
    "found": {"states": [b"\1"], "boundaries": b"\1\0\0\0"},
    "reserved": {"states": [b"\1"]},
    "accepted": {"job": 1, "states": [b"\1"]},
    "cleared": {"keys": 1, "bytes": 2},
    "drained": {"jobs": 0, "unsealed": 0},
    "report": {"status": {"a": [1, {"b": 2.5}]}},
    "verified": {"findings": ["x"], "slots": 1, "payloads": 1},
    "listing": {"keys": b"k" * 32, "cursor": 0},
    "completed": {"job": 1, "outcome": "done", "bytes": 1, "seconds": 0.5, "failed": [b""]},
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


def in_state(state: State, *, daemon: bool) -> Connection:
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
