"""vLLM's entry point for plug-ins (`vllm.general_plugins`): it calls `install` in each of its processes.

The connector is registered by its name, so that vLLM finds it there: also in the front end, which makes no connector
and looks up the class of its figures. An engine's identity is read as soon as its configuration is made, which is
before any weights are loaded. It is kept in the configuration, which all of the engine's processes are given. The
policy for loads that fail is set there, too, before any scheduler reads it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.vllm import versions
from kvoffloadd.integrations.vllm.config import INSIDE, POLICY, recomputes
from kvoffloadd.integrations.vllm.identity import IDENTITY, OPTION, identity_of

logger = logging.getLogger("vllm.kvoffloadd")

_ARGUMENTS = "vllm.engine.arg_utils"
"""Loaded where configurations are made; other processes must not load it for us."""
_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
CONNECTOR, _SPEC = "KVOffloaddConnector", "KVOffloaddSpec"
_PACKAGE = "kvoffloadd.integrations.vllm"


def install() -> None:
    """Registers the connector, and watches configurations being made. Never raises: vLLM calls this for every engine,
    also for those without our connector. With a release that is not supported it only logs that, once an engine.
    """
    try:
        versions.check()
        _register()
        _watch()
    except ImportError as error:
        if multiprocessing.parent_process() is None:  # each of the engine's processes is here
            logger.warning("%s can't be used: %s", CONNECTOR, error)
    except Exception:  # an engine that needs the connector ends at its start, with the reason
        logger.exception("kvoffloadd: a bug, please report it: %s can't be used", CONNECTOR)


def _register() -> None:
    """Registers the connector by name, so that vLLM imports it only if it is used."""
    with suppress(ValueError):  # it is registered already
        importlib.import_module(_FACTORY).KVConnectorFactory.register_connector(CONNECTOR, _PACKAGE, CONNECTOR)


def _watch() -> None:
    arguments = sys.modules.get(_ARGUMENTS)
    made = None if arguments is None else arguments.EngineArgs.create_engine_config
    if arguments is None or hasattr(made, "kvoffloadd"):
        return
    arguments.EngineArgs.create_engine_config = _noting(made)


def note(vllm_config: Any) -> None:
    """Puts the identity of the engine into the options of our connectors, where it has any, and makes vLLM recompute
    requests whose loads fail.

    Raises UsageError for an invalid `fingerprint` or `recompute_failed_loads`.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    if _wants_policy(transfer.kv_connector, transfer.kv_connector_extra_config):
        if transfer.kv_load_failure_policy != POLICY:
            logger.info("kvoffloadd: requests whose loads fail are recomputed (kv_load_failure_policy = %s)", POLICY)
        transfer.kv_load_failure_policy = POLICY
    found: dict[Fingerprint, dict[str, Any]] = {}
    for extra in _ours(transfer.kv_connector, transfer.kv_connector_extra_config, transfer.kv_load_failure_policy):
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


def _wants_policy(connector: str | None, extra: dict[str, Any]) -> bool:
    """Returns whether our connector is used, and no entry of it opts out. vLLM's default is not its user's choice, and
    looks the same: a policy that is given has no effect unless an entry opts out.
    """
    wanted = [recomputes(options) for name, options in _entries(connector, extra) if name == CONNECTOR]
    return bool(wanted) and all(wanted)


def _entries(connector: str | None, extra: dict[str, Any]) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """Yields each connector with its options: this one, and those inside a MultiConnector."""
    yield connector, extra
    for inner in extra.get("connectors", ()):
        yield from _entries(inner.get("kv_connector"), inner.get("kv_connector_extra_config") or {})


def _ours(connector: str | None, extra: dict[str, Any], policy: str) -> Iterator[dict[str, Any]]:
    """Yields the options of our connectors: this one's, or those inside a MultiConnector. They get what they can't see
    of it: that there is one, and its `policy` for loads that fail, which is the one that vLLM follows.
    """
    if connector == CONNECTOR or extra.get("spec_name") == _SPEC:
        yield extra
    for inner in extra.get("connectors", ()):
        extra = inner.get("kv_connector_extra_config") or {}
        for ours in _ours(inner.get("kv_connector"), extra, policy):
            inner["kv_connector_extra_config"], inner["kv_load_failure_policy"] = extra, policy
            ours[INSIDE] = True
            yield ours
