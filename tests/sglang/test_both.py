"""Tests an engine of SGLang and one of vLLM on one daemon, at the same time: each answers as alone, and gets its turn.

vLLM has a separate venv, which `make test-vllm` makes; without it these tests are skipped.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.process import memory_folder
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.conftest import SEED
from tests.e2e import disk
from tests.e2e.daemons import Hold
from tests.enginechild import ROOT, EngineChild
from tests.sglang import engine as sglang
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.crowd import Crowd
from tests.vllm import engine as vllm
from tests.vllm import models

VLLM_PYTHON = ROOT / "build" / "vllm-venv" / "bin" / "python"
"""A venv of its own: vLLM and SGLang want other releases of what both need."""

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="no build/vllm-venv: `make test-vllm` makes it"),
]

KIND = "dense"
KILLS, KILLS_WARM = 3, 3
WORKERS = 2
MANY = 12
QUIET_ROUNDS = 10
"""After the last kill, at most, until each engine gets something back: stress workers evict much of it."""

StartVllm = Callable[..., vllm.VllmEngine]


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model as vLLM's libraries do."""
    return models.write(KIND, tmp_path_factory.mktemp("vllm"), str(VLLM_PYTHON))


@pytest.fixture
def start_vllm(start_daemon: StartDaemon, tmp_path: Path, vllm_model: Path) -> Iterator[StartVllm]:
    """`start_vllm(connector=..., **options)` -> an engine of the test's own, ended before its daemons are."""
    logs = (tmp_path / f"vllm-{number}.log" for number in count())
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            vllm.VllmEngine(vllm_model, next(logs), python=str(VLLM_PYTHON), **options)
        )


def sessions_of(daemon: Daemon, engine: EngineChild) -> list[dict[str, Any]]:
    """Returns the sessions of all its processes, which share its session with the terminal."""
    return [one for one in daemon.sessions() if os.getsid(one["pid"]) == engine.child.pid]


def jobs_of(daemon: Daemon, engine: EngineChild) -> int:
    """Counts its jobs under way."""
    return sum(session["jobs"] for session in sessions_of(daemon, engine))


class Both:
    """The two engines, asked the same questions round by round. `got`: tokens that each had from the daemon."""

    def __init__(self, one: sglang.SglangEngine, other: vllm.VllmEngine, asked: Sequence[sglang.Prompts]) -> None:
        self.one, self.other = one, other
        self.got = [0, 0]
        self._asked = asked

    def begin(self) -> None:
        """Both have forgotten all prompts, and are asked all of them at once."""
        self.one.flush()
        self.other.reset(connector=False)
        self.one.begin(self._asked[0], together=True)
        self.other.begin(self._asked[1])

    def busy(self) -> bool:
        """Is one of them?"""
        return self.one.busy() or self.other.busy()

    def finish(self) -> list[list[list[int]]]:
        """What each has answered."""
        found, others = self.one.finish(), self.other.finish()
        self.got[0] += sum(sglang.cached(found))
        self.got[1] += sum(tokens or 0 for tokens in vllm.cached(others))
        return [sglang.tokens(found), vllm.tokens(others)]

    def await_lines(self, daemon: Daemon) -> None:
        """Waits until both have found the daemon again."""
        self.other.await_connection()
        until(lambda: len(sessions_of(daemon, self.one)) == sglang.SESSIONS, "SGLang's lines are up", 60.0)


