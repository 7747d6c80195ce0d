"""Reads side by side: what hangs holds up nothing else, takes no further thread, and is read again when it is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvoffloadd.agent.engines.sidebyside import Readers
from kvoffloadd.agentwire.frames import Code
from kvoffloadd.testing.wait import until

FOREVER_S = 60.0
FAILED = Code.FAILED


class HangingStore:
    """Each object's value is its name. Those in `hanging` hang until `go_on`."""

    def __init__(self, threads: int) -> None:
        self.readers = Readers(threads)
        self.hanging: set[str] = set()
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def work(self, names: Sequence[str]) -> list[bytes | int | None]:
        self.begun += names
        if self.hanging.intersection(names):
            self.go_on.wait(FOREVER_S)
        if "none" in names[0]:
            raise OSError(names[0])
        return [name.encode() for name in names]

    def read(self, until_s: float = FOREVER_S, **lots: list[str]) -> dict[str, bytes | int | None]:
        return self.readers.read(lots, self.work, time.monotonic() + until_s)

    def give_up(self, begun: int, *names: str) -> None:
        """Read lots that hang, until `begun` of them have begun."""

        def read() -> bool:
            lots = {name: [name] for name in names}
            assert self.readers.read(lots, self.work, time.monotonic() + 0.05) == dict.fromkeys(names, FAILED)
            return len(self.begun) == begun

        until(read, "so many have begun")


@pytest.fixture
def store() -> Iterator[HangingStore]:
    made = HangingStore(3)
    yield made
    made.go_on.set()


def test_all_come(store: HangingStore) -> None:
    assert store.read(x=["a", "b"], y=["c"]) == {"a": b"a", "b": b"b", "c": b"c"}
    assert store.read() == {}


def test_a_lot_that_fails_is_nothing_to_the_others(store: HangingStore) -> None:
    assert store.read(x=["a"], y=["none", "b"]) == {"a": b"a", "none": FAILED, "b": FAILED}
    assert store.read(y=["b"]) == {"b": b"b"}


def test_a_lot_that_hangs_holds_up_nothing_and_takes_one_thread(store: HangingStore) -> None:
    store.hanging = {"bad"}
    store.give_up(1, "bad")
    for _ in range(20):  # at once, and not in the lot's turn
        assert store.read(bad=["bad", "c"], x=["a"]) == {"bad": FAILED, "c": FAILED, "a": b"a"}
    assert store.begun.count("bad") == 1
    store.hanging = set()
    store.go_on.set()
    until(lambda: store.read(bad=["bad", "c"]) == {"bad": b"bad", "c": b"c"}, "it is read again")


def test_more_that_hang_than_there_are_threads_begin_no_more(store: HangingStore) -> None:
    store.hanging = set("abcdef")
    store.give_up(3, *"abcdef")
    store.give_up(3, *"abcdef")
    store.hanging = set()
    store.go_on.set()
    lots = {name: [name] for name in "abcdef"}
    until(lambda: store.read(FOREVER_S, **lots) == {name: name.encode() for name in "abcdef"}, "all are read again")
