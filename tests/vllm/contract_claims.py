"""What requests want retained is claimed, with vLLM's own scheduler, a real daemon and no model.

Not collected: `test_contract` runs it with each release's Python.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import RequestStatus

from kvoffloadd.client import ClaimFigures
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.vllm.engine import ROUTES, claims
from tests.vllm.modelless import BLOCK, WINDOW, Modelless, is_connected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

StartDaemon = Callable[..., Daemon]
StartEngine = Callable[..., Modelless]
Given = dict[str, Any]

KINDS = ("dense", "hybrid")
BLOCKS = 10
LENGTH = BLOCKS * BLOCK + 5


@pytest.fixture
def engine(start_daemon: StartDaemon) -> Iterator[StartEngine]:
    """`engine(kind, route, **extra)` -> one whose lookups reach its daemon."""
    made: list[Modelless] = []

    def start(kind: str = "dense", route: str = "connector", **extra: Any) -> Modelless:
        daemon = start_daemon("memory.slab_bytes=1MiB", memory="64MiB")
        config = ROUTES[route](daemon.socket, BLOCK, **extra)
        made.append(Modelless(os.environ["KVOFFLOADD_TINY_MODEL"], kind, daemon, config))
        until(lambda: made[-1].generate([[3]]) and is_connected(made[-1]), "its lookups reach the daemon")
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def prompt() -> list[int]:
    """Ends with tokens that fill no block."""
    rng = random.Random(6)
    return [rng.randrange(3, 500) for _ in range(LENGTH)]


def envelope(*directives: Given, kind: str = "kv.retain", version: str = "1.0") -> KvHintsEnvelope:
    action = KvHintAction("a", kind, version, {"scope": None, "directives": list(directives)})
    return KvHintsEnvelope("0.1", "m", [action])


WAYS: dict[str, Given] = {
    "params": {"params": {"kvoffloadd.retain": {"seconds": 600, "priority": 80}}},
    "hints": {"kv_hints": envelope({"end": LENGTH, "priority": 80, "duration": 600})},
}


def made(one: Modelless, count: int) -> list[ClaimFigures]:
    """Returns the claims of its daemon when there are so many."""
    until(lambda: len(claims(one.daemon)) >= count, "it is claimed")
    found = claims(one.daemon)
    assert len(found) == count
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_prompt_needs_is_claimed(
    engine: StartEngine, prompt: list[int], kind: str, route: str, way: str
) -> None:
    """Also if the engine has some of it itself, or all, or the daemon brings it: no key is left out."""
    one = engine(kind, route)
    one.generate([prompt[: 4 * BLOCK + 1]])
    for number in range(1, 4):
        one.generate([prompt], **WAYS[way])
        found = made(one, number)[-1]
        in_memory = BLOCKS if kind == "dense" else BLOCKS + WINDOW // BLOCK
        assert (found.priority, found.tokens) == (80, BLOCKS * BLOCK)
        assert found.memory_keys >= in_memory
        if kind == "dense":
            assert found.keys == BLOCKS
        elif route == "connector":
            assert found.keys < 2 * BLOCKS, "of a window its end"
        else:
            assert found.keys == 2 * BLOCKS, "vLLM's connector does not say which groups have windows"
        if number == 2:
            one.forget()
    assert not one.scheduler.connector.scheduler.manager._retaining._unscheduled


def test_ranges_and_what_was_generated(engine: StartEngine, prompt: list[int]) -> None:
    one = engine(offload_prompt_only=False)
    entries = [{"seconds": 600, "end": 64, "name": "agent"}, {"seconds": 60, "start": 64, "end": 1000, "name": "agent"}]
    directives = [
        {"end": 64, "priority": 90, "duration": 600},
        {"start": 256, "priority": 80, "duration": 600},
        {"covers_output": True, "priority": 70, "duration": 600},
    ]
    hints = envelope(*directives)
    one.generate([prompt], max_tokens=40, params={"kvoffloadd.retain": entries}, kv_hints=hints)
    found = made(one, 5)
    asked = {(claim.name, claim.priority): (claim.keys, claim.tokens, claim.memory_keys) for claim in found}
    assert asked == {
        ("agent #1", 50): (2, 64, 2),
        ("agent #2", 50): (8, 320, 8),
        ("", 90): (2, 64, 2),
        ("", 80): (3, 352, 3),
        ("", 70): (1, 352, 1),
    }


def test_a_conversation_claims_its_keys_anew_with_each_turn(engine: StartEngine, prompt: list[int]) -> None:
    one = engine()
    for turn in (4, 7, 10):
        asked = {"seconds": 600, "name": "agent 7"}
        one.generate([prompt[: turn * BLOCK + 1]], params={"kvoffloadd.retain": asked})
        until(lambda: [claim.keys for claim in claims(one.daemon)] == [turn], "this turn is claimed")  # noqa: B023


def test_a_request_that_is_aborted_before_it_runs_claims_nothing(engine: StartEngine, prompt: list[int]) -> None:
    one = engine()
    (name,) = one.add([prompt], **WAYS["params"])
    one.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
    one.generate([prompt], params={"kvoffloadd.retain": {"seconds": 600, "name": "after"}})
    assert [claim.name for claim in made(one, 1)] == ["after"]


def test_after_a_reset_keys_are_claimed_by_their_new_names(engine: StartEngine, prompt: list[int]) -> None:
    one = engine()
    one.generate([prompt], **WAYS["params"])
    made(one, 1)
    (name,) = one.add([prompt], max_tokens=30, **WAYS["hints"])
    while not one.scheduler.requests[name].num_output_tokens:
        one.step()
    one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    one.generate([])
    made(one, 1)
    until(lambda: claims(one.daemon)[0].memory_keys == BLOCKS, "what was stored anew is kept")


def test_what_is_ignored_is_counted(engine: StartEngine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    counted = Counter[str]()
    monkeypatch.setattr(OffloadingConnectorStats, "increase_counter", lambda _, *count: counted.update([count[0]]))
    one.generate([prompt], params={"kvoffloadd.retain": "for ever"})
    one.generate([prompt], kv_hints=envelope(version="2.0"))
    one.generate([prompt], kv_hints=envelope(kind="kv.fetch"))
    one.generate([prompt], params={"kvoffloadd.retain": 600})
    assert len(made(one, 1)) == 1
    assert counted["vllm:kvoffloadd_ignored_hints"] == 3
