"""A scheduler's line to a real daemon: answers, what they pin, and what becomes of them when the daemon goes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.cache.memory.lease import LEASE_KEYS
from kvoffloadd.client import Client, Found, KeyState, KvCache
from kvoffloadd.errors import ConnectionLostError
from kvoffloadd.integrations.common.claims import Directive
from kvoffloadd.integrations.common.link import DaemonLink
from kvoffloadd.integrations.vllm.claims import RequestKeys
from kvoffloadd.integrations.vllm.keys import PLAIN
from kvoffloadd.integrations.vllm.lookup_thread import LookupThread, PinRequest, UsedKeys
from kvoffloadd.model import Tier
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import disk_settings, only_on_disk, store_on_disk
from tests.e2e.rank import Keys, Rank, new_keys
from tests.e2e.sharedstore import SharedStore
from tests.e2e.unrecordable import WAYS, Unrecordable, epoch, requests
from tests.integrations.vllm.conftest import Lines

Start = Callable[..., Daemon]
Make = Callable[[Daemon], Lines]
HIT, MISS, PENDING = KeyState.HIT, KeyState.MISS, KeyState.PENDING


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 12)


def pin_request(keys: Keys, other: Keys | None = None) -> PinRequest:
    """Makes a request for both groups, if there are keys for the other."""
    groups = {0: [key.tobytes() for key in keys]}
    return PinRequest("r", groups if other is None else {**groups, 1: [key.tobytes() for key in other]})


def connected(lookup_thread: LookupThread) -> LookupThread:
    until(lambda: lookup_thread.connected, "the lookup_thread is connected")
    return lookup_thread


def answered(lookup_thread: LookupThread, asked: PinRequest, times: int = 1) -> list[dict[int, list[int]]]:
    """Each answer as it came."""
    found: list[dict[int, list[int]]] = []

    def enough() -> bool:
        for one in lookup_thread.answers():
            assert one is asked
            found.append({group: list(states) for group, states in one.states.items()})
        return len(found) >= times and not asked.promoting

    until(enough, "it is answered")
    return found


def leased(daemon: Daemon) -> int:
    return int(daemon.status()["leases"]["keys"])


def store(rank: Rank, keys: Keys, group: int = 0, at_once: int = 64) -> None:
    for at in range(0, len(keys), at_once):
        rank.store_keys(keys[at : at + at_once], group)


def test_what_hits_is_pinned_until_it_is_forgotten(daemon: Daemon, lines: Make, keys: Keys) -> None:
    line = lines(daemon)
    store(line.rank(), keys[:8])
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys)
    assert asked.holds == 12
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [HIT] * 8 + [MISS] * 4}]
    assert (asked.holds, leased(daemon)) == (8, 8)
    lookup_thread.forget(asked)
    until(lambda: leased(daemon) == 0, "it is released")


def test_groups_begin_where_their_first_keys_are(daemon: Daemon, lines: Make, keys: Keys) -> None:
    """The engine has what stands before."""
    line = lines(daemon)
    rank = line.rank()
    store(rank, keys[:4])
    store(rank, keys[2:4], group=1)
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys[:4], keys[2:4])
    asked.ends |= {0: 16, 1: 45}  # the last one of three keys of 16 tokens need not be whole
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [HIT] * 4, 1: [HIT] * 2}]
    ((_, found),) = asked.found
    assert found.boundaries.tolist() == [64, 48]


@pytest.mark.slow
def test_all_that_a_prompt_needs_comes_from_another_host(
    start_daemon: Start, lines: Make, keys: Keys, tmp_path: Path
) -> None:
    """It needs all keys of one group, and of the other one those at its end."""
    shared = SharedStore(tmp_path)
    here, there = (start_daemon(*shared.settings()) for _ in range(2))
    rank, line = lines(here).rank(), lines(there)
    line.rank()
    for host in (here, there):
        until(lambda: any(host.status()["remote"]["eras"].values()), "it may use the store")  # noqa: B023  at once
    store(rank, keys[:8])
    store(rank, keys[6:8], group=1)
    until(lambda: here.status()["remote"]["pushed"]["keys"] == 10, "the store has all of it")
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys[:8], keys[6:8])
    asked.ends |= {0: 16, 1: 7 * 16}
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked)[-1] == {0: [HIT] * 8, 1: [HIT] * 2}


def test_what_is_forgotten_at_once_is_not_pinned(daemon: Daemon, lines: Make, keys: Keys) -> None:
    line = lines(daemon)
    store(line.rank(), keys)
    lookup_thread = connected(line.lookup_thread())
    for _ in range(20):
        asked = pin_request(keys)
        lookup_thread.ask(asked)
        lookup_thread.forget(asked)
    last = pin_request(keys[:1])
    lookup_thread.ask(last)
    until(lambda: list(lookup_thread.answers())[-1:] == [last], "the last one is answered")
    assert leased(daemon) == 1


def test_what_is_forgotten_before_its_turn_is_not_asked_for(
    daemon: Daemon, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup_thread = connected(lines(daemon).lookup_thread())
    pin, goes_on = Client.pin, threading.Event()
    pins: list[Any] = []

    def wait() -> None:
        assert goes_on.wait(HANG_S)

    def counted(client: Client, *arguments: Any) -> Found:
        pins.append(arguments)
        return pin(client, *arguments)

    monkeypatch.setattr(Client, "pin", counted)
    lookup_thread._commands.put(wait)
    asked, last = pin_request(keys), pin_request(keys[:1])
    lookup_thread.ask(asked)
    lookup_thread.forget(asked)
    lookup_thread.ask(last)
    goes_on.set()
    assert answered(lookup_thread, last) == [{0: [MISS]}]
    assert len(pins) == 1


def used(keys: Keys, other: Keys, ends: dict[int, int]) -> UsedKeys:
    """Keys of both groups, as vLLM names them; `ends`: where the first one of each ends."""
    named = [key.tobytes() + group.to_bytes(4, "big") for group, those in enumerate((keys, other)) for key in those]
    firsts = {named[0]: ends.get(0), named[len(keys)]: ends.get(1)}
    return UsedKeys(named, PLAIN, firsts.get)


def touched(daemon: Daemon) -> int:
    return int(daemon.status()["cache"]["keys_touched"])


@pytest.mark.slow
def test_what_the_engine_has_itself_is_told(start_daemon: Start, lines: Make, keys: Keys) -> None:
    """It goes in requests that fit, when there is nothing to look up; what the daemon does not have does not count."""
    daemon = start_daemon("limits.keys_per_request=5")
    line = lines(daemon)
    rank = line.rank()
    store(rank, keys[:8], at_once=5)
    store(rank, keys[6:8], group=1)
    lookup_thread = connected(line.lookup_thread())
    prompts = [used(keys, keys[6:8], {0: 16, 1: 7 * 16}) for _ in range(3)]
    lookup_thread.touch(prompts)
    asked = pin_request(keys[:2])
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [HIT] * 2}]
    until(lambda: touched(daemon) == 3 * 10, "the daemon knows")


@pytest.mark.slow
def test_keys_are_used_where_they_stand_in_their_prompt(
    start_daemon: Start, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup places them in the same way."""
    line = lines(start_daemon())
    line.rank()
    lookup_thread = connected(line.lookup_thread())
    touches: list[Any] = []
    monkeypatch.setattr(lookup_thread._link.client, "touch", lambda _, first: touches.append(first))
    lookup_thread.touch([used(keys[:3], keys[3:5], {0: 16, 1: 45}), used(keys[:1], keys[:1], {})])
    until(lambda: len(touches) == 2, "both were told")
    assert touches == [{0: 0, 1: 2}, {0: 0, 1: 0}]


