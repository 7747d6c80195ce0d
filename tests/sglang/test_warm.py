"""A daemon that goes on with the memory that it had: the running engine loads from it, and nothing that was damaged."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.conftest import SEED
from tests.e2e.disk import MIB
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, PAGE, SESSIONS, Prompts, SglangEngine, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

MEMORY = 64 * MIB
PAGES = sum(ALL) // PAGE


@pytest.fixture
def pool_file(tmp_path: Path) -> Iterator[Path]:
    path = Path(f"/dev/shm/kvoffloadd-sglang-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        path = tmp_path / "pool"
    yield path
    path.unlink(missing_ok=True)


def test_daemon_restarted_warm(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, pool_file: Path
) -> None:
    print("random seed:", SEED)
    daemon = start_daemon(f"memory.pool_file={pool_file}", memory=str(MEMORY))
    engine = start_engine("dense", storage=stored_at(daemon.socket))
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    sealed(daemon)
    again(daemon, engine)
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)

    daemon.kill()
    damage(pool_file, 10)
    daemon.expected_in_log = "checksum|verif"
    again(daemon, engine)
    found = engine.generate(asked)
    assert tokens(found) == expected
    assert 0 < daemon.status()["cache"]["keys_corrupt"] <= 10
    assert sum(cached(found)) < sum(ALL)
    # What was lost has been computed and stored again.
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def sealed(daemon: Daemon) -> None:
    until(lambda: daemon.status()["cache"]["unsealed"] == 0, "all is sealed")


def again(daemon: Daemon, engine: SglangEngine) -> None:
    """The daemon, killed if it runs, is started and has what it had; the engine is connected and has nothing."""
    daemon.kill()
    daemon.start()
    assert daemon.status()["cache"]["keys_adopted"] == PAGES
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    engine.flush()


def damage(pool_file: Path, bits: int) -> None:
    """Flip bits of payloads; at the file's end are its slots."""
    rng = np.random.default_rng(SEED)
    with pool_file.open("r+b") as file:
        whole = np.fromfile(file, np.uint8)
        pages = whole[len(whole) - MEMORY :].reshape(-1, 4096)
        for page in rng.choice(np.flatnonzero(pages.any(axis=1)), bits, replace=False):
            at = len(whole) - MEMORY + int(page) * 4096 + int(np.flatnonzero(pages[page])[0])
            file.seek(at)
            file.write(bytes([whole[at] ^ 1 << int(rng.integers(8))]))