def test_under_stress_and_kills(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    start_vllm: StartVllm,
    reference: Reference,
    asked: sglang.Prompts,
    tmp_path: Path,
) -> None:
    """Memory holds neither engine's prompts, stress workers want more than all of it, and the daemon is killed: with
    its memory at first, then so that its successor takes it over.
    """
    print("random seed:", SEED)
    rng = random.Random(SEED)
    prompts = [asked, vllm.prompts(3, vllm.COUNT)]
    with start_vllm() as plain:
        expected = [reference(KIND, asked), vllm.tokens(plain.generate(prompts[1]))]
    with memory_folder() as pool:
        daemon = start_daemon(*disk.disk_settings((tmp_path / "disk", 512 * disk.MIB)), memory="24MiB")
        both = Both(
            start_engine(KIND, storage=sglang.stored_at(daemon.socket)),
            start_vllm(connector=vllm.by_connector(daemon.socket)),
            prompts,
        )
        with Crowd(daemon, tmp_path, workers=WORKERS, seed=SEED, working_set_bytes=256 * disk.MIB) as crowd:
            begun = time.monotonic()
            both.begin()
            assert both.finish() == expected
            round_s = time.monotonic() - begun
            kills = 0
            while kills < KILLS + KILLS_WARM:
                both.begin()
                while both.busy() and kills < KILLS + KILLS_WARM:
                    time.sleep(rng.random() * round_s / 2)
                    daemon.kill()
                    kills += 1
                    if kills >= KILLS:
                        daemon.settings["memory.pool_file"] = str(Path(pool) / "pool")
                    time.sleep(rng.random() * round_s / 8)
                    daemon.start()
                assert both.finish() == expected, f"after {kills} kills"
            print(f"{kills} kills, {both.got} tokens from the daemon")
            both.got = [0, 0]
            for _ in range(QUIET_ROUNDS):
                both.await_lines(daemon)
                both.begin()
                assert both.finish() == expected
                if min(both.got) > 0:
                    break
            crowd.leave()
        counted, status = crowd.counters.total, daemon.status()
        print(f"then {both.got} tokens; {counted('verified_loads')} loads of stress workers verified")
        assert min(both.got) > 0
        assert (counted("wrong_bytes"), counted("broken_promises")) == (0, 0)
        assert counted("verified_loads") > 0
        assert status["cache"]["keys_evicted"] > 0
        assert status["disk"]["promoted"]["keys"] > 0
        both.one.close()
        both.other.close()
        daemon.audit()
        assert daemon.stop() == 0


def test_neither_starves_the_other(
    start_daemon: StartDaemon, start_engine: StartEngine, start_vllm: StartVllm, hold: Hold
) -> None:
    """There is one thread for copies and small turns. Many loads of vLLM go before a longer one of SGLang: by turns of
    jobs they would all end first, by turns of engines most of them are under way when SGLang's ends. And a load of
    SGLang goes before a short one of vLLM.
    """
    long = vllm.prompts(5, 1, 1000)
    many, few = vllm.prompts(7, MANY, 261), vllm.prompts(8, 1, 70)
    settings = ("copy.threads=1", "copy.chunk_bytes=64KiB", "memory.slab_bytes=4MiB")
    daemon = start_daemon(*settings, memory="256MiB", faults=f"{hold.fault},delay_s=0.05")
    one = start_engine(KIND, storage=sglang.stored_at(daemon.socket))
    other = start_vllm(connector=vllm.by_connector(daemon.socket), num_gpu_blocks_override=160)
    expected = [sglang.tokens(one.generate(long)), *(vllm.tokens(other.generate(asked)) for asked in (many, few))]
    until(lambda: daemon.status()["running"]["jobs"] == 0, "all is stored", 300.0)

    def behind(
        first: EngineChild, begin: Callable[[], None], jobs: int, then: EngineChild, begin_then: Callable[[], None]
    ) -> int:
        """How many of the first one's jobs are under way when the other's load, which came behind them, has ended."""
        one.flush()
        other.reset(connector=False)
        with hold:
            begin()
            until(lambda: jobs_of(daemon, first) >= jobs, "the first loads", 300.0)
            begin_then()
            until(lambda: jobs_of(daemon, then), "the other loads behind it", 300.0)
        until(lambda: not jobs_of(daemon, then), "its load has ended", 300.0)
        return jobs_of(daemon, first)

    left = behind(other, lambda: other.begin(many), MANY, one, lambda: one.begin(long))
    found, others = one.finish(), other.finish()
    assert (sglang.tokens(found), vllm.tokens(others)) == (expected[0], expected[1])
    assert (sglang.cached(found), vllm.cached(others)) == ([960], [256] * MANY)
    assert left > MANY // 2, "SGLang's went before most of what vLLM had asked for before"
    left = behind(one, lambda: one.begin(long), 1, other, lambda: other.begin(few))
    found, others = one.finish(), other.finish()
    assert (sglang.tokens(found), vllm.tokens(others)) == (expected[0], expected[2])
    assert (sglang.cached(found), vllm.cached(others)) == ([960], [64])
    assert left == 1, "vLLM's went before the end of what SGLang had asked for before"
