"""Tests sliding windows in a separate pool: of it a prompt needs the last pages alone."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import ALL, Prompts, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

WITHOUT_ASSERTS = {"PYTHONOPTIMIZE": "1"}
"""SGLang asserts that Gemma 4 has other kernels than those for CPUs, with which it answers well."""


def test_windows(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    daemon = start_daemon(memory="256MiB")
    with start_engine("windows", environment=WITHOUT_ASSERTS) as plain:
        expected = tokens(plain.generate(asked))
    engine = start_engine("windows", storage=stored_at(daemon.socket), environment=WITHOUT_ASSERTS)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)
    (namespace,) = daemon.status()["namespaces"]
    print(namespace)
    daemon.kill()
    engine.flush()
    assert tokens(engine.generate(asked)) == expected
