"""Little room, requests that end early, caches that are reset, and two engines at one daemon."""

from __future__ import annotations

import pytest

from kvoffloadd.testing.leaks import UID
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import ALL, COUNT, ROUTES, Prompts, by_connector, by_spec, cached, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def check_nothing_held(daemon: Daemon) -> None:
    """No lease, no slot, no job is left, while the engine lives."""

    def held() -> dict[str, int]:
        status = daemon.status()
        account = status["accounts"][str(UID)]
        figures = {
            "jobs": status["running"]["jobs"],
            "holds": status["running"]["holds"],
            "leases": account.get("leases", 0),
            "unsealed": status["cache"]["unsealed"],
        }
        return {name: number for name, number in figures.items() if number}

    until(lambda: held() == {}, f"nothing is held; held: {held()}", 30.0)
    assert daemon.verify(payloads=True) == ()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_memory_smaller_than_the_prompts(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    route: str,
) -> None:
    """The prompts have 180 keys of 128 KiB, or 276 of 64: keys are evicted while others are loaded, and what is
    promised is there.
    """
    daemon = start_daemon(memory="10MiB")
    engine = start_engine(kind, connector=ROUTES[route](daemon.socket))
    expected = reference(kind, asked)
    for order in (1, 1, -1, -1, 1):
        answer = engine.generate(asked[::order])
        assert tokens(answer) == expected[::order]
    status = daemon.status()
    assert status["cache"]["keys_evicted"] > 0
    assert status["transfers"]["load"]["keys"] > 0
    assert status["transfers"]["load"]["not_done"] == 0
    check_nothing_held(daemon)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_abort(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    route: str,
) -> None:
    """Some requests are computed, some wait for a load, and some wait for blocks."""
    daemon = start_daemon(memory="256MiB", faults="delay_s=0.02")
    engine = start_engine(kind, connector=ROUTES[route](daemon.socket))
    expected = reference(kind, asked)
    for steps in (1, 2, 3, 5, 8):
        answer = engine.abort(asked, steps)
        for request, wanted in zip(answer, expected, strict=True):
            assert request.tokens == wanted[: len(request.tokens)]
        assert sum(request.reason == "length" for request in answer) >= COUNT // 2
    check_nothing_held(daemon)
    assert tokens(engine.generate(asked)) == expected


@pytest.mark.parametrize(("kind", "blocks"), [("dense", 36), ("hybrid", 56)])
def test_preemption(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    blocks: int,
) -> None:
    """Two requests fit at their start, and not at their end."""
    daemon = start_daemon(memory="256MiB")
    connector = by_connector(daemon.socket)
    engine = start_engine(kind, connector=connector, num_gpu_blocks_override=blocks, max_num_batched_tokens=128)
    expected = reference(kind, asked, max_tokens=120)
    for _ in range(2):
        assert tokens(engine.generate(asked, max_tokens=120)) == expected
    assert engine.metrics()["vllm:num_preemptions"] > 0
    check_nothing_held(daemon)


@pytest.mark.parametrize("route", ROUTES)
def test_reset(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, route: str
) -> None:
    """Nothing old hits after an update of weights, and the cache works on."""
    daemon = start_daemon(memory="256MiB")
    engine = start_engine("dense", connector=ROUTES[route](daemon.socket))
    expected = reference("dense", asked)
    for hit in ([0] * COUNT, ALL):
        answer = engine.generate_anew(asked)
        assert (cached(answer), tokens(answer)) == (hit, expected)
    engine.reset(connector=True)
    for hit in ([0] * COUNT, ALL):
        answer = engine.generate_anew(asked)
        assert (cached(answer), tokens(answer)) == (hit, expected)


def test_salt(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    """Who salts shares with those of the same salt alone."""
    daemon = start_daemon(memory="256MiB")
    engine = start_engine("dense", connector=by_spec(daemon.socket))
    hits = [cached(engine.generate(asked, salt=salt)) for salt in (None, "a", "b", "a", None)]
    assert hits == [[0] * COUNT] * 3 + [ALL] * 2


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_prefill_and_decode(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """One engine computes the prompts, another one answers them; of sliding windows only what they see is moved."""
    daemon = start_daemon(memory="256MiB")
    connector = by_connector(daemon.socket)
    prefill, decode = (start_engine(kind, connector=connector) for _ in range(2))
    prefill.generate(asked, max_tokens=1)
    settle(daemon, prefill)
    answer = decode.generate(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == reference(kind, asked)
    moved = daemon.status()["transfers"]["load"]
    whole = 3 if kind == "hybrid" else 1
    # 15 chunks of 32 tokens of a full group; of a sliding one, those that 128 tokens before the end touch.
    assert moved["keys"] == COUNT * (15 + (whole - 1) * 4)
    assert moved["not_done"] == 0
