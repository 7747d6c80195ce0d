"""The table of messages that each side may send in each state.

    HELLO --hello--> GREETING --welcome--> READY --bye--> LEAVING
                         +----error----> HELLO

The client may have many requests under way in READY. In LEAVING only the daemon sends: completions of jobs that still
run, replies to earlier requests, and `done` for the bye, after which it closes the socket. A move that is not in the
table is the sender's fault and changes nothing.
"""

from __future__ import annotations

import enum

from kvoffloadd.protocol.messages import PUSHES, REPLIES, REQUESTS


class ProtocolState(enum.Enum):
    """The state of a session."""

    __hash__ = object.__hash__  # that of Enum runs in Python, for each request

    HELLO = "hello"
    GREETING = "greeting"
    READY = "ready"
    LEAVING = "leaving"


_ASKS = {tag: ProtocolState.READY for tag in REQUESTS if tag not in ("hello", "bye")}
_ANSWERS = {tag: ProtocolState.READY for tag in (*REPLIES, *PUSHES) if tag != "welcome"}

CLIENT_MOVES: dict[ProtocolState, dict[str, ProtocolState]] = {
    ProtocolState.HELLO: {"hello": ProtocolState.GREETING},
    ProtocolState.GREETING: {},
    ProtocolState.READY: {**_ASKS, "bye": ProtocolState.LEAVING},
    ProtocolState.LEAVING: {},
}

DAEMON_MOVES: dict[ProtocolState, dict[str, ProtocolState]] = {
    ProtocolState.HELLO: {"error": ProtocolState.HELLO},
    ProtocolState.GREETING: {"welcome": ProtocolState.READY, "error": ProtocolState.HELLO},
    ProtocolState.READY: _ANSWERS,
    ProtocolState.LEAVING: dict.fromkeys(_ANSWERS, ProtocolState.LEAVING),
}

_OBSERVER = frozenset(
    {"hello", "ping", "status", "verify", "clear", "drain", "lookup", "subscribe", "snapshot", "bye"}
    | {"delete", "retain", "forget", "claims", "prefetch_claims"}
)
_SCHEDULER = frozenset(REQUESTS) - {"attach", "attach_ipc", "attach_vmm", "detach", "store", "load", "cancel"}

ROLE_MAY: dict[str, frozenset[str]] = {
    "observer": _OBSERVER,
    "scheduler": _SCHEDULER,
    "worker": frozenset(REQUESTS),
}
