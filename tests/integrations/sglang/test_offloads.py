"""Tests stores under way: their ends are reported in order, and there are never too many."""

from __future__ import annotations

import threading

from kvoffloadd.integrations.sglang.storequeue import StoreQueue
from kvoffloadd.testing.wait import until

SOON_S = 100.0


def boom() -> bool:
    raise ValueError("a bug")


def test_ends_are_told_in_order() -> None:
    offloads, go = StoreQueue(100), threading.Event()
    assert offloads.begin(1, lambda: go.wait(SOON_S))
    assert offloads.begin(1, boom)
    assert offloads.begin(1, lambda: True)
    assert offloads.ended() == 0
    go.set()
    until(lambda: offloads.ended() == 3, "they have ended", SOON_S)
    assert [offloads.pop() for _ in range(3)] == [True, False, True]
    assert offloads.ended() == 0
    offloads.close(SOON_S)


def test_what_is_under_way_is_bounded() -> None:
    offloads, go = StoreQueue(4), threading.Event()
    assert offloads.begin(9, lambda: go.wait(SOON_S)), "one alone, however large"
    assert not offloads.begin(1, lambda: True)
    go.set()
    until(lambda: offloads.ended() == 1, "it has ended", SOON_S)
    assert not offloads.begin(1, lambda: True), "until SGLang has heard of it: ranks must answer alike"
    assert offloads.pop()
    assert offloads.begin(3, lambda: True)
    assert offloads.begin(1, lambda: True)
    assert not offloads.begin(1, lambda: True)
    offloads.quiesce()
    assert offloads.ended() == 0
    assert offloads.begin(4, lambda: True)
    offloads.close(SOON_S)


def test_a_close_does_not_wait_for_ever() -> None:
    offloads, go = StoreQueue(4), threading.Event()
    assert offloads.begin(1, lambda: go.wait(SOON_S))
    offloads.close(0.0)
    go.set()
