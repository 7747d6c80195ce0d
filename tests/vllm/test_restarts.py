"""What was stored outlives the engine, and with a disk the daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e import disk
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import ALL, ROUTES, Prompts, by_connector, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def lasting(start_daemon: StartDaemon, tmp_path: Path) -> Daemon:
    """A daemon with a disk."""
    return start_daemon(*disk.disk_settings((tmp_path / "disk", 512 * disk.MIB)), memory="256MiB")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_engine_restarted(
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    reference: Reference,
    asked: Prompts,
    kind: str,
    route: str,
) -> None:
    """The first round of the next engine hits: its predecessor is killed, not asked to end."""
    daemon = start_daemon(memory="256MiB")
    connector = ROUTES[route](daemon.socket)
    first = start_engine(kind, connector=connector)
    assert tokens(first.generate(asked)) == reference(kind, asked)
    settle(daemon, first)
    first.kill()
    answer = start_engine(kind, connector=connector).generate(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == reference(kind, asked)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_daemon_restarted(
    lasting: Daemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """The engine, kept, connects again by itself and hits what is on disk."""
    engine = start_engine(kind, connector=by_connector(lasting.socket))
    assert tokens(engine.generate(asked)) == reference(kind, asked)
    settle(lasting, engine)
    disk.idle(lasting)
    lasting.stop()
    lasting.start()
    until(lambda: len(lasting.sessions()) == 2, "scheduler and worker are back", 30.0)
    engine.await_connection()
    answer = engine.generate_anew(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == reference(kind, asked)
    assert lasting.status()["disk"]["keys"] > 0
    found = engine.metrics()
    assert found["vllm:prompt_tokens_cached_by_source/disk"] == sum(ALL)
    assert found["vllm:kvoffloadd_disk_hit_keys"] > 0
    assert cached(engine.generate_anew(asked)) == ALL
    again = engine.metrics()
    assert again["vllm:prompt_tokens_cached_by_source/host"] == sum(ALL), "it is in memory by now"
    assert again["vllm:kvoffloadd_disk_hit_keys"] == found["vllm:kvoffloadd_disk_hit_keys"]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_both_restarted(
    lasting: Daemon, start_engine: StartEngine, reference: Reference, asked: Prompts, kind: str
) -> None:
    """Nothing is left but files."""
    connector = by_connector(lasting.socket)
    with start_engine(kind, connector=connector) as first:
        assert tokens(first.generate(asked)) == reference(kind, asked)
        first.generate(prompts(0, 1, 33))
        disk.idle(lasting)
    lasting.stop()
    lasting.start()
    answer = start_engine(kind, connector=connector).generate(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == reference(kind, asked)
