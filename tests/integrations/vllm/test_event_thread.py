"""Tests what routers hear of a real daemon's keys: never anything wrong."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, Tier
from kvoffloadd.integrations.vllm import event_thread as watching
from kvoffloadd.integrations.vllm.event_thread import TIERS, EventThread, PublishedKeys
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.wait import throughout
from tests.e2e.disk import disk_settings, idle
from tests.e2e.rank import Keys, new_keys
from tests.integrations.vllm.conftest import Lines

Start = Callable[..., Daemon]
Make = Callable[[Daemon], Lines]


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 12)


class KeyListener:
    """Who listens."""

    def __init__(self, event_thread: EventThread) -> None:
        self.event_thread = event_thread
        self.believed: set[tuple[int, Tier, bytes]] = set()
        self.told = 0
        self.latest = 0

    def believes(self, group: int, keys: Keys, tiers: Collection[Tier] = (Tier.MEMORY,)) -> bool:
        return self.listen() == {(group, tier, key.tobytes()) for key in keys for tier in tiers}

    def generation(self, number: int) -> bool:
        self.listen()
        return self.latest == number

    def listen(self, most: int = 1 << 30) -> set[tuple[int, Tier, bytes]]:
        for news in self.event_thread.news(most):
            named = {(news.group, news.tier, key) for key in news.keys}
            assert news.generation >= self.latest
            self.latest = news.generation
            self.told += len(named)
            if news.removed:
                assert named <= self.believed
                self.believed -= named
            else:
                assert named.isdisjoint(self.believed)
                self.believed |= named
        return self.believed


def test_what_comes_and_goes(daemon: Daemon, lines: Make, keys: Keys) -> None:
    line = lines(daemon)
    rank = line.rank()
    rank.store_keys(keys[:4])
    router = KeyListener(line.event_thread())
    until(lambda: router.believes(0, keys[:4]), "what was there is told")
    rank.store_keys(keys)
    until(lambda: router.believes(0, keys), "what came is told")
    rank.client.clear()
    until(lambda: router.believes(0, keys[:0]), "what was cleared is told")
    assert router.told == 24


def test_no_more_keys_are_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond it are not published, and make room for nothing when they go."""
    monkeypatch.setattr(watching, "TOLD_MAX", 3)
    published = PublishedKeys([0, 1])
    first, second = (0, Tier.MEMORY), (1, Tier.DISK)
    assert published.came(first, [b"a", b"b"]) == [b"a", b"b"]
    assert published.came(second, [b"c", b"d"]) == [b"c"]
    assert published.came(first, [b"e"]) == []
    assert published.went(second, [b"d"]) == []
    assert published.came(first, [b"e"]) == []
    assert published.went(first, [b"a"]) == [b"a"]
    assert published.came(first, [b"a", b"e"]) == [b"a"]


@pytest.mark.parametrize("where", ["events", "snapshot_page"])
def test_a_bug_is_no_end(daemon: Daemon, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """All is told anew after it."""
    line = lines(daemon)
    rank = line.rank()
    rank.store_keys(keys[:4])
    call, bugs = getattr(Client, where), [ZeroDivisionError("a bug")]

    def fail_once(*arguments: Any, **options: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return call(*arguments, **options)

    monkeypatch.setattr(Client, where, fail_once)
    router = KeyListener(line.event_thread())
    until(lambda: not bugs, "it meets the bug")
    rank.store_keys(keys)
    until(lambda: router.believes(0, keys), "it goes on")


@pytest.mark.slow
def test_a_daemon_that_dies(start_daemon: Start, lines: Make, keys: Keys, tmp_path: Path) -> None:
    """What it had is gone; what it has on disk is there again with it."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 << 20)))
    line = lines(daemon)
    line.rank().store_keys(keys, 1)
    router = KeyListener(line.event_thread())
    until(lambda: router.believes(1, keys, list(TIERS)), "it is told, in both tiers")
    idle(daemon)
    daemon.leave_guests()
    daemon.kill()
    until(lambda: router.believes(1, keys[:0]), "the death is told")
    daemon.start()
    line.rank()  # who registers the groups
    until(lambda: router.believes(1, keys, [Tier.DISK]), "what is on disk is told")


def test_after_a_reset_only_the_engines_own(daemon: Daemon, lines: Make, keys: Keys) -> None:
    """What others store has no name that this engine has; what it stores itself under its old names it can't load."""
    line = lines(daemon)
    rank = line.rank()
    rank.store_keys(keys[:4])
    router = KeyListener(line.event_thread())
    until(lambda: router.believes(0, keys[:4]), "it is told")
    router.event_thread.renew(7)
    until(lambda: router.generation(7), "no news of the old names come any more")
    until(lambda: router.believes(0, keys[:0]), "all of it is told as removed")
    router.event_thread.expect({0: [key.tobytes() for key in keys[8:]]})
    rank.store_keys(keys)
    until(lambda: router.believes(0, keys[8:]), "the engine's own are told")
    throughout(lambda: router.believes(0, keys[8:]), "no others are told", 0.2)


def test_nobody_listens_for_a_while(daemon: Daemon, lines: Make, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """News are bounded; all of it is delivered in the end."""
    monkeypatch.setattr(watching, "_NEWS_MAX", 4)
    monkeypatch.setattr(watching, "_NEWS_KEYS", 8)
    line = lines(daemon)
    rank = line.rank()
    router = KeyListener(line.event_thread())
    keys = new_keys(np.random.default_rng(seed), 256)
    rank.store_keys(keys)
    until(lambda: len(router.event_thread._news) >= 4, "news wait")
    rank.client.clear()
    rank.store_keys(keys[:100])
    throughout(lambda: len(router.event_thread._news) <= 4, "news are bounded", 0.3)
    assert len(router.listen(most=8)) == 8
    until(lambda: router.believes(0, keys[:100]), "all is told")
