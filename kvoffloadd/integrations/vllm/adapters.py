"""LoRA adapters: what identifies one are the contents of its files, and not the name and the path that vLLM has for it.

A scheduler puts them into the block hashes of the adapter's requests, and with that into vLLM's own prefix cache, too.
What a rank has loaded may be another state of the files, from before they were written again: the rank names what it
loads, and neither stores nor loads blocks for a request that was told of another state.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from dataclasses import dataclass
from typing import Any

from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint, model_of, snapshot_of
from kvoffloadd.integrations.common.naming import digest_of

logger = logging.getLogger("vllm.kvoffloadd")

_HASHES = "vllm.v1.core.kv_cache_utils"
_LOADER = "vllm.lora.worker_manager"
_NOTED = "kvoffloadd_adapter"
_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One that a request has. `number`: vLLM's id. `contents`: of its files, empty where they are not known."""

    number: int
    contents: str


class AdapterNames:
    """Names adapters by their files, for a scheduler. `settings`: how the engine applies adapters."""

    def __init__(self, how: Fingerprint, settings: str) -> None:
        self._how = how
        self._settings = settings
        self._read: dict[str, tuple[str, str]] = {}  # path -> what its files were like, and their contents
        self._warned: set[str] = set()

    def adapter_of(self, request: Any) -> LoadedAdapter | None:
        """Of a request of vLLM's, as its files were when it came."""
        lora = request.lora_request
        if lora is None:
            return None
        noted: LoadedAdapter | None = getattr(request, _NOTED, None)
        if noted is None:
            noted = LoadedAdapter(lora.lora_int_id, self._contents(lora.lora_path))
            setattr(request, _NOTED, noted)
        return noted

    def salt_of(self, request: Any) -> str:
        """What goes into the block hashes of a request that has an adapter. Empty: its adapter is not known."""
        adapter = self.adapter_of(request)
        if adapter is None or not adapter.contents:
            return ""
        return digest_of((self._named(request), self._settings))

    def _named(self, request: Any) -> str:
        """All bytes are read once for each state of the files."""
        path, contents = request.lora_request.lora_path, request.kvoffloadd_adapter.contents
        shape = f"3d {request.lora_request.is_3d_lora_weight}"
        if self._how is Fingerprint.AUTO:
            return f"{contents} {shape}"
        before, named = self._read.get(path, ("", ""))
        if before != contents:
            named = contents_at(path, self._how)
            self._read[path] = contents, named
        return f"{named} {shape}"

    def _contents(self, path: str) -> str:
        found = contents_at(path)
        if not found and path not in self._warned:
            self._warned.add(path)
            logger.warning(
                "kvoffloadd: nothing is stored or loaded for requests with the LoRA adapter at %s: what is in its "
                "files is not known here",
                path,
            )
        return found


def contents_at(path: str, how: Fingerprint = Fingerprint.AUTO) -> str:
    """What is in an adapter's files. `path`: as vLLM has it, a place or a name on the hub. Empty: not known."""
    place = os.path.expanduser(path)
    if not os.path.exists(place):
        place = snapshot_of(path, file=_CONFIG) or ""
    try:
        return model_of(place, how) if place else ""
    except ContentsError:
        return ""


_loaded: dict[int, str] = {}
"""What this rank has loaded: vLLM's id of an adapter -> the contents of its files. Empty: they changed meanwhile."""


def is_loaded(adapter: LoadedAdapter | None) -> bool:
    """Whether this rank computes with just this adapter; without one it does."""
    return adapter is None or (bool(adapter.contents) and _loaded.get(adapter.number) == adapter.contents)


def may_be_loaded(adapter: LoadedAdapter | None) -> bool:
    """As `is_loaded`, or it has none of that number yet, and will load it for the request."""
    return is_loaded(adapter) or (adapter is not None and bool(adapter.contents) and adapter.number not in _loaded)


def name_in_hashes(names: AdapterNames) -> None:
    """From now on vLLM's block hashes in this process name adapters by their contents, too."""
    module: Any = importlib.import_module(_HASHES)
    original = getattr(module._gen_lora_extra_hash_keys, "original", module._gen_lora_extra_hash_keys)

    @functools.wraps(original)
    def extra_keys(request: Any) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = original(request)
        salt = names.salt_of(request) if found else ""
        return [*found, ("lora contents", salt)] if salt else found

    extra_keys.original = original  # type: ignore[attr-defined]
    module._gen_lora_extra_hash_keys = extra_keys


def note_what_is_loaded() -> None:
    """From now on it is known what is in the adapters that vLLM loads in this process."""
    manager: Any = importlib.import_module(_LOADER).WorkerLoRAManager
    if hasattr(manager._load_adapter, "original"):
        return
    load = manager._load_adapter

    @functools.wraps(load)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        _loaded[lora_request.lora_int_id] = ""  # until it is known; what can't be loaded stays so
        before = contents_at(lora_request.lora_path)
        adapter = load(self, lora_request)
        after = contents_at(lora_request.lora_path)
        # Of the hub's, which are fetched on the way, each state has a place of its own.
        if before in ("", after):
            _loaded[lora_request.lora_int_id] = after
        return adapter

    load_adapter.original = load  # type: ignore[attr-defined]
    manager._load_adapter = load_adapter
