"""What this rank's SGLang says of itself, and where it tells that weights change: nothing else reads its internals."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_device, get_exec, get_model, get_parallel, get_spec

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.sglang.namespace import DRAFT, KERNELS, MODEL
from kvoffloadd.integrations.sglang.weights import WeightChanges

WEIGHTS = WeightChanges()
"""Of this process, which has one rank. `watch_weights` keeps it up to date."""

_CHANGES = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
)


def arguments() -> dict[str, Any]:
    """For `namespace_of`."""
    model, kernels, draft = get_model(), get_exec().kernel, get_spec()
    found = {name: getattr(model, name) for name in ("model_path", "revision", *MODEL)}
    found |= {name: getattr(kernels, name) for name in KERNELS}
    found |= {name: getattr(draft, name) for name in DRAFT}
    return found | {"device": get_device().device}


def refuse_parallel(config: Any) -> None:
    """`config`: SGLang's HiCacheStorageConfig. Raises UsageError for ranks that are not known to share keys well."""
    parallel = get_parallel()
    given = {
        "--pp-size": config.pp_size,
        "--attn-cp-size": config.attn_cp_size,
        "--dcp-size": config.dcp_size,
        "--nnodes": parallel.nnodes,
    }
    for flag, size in given.items():
        if size > 1:
            raise UsageError(f"kvoffloadd was not tried with {flag} {size}, and refuses it: leave it at 1")


def agreed(number: int) -> int:
    """The first rank's number, in all ranks that hold parts of the same keys; they all come here, once."""
    group = get_parallel().attn_tp_group
    if group.world_size == 1:
        return number
    numbers = [number]
    importlib.import_module("torch").distributed.broadcast_object_list(
        numbers, src=group.ranks[0], group=group.cpu_group
    )
    return int(numbers[0])


@functools.cache
def watch_weights() -> None:
    """Have `WEIGHTS` told of every change, from now on. Raises AttributeError where SGLang has other methods."""
    for name in _CHANGES:
        _call_before(WeightUpdater, name, WEIGHTS.change)
    _call_before(WeightUpdater, "begin_weight_update", WEIGHTS.session_begins)
    _call_after(WeightUpdater, "end_weight_update", WEIGHTS.session_ends)
    _call_after(HiCacheController, "reset", WEIGHTS.flush)


def _call_before(owner: type, name: str, told: Callable[[], None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        told()
        return method(*arguments, **named)

    setattr(owner, name, wrapper)


def _call_after(owner: type, name: str, told: Callable[[], None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        told()
        return result

    setattr(owner, name, wrapper)
