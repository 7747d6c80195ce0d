"""Reads this rank's SGLang, and hooks its changes of weights: no other module reads its internals."""

from __future__ import annotations

import functools
import importlib
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.schedule_batch import Req, split_cached_prefix_by_tier
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context, get_device, get_exec, get_memory, get_parallel
from sglang.srt.utils import cpu_has_amx_support

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.hints import HintReader
from kvoffloadd.integrations.sglang import counters
from kvoffloadd.integrations.sglang.adapters import ADAPTERS
from kvoffloadd.integrations.sglang.claims import RetainedPages
from kvoffloadd.integrations.sglang.files import FILES
from kvoffloadd.integrations.sglang.guard import or_else
from kvoffloadd.integrations.sglang.identity import from_elsewhere, model_source, sources_of
from kvoffloadd.integrations.sglang.pagestore import PageStore
from kvoffloadd.integrations.sglang.pools import TpRank
from kvoffloadd.integrations.sglang.weights import WEIGHTS

_AT_REST: weakref.WeakSet[PageStore] = weakref.WeakSet()
_TOLD_OF_HITS: weakref.WeakSet[PageStore] = weakref.WeakSet()
_TOLD_OF_HINTS: weakref.WeakSet[PageStore] = weakref.WeakSet()
_HINTS = HintReader(logging.getLogger("sglang.kvoffloadd"))

_CHANGES = (
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "receive_weights_from_distributed",
    "load_weights_from_distributed",
)


def arguments() -> dict[str, Any]:
    """Returns all of SGLang's arguments, by name, with their present values."""
    found: dict[str, Any] = get_context().resolved_server_args_dict()
    return found


def has_amx() -> bool:
    """Returns whether this engine computes on a processor with AMX."""
    return get_device().device == "cpu" and bool(cpu_has_amx_support())


def refuse_parallel(pp_size: int, attn_cp_size: int, dcp_size: int) -> None:
    """Raises UsageError for ranks that are not known to share keys well, and for ranks on several hosts."""
    if (nodes := get_parallel().nnodes) > 1:
        raise UsageError(
            f"kvoffloadd needs all ranks of an engine on one host, and --nnodes {nodes} spreads them over {nodes}: "
            "each host's daemon would have only parts of keys, and nothing would hit. Leave --nnodes at 1, with a "
            "--tp-size that fits one host"
        )
    given = {"--pp-size": pp_size, "--attn-cp-size": attn_cp_size, "--dcp-size": dcp_size}
    for flag, size in given.items():
        if size > 1:
            raise UsageError(f"kvoffloadd has not been tested with {flag} {size}, and refuses it: leave it at 1")


def refuse_moving_memory() -> None:
    """Raises UsageError where the memory of device pools may be replaced without the daemon's knowledge."""
    given = {
        "--enable-memory-saver": get_exec().features.enable_memory_saver,
        "--enable-unified-memory": get_memory().enable_unified_memory,
    }
    for flag, is_set in given.items():
        if is_set:
            raise UsageError(
                f"kvoffloadd's linker can't be used with {flag}: the daemon copies from and to the KV cache"
            )


def dcp_size() -> int:
    """Returns how many ranks share a request's tokens when it decodes."""
    return int(get_parallel().attn_dcp_size)


def stream() -> Any:
    """Returns the GPU's stream that the calling thread works on."""
    return importlib.import_module("torch").cuda.current_stream()


def rank() -> TpRank:
    """Returns this rank's place among those that hold parts of the same keys."""
    parallel = get_parallel()
    return TpRank(parallel.attn_tp_rank, parallel.attn_tp_size)


def agreed(number: int) -> int:
    """Returns the first rank's number on all ranks that hold parts of the same keys; all of them must call it, each
    time.
    """
    group = get_parallel().attn_tp_group
    if group.world_size == 1:
        return number
    numbers = [number]
    importlib.import_module("torch").distributed.broadcast_object_list(
        numbers, src=group.ranks[0], group=group.cpu_group
    )
    return int(numbers[0])


