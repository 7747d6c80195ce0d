"""What waits for peers that do not read: bounded for each session, and for all sessions of a uid together."""

from __future__ import annotations

import asyncio

import pytest

from kvoffloadd.errors import BusyError, LimitError
from kvoffloadd.protocol import messages as m
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.protocol.state import ProtocolState
from kvoffloadd.server.peers.account import BUILT_IN, Account, Accounts
from kvoffloadd.server.peers.outbox import Outbox
from tests.server.test_ends import connection

PIECE = 1 << 20
UID_BYTES = BUILT_IN["outbox_bytes"].cap


def used(account: Account) -> tuple[int, int]:
    """Bytes that wait, and that are promised."""
    return account.unread_bytes, account.used["outbox_bytes"] - account.unread_bytes


def crowd(account: Account) -> list[Outbox]:
    """Sessions that hold half of what their uid may, and some more."""
    boxes = [Outbox(8 * PIECE, account) for _ in range(UID_BYTES // 2 // (4 * PIECE) + 1)]
    for box in boxes:
        for _ in range(4):
            box.put(bytes(PIECE))
    return boxes


def empty(box: Outbox) -> None:
    while box.frames:
        box.sent(min(len(box.frames[0][0]), PIECE // 3))


def test_many_sessions_share_what_their_uid_may_leave_unread() -> None:
    accounts = Accounts({})
    account = accounts.of(1)
    outbox, others, stranger = Outbox(8 * PIECE, account), crowd(account), Outbox(8 * PIECE, accounts.of(2))
    assert not outbox.room(1), "no event is added"
    assert stranger.room(1)
    assert not outbox.congested, "it has read all, so it is served"
    outbox.put(b"reply")
    assert outbox.congested, "until it has read this one, too"
    stranger.put(b"reply")
    assert not stranger.congested
    empty(outbox)
    outbox.reserve(4 * PIECE)
    assert used(account)[1] == 4 * PIECE, "what is promised has room of its own"
    empty(others.pop())
    assert outbox.room(1)
    for box in others:
        empty(box)
    outbox.unreserve(4 * PIECE)
    empty(stranger)
    assert used(account) == (0, 0)
    assert accounts.leaks() == []


def test_what_is_promised_to_a_uid_is_bounded() -> None:
    account = Accounts({}).of(1)
    boxes = [Outbox(8 * PIECE, account) for _ in range(UID_BYTES // (8 * PIECE) + 1)]
    for box in boxes[:-1]:
        box.reserve(8 * PIECE)
    with pytest.raises(BusyError):
        boxes[-1].reserve(1)
    assert boxes[-1].reserved_bytes == 0
    boxes[0].unreserve(8 * PIECE)
    boxes[-1].reserve(1)


def test_what_goes_with_a_promise_is_charged_with_it_or_not_at_all() -> None:
    accounts = Accounts({"jobs": 1})
    account = accounts.of(1)
    box = Outbox(PIECE, account)
    box.reserve(PIECE // 4, jobs=1)
    assert account.used == {"outbox_bytes": PIECE // 4, "jobs": 1}
    with pytest.raises(LimitError):
        box.reserve(1, jobs=1)
    with pytest.raises(BusyError, match="read completions"):
        box.reserve(PIECE, jobs=0)
    assert (account.used, box.reserved_bytes) == ({"outbox_bytes": PIECE // 4, "jobs": 1}, PIECE // 4)
    assert accounts.figures() == {"1": {"jobs": 1}}, "what status shows"
    box.unreserve(PIECE // 4, jobs=1)
    assert accounts.leaks() == []


def test_who_wants_no_room_is_not_refused_for_want_of_it() -> None:
    """A pin of keys in memory sends nothing later, whatever is unread in this session or in others."""
    accounts = Accounts({"leases": 10})
    account = accounts.of(1)
    box = Outbox(8 * PIECE, account)
    for _ in range(UID_BYTES // PIECE + 1):
        box.put(bytes(PIECE))
    with pytest.raises(BusyError):
        box.reserve(1)
    box.reserve(0, leases=7)
    with pytest.raises(LimitError):
        box.reserve(0, leases=7)
    assert account.used["leases"] == 7


def test_a_frame_for_many_counts_once() -> None:
    account = Accounts({}).of(1)
    boxes = [Outbox(8 * PIECE, account) for _ in range(100)]
    frame = bytes(PIECE)
    for box in boxes:
        box.put(frame)
    assert account.unread_bytes == PIECE
    for box in boxes:
        assert box.queued_bytes == PIECE
        box.sent(7)
    assert account.unread_bytes == PIECE
    for box in boxes:
        empty(box)
    assert account.unread_bytes == 0
    boxes[0].put(frame)
    assert account.unread_bytes == PIECE


async def test_no_frame_overtakes_those_that_wait() -> None:
    made, theirs, _ = connection()
    theirs.setblocking(False)
    client = Connection(daemon=False)
    made._protocol.state = client.state = ProtocolState.READY
    sent, outbox = 0, made._outbox
    while len(outbox.frames) < 2:
        sent += 1
        made._send(m.Listing(seq=sent, keys=bytes(PIECE // 8), cursor=0))
    assert 0 < outbox.queued_bytes < outbox.account.unread_bytes, "the first of them is written in part"
    client.receive_data(theirs.recv(PIECE))  # so that the socket would take more
    sent += 1
    made._send(m.Done(seq=sent))
    came: list[m.Message] = []
    while len(came) < sent:
        while (found := client.next_message()) is not None:
            came.append(found[0])
        await asyncio.sleep(0)
        try:
            client.receive_data(theirs.recv(PIECE))
        except BlockingIOError:
            assert len(came) == sent or outbox.frames
    assert [message.seq for message in came if isinstance(message, m.Reply)] == list(range(1, sent + 1))
    assert (outbox.queued_bytes, used(outbox.account)) == (0, (0, 0))
    await made.end("the test ends")
    theirs.close()


async def test_what_waits_for_a_peer_that_is_gone_is_dropped_at_once() -> None:
    """Nobody will read it: it counts no longer, and the loop watches the socket no longer. Its end may take long."""
    made, theirs, context = connection()
    while not made._outbox.frames:
        made._writer.send(bytes(PIECE))
    account = made._account
    assert used(account)[0] > 0
    theirs.close()
    made._writer.flush()
    assert not made._outbox.frames
    assert used(account) == (0, 0)
    assert not context.loop.remove_writer(made._sock.fileno())
    await made.end("it has ended already")