def ended(keys: Keys, other: Keys, *directives: Directive) -> RequestKeys:
    """A request that has these keys of both groups, all in its prompt."""
    named = [key.tobytes() + group.to_bytes(4, "big") for group, those in enumerate((keys, other)) for key in those]
    ends = [16 * (at + 1) for those in (keys, other) for at in range(len(those))]
    return RequestKeys(directives, named, ends, len(named), PLAIN)


def test_what_a_request_wants_retained_is_claimed(daemon: Daemon, lines: Make, keys: Keys) -> None:
    """Both groups, and all that each directive says of it."""
    line = lines(daemon)
    rank = line.rank()
    lookup_thread = connected(line.lookup_thread())
    asked = [Directive(600.0, 80, "agent 7", 32, 96), Directive(60.0, start=160)]
    lookup_thread.retain(ended(keys, keys[:4], *asked))
    until(lambda: len(rank.client.claims()) == 2, "both are claimed")
    later, sooner = rank.client.claims()
    assert (sooner.name, sooner.priority, sooner.keys, sooner.tokens) == ("agent 7", 80, 4 + 2, 96)
    assert (later.name, later.priority, later.keys, later.tokens) == ("", 50, 2, 192)
    assert 500 < sooner.left_s <= 600
    assert 0 < later.left_s <= 60


