"""Sleep mode: vLLM takes the KV cache's memory away, and gives it other memory at the same addresses on waking up.

A daemon that was not told would keep the old memory, and load into it: the engine would read whatever the new memory
holds. So an engine that could sleep untold is not started.
"""

from __future__ import annotations

from typing import Any

from kvoffloadd.errors import UsageError


def refuse_sleep(engine: Any, why: str) -> None:
    """`engine`: a VllmConfig. Raises UsageError, with `why`, if such an engine can sleep."""
    model = engine.model_config
    # vLLM sets the second with the first; by itself it is enough for an engine to be put to sleep.
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("enable_sleep_mode", "enable_cumem_allocator")
        if getattr(model, name)
    ]
    if given:
        raise UsageError(f"kvoffloadd can't follow sleep mode ({given[0]}) here: {why}")
