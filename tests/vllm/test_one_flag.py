"""An engine with the flag that `kvoffloadd flags vllm` prints and nothing else, next to a daemon without a path."""

from __future__ import annotations

import json
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from tests.mountnamespace import MountNamespace, why_not
from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import ALL, MULTIPROCESS, Prompts, by_connector, cached, prompts, settle, tokens
from tests.vllm.test_kills import check_works_again

HIDDEN = ("/run",)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    """Makes one without a daemon of somebody else at root's socket, which is this user's."""
    if reason := why_not(HIDDEN):
        pytest.skip(reason)
    with MountNamespace(HIDDEN) as namespace:
        yield namespace


def python_in(host: MountNamespace, folder: Path) -> str:
    """The path of a program that is this Python, in the namespace."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(host.inside())} {shlex.quote(sys.executable)} "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def flag(host: MountNamespace) -> dict[str, Any]:
    """`kv_transfer_config`, as printed."""
    words = shlex.split(host.kvoffloadd("flags", "vllm").stdout)
    assert words[:4] == ["vllm", "serve", "MODEL", "--kv-transfer-config"]
    (config,) = words[4:]
    assert json.loads(config) == {"kv_connector": "KVOffloaddConnector", "kv_role": "kv_both"}
    return dict(json.loads(config))


def status(host: MountNamespace) -> dict[str, Any]:
    done = host.kvoffloadd("status", "--json")
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def test_one_flag_is_enough(
    host: MountNamespace, start_engine: StartEngine, reference: Reference, asked: Prompts, tmp_path: Path
) -> None:
    """Scheduler and ranks are separate processes, which find the daemon by themselves, also the next one."""
    log = tmp_path / "daemon.log"
    daemon = host.serve("--memory", "256MiB", log=log)
    engine = start_engine("dense", connector=flag(host), environment=MULTIPROCESS, python=python_in(host, tmp_path))
    engine.await_connection()
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    engine.generate(prompts(0, 1, 33))  # the last stores go with the next step
    engine.await_transfers()
    until(lambda: status(host)["running"]["jobs"] == 0, "all is stored", every_s=0.2)
    answer = engine.generate_anew(asked)
    assert cached(answer) == ALL
    assert tokens(answer) == expected
    daemon.kill()
    daemon.wait()
    assert tokens(engine.generate_anew(asked)) == expected
    host.serve("--memory", "256MiB", log=log)
    engine.await_connection()


def test_requests_may_fail_with_their_loads(
    start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts
) -> None:
    """The option leaves vLLM's policy as it is: it ends such requests with an error, and the engine goes on."""
    daemon = start_daemon(memory="256MiB")
    engine = start_engine("dense", connector=by_connector(daemon.socket, recompute_failed_loads=False))
    engine.await_connection()
    expected = tokens(engine.generate(asked))
    settle(daemon, engine)
    engine.reset(connector=False)
    engine.kill_before_load(daemon.pid)
    ended = engine.generate(asked)
    assert {request.reason for request in ended} <= {"error", "length"}
    assert any(request.reason == "error" for request in ended)
    assert daemon.wait() < 0
    daemon.kill()
    check_works_again(daemon, engine, asked, expected)