@pytest.mark.slow
def test_more_keys_than_a_claim_may_have_are_several_claims(start_daemon: Start, lines: Make, keys: Keys) -> None:
    """The beginning of the prompt is claimed last: of one priority, the daemon gives up the oldest claims first."""
    line = lines(start_daemon("limits.keys_per_request=5"))
    rank = line.rank()
    lookup_thread = connected(line.lookup_thread())
    for _ in range(2):
        lookup_thread.retain(ended(keys, keys[:1], Directive(600.0, name="agent 7")))
    lookup_thread.retain(ended(keys[:1], keys[:0], Directive(600.0, name="last")))
    until(lambda: [claim.name for claim in rank.client.claims()][-1:] == ["last"], "all is claimed")
    found = [(claim.name, claim.tokens) for claim in rank.client.claims()]
    assert found == [("agent 7 #3", 192), ("agent 7 #2", 160), ("agent 7 #1", 80), ("last", 16)]


@pytest.mark.slow
def test_a_refused_claim_refuses_no_other(start_daemon: Start, lines: Make, keys: Keys) -> None:
    line = lines(start_daemon())
    rank = line.rank()
    lookup_thread = connected(line.lookup_thread())
    lookup_thread.retain(ended(np.concatenate([keys[:1], keys[1:2], keys[1:2]]), keys[:0], Directive(600.0)))
    lookup_thread.retain(ended(keys, keys[:0], Directive(600.0, name="right")))
    until(lambda: [claim.name for claim in rank.client.claims()] == ["right"], "the other one is claimed")
    assert lookup_thread.connected
    assert lookup_thread.lost_claims == 1


