"""What clients and daemons say, and what is made of it. Each function takes one thing that is almost right."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgpack

from kvoffloadd.client import calls as client_calls
from kvoffloadd.client.connection import ConnectionState
from kvoffloadd.client.events import EventQueue
from kvoffloadd.client.jobs import Job
from kvoffloadd.client.results import Found
from kvoffloadd.errors import PeerError
from kvoffloadd.model import Direction
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import PREFIX, encode
from kvoffloadd.protocol.state import ProtocolState
from tests.cache.conftest import Open, open_tier  # noqa: F401  a fixture
from tests.outside.changes import Take, changed_frame
from tests.protocol.samples import in_state, sample


def protocol(by_client: bool) -> Take:
    """What one side of a session takes of the other."""
    known = m.FROM_CLIENT if by_client else m.FROM_DAEMON

    def take(rng: Random) -> None:
        body = encode(sample(rng.choice(sorted(known))))[PREFIX.size :]
        connection = in_state(rng.choice([ProtocolState.HELLO, ProtocolState.READY]), daemon=by_client)
        with suppress(PeerError):
            connection.receive_data(changed_frame(rng, body, msgpack.packb))
            while connection.next_message() is not None or connection.unpacking is not None:
                pass

    return take


def replies(rng: Random) -> None:
    """What the client takes of its daemon. A value comes of it only if it fits what was asked."""
    namespace = cast(Any, SimpleNamespace(id=1, named_id=lambda: 1))
    job = Job(1, Direction.STORE, namespace, (2,))
    spec = client_calls.JobSpec(Direction.STORE, namespace, [], (2,), client_calls.JobOptions())
    asked: dict[str, client_calls.Call[Any]] = {
        "found": client_calls.pin({0: bytes(64)}, 0, 32, lambda: True),
        "reserved": client_calls.reserve({0: bytes(64)}, 0, None, 32),
        "accepted": client_calls.submit(spec, job, lambda: True),
        "listing": client_calls.snapshot(0, 0, 32),
        "cleared": client_calls.clear(False, None, None, 1.0, b"t" * 16, lambda: True),
        "retained": client_calls.forget("a", 0),
        "claimed": client_calls.claims(0),
        "drained": client_calls.drain(False, 1.0),
        "verified": client_calls.verify(False, False, False),
        "report": client_calls.status(),
        "attached": client_calls.attach((7,), None),
    }
    events = EventQueue(32)
    events.subscribed = True
    state = greeted(ConnectionState(events))
    tag = rng.choice([*asked, "completed", "ready", "events", "error"])
    call = asked.get(tag, asked["found" if tag == "ready" else "accepted"])
    state.ask(call)
    further: dict[str, Any] = {
        **{tag: {"states": [b"\1\1"]} for tag in ("found", "ready", "reserved")},
        "accepted": {"states": [b"\3\3"]},
    }
    with suppress(PeerError):
        if tag == "ready":
            state.receive(encode(sample("found", seq=2, states=[b"\1\1"], promoting=1, lease=1)), [])
        if tag == "completed":
            state.receive(encode(sample("accepted", seq=2, states=[b"\3\3"])), [])
        answered = {} if tag in ("completed", "ready", "events") else {"seq": 2}
        body = encode(sample(tag, **answered, **further.get(tag, {})))
        state.receive(changed_frame(rng, body[PREFIX.size :], msgpack.packb), [])
        if isinstance(call.value, Found):
            assert [len(states) for states in call.value.states] == [2]
        if job.result is not None and tag == "completed":
            assert job.result.valid(0).shape == (2,)
    state.end("over")


def greeted(state: ConnectionState) -> ConnectionState:
    """The same, with its daemon's welcome: what is asked next is request 2."""
    state.ask(client_calls.hello("worker", b"i" * 16, m.NamespaceSpec(model="m")))
    state.receive(encode(sample("welcome", seq=1, fds=1)), [99])
    return state
