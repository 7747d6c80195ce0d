"""What an engine serves from its own cache counts in the daemon as used, with vLLM's own scheduler and a real daemon.

Not collected: `test_contract` runs it with each release's Python.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import RequestStatus

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.sharedstore import SharedStore
from tests.vllm.engine import by_connector
from tests.vllm.modelless import BLOCK, WINDOW, Modelless, is_connected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

StartDaemon = Callable[..., Daemon]
StartEngine = Callable[..., Modelless]

KINDS = ("dense", "hybrid")
HEAD, TAIL, USERS = 4, 3, 60
"""Blocks of a system prompt, and of what each of its users adds to it."""

THIRD = "512KiB"
"""Holds a third of all that the users have: 64 keys of 8 KiB."""


@pytest.fixture
def engine(start_daemon: StartDaemon) -> Iterator[StartEngine]:
    """`engine(kind, *settings, memory=...)` -> one whose lookups reach its daemon."""
    made: list[Modelless] = []

    def start(kind: str = "dense", *settings: str, memory: str = "64MiB") -> Modelless:
        daemon = start_daemon("memory.slab_bytes=64KiB", *settings, memory=memory)
        made.append(Modelless(os.environ["KVOFFLOADD_TINY_MODEL"], kind, daemon, by_connector(daemon.socket, BLOCK)))
        until(lambda: made[-1].generate([[3]]) and is_connected(made[-1]), "its lookups reach the daemon")
        return made[-1]

    yield start
    for one in made:
        one.close()


def words(blocks: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 500) for _ in range(blocks * BLOCK)]


def touched(one: Modelless) -> int:
    """Returns the number of keys that it reported to the daemon as used: it does so when it has nothing else to ask,
    but before it ends a `keep`.
    """
    return int(one.daemon.status()["cache"]["keys_touched"])


def needed(one: Modelless, blocks: int) -> int:
    """Returns the number of keys that a load of `blocks` blocks needs: of a window those at its end."""
    return sum(blocks if reach is None else min(blocks, WINDOW // BLOCK) for reach in one._reach)


@pytest.mark.parametrize("kind", KINDS)
def test_every_user_of_a_system_prompt_gets_it(engine: StartEngine, kind: str) -> None:
    """One after the other, and again once the engine has forgotten them. The daemon's memory holds a third."""
    one = engine(kind, memory=THIRD)
    head = words(HEAD, 1)
    assert one.generate([[*head, 7]]) == [0]
    for user in range(USERS):
        assert one.generate([head + words(TAIL, 100 + user)]) == [HEAD * BLOCK]
        until(lambda: touched(one) >= (user + 1) * needed(one, HEAD), "the daemon knows")  # noqa: B023  at once
    one.forget()
    one.scribble()
    cached = []
    for user in range(USERS):
        cached += one.generate([head + words(TAIL, 100 + user)])
        one.forget()
        one.scribble()
    assert min(cached) >= HEAD * BLOCK


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_counts_once(engine: StartEngine, kind: str) -> None:
    """However often it is looked at, also when it is preempted and finds what it has computed itself."""
    one = engine(kind)
    prompt = words(HEAD, 1)
    one.generate([[*prompt, 7]])
    assert touched(one) == 0
    (name,) = one.add([prompt + words(TAIL, 2)], max_tokens=40)
    while one.scheduler.requests[name].num_output_tokens < 5:
        one.step()
    until(lambda: touched(one) == needed(one, HEAD), "the daemon knows")
    request = one.scheduler.requests[name]
    one.scheduler.running.remove(request)
    one.scheduler._preempt_request(request, time.monotonic())
    assert request.status is RequestStatus.PREEMPTED
    one.generate([])
    one.generate([[5] * 40])  # nothing of it is there
    one.generate([[*prompt, 9]])
    until(lambda: touched(one) == 2 * needed(one, HEAD), "the daemon knows of the next request")
    assert touched(one) == 2 * needed(one, HEAD)


def test_one_prefix_of_many_requests_is_told_once_a_step(engine: StartEngine) -> None:
    """The daemon would count it once in any case."""
    one = engine()
    prompt = [*words(HEAD, 1), 7]
    one.generate([prompt])
    (name,) = one.add([prompt])
    one.step()
    scheduler = one.scheduler.connector.scheduler
    keys = list(scheduler._req_status[name].group_states[0].offload_keys)
    for other in ("a", "b", "c"):
        scheduler.manager.touch(keys, ReqContext(other))
    one.generate([])
    until(lambda: touched(one) >= 2 * HEAD, "the daemon knows")
    one.generate([prompt])
    until(lambda: touched(one) >= 3 * HEAD, "and of what came later")
    assert touched(one) == 3 * HEAD


def test_what_is_of_another_salt_or_before_a_reset_is_not_touched(engine: StartEngine) -> None:
    one = engine()
    head = words(HEAD, 1)
    one.generate([head])
    assert one.generate([[*head, 7]], salt="other") == [0]
    one.scheduler.reset_prefix_cache(reset_connector=True)
    assert one.generate([[*head, 7]]) == [0]
    assert touched(one) == 0
    assert one.generate([[*head, 8]]) == [HEAD * BLOCK]
    until(lambda: touched(one) == HEAD, "the daemon knows what was stored anew")


def test_what_the_engine_uses_twice_is_pushed(engine: StartEngine, tmp_path: Path) -> None:
    """This is the default of `remote.push`: what one request alone has used stays here."""
    store = SharedStore(tmp_path)
    one = engine("dense", *store.settings("remote.push=second-use"))
    until(lambda: any(one.daemon.status()["remote"]["eras"].values()), "it may use the store")
    head = words(HEAD, 1)
    for seed in (2, 3):
        one.generate([head + words(TAIL, seed)])
    until(lambda: one.daemon.status()["remote"]["pushed"]["keys"] == HEAD, "the store has the head")
    assert len(store.objects()) == HEAD