def test_a_daemon_that_knows_no_claims_gets_none(
    daemon: Daemon, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm.kvoffloadd"), "propagate", True)
    line = lines(daemon)
    rank = line.rank()
    lookup_thread = connected(line.lookup_thread())
    connector = lookup_thread._link.client._core._connector
    known = connector.features
    connector.features = known - {"retain"}
    for _ in range(2):
        lookup_thread.retain(ended(keys, keys, Directive(600.0)))
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    answered(lookup_thread, asked)
    assert not rank.client.claims()
    assert lookup_thread.connected
    assert caplog.text.count("the daemon is older and knows no claims") == 1
    assert lookup_thread.lost_claims == 2
    connector.features = known
    lookup_thread.retain(ended(keys, keys, Directive(600.0)))
    until(lambda: len(rank.client.claims()) == 1, "a later one does")
    assert lookup_thread.lost_claims == 2


@pytest.mark.slow
def test_hints_that_nobody_takes_are_lost(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon()
    line = lines(daemon)
    line.rank()
    lookup_thread = connected(line.lookup_thread())
    daemon.kill()
    until(lambda: not lookup_thread.connected, "it knows")
    lookup_thread.touch([used(keys, keys, {})])
    lookup_thread.retain(ended(keys, keys, Directive(600.0)))
    until(lambda: not lookup_thread._used, "they are forgotten")
    daemon.start()
    until(lambda: lookup_thread.connected, "it is connected again")
    assert touched(daemon) == 0
    assert daemon.status()["retention"]["claims_made"] == 0
    assert lookup_thread.lost_claims == 1


@pytest.mark.slow
def test_more_keys_than_a_request_may_have(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon("limits.keys_per_request=5")
    line = lines(daemon)
    rank = line.rank()
    store(rank, keys[:11], at_once=5)
    store(rank, keys[3:], group=1, at_once=5)
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys, keys)
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [HIT] * 11 + [MISS], 1: [MISS] * 3 + [HIT] * 9}]
    assert len(asked.leases) == 5
    assert (asked.holds, leased(daemon)) == (20, 20)
    lookup_thread.forget(asked)
    until(lambda: leased(daemon) == 0, "all of it is released")


@pytest.mark.slow
def test_a_refused_piece_leaves_nothing_pinned(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon("limits.keys_per_request=5", f"limits.leases={LEASE_KEYS + 8}")
    line = lines(daemon)
    store(line.rank(), keys, at_once=5)
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [MISS] * 12}]
    until(lambda: leased(daemon) == 0, "nothing is pinned")
    assert lookup_thread.connected
    again = pin_request(keys[:5])
    lookup_thread.ask(again)
    assert answered(lookup_thread, again) == [{0: [HIT] * 5}]


@pytest.mark.slow
def test_keys_from_disk(start_daemon: Start, lines: Make, tmp_path: Path, seed: int) -> None:
    """Answered twice, in several pieces, and pinned in the end."""
    settings = disk_settings((tmp_path / "disk", 64 << 20))
    daemon = start_daemon(*settings, "limits.keys_per_request=64", memory="1MiB")
    line = lines(daemon)
    rank = line.rank()
    keys = new_keys(np.random.default_rng(seed), 640)
    store_on_disk(daemon, rank, keys)
    away, more = np.split(only_on_disk(rank, keys, 64)[:170], [150])
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(away)
    lookup_thread.ask(asked)
    first, last = answered(lookup_thread, asked, times=2)
    assert set(first[0]) == {PENDING}
    assert last == {0: [HIT] * 150}
    assert (len(asked.leases), asked.holds, leased(daemon)) == (3, 150, 150)
    assert asked.tiers == {0: bytes([Tier.DISK] * 150)}
    both = pin_request(np.concatenate([away[:64], more]))
    lookup_thread.ask(both)
    assert answered(lookup_thread, both, times=2)[-1] == {0: [HIT] * 84}
    assert both.tiers == {0: bytes([Tier.MEMORY] * 64 + [Tier.DISK] * 20)}, "of the first piece all is in memory by now"
    lookup_thread.forget(asked)
    lookup_thread.forget(both)
    until(lambda: leased(daemon) == 0, "all of it is released")


