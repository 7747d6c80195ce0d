"""Requests that wait pin a part of the daemon's memory, however many they are."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import ROUTES, prompts, tokens
from tests.vllm.test_pressure import check_nothing_held

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

COUNT, CHUNKS = 24, 15
KEY_BYTES = 131_072
"""Of 32 tokens of the dense model."""


@pytest.mark.parametrize("route", ROUTES)
def test_what_waits_pins_half_of_the_memory_at_most(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, route: str
) -> None:
    """The memory holds the keys of all requests. The engine has room for few of them at once, and the rest waits."""
    daemon = start_daemon(memory=f"{COUNT * CHUNKS * KEY_BYTES + (4 << 20)}")
    asked = prompts(12, COUNT)
    engine = start_engine("dense", connector=ROUTES[route](daemon.socket), num_gpu_blocks_override=40)
    expected = reference("dense", asked)
    assert tokens(engine.generate(asked)) == expected
    half = daemon.status()["memory"]["capacity_bytes"] // KEY_BYTES // 2
    engine.reset(connector=False)
    engine.begin(asked)
    pinned = [0]
    while engine.busy():
        pinned.append(int(daemon.status()["leases"]["keys"]))
    assert tokens(engine.finish()) == expected
    # What loads is not counted: two requests, for which the engine has room, and the one that is about to.
    print(f"{max(pinned)} keys pinned at most, of {COUNT * CHUNKS}; half of the memory: {half}")
    assert CHUNKS < max(pinned) <= half + 3 * CHUNKS
    check_nothing_held(daemon)
