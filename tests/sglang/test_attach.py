"""The storage, taken off and given to engines that run: what is refused, in which words, and that they go on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from scripts.sglang import storage_options
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, SESSIONS, Prompts, SglangEngine, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

CONFIG = "hicache_storage_backend_extra_config"
LONG = 200


def refused(engine: SglangEngine, config: dict[str, Any]) -> str:
    """Returns SGLang's message."""
    done = engine.do("attach", config=json.dumps(config))
    assert not done["success"], done
    return str(done["message"])


def test_an_engine_with_the_storage(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket)
    config = json.loads(storage[CONFIG])
    engine = start_engine("dense", storage=storage)
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.start({"long": asked[0]}, LONG)
    done = engine.do("detach")
    assert not done["success"]
    assert "not idle" in done["message"]
    assert "not idle" in refused(engine, config)
    (long,) = engine.end("long")
    assert (len(long.tokens), long.tokens[:8]) == (LONG, expected[0])
    settle(daemon)
    until(lambda: engine.do("detach")["success"], "it is idle")
    until(lambda: not daemon.sessions(), "its sessions have ended")

    assert '"interface_v1": 1' in refused(engine, {**config, "interface_v1": 0})
    assert "timeout_s must be a number" in refused(engine, {**config, "timeout_s": "long"})
    assert "socket must be a path" in refused(engine, {**config, "socket": 7})
    until(lambda: not daemon.sessions(), "its sessions have ended")
    engine.flush()
    assert cached(engine.generate(asked[:1])) == [0]

    engine.flush()
    done = engine.do("attach", config=json.dumps(config))
    assert done["success"], done
    until(lambda: len(daemon.sessions()) == SESSIONS, "all lines are up", 60.0)
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def test_an_engine_whose_pools_cannot_be_shared(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    """It was started without the storage: no other process can map its pools. It can be asked again and again."""
    daemon = start_daemon(memory="256MiB")
    storage = storage_options(socket=str(daemon.socket))
    config = json.loads(storage[CONFIG])
    without = {name: value for name, value in storage.items() if not name.startswith("hicache_storage_backend")}
    engine = start_engine("dense", storage=without)
    for _ in range(2):
        assert '"allocator": "shm"' in refused(engine, config)
    until(lambda: not daemon.sessions(), "its sessions have ended")
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (reference("dense", asked), [0] * len(asked))
