"""Engines by name. Each is imported only on request."""

from __future__ import annotations

import importlib

from kvoffloadd.agent.engines.base import Engine, EngineError

ENGINES = {
    "memory": "kvoffloadd.agent.engines.memory:MemoryEngine",
    "memory-stops": "kvoffloadd.agent.engines.memory:StoppingMemoryEngine",
    "mooncake": "kvoffloadd.agent.engines.mooncake:MooncakeEngine",
    "valkey": "kvoffloadd.agent.engines.valkey:ValkeyEngine",
}


def make_engine(name: str) -> Engine:
    """Returns an engine. Raises EngineError if there is none of this name, or its package is not installed."""
    place = ENGINES.get(name)
    if place is None:
        raise EngineError(f"unknown engine {name!r}; known are {', '.join(ENGINES)}", fault="operator")
    module, _, cls = place.partition(":")
    try:
        made: Engine = getattr(importlib.import_module(module), cls)()
    except ImportError as error:
        raise EngineError(f"engine {name}: {error}", fault="operator") from error
    return made
