"""Tests sliding windows in a separate pool, through both seats: of it a prompt needs the last pages alone."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import ALL, Prompts, cached, linked, linked_to, settle, stored_at, tokens
from tests.sglang.test_windows import WITHOUT_ASSERTS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_windows(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    daemon, half = start_daemon(memory="256MiB"), len(asked) // 2
    with start_engine("windows", environment=WITHOUT_ASSERTS) as plain:
        expected = tokens(plain.generate(asked))
    linker = start_engine("windows", **linked_to(daemon.socket), environment=WITHOUT_ASSERTS)
    assert tokens(linker.generate(asked[:half])) == expected[:half]
    settle(daemon)
    linker.flush()
    found = linker.generate(asked[:half])
    assert (tokens(found), linked(found)) == (expected[:half], ALL[:half])
    linker.close()
    storage = start_engine("windows", storage=stored_at(daemon.socket), environment=WITHOUT_ASSERTS)
    found = storage.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL[:half] + [0] * half)
    settle(daemon)
    storage.close()
    linker = start_engine("windows", **linked_to(daemon.socket), environment=WITHOUT_ASSERTS)
    found = linker.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
    daemon.kill()
    linker.flush()
    assert tokens(linker.generate(asked)) == expected
