"""Two hosts with an engine and a daemon each, and a store that they share: the first one computes prompts, the second
one answers them. Whatever dies, no request fails, and what is answered is what would have been.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.lab import Lab, why_not_isolated
from scripts.harness.stores import remote_python, why_no_mooncake, why_no_valkey
from tests.remote.cluster import make_cluster
from tests.remote.site import Site, remote
from tests.vllm.conftest import TRAITS, Reference, StartDaemon
from tests.vllm.engine import Prompts, Request, VllmEngine, by_chunks, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

HERE, THERE = range(2)
STORE_BYTES = 256 << 20
COUNT = 4
"""Prompts at a time."""
PREFILL = {"do_remote_decode": True}
DECODE = {"do_remote_prefill": True}
AS_LATE = {"linear": {"prefix_match_unit": 4}}
"""As in `test_handoff`."""
KILLED_WITHIN_S = 0.6
SHARED_S = 120.0


class Pair:
    """The two hosts, as long as `stack`."""

    def __init__(self, kind: str, model: Path, site: Site, folder: Path, stack: ExitStack) -> None:
        self.site = site
        self.daemons = [site.daemon(at, f"memory.pool_file={folder / f'pool-{at}'}") for at in (HERE, THERE)]
        self.engines = [
            stack.enter_context(
                VllmEngine(
                    model,
                    folder / f"engine-{at}.log",
                    connector=by_chunks(daemon.socket, 1),
                    python=str(site.cluster.lab.hosts[at].python(site.folder)),
                    **TRAITS[kind],
                )
            )
            for at, daemon in enumerate(self.daemons)
        ]
        for daemon in self.daemons:
            until(partial(_knows_era, daemon), "an era is known")

    def compute(self, asked: Prompts, **given: Any) -> list[Request]:
        """Computes prompts on the first host; the store has all of it then."""
        answer = self.engines[HERE].generate(asked, max_tokens=1, **given)
        settle(self.daemons[HERE], self.engines[HERE])
        until(lambda: _is_pushed(self.daemons[HERE]), "the store has all of it", 60.0)
        return answer

    def begin_both(self, computed: Prompts, answered: Prompts) -> None:
        """The first host computes some, while the second one answers others with what the first one computed."""
        self.engines[THERE].reset(connector=False)
        self.engines[HERE].begin(computed, 1, params=PREFILL)
        self.engines[THERE].begin(answered, params=DECODE)

    def shares(self, asked: Prompts) -> bool:
        """Whether what the first host computes now is loaded on the second one."""
        self.engines[HERE].generate(asked, max_tokens=1)
        settle(self.daemons[HERE], self.engines[HERE])
        time.sleep(1.0)
        return cached(self.engines[THERE].generate_anew(asked)) == [480] * len(asked)

    def kill(self, victim: str) -> None:
        """`victim`: "store", "master", or "daemon" or "agent" and the number of a host."""
        what, _, number = victim.partition(" ")
        if what == "daemon":
            self.daemons[int(number)].kill()
        elif what == "agent":
            if pid := remote(self.daemons[int(number)])["agent"]["pid"]:
                os.kill(pid, signal.SIGKILL)
        else:
            self._process(what).kill()

    def revive(self, victim: str) -> None:
        """Revives a daemon after `kill`. A daemon starts its agent by itself."""
        what, _, number = victim.partition(" ")
        if what == "daemon":
            self.daemons[int(number)].start()
        elif what != "agent":
            self._process(what).start()

    def _process(self, what: str) -> Any:
        store, *master = self.site.cluster.stores
        return store if what == "store" else master[0]


def _knows_era(daemon: Daemon) -> bool:
    return any(remote(daemon)["eras"].values())


def _is_pushed(daemon: Daemon) -> bool:
    status = daemon.status()
    return not status["cache"]["unsealed"] and int(status["remote"]["pushed"]["keys"]) >= int(status["cache"]["keys"])


@pytest.fixture
def make_pair(
    start_daemon: StartDaemon, model: Callable[[str], Path], tmp_path: Path
) -> Iterator[Callable[[str, str], Pair]]:
    """`make_pair(kind of model, kind of store)`: on separate hosts where this user may make them, else on this one."""
    python = remote_python()
    with ExitStack() as stack:

        def make(kind: str, store: str) -> Pair:
            if reason := why_no_mooncake(python) if store == "mooncake" else why_no_valkey():
                pytest.skip(reason)
            lab = stack.enter_context(Lab(tmp_path, 3, isolated=not why_not_isolated()))
            cluster = make_cluster(store, lab, tmp_path, stack, memory_bytes=STORE_BYTES)
            return Pair(kind, model(kind), Site(cluster, start_daemon, tmp_path), tmp_path, stack)

        yield make


@pytest.mark.parametrize(("kind", "store"), [("dense", "mooncake"), ("hybrid", "valkey"), ("linear", "mooncake")])
def test_prefill_here_and_decode_there(
    make_pair: Callable[[str, str], Pair], reference: Reference, kind: str, store: str
) -> None:
    """480 of 501 tokens are loaded, and 500 of prompts that are handed over."""
    asked, others = prompts(2, COUNT), prompts(3, COUNT)
    whole = reference(kind, asked)
    handed = reference(kind, others, **AS_LATE.get(kind, {}))
    pair = make_pair(kind, store)
    pair.compute(asked)
    answer = pair.engines[THERE].generate(asked)
    assert cached(answer) == [480] * COUNT
    assert tokens(answer) == whole
    pair.compute(others, params=PREFILL)
    answer = pair.engines[THERE].generate(others, params=DECODE)
    assert cached(answer) == [500] * COUNT
    assert tokens(answer) == handed
    assert remote(pair.daemons[THERE])["corrupt"] == dict.fromkeys(remote(pair.daemons[THERE])["corrupt"], 0)


@pytest.mark.parametrize(("kind", "store"), [("dense", "valkey"), ("hybrid", "mooncake")])
def test_whatever_dies(
    make_pair: Callable[[str, str], Pair], reference: Reference, rng: random.Random, kind: str, store: str
) -> None:
    """Each of the processes once, in random order, at a random moment in which both engines have requests."""
    victims = ["store", *(["master"] if store == "mooncake" else []), "daemon 0", "daemon 1", "agent 0", "agent 1"]
    rng.shuffle(victims)
    rounds = [prompts(rng.randrange(1 << 30), COUNT) for _ in range(len(victims) + 1)]
    expected = [reference(kind, those) for those in rounds]
    pair = make_pair(kind, store)
    pair.compute(rounds[0], params=PREFILL)
    if not why_not_isolated():
        pair.site.cluster.lab.slow(pair.site.cluster.lab.hosts[-1], "300mbit")  # so that there is a moment to die in
    for at, victim in enumerate(victims):
        pair.begin_both(rounds[at + 1], rounds[at])
        time.sleep(rng.uniform(0, KILLED_WITHIN_S))
        pair.kill(victim)
        computed, answered = (engine.finish() for engine in pair.engines)
        assert [those[0] for those in tokens(computed)] == [those[0] for those in expected[at + 1]], victim
        assert tokens(answered) == expected[at], victim
        pair.revive(victim)
        settle(pair.daemons[HERE], pair.engines[HERE])
    until(lambda: pair.shares(prompts(rng.randrange(1 << 30), 2)), "they share again", SHARED_S, every_s=1.0)
    for daemon in pair.daemons:
        assert daemon.verify(payloads=True) == ()
