"""The linker's rounds: what one engine has stored, it and the next one load from device pools, and answer as ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from tests.e2e import disk
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, SESSIONS, TWO_RANKS, Prompts, cached, linked, linked_to, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_rounds_a_second_engine_and_a_restarted_daemon(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, tmp_path: Path
) -> None:
    daemon = start_daemon(*disk.disk_settings((tmp_path / "disk", 512 * disk.MIB)), memory="256MiB")
    expected, nothing = reference("dense", asked), [0] * len(asked)
    first = start_engine("dense", **linked_to(daemon.socket))
    found = first.generate(asked)
    assert (tokens(found), linked(found)) == (expected, nothing)
    settle(daemon)
    first.flush()
    found = first.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
    first.flush()
    assert tokens(first.generate(asked, together=True)) == expected
    settle(daemon)
    first.close()
    second = start_engine("dense", **linked_to(daemon.socket))
    found = second.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
    disk.idle(daemon)
    daemon.stop()
    second.flush()
    found = second.generate(asked)
    assert (tokens(found), linked(found)) == (expected, nothing), "without a daemon it computes"
    daemon.start()
    second.flush()
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up again", 60.0)
    found = second.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL), "from disk"


def test_both_seats_share_keys(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    half, expected = len(asked) // 2, reference("dense", asked)
    storage = start_engine("dense", storage=stored_at(daemon.socket))
    assert tokens(storage.generate(asked[:half])) == expected[:half]
    settle(daemon)
    storage.close()
    linker = start_engine("dense", **linked_to(daemon.socket))
    found = linker.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL[:half] + [0] * half)
    settle(daemon)
    linker.close()
    assert len(daemon.status()["namespaces"]) == 1
    found = start_engine("dense", storage=stored_at(daemon.socket)).generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def test_zeros_change_every_answer(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    expected = reference("dense", asked)
    engine = start_engine("dense", **linked_to(daemon.socket, "ZeroingLinker", "tests.sglang.zeroing"))
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert linked(found) == ALL
    assert all(one != other for one, other in zip(tokens(found), expected, strict=True))


def test_two_ranks(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    daemon = start_daemon(memory="256MiB")
    engine = start_engine("dense", **linked_to(daemon.socket), environment=TWO_RANKS, tp_size=2)
    expected = tokens(engine.generate(asked))
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
    daemon.kill()
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), linked(found)) == (expected, [0] * len(asked))
    daemon.start()
    until(lambda: len(daemon.sessions()) == 2 * SESSIONS, "all lines are up again", 60.0)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
