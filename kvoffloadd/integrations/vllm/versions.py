"""Knows vLLM's version, and the differences between supported releases: no other module depends on a version.

vLLM's offloading interface is experimental and changes with every release, so an unknown one is refused rather than
guessed at.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kvoffloadd.errors import UsageError


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """A supported release. `number`: major and minor. `tells_of_sleep`: connectors are notified when the KV cache is
    unmapped, and mapped again.
    """

    number: str
    tells_of_sleep: bool


RELEASES = {
    "0.32": VllmRelease("0.32", tells_of_sleep=False),
    "0.33": VllmRelease("0.33", tells_of_sleep=True),
}
SUPPORTED = tuple(RELEASES)


def release(version: str) -> str:
    """Returns major and minor number of a version: "0.32.0+cpu" -> "0.32"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def version() -> str:
    """Returns the whole version of the installed vLLM: a patch release may compute other bytes."""
    return str(importlib.import_module("vllm").__version__)


def check() -> VllmRelease:
    """Returns the installed release. Raises ImportError if there is no vLLM, or one that is not supported."""
    installed = version()
    known = RELEASES.get(release(installed))
    if known is None:
        named = ", ".join(f"{supported}.x" for supported in SUPPORTED)
        raise ImportError(f"kvoffloadd supports vLLM {named}; installed is {installed}")
    return known


def refuse_sleep(engine: Any, why: str) -> None:
    """Raises UsageError, with `why`, if `engine`, a VllmConfig, can sleep.

    Asleep, vLLM takes the KV cache's memory away, and gives it other memory at the same addresses on waking up. A
    daemon without notice of that would keep the old memory, and load into it: the engine would read whatever the new
    memory holds. So an engine that could sleep without notice is not started.
    """
    model = engine.model_config
    # vLLM sets the second with the first; the second alone is enough for an engine to be put to sleep.
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("enable_sleep_mode", "enable_cumem_allocator")
        if getattr(model, name)
    ]
    if given:
        raise UsageError(f"kvoffloadd can't follow sleep mode ({given[0]}) here: {why}")