def all_agree(good: bool) -> bool:
    """Returns whether all ranks that hold parts of the same keys are good; all of them must call it, each time."""
    group = get_parallel().attn_tp_group
    if group.world_size == 1:
        return good
    torch = importlib.import_module("torch")
    flag = torch.tensor([int(good)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())


@contextmanager
def all_or_none() -> Iterator[None]:
    """Surrounds a step of the start that no rank may pass alone: a rank that waits for a missing one waits for ever.
    All ranks that hold parts of the same keys come here, each time, and nothing within waits for the others. An error
    of one is raised in all of them.
    """
    try:
        yield
    except Exception:
        all_agree(good=False)
        raise
    if not all_agree(good=True):
        raise UsageError("kvoffloadd can't start on another rank of this engine: see that rank's log")


@functools.cache
def watch_start() -> None:
    """Records SGLang's files before it loads anything, and has all later loads reported. Raises as `watch_weights`
    does.
    """
    watch_weights()
    _watch_adapters()
    FILES.look(sources_of(arguments()))


@functools.cache
def watch_weights() -> None:
    """Has every change reported to `WEIGHTS` from now on. Raises AttributeError where SGLang has other methods."""
    _watch_loads()
    for name in _CHANGES:
        _call_before(WeightUpdater, name, WEIGHTS.change)
    _call_before(WeightUpdater, "begin_weight_update", WEIGHTS.session_begins)
    _call_after(WeightUpdater, "end_weight_update", WEIGHTS.session_ends)
    _call_after(UnifiedRadixCache, "reset", WEIGHTS.flush)


def _watch_loads() -> None:
    """Has `WEIGHTS` load all weights that come from files, if this engine has one rank."""
    update = WeightUpdater.update_weights_from_disk

    @functools.wraps(update)
    def loading(
        updater: WeightUpdater, model_path: str, load_format: str, weight_name_filter: Any = None, **named: Any
    ) -> Any:
        def load() -> tuple[bool, str]:
            done: tuple[bool, str] = update(updater, model_path, load_format, weight_name_filter, **named)
            return done

        given = arguments()
        is_alone = given["tp_size"] == given["pp_size"] == 1
        if not is_alone or weight_name_filter is not None or from_elsewhere({"load_format": load_format}):
            WEIGHTS.change()
            return load()
        # It looks for names on the hub in the default cache, whatever `download_dir` is.
        return WEIGHTS.load(model_source(model_path, {**given, "download_dir": None}), load_format, load)

    WeightUpdater.update_weights_from_disk = loading


def _watch_adapters() -> None:
    """Has each load of an adapter reported to `ADAPTERS`, and the extra key of each request taken from there."""
    load, load_tensors, make = LoRAManager._load_lora_adapter, LoRAManager._load_lora_adapter_from_tensors, Req.__init__

    @functools.wraps(load)
    def loading(manager: LoRAManager, lora_ref: Any) -> Any:
        with ADAPTERS.loading(lora_ref.lora_id, lora_ref.lora_path):
            return load(manager, lora_ref)

    @functools.wraps(load_tensors)
    def receiving(manager: LoRAManager, lora_ref: Any, *arguments: Any, **named: Any) -> Any:
        ADAPTERS.received(lora_ref.lora_id)
        return load_tensors(manager, lora_ref, *arguments, **named)

    @functools.wraps(make)
    def making(request: Req, *arguments: Any, **named: Any) -> None:
        make(request, *arguments, **named)
        request.extra_key = ADAPTERS.extra_key(request.extra_key, request.lora_id)

    LoRAManager._load_lora_adapter = loading
    LoRAManager._load_lora_adapter_from_tensors = receiving
    Req.__init__ = making


def rest_during_flushes(pages: PageStore) -> None:
    """Keeps `pages` at rest while SGLang's HiCache forgets its pages: it waits ten seconds for its storage's threads,
    and its scheduler dies if one of them still waits for the daemon then.
    """
    _AT_REST.add(pages)
    _watch_flushes()


@functools.cache
def _watch_flushes() -> None:
    forget = HiCacheController.reset

    @functools.wraps(forget)
    def wrapper(controller: HiCacheController) -> None:
        with ExitStack() as stack:
            for pages in list(_AT_REST):
                stack.enter_context(pages.at_rest())
            forget(controller)

    HiCacheController.reset = wrapper


def tell_hits(pages: PageStore) -> None:
    """Has the pages that SGLang serves from its other levels reported to `pages`. One rank is enough."""
    _TOLD_OF_HITS.add(pages)
    _watch_admissions()


@functools.cache
def _watch_admissions() -> None:
    """Hooks the admission of requests. Each is admitted once, unless it is retracted: pages that it finds after that
    may be its own.
    """
    account = PrefillAdder._account_prefill_cache_admission

    @functools.wraps(account)
    def wrapper(adder: PrefillAdder, req: Req, prefix_len: int) -> None:
        account(adder, req, prefix_len)
        if not req.retracted_stain:
            _tell_hits(adder.tree_cache, req, prefix_len)

    PrefillAdder._account_prefill_cache_admission = wrapper


@or_else(lambda *_: None)
def _tell_hits(tree: UnifiedRadixCache, request: Req, prefix_tokens: int) -> None:
    notified = [pages for pages in _TOLD_OF_HITS if pages.available]
    if not notified:
        return
    _device, _host, from_storage = split_cached_prefix_by_tier(
        prefix_len=prefix_tokens,
        host_hit_len=request.materialized_host_hit_len(),
        storage_hit_len=request.storage_hit_length,
        storage_hit_start=request.storage_hit_start,
        host_hit_is_storage=request.host_hit_is_storage,
    )
    hits = (prefix_tokens - from_storage) // tree.page_size
    if not hits:
        return
    keys = _keys_of(tree, request)[:hits]  # pages that a linker has loaded are not in the tree yet
    for pages in notified:
        pages.used(keys)


def tell_hints(pages: PageStore) -> None:
    """Has `pages` claim what requests want retained when they have ended. One rank is enough."""
    _TOLD_OF_HINTS.add(pages)
    _watch_releases()


@functools.cache
def _watch_releases() -> None:
    """Hooks the ends of requests: the tree has what it keeps of them then. It releases retracted ones as well."""
    release = UnifiedRadixCache.on_release

    @functools.wraps(release)
    def wrapper(tree: UnifiedRadixCache, req: Req, **named: Any) -> None:
        if getattr(req, "kv_hints", None) is not None and req.finished():
            _tell_hints(tree, req)
        release(tree, req, **named)

    UnifiedRadixCache.on_release = wrapper


@or_else(lambda *_: None)
def _tell_hints(tree: UnifiedRadixCache, request: Req) -> None:
    if not _TOLD_OF_HINTS:
        return
    found = _HINTS.read(request.kv_hints.actions)
    counters.IGNORED_HINTS.inc(found.ignored)
    if not found.directives or request.last_node is None:
        return
    in_prompt = len(request.origin_input_ids) // tree.page_size
    wanted = RetainedPages(found.directives, _keys_of(tree, request), in_prompt)
    for pages in list(_TOLD_OF_HINTS):
        pages.retain(wanted)


def _keys_of(tree: UnifiedRadixCache, request: Req) -> list[str]:
    """Returns the names of a request's pages that the tree has, from the first token on."""
    node, core = request.last_node, tree.tree_core
    return [*core.get_prefix_hash_values(node), *core.get_hash_values(node)]


def _call_before(owner: type, name: str, callback: Callable[[], None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        callback()
        return method(*arguments, **named)

    setattr(owner, name, wrapper)


def _call_after(owner: type, name: str, callback: Callable[[], None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        callback()
        return result

    setattr(owner, name, wrapper)
