"""Events that wait for delivery: a client that makes too many loses its own, and learns of it before later ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cache.memory.events import EVENT_BYTES, Event, WaitingEvents
from kvoffloadd.cache.memory.namespace import Namespace

ONE = EVENT_BYTES + 32
"""Bytes of an event of one key."""


def namespace(uid: int, name: bytes = b"a") -> Namespace:
    return Namespace(name * 16, uid, "m", 32, epoch=0)


def event(of: Namespace, number: int, keys: int = 1) -> Event:
    return Event(of, 0, number.to_bytes(32, "big") * keys, b"")


def taken(waiting: WaitingEvents, of: Namespace) -> list[int]:
    """The first key of each event that waits."""
    found = []
    while (one := waiting.take(of)) is not None:
        found.append(int.from_bytes(one.added[:32], "big"))
    return found


def test_events_come_in_order_and_namespaces_apart() -> None:
    waiting, first, other = WaitingEvents(), namespace(1), namespace(1, b"b")
    for number in range(10):
        waiting.put(event(first if number % 2 else other, number))
    assert taken(waiting, first) == [1, 3, 5, 7, 9]
    assert waiting.waits(other)
    assert not waiting.waits(first)
    assert taken(waiting, other) == [0, 2, 4, 6, 8]
    assert not waiting.waits(other)


def test_a_flood_costs_its_own_namespace_the_oldest() -> None:
    waiting, loud = WaitingEvents(100 * ONE), namespace(1)
    for number in range(1000):
        waiting.put(event(loud, number))
    assert waiting.lost == 1000 - 25, "half of a half: the rest is for other users, and for the user's other namespaces"
    assert waiting.take_loss(loud)
    assert not waiting.take_loss(loud), "it is reported once"
    assert taken(waiting, loud) == list(range(975, 1000))
    assert not waiting.waits(loud)


def test_a_user_s_flood_costs_no_other_user_an_event() -> None:
    waiting = WaitingEvents(100 * ONE)
    crowd = [namespace(1, bytes([number])) for number in range(50)]
    for number in range(1000):
        for loud in crowd:
            waiting.put(event(loud, number))
    quiet = namespace(2)
    for number in range(10):
        waiting.put(event(quiet, number))
    assert not waiting.take_loss(quiet)
    assert taken(waiting, quiet) == list(range(10))
    assert all(waiting.take_loss(loud) for loud in crowd)


def test_a_namespace_s_flood_leaves_room_for_the_user_s_others() -> None:
    waiting, loud, quiet = WaitingEvents(100 * ONE), namespace(1), namespace(1, b"b")
    for number in range(1000):
        waiting.put(event(loud, number))
    for number in range(10):
        waiting.put(event(quiet, number))
    assert not waiting.take_loss(quiet)
    assert taken(waiting, quiet) == list(range(10))


def test_an_event_that_no_queue_could_hold_is_a_loss_with_all_before_it() -> None:
    """Later than what was lost is all that waits, or a snapshot that was read in between would be wrong for good."""
    waiting, owner = WaitingEvents(100 * ONE), namespace(1)
    waiting.put(event(owner, 1))
    waiting.put(event(owner, 2, keys=1000))
    assert waiting.waits(owner)
    assert waiting.take_loss(owner)
    assert taken(waiting, owner) == []
    assert waiting.lost == 2
    assert not waiting.waits(owner)


NAMESPACES = [namespace(uid, name) for uid in (1, 2, 3) for name in (b"a", b"b")]


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "take"]), st.sampled_from(range(6)), st.sampled_from([1, 1, 5, 400]))
    )
)
def test_whatever_is_not_told_is_a_loss_that_is(actions: list[tuple[str, int, int]]) -> None:
    waiting = WaitingEvents(40 * ONE)
    put, delivered, bytes_waiting = [0] * 6, [0] * 6, 0
    for what, number, keys in actions:
        of = NAMESPACES[number]
        if what == "put":
            put[number] += 1
            waiting.put(event(of, put[number], keys))
        else:
            lost = waiting.take_loss(of)
            one = waiting.take(of)
            if one is None:
                assert lost == (delivered[number] < put[number])
                delivered[number] = put[number]
            else:
                now = int.from_bytes(one.added[:32], "big")
                assert now > delivered[number]
                assert lost == (now > delivered[number] + 1), "no more and no less than what is missing"
                delivered[number] = now
        bytes_waiting = sum(one.size for queue in waiting._queues.values() for one in queue.events)
        assert bytes_waiting <= 40 * ONE
    for of in NAMESPACES:
        waiting.take_loss(of)
        taken(waiting, of)
    assert not waiting._queues
    assert not waiting._bytes_by_uid
    assert not waiting._bytes
