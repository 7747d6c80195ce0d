"""Windows: what may be reserved at once, and whose turn it is when there is room."""

from __future__ import annotations

from kvoffloadd.cache.lower.window import Window
from kvoffloadd.scheduling.lanes import Flow


def test_room_is_what_is_left_and_what_is_too_large_goes_alone() -> None:
    window: Window[str] = Window(100)
    assert window.has_room(1000)
    window.used_bytes = 60
    assert window.has_room(40)
    assert not window.has_room(41)


def test_who_waits_goes_before_who_comes_but_for_an_idle_window() -> None:
    window: Window[str] = Window(100)
    window.used_bytes = 100
    assert not window.is_busy
    window.wait("a", Flow(1, 1), 10)
    assert window.is_busy
    assert window.next() == "a"
    assert not window.is_busy
    window.wait_first("a")
    assert window.is_busy
    window.used_bytes = 0
    assert not window.is_busy, "nobody would tell of room any more"


def test_users_and_engines_have_turns_and_who_had_no_room_keeps_its_own() -> None:
    window: Window[str] = Window(100)
    for number in range(5):
        window.wait(f"a{number}", Flow(1, 1), 25)
    window.wait("b", Flow(2, 7), 25)
    order = [window.next(), window.next()]
    assert "b" in order
    for who in order:
        assert who is not None
        window.wait_first(who)
    assert [window.next() for _ in range(7)] == [*order, "a1", "a2", "a3", "a4", None]
