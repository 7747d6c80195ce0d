"""vLLM's own scheduler twice, with a real daemon and no model: requests at random, some of them aborted or preempted.

Not collected: `test_random_steps` runs it with each release's Python. Every token that a model would read is looked at.
The seed determines what is asked and done in each round; how many steps a round takes is a matter of time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvoffloadd.integrations.vllm.worker import KVOffloaddWorker
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.vllm.damage import damage
from tests.vllm.engine import by_connector
from tests.vllm.modelless import BLOCK, Modelless

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

StartDaemon = Callable[..., Daemon]

ROUNDS = 12
STEPS_MAX = 100_000
LENGTHS = (2, 20, 33, 64, 65, 96, 101, 110, 128, 129, 130, 200, 256, 300, 301, 500)
PARAMS = ({"do_remote_decode": True}, *[{"do_remote_prefill": True}] * 2,
          {"do_remote_prefill": True, "do_remote_decode": True}, None)  # fmt: skip
ABORT, PREEMPT, RESET = 0.02, 0.01, 0.004
"""How likely each is after a step."""


@dataclass(frozen=True)
class StepsCase:
    """`damage`: loads find keys damaged. `resets`: engines reset their caches, and the connector's."""

    damage: bool = False
    resets: bool = False
    canonical: bool = False


CASES = {
    "damage": StepsCase(damage=True),
    "resets": StepsCase(resets=True),
    "by heads": StepsCase(resets=True, canonical=True),
}


class Steps:
    """Does the steps on the engines. `rng`: of the case; each round has a separate one."""

    def __init__(self, case: StepsCase, rng: random.Random) -> None:
        self._case = case
        bases = [[rng.randrange(3, 500) for _ in range(600)] for _ in range(4)]
        self._prompts = [base[: rng.choice(LENGTHS)] for base in bases for _ in range(5)]

    def round(self, one: Modelless, rng: random.Random) -> None:
        """Some requests, to the end of all."""
        one.scheduler.max_num_scheduled_tokens = rng.choice([640, 640, 48, 100])
        names = []
        for _ in range(rng.randrange(1, 8)):
            names += one.add(
                [rng.choice(self._prompts)],
                max_tokens=rng.choice([1, 1, 3, 40, 90]),
                params=rng.choice(PARAMS),
                salt=rng.choice([None, None, "a"]),
            )
        for _ in range(STEPS_MAX):
            if not one.scheduler.has_requests():
                break
            if not one.step():
                time.sleep(0.001)
            self._disturb(one, names, rng)
        else:
            raise AssertionError(f"after {STEPS_MAX} steps requests are left: {one.scheduler.requests}")
        check_nothing_is_left(one)
        if rng.random() < 0.7:
            one.forget()
            one.scribble()
        if self._case.resets and rng.random() < 0.1:
            assert one.scheduler.reset_prefix_cache(reset_connector=True)

    def _disturb(self, one: Modelless, names: list[str], rng: random.Random) -> None:
        if rng.random() < ABORT:
            one.scheduler.finish_requests([rng.choice(names)], RequestStatus.FINISHED_ABORTED)
        if rng.random() < PREEMPT and one.scheduler.running:
            one.scheduler._preempt_request(one.scheduler.running.pop(), time.monotonic())
        if self._case.resets and rng.random() < RESET:
            try:
                one.scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5, reset_connector=True)
            except RuntimeError as error:
                if "waiting for remote KV transfer" not in str(error):
                    raise


def check_nothing_is_left(one: Modelless) -> None:
    """Checks that nothing is left anywhere of requests that have ended."""
    connector = one.scheduler.connector
    handoff, scheduler = connector._handoff, connector.scheduler
    assert not (handoff._prompts or handoff._computing or handoff._computed or handoff._loading)
    assert not (connector._failed or connector._lost or connector._offered)
    assert not (scheduler._req_status or scheduler._jobs or scheduler._block_id_to_pending_jobs)
    assert not (scheduler.manager._requests or scheduler.manager._outstanding or scheduler.manager._fresh)


def damage_at_random(daemon: Daemon, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damages a key before some loads, each key once: what was damaged before may be gone."""
    submit = KVOffloaddWorker.submit_load
    damaged: set[tuple[int, bytes]] = set()

    def submit_load(worker: Any, job: int, source: Any, *others: Any, **named: Any) -> bool:
        chosen = rng.choice([(group, key) for group, keys in source.groups for key in keys])
        if rng.random() < 0.4 and chosen not in damaged:
            damaged.add(chosen)
            damage(daemon.pid, *chosen)
        return submit(worker, job, source, *others, **named)

    daemon.expected_in_log = "checksum"
    monkeypatch.setattr(KVOffloaddWorker, "submit_load", submit_load)


def _is_connected(one: Modelless) -> bool:
    return bool(one.scheduler.connector.scheduler.manager._lookup_thread.connected)


@pytest.fixture
def engines(start_daemon: StartDaemon) -> Iterator[Callable[..., list[Modelless]]]:
    """`engines(kind, chunk, **extra)` -> two at one daemon, both connected."""
    made: list[Modelless] = []

    def start(kind: str, chunk: int, **extra: bool) -> list[Modelless]:
        daemon = start_daemon("memory.verify_loads=true", memory="64MiB")
        for _ in range(2):
            connector = by_connector(daemon.socket, chunk, **extra)
            made.append(Modelless(os.environ["KVOFFLOADD_TINY_MODEL"], kind, daemon, connector))
            until(lambda: made[-1].generate([[3]]) and _is_connected(made[-1]), "its lookups reach the daemon")
        return made

    yield start
    for one in made:
        one.close()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_random_steps(
    engines: Callable[..., list[Modelless]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    kind: str,
    chunk: int,
    name: str,
) -> None:
    case, rng = CASES[name], random.Random(f"{seed} {kind} {chunk} {name}")
    extra = {"canonical_layout": case.canonical, "offload_prompt_only": rng.random() < 0.5}
    both = engines(kind, chunk, **extra)
    daemon = both[0].daemon
    if case.damage:
        damage_at_random(daemon, rng, monkeypatch)
    steps = Steps(case, rng)
    for number in range(ROUNDS):
        for at, one in enumerate(both):
            steps.round(one, random.Random(f"{seed} {kind} {chunk} {name} {number} {at}"))
    until(lambda: daemon.status()["leases"]["keys"] == 0, "nothing is pinned")
