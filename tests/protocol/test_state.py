"""Who may say what when: every pair of state and message walks the table."""

from __future__ import annotations

import pytest

from kvoffloadd.errors import StateError
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.state import CLIENT_MOVES, DAEMON_MOVES, ROLE_MAY, ProtocolState
from tests.protocol.samples import EVERY, fds_of, in_state, sample

PAIRS = [(state, tag) for state in ProtocolState for tag in EVERY]


def moves(tag: str) -> dict[ProtocolState, dict[str, ProtocolState]]:
    return CLIENT_MOVES if tag in m.FROM_CLIENT else DAEMON_MOVES


@pytest.mark.parametrize(("state", "tag"), PAIRS)
def test_the_sender_keeps_to_the_table(state: ProtocolState, tag: str) -> None:
    sender = in_state(state, daemon=tag in m.FROM_DAEMON)
    after = moves(tag)[state].get(tag)
    if after is None:
        with pytest.raises(StateError, match=tag):
            sender.send(sample(tag))
        assert sender.state is state
    else:
        sender.send(sample(tag))
        assert sender.state is after


@pytest.mark.parametrize(("state", "tag"), PAIRS)
def test_the_receiver_holds_the_sender_to_it(state: ProtocolState, tag: str) -> None:
    receiver = in_state(state, daemon=tag in m.FROM_CLIENT)
    after = moves(tag)[state].get(tag)
    # Made by a sender who cares for nothing.
    frame = in_state(sender_state(tag), daemon=tag in m.FROM_DAEMON).send(sample(tag))
    fds = fds_of(tag) if after is not None else 0
    if after is None and fds_of(tag):
        return  # descriptors with what can't be taken end the stream: see test_descriptors
    receiver.receive_data(frame, [50] * fds)
    if after is None:
        with pytest.raises(StateError) as caught:
            receiver.next_message()
        assert caught.value.seq == getattr(sample(tag), "seq", 0)
        assert receiver.state is state
    else:
        found = receiver.next_message()
        assert found == (sample(tag), [50] * fds)
        assert receiver.state is after


def sender_state(tag: str) -> ProtocolState:
    return next(state for state, allowed in moves(tag).items() if tag in allowed)


def test_what_follows_a_refused_message_is_understood() -> None:
    receiver = in_state(ProtocolState.READY, daemon=True)
    again = in_state(ProtocolState.HELLO, daemon=False).send(sample("hello"))
    receiver.receive_data(again + in_state(ProtocolState.READY, daemon=False).send(sample("ping")))
    with pytest.raises(StateError):
        receiver.next_message()
    assert receiver.next_message() == (sample("ping"), [])


def test_only_the_daemon_speaks_when_the_client_leaves() -> None:
    assert CLIENT_MOVES[ProtocolState.LEAVING] == {}
    assert {"done", "completed", "error"} <= set(DAEMON_MOVES[ProtocolState.LEAVING])


@pytest.mark.parametrize("tag", EVERY)
def test_every_message_has_its_moment(tag: str) -> None:
    assert any(tag in allowed for allowed in moves(tag).values())
    other = DAEMON_MOVES if tag in m.FROM_CLIENT else CLIENT_MOVES
    assert not any(tag in allowed for allowed in other.values())


@pytest.mark.parametrize("request_tag", m.REQUESTS)
def test_every_request_has_a_reply_and_somebody_who_may_ask(request_tag: str) -> None:
    assert m.REQUESTS[request_tag].reply in m.REPLIES
    assert any(request_tag in may for may in ROLE_MAY.values())


def test_roles() -> None:
    assert all(may <= set(m.REQUESTS) for may in ROLE_MAY.values())
    assert not {"store", "load", "attach"} & ROLE_MAY["scheduler"]
    assert not {"pin", "reserve", "register"} & ROLE_MAY["observer"]
