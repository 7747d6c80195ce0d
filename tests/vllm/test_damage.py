"""A damaged key costs a request what is behind it, and nothing else: what else was loaded is kept, for every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.vllm.conftest import Reference, StartDaemon, StartEngine
from tests.vllm.engine import COUNT, by_chunks, cached, prompts, settle, tokens

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WHOLE, HALF = 576, 288
"""Tokens of whole blocks, of 96 tokens in the model with linear attention and of 32 in the others."""
BLOCKS = 1500
"""Enough for all prompts twice: vLLM counts the blocks of a load that failed until the request computes."""
OPTIONS: Mapping[str, dict[str, Any]] = {"linear": {"max_num_seqs": 1}}
"""In bfloat16 a prompt that is begun half way, or in another batch, has other last bits: it is compared with itself."""
COUNTERS = [f"vllm:kvoffloadd_{what}" for what in ("failed_loads", "kept_tokens", "recomputed_tokens")]


@pytest.mark.parametrize(
    ("kind", "which", "kept"),
    [
        ("dense", "middle", HALF),
        ("dense", "first", 0),
        ("hybrid", "middle", HALF),
        ("hybrid", "window", HALF),
        ("linear", "middle", HALF),
        ("linear", "window", HALF),
        ("conv", "middle", HALF),
    ],
)
def test_a_damaged_key_costs_what_is_behind_it(
    start_daemon: StartDaemon, start_engine: StartEngine, reference: Reference, kind: str, which: str, kept: int
) -> None:
    """One key in each of 12 prompts is damaged. vLLM has stored windows and states where a shorter prompt ended, half
    way, too.
    """
    asked = prompts(2, COUNT, WHOLE + 4)
    daemon = start_daemon("memory.verify_loads=true", memory="256MiB")
    engine = start_engine(
        kind, connector=by_chunks(daemon.socket, 1), num_gpu_blocks_override=BLOCKS, **OPTIONS.get(kind, {})
    )
    engine.await_connection()
    engine.generate([prompt[: HALF + 4] for prompt in asked])
    settle(daemon, engine)
    answer = engine.generate_anew(asked)
    assert cached(answer) == [HALF] * COUNT, "as after the failure"
    expected = tokens(answer)
    if kind not in OPTIONS:
        assert expected == reference(kind, asked)
    settle(daemon, engine)
    daemon.expected_in_log = "checksum"
    engine.damage_loads(daemon.pid, which)
    before = engine.metrics()
    answer = engine.generate_anew(asked)
    assert tokens(answer) == expected
    assert cached(answer) == [kept] * COUNT
    after = engine.metrics()
    counted = [after[name] - before.get(name, 0) for name in COUNTERS]
    assert counted == [COUNT, COUNT * kept, COUNT * (WHOLE - kept)]
    settle(daemon, engine)
    answer = engine.generate_anew(asked)  # what was computed is stored
    assert cached(answer) == [WHOLE] * COUNT
    assert tokens(answer) == expected
