"""No engine is served pages of other weights, of another adapter, or of an engine with other arguments."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.sglang import lora
from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import (
    ALL,
    REWRITE,
    Prompts,
    SglangEngine,
    cached,
    linked,
    linked_to,
    settle,
    stored_at,
    tokens,
)
from tests.vllm.models import OTHER

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(3600)]

CONFIG = "hicache_storage_backend_extra_config"
FEW = 3
Model = Callable[[str], Path]

_salts = count()


@pytest.fixture
def few(asked: Prompts) -> Prompts:
    """Returns as many prompts as SGLang's own levels hold."""
    return asked[:FEW]


def computed(engine: SglangEngine, prompts: Prompts, **fields: Any) -> list[list[int]]:
    """Returns what this engine answers where it finds nothing: no other request has used that salt."""
    found = engine.ask(prompts, cache_salt=f"nobody's {next(_salts)}", **fields)
    assert [one.cached for one in found] == [0] * len(prompts)
    return tokens(found)


def is_alone(engine: SglangEngine, prompts: Prompts) -> bool:
    """Whether it is served nothing that others have stored, and answers as it computes."""
    found = engine.ask(prompts)
    return (tokens(found), cached(found)) == (computed(engine, prompts), [0] * len(prompts))


def test_files_written_again(
    start_daemon: StartDaemon, start_engine: StartEngine, few: Prompts, model: Model, tmp_path: Path
) -> None:
    """They change between the load of the weights and the storage, at the start and later: what such an engine has
    computed is of no known version.
    """
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket)
    folder = shutil.copytree(model("dense"), tmp_path / "model")
    late = json.loads(storage[CONFIG])
    late |= {"module_path": "tests.sglang.rewriting", "class_name": "RewritingStorage"}
    options = {"storage": storage | {CONFIG: json.dumps(late)}, "model_path": str(folder)}
    first = start_engine("dense", environment={REWRITE: f"{model(OTHER)}:{folder}"}, **options)
    assert tokens(first.ask(few)) == computed(first, few)
    settle(daemon)
    first.flush()
    assert cached(first.ask(few)) == [448] * FEW, "it finds its own pages"
    first.close()

    options |= {"storage": storage}
    second = start_engine("dense", **options)
    assert is_alone(second, few)
    settle(daemon)
    second.flush()
    assert second.do("detach")["success"]
    shutil.copytree(model("dense"), folder, dirs_exist_ok=True)
    assert second.do("attach", config=storage[CONFIG])["success"]
    assert is_alone(second, few)
    settle(daemon)
    second.close()

    third = start_engine("dense", **options)
    assert is_alone(third, few)
    settle(daemon)
    third.close()
    fourth = start_engine("dense", **options)
    found = fourth.ask(few)
    assert (tokens(found), cached(found)) == (computed(fourth, few), [448] * FEW), "nothing has changed since"


def test_adapters_trained_again(
    start_daemon: StartDaemon, start_engine: StartEngine, few: Prompts, tmp_path: Path
) -> None:
    """They are trained between two starts, and while an engine serves. No request gets an adapter's
    pages without it.
    """
    daemon = start_daemon(memory="256MiB")
    adapter = tmp_path / "adapter"
    options = {"storage": stored_at(daemon.socket), "lora_paths": [f"mine={adapter}"], **lora.OPTIONS}
    lora.train(adapter, 1)
    first = start_engine("dense", **options)
    old = tokens(first.ask(few, lora_path="mine"))
    assert old == computed(first, few, lora_path="mine")
    settle(daemon)
    first.flush()
    found = first.ask(few, extra_key=first.do("adapter_id", name="mine")["id"])
    assert (tokens(found), cached(found)) == (computed(first, few), [0] * FEW)
    settle(daemon)
    first.close()

    second = start_engine("dense", **options)
    found = second.ask(few, lora_path="mine")
    assert (tokens(found), cached(found)) == (old, [448] * FEW), "nothing has changed since"
    done = second.do("unload_adapter", name="mine")
    assert done["success"], done
    lora.train(adapter, 2)
    done = second.do("load_adapter", name="mine", path=str(adapter))
    assert done["success"], done
    found = second.ask(few, lora_path="mine")
    new = computed(second, few, lora_path="mine")
    assert new != old
    assert (tokens(found), cached(found)) == (new, [0] * FEW)
    settle(daemon)
    second.close()

    third = start_engine("dense", **options)
    found = third.ask(few, lora_path="mine")
    assert (tokens(found), cached(found)) == (new, [0] * FEW)


def test_what_is_harmless_and_what_is_not(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    daemon = start_daemon(memory="256MiB")
    storage = stored_at(daemon.socket)
    first = start_engine("dense", storage=storage)
    expected = tokens(first.generate(asked))
    settle(daemon)
    first.close()
    batches = {"chunked_prefill_size": 256, "max_running_requests": 3, "mem_fraction_static": 0.2, "random_seed": 7}
    host = {"hicache_host_memory_mode": "cache", "hicache_ratio": 2.0, "hicache_write_policy": "write_through"}
    names = {"served_model_name": "another", "weight_version": "v2", "log_level": "warning"}
    for options in (batches, {"storage": storage | host, "max_total_tokens": 1600} | names):
        engine = start_engine("dense", **{"storage": storage} | options)
        found = engine.generate(asked)
        assert (tokens(found), cached(found)) == (expected, ALL)
        engine.close()
    engine = start_engine("dense", **linked_to(daemon.socket), radix_eviction_policy="lfu", schedule_policy="lpm")
    found = engine.generate(asked)
    assert (tokens(found), linked(found)) == (expected, ALL)
    engine.close()
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    engine = start_engine("dense", storage=storage, json_model_override_args=json.dumps(other))
    assert is_alone(engine, asked[:FEW])
