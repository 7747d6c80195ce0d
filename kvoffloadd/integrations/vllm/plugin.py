"""vLLM's entry point for plug-ins (`vllm.general_plugins`): it calls `install` in each of its processes.

What an engine computes with is read as soon as its configuration is made, which is before any weights are loaded. It is
kept in the configuration, which all of the engine's processes are given.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.vllm import versions
from kvoffloadd.integrations.vllm.identity import IDENTITY, OPTION, identity_of

_ARGUMENTS = "vllm.engine.arg_utils"
"""Loaded where configurations are made; others shall not load it for us."""
_CONNECTOR, _SPEC = "KVOffloaddConnector", "KVOffloaddSpec"


def install() -> None:
    """Watch configurations being made. Nothing for a release that is not supported."""
    try:
        versions.check()
    except ImportError:
        return
    arguments = sys.modules.get(_ARGUMENTS)
    made = None if arguments is None else arguments.EngineArgs.create_engine_config
    if arguments is None or hasattr(made, "kvoffloadd"):
        return
    arguments.EngineArgs.create_engine_config = _noting(made)


def note(vllm_config: Any) -> None:
    """Put the identity of the engine into the options of our connectors, where it has any.

    Raises UsageError for a `fingerprint` that can't be.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    found: dict[Fingerprint, dict[str, Any]] = {}
    for extra in _ours(transfer.kv_connector, transfer.kv_connector_extra_config):
        how = Fingerprint.of(extra.get(OPTION, Fingerprint.AUTO), "kv_connector_extra_config")
        if how not in found:
            found[how] = identity_of(vllm_config, how)
        extra[IDENTITY] = found[how]


def _noting(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(*arguments: Any, **named: Any) -> Any:
        vllm_config = create(*arguments, **named)
        note(vllm_config)
        return vllm_config

    create_engine_config.kvoffloadd = True  # type: ignore[attr-defined]
    return create_engine_config


def _ours(connector: str | None, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The options of our connectors: this one's, or those inside a MultiConnector."""
    if connector == _CONNECTOR or extra.get("spec_name") == _SPEC:
        yield extra
    for inner in extra.get("connectors", ()):
        yield from _ours(inner.get("kv_connector"), inner.setdefault("kv_connector_extra_config", {}))
