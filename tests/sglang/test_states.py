"""Tests states of convolutions in a separate pool, next to keys and values: a prompt needs the last one alone."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import StartDaemon, StartEngine
from tests.sglang.engine import Prompts, cached, settle, stored_at, tokens

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1800)]


BEGUN = 300
OPTIONS = {"page_size": 1, "disable_overlap_schedule": True, "max_mamba_cache_size": 12}
"""On a CPU, SGLang keeps states of ends of requests alone, and only with pages of one token."""


def test_states(start_daemon: StartDaemon, start_engine: StartEngine, asked: Prompts) -> None:
    """If a prompt goes on where another request ended, all that came before is loaded, with its state."""
    daemon = start_daemon(memory="256MiB")
    begun = [prompt[:BEGUN] for prompt in asked]
    engine = start_engine("conv", storage=stored_at(daemon.socket), **OPTIONS)
    answers = tokens(engine.generate(begun))
    longer = [first + answer + prompt[BEGUN:] for first, answer, prompt in zip(begun, answers, asked, strict=True)]
    settle(daemon)
    engine.flush()
    found = engine.generate(longer)
    assert all(one >= BEGUN for one in cached(found)), cached(found)
    engine.close()
    with start_engine("conv", **OPTIONS) as plain:
        assert tokens(plain.generate(begun)) == answers
        assert tokens(plain.generate(longer)) == tokens(found)
