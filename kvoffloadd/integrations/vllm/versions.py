"""Which vLLM this is, and what differs between those that the adapter knows: nothing else asks for a version.

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
    """`number`: major and minor. `tells_of_sleep`: connectors hear when the KV cache is unmapped, and mapped again."""

    number: str
    tells_of_sleep: bool


RELEASES = {
    "0.32": VllmRelease("0.32", tells_of_sleep=False),
    "0.33": VllmRelease("0.33", tells_of_sleep=True),
}
SUPPORTED = tuple(RELEASES)


def release(version: str) -> str:
    """Major and minor number of a version: "0.32.0+cpu" -> "0.32"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def version() -> str:
    """Returns the whole version of the installed vLLM: a patch release may compute other bytes."""
    return str(importlib.import_module("vllm").__version__)


def check() -> VllmRelease:
    """The installed release. Raises ImportError if there is no vLLM, or one that is not supported."""
    installed = version()
    known = RELEASES.get(release(installed))
    if known is None:
        named = ", ".join(f"{one}.x" for one in SUPPORTED)
        raise ImportError(f"kvoffloadd supports vLLM {named}; installed is {installed}")
    return known


def refuse_sleep(engine: Any, why: str) -> None:
    """`engine`: a VllmConfig. Raises UsageError, with `why`, if such an engine can sleep.

    Asleep, vLLM takes the KV cache's memory away, and gives it other memory at the same addresses on waking up. A
    daemon that was not told would keep the old memory, and load into it: the engine would read whatever the new memory
    holds. So an engine that could sleep untold is not started.
    """
    model = engine.model_config
    # vLLM sets the second with the first; by itself it is enough for an engine to be put to sleep.
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("enable_sleep_mode", "enable_cumem_allocator")
        if getattr(model, name)
    ]
    if given:
        raise UsageError(f"kvoffloadd can't follow sleep mode ({given[0]}) here: {why}")
