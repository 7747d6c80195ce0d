"""An engine that is started with the flags that users have to give, and no others."""

from __future__ import annotations

import json

import pytest

from kvoffloadd.sglangnames import PACKAGE
from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import PAGE, Prompts, cached, settle, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


def test_the_plug_in_sets_the_others(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    daemon, prompts = start_daemon(memory="256MiB"), asked[:2]
    config = {"module_path": PACKAGE, "class_name": "KVOffloaddStorage", "prefetch_threshold": PAGE}
    storage = {
        "enable_hierarchical_cache": True,
        "enable_cache_report": True,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(config | {"socket": str(daemon.socket), "timeout_s": 60.0}),
        "hicache_storage_prefetch_policy": "wait_complete",  # the machine may be busy
    }
    engine = start_engine("dense", storage=storage)
    computed = engine.generate(prompts)
    assert cached(computed) == [0, 0]
    settle(daemon)
    engine.flush()
    loaded = engine.generate(prompts)
    assert (tokens(loaded), cached(loaded)) == (tokens(computed), [448, 448])
