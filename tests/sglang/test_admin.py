"""What is done to an engine that runs: its storage cleared, taken off and given back, its weights changed; and what is
refused at the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvoffloadd.testing.wait import until
from tests.enginechild import EngineError
from tests.sglang.conftest import Reference, StartDaemon, StartEngine
from tests.sglang.engine import ALL, Prompts, Seat, cached, linked_to, settle, stored_at, tokens
from tests.vllm.models import OTHER

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]

Model = Callable[[str], Path]


def test_cleared_taken_off_and_given_back(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts
) -> None:
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket)
    engine = start_engine("dense", storage=storage)
    expected, nothing = reference("dense", asked), [0] * len(asked)
    assert tokens(engine.generate(asked)) == expected
    settle(daemon)
    engine.flush()
    assert engine.do("clear")["success"]
    assert daemon.status()["cache"]["keys"] == 0
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, nothing)
    settle(daemon)
    engine.flush()
    assert engine.do("detach")["success"]
    until(lambda: not daemon.sessions(), "the daemon has noticed that it was taken off")
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, nothing)
    engine.flush()
    done = engine.do("attach", config=storage["hicache_storage_backend_extra_config"])
    assert done["success"], done
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (expected, ALL)


def test_weights_changed_in_place(
    seat: Seat, start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, model: Model
) -> None:
    """What the old weights have computed is neither found nor served; others may have use for it."""
    daemon = start_daemon(memory="256MiB")
    engine = start_engine("dense", **seat.options(daemon.socket))
    before, after, nothing = reference("dense", asked), reference(OTHER, asked), [0] * len(asked)
    assert before != after
    assert tokens(engine.generate(asked)) == before
    settle(daemon)
    stored = daemon.status()["cache"]["keys"]
    done = engine.do("update_weights", model=str(model(OTHER)), flush=True)
    assert done["success"], done
    assert daemon.status()["cache"]["keys"] == stored
    found = engine.generate(asked)
    assert (tokens(found), seat.found(found)) == (after, nothing)
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), seat.found(found)) == (after, ALL)
    done = engine.do("update_weights", model=str(model("dense")), flush=True)
    assert done["success"], done
    found = engine.generate(asked)
    assert (tokens(found), seat.found(found)) == (before, nothing)


def test_weights_changed_before_the_storage_came(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, asked: Prompts, model: Model
) -> None:
    """What others of the model's name have stored is not of these weights."""
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket)
    first = start_engine("dense", storage=storage)
    before, after, nothing = reference("dense", asked), reference(OTHER, asked), [0] * len(asked)
    assert tokens(first.generate(asked)) == before
    settle(daemon)
    first.close()
    name = "hicache_storage_backend_extra_config"
    another = json.loads(storage[name]) | {"module_path": "tests.sglang.forgetful", "class_name": "ForgetfulStorage"}
    engine = start_engine("dense", storage=storage | {name: json.dumps(another)})
    done = engine.do("update_weights", model=str(model(OTHER)), flush=True)
    assert done["success"], done
    assert engine.do("detach")["success"]
    done = engine.do("attach", config=storage[name])
    assert done["success"], done
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (after, nothing)
    settle(daemon)
    engine.flush()
    found = engine.generate(asked)
    assert (tokens(found), cached(found)) == (after, ALL)


def test_another_layout_is_refused_by_the_flags_name(start_daemon: StartDaemon, start_engine: StartEngine) -> None:
    daemon = start_daemon(memory="256MiB")
    with pytest.raises(EngineError, match="kvoffloadd needs --hicache-mem-layout page_first_direct"):
        start_engine("dense", storage=stored_at(daemon.socket, hicache_mem_layout="layer_first"))


def test_an_unknown_option_is_refused_by_its_name(start_daemon: StartDaemon, start_engine: StartEngine) -> None:
    daemon = start_daemon(memory="256MiB")
    with pytest.raises(EngineError, match="config: sokket: not an option of kvoffloadd"):
        start_engine("dense", **linked_to(daemon.socket, sokket="x"))