@pytest.mark.slow
def test_keys_from_disk_that_have_come_before_the_answer_is_read(
    start_daemon: Start, lines: Make, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may be as fast as the socket. They are not asked for once more, and it is known that the disk had them."""
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 << 20)), memory="1MiB")
    line = lines(daemon)
    rank = line.rank()
    keys = new_keys(np.random.default_rng(seed), 640)
    store_on_disk(daemon, rank, keys)
    lookup_thread = connected(line.lookup_thread())
    pin = Client.pin

    def late(client: Client, *arguments: Any) -> Found:
        found = pin(client, *arguments)

        def has_come() -> bool:
            client.ping()
            return found.ready

        until(has_come, "they have come")
        return found

    monkeypatch.setattr(Client, "pin", late)
    asked = pin_request(only_on_disk(rank, keys)[:20])
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked, times=2)[-1] == {0: [HIT] * 20}
    assert asked.tiers == {0: bytes([Tier.DISK] * 20)}


@pytest.mark.slow
def test_keys_that_have_come_do_not_prove_that_the_daemon_answers(keys: Keys) -> None:
    """What was received before it died is answered, and the link stays lost."""
    pin = pin_request(keys[:2])
    found = SimpleNamespace(ready=True, states=[np.array([HIT, HIT], np.uint8)], tiers=None, promotion=7)
    pin.found = [({0: slice(0, 2)}, cast(Found, found))]
    pin.promoting = True
    client: Any = SimpleNamespace(wait_ready=lambda found, _: found, close=lambda *_, **__: None)
    lookup_thread = LookupThread.__new__(LookupThread)
    lookup_thread._link = DaemonLink(client, KvCache((), []), logging.getLogger(__name__), lost="no cache")
    lookup_thread._promoting, lookup_thread._answers = [pin], deque()
    lookup_thread._link.lost(ConnectionLostError("it died"))
    lookup_thread._look_for_promotions()
    assert [list(one.states[0]) for one in lookup_thread._answers] == [[HIT, HIT]]
    assert not lookup_thread._link.connected
    assert lookup_thread._link.retry_in_s > 0


def test_forgotten_on_its_way_from_disk(start_daemon: Start, lines: Make, tmp_path: Path, seed: int) -> None:
    daemon = start_daemon(*disk_settings((tmp_path / "disk", 64 << 20)), memory="1MiB")
    line = lines(daemon)
    rank = line.rank()
    keys = new_keys(np.random.default_rng(seed), 640)
    store_on_disk(daemon, rank, keys)
    lookup_thread = connected(line.lookup_thread())
    for at in range(5):
        asked = pin_request(only_on_disk(rank, keys)[at * 20 : at * 20 + 20])
        lookup_thread.ask(asked)
        until(lambda: list(lookup_thread.answers()), "it is answered")
        lookup_thread.forget(asked)
    until(lambda: leased(daemon) == 0, "all of it is released")


@pytest.mark.slow
def test_a_daemon_that_dies_and_comes_back_while_nothing_is_asked(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon()
    line = lines(daemon)
    store(line.rank(), keys)
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    answered(lookup_thread, asked)
    daemon.leave_guests()
    daemon.kill()
    until(lambda: not lookup_thread.connected, "the death is known")
    while_away = pin_request(keys)
    lookup_thread.ask(while_away)
    assert answered(lookup_thread, while_away) == [{0: [MISS] * 12}]
    lookup_thread.forget(while_away)
    daemon.start()
    until(lambda: lookup_thread.connected, "it is connected again")
    lookup_thread.forget(asked)  # a lease of the daemon that is dead, whose number its successor may have given anew
    store(line.rank(), keys[:6])
    anew = pin_request(keys)
    lookup_thread.ask(anew)
    assert answered(lookup_thread, anew) == [{0: [HIT] * 6 + [MISS] * 6}]
    assert leased(daemon) == 6


@pytest.mark.slow
def test_started_before_the_daemon(start_daemon: Start, lines: Make, keys: Keys) -> None:
    daemon = start_daemon()
    daemon.kill()
    lookup_thread = lines(daemon).lookup_thread()
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [MISS] * 12}]
    daemon.start()
    connected(lookup_thread)


def test_cleared(daemon: Daemon, lines: Make, keys: Keys) -> None:
    line = lines(daemon)
    store(line.rank(), keys)
    lookup_thread = connected(line.lookup_thread())
    lookup_thread.clear(5.0)
    assert lookup_thread.connected  # what is computed from now on is stored
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [MISS] * 12}]


def test_cleared_while_nobody_answers(daemon: Daemon, lines: Make, keys: Keys) -> None:
    """The scheduler waits no longer than its limit, and nothing hits before the daemon has cleared."""
    line = lines(daemon)
    store(line.rank(), keys)
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys)
    daemon.signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        lookup_thread.clear(0.2)
        assert 0.2 <= time.monotonic() - begun < HANG_S  # the daemon is stopped until after that
        assert not lookup_thread.connected
        lookup_thread.ask(asked)
    finally:
        daemon.signal(signal.SIGCONT)
    assert answered(lookup_thread, asked) == [{0: [MISS] * 12}]
    connected(lookup_thread)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_clear_that_can_not_be_recorded_is_one_clear(
    start_daemon: Start, lines: Make, keys: Keys, tmp_path: Path, way: str
) -> None:
    """The engine goes on at once, and what others store after it stays."""
    place = Unrecordable(way, tmp_path)
    daemon = start_daemon(*place.settings(), faults=place.faults)
    line = lines(daemon)
    rank = line.rank()
    store(rank, keys)
    lookup_thread = connected(line.lookup_thread())
    place.spoil()
    lookup_thread.clear(HANG_S)
    assert lookup_thread.connected
    store(rank, keys)
    cleared, asked = epoch(daemon), requests(daemon)
    until(lambda: requests(daemon) >= asked + 5, "the daemon was weighed a few times")
    pin = pin_request(keys)
    lookup_thread.ask(pin)
    assert answered(lookup_thread, pin) == [{0: [HIT] * 12}]
    assert daemon.status()["clears"] == {"unrecorded": 1, "places": [place.place]}
    place.mend()
    until(lambda: daemon.status()["clears"]["unrecorded"] == 0, "the daemon has recorded it")
    assert epoch(daemon) == cleared


@pytest.mark.slow
def test_cleared_before_there_is_a_daemon(start_daemon: Start, lines: Make, keys: Keys) -> None:
    """The namespace is empty as soon as there is one, and what the engine has is known there."""
    daemon = start_daemon()
    daemon.kill()
    lookup_thread = lines(daemon).lookup_thread()
    lookup_thread.clear(5.0)
    daemon.start()
    connected(lookup_thread)
    store(lines(daemon).rank(), keys)
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [HIT] * 12}]


def test_a_bug_is_a_miss(daemon: Daemon, lines: Make, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on without a cache, and with it when the bug was a passing one."""
    line = lines(daemon)
    store(line.rank(), keys)
    lookup_thread = connected(line.lookup_thread())
    pin, bugs = lookup_thread._link.client.pin, [ZeroDivisionError("a bug")]

    def pin_or_fail(*arguments: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return pin(*arguments)

    monkeypatch.setattr(lookup_thread._link.client, "pin", pin_or_fail)
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    assert answered(lookup_thread, asked) == [{0: [MISS] * 12}]

    def hits() -> bool:
        again = pin_request(keys)
        lookup_thread.ask(again)
        return answered(lookup_thread, again) == [{0: [HIT] * 12}]

    until(hits, "it is asked again")


def test_close_ends_the_session_and_its_leases(daemon: Daemon, lines: Make, keys: Keys) -> None:
    line = lines(daemon)
    store(line.rank(), keys)
    lookup_thread = connected(line.lookup_thread())
    asked = pin_request(keys)
    lookup_thread.ask(asked)
    answered(lookup_thread, asked)
    lookup_thread.close(5.0)
    until(lambda: leased(daemon) == 0, "the leases ended")
    assert [session["role"] for session in daemon.sessions()] == ["worker"]


@pytest.mark.slow
def test_how_many_keys_fill_half_of_the_memory(start_daemon: Start, lines: Make, keys: Keys) -> None:
    """This is known as soon as there are some."""
    daemon = start_daemon(memory="1MiB")
    line = lines(daemon)
    lookup_thread = connected(line.lookup_thread())
    assert lookup_thread.half_tier_keys > 1 << 60
    store(line.rank(), keys)
    until(lambda: lookup_thread.half_tier_keys == 128, "256 pages have half as many slots")
