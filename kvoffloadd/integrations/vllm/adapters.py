"""Identifies LoRA adapters by the contents of the files that the ranks have loaded, and not by the name and the path
that vLLM has for them, nor by the files that lie there when a request comes.

The scheduler names an adapter once all ranks have loaded it, and have reported that they loaded the same. The name goes
into the block hashes of the adapter's requests, and with that into vLLM's own prefix cache. vLLM loads adapters when it
runs the first request that has one: here they are loaded when that request comes, so that it has the name of the
adapter that will compute it.

When vLLM drops an adapter for lack of space, the ranks alone load it again, in the middle of a step. Each rank
therefore judges, too: it never again stores or loads under the name of an adapter that it has once replaced by another.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint, model_of, snapshot_of
from kvoffloadd.integrations.common.naming import digest_of

logger = logging.getLogger("vllm.kvoffloadd")

_HASHES = "vllm.v1.core.kv_cache_utils"
_ENGINE = "vllm.v1.engine.core"
_LOADER = "vllm.lora.worker_manager"
_NOTED = "kvoffloadd_adapter"
_SEEN = "kvoffloadd_adapter_files"
_CONFIG = "adapter_config.json"


# --- the scheduler's process ---


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The adapter that ranks compute a request with. `number`: vLLM's id. `state`: of its files when they were loaded,
    empty where that is not known.
    """

    number: int
    state: str


@dataclass(eq=False, slots=True)
class NamedAdapter:
    """The adapter of requests. `salt`: text in their block hashes. `seen`: state of its files at the last load by all
    ranks. `replaced`: ranks have, or may have, loaded another one under its number since.
    """

    loaded: LoadedAdapter
    salt: str
    seen: str = ""
    replaced: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether its requests load and store."""
        return bool(self.loaded.state) and not self.replaced


class AdapterNames:
    """Names adapters by the contents that ranks have loaded. `settings`: how the engine applies adapters."""

    def __init__(self, how: Fingerprint, settings: str) -> None:
        self._how = how
        self._settings = settings
        self._named: dict[int, NamedAdapter] = {}
        self._warned: set[str] = set()

    def adapter_of(self, request: Any) -> NamedAdapter | None:
        """Returns the adapter of a request of vLLM's, as it was named first, or by `settle`."""
        lora = request.lora_request
        if lora is None:
            return None
        noted: NamedAdapter | None = getattr(request, _NOTED, None)
        if noted is None:
            # vLLM makes requests in a separate thread: that one looks at the files.
            setattr(request, _SEEN, state_at(lora))
            noted = self._named.get(lora.lora_int_id) or self._nameless(lora.lora_int_id)
            setattr(request, _NOTED, noted)
        return noted

    def settle(self, request: Any, add_lora: Callable[[Any], object] | None) -> None:
        """Names a request before the scheduler has it: the request's name is that of the loaded adapter. `add_lora`:
        vLLM's, which has `learn` called; for an adapter that is loaded it does nothing. None: ranks can load nothing
        now.
        """
        noted = self.adapter_of(request)
        if noted is None:
            return
        lora, seen = request.lora_request, getattr(request, _SEEN)
        named = self._named.get(lora.lora_int_id)
        # Files that were written again may be the loaded ones: vLLM had dropped the adapter.
        if named is None or lora.load_inplace or seen not in (named.loaded.state, named.seen):
            named = self._load(lora, seen, add_lora)
        if noted is not named:
            setattr(request, _NOTED, named)
            request.block_hashes.clear()
            request.update_block_hashes()

    def learn(self, lora: Any, states: Collection[str]) -> None:
        """Names a LoRARequest by the states that ranks have loaded."""
        number = lora.lora_int_id
        (state,) = set(states) if len(set(states)) == 1 else ("",)
        former = self._named.get(number)
        if former is not None and state and former.loaded.state == state:
            return
        contents = self._contents(lora, state)
        self.forget(number)
        if contents:
            salt = digest_of((contents, self._settings))
            self._named[number] = NamedAdapter(LoadedAdapter(number, state), salt)
            return
        self._named[number] = self._nameless(number)
        if lora.lora_path not in self._warned:
            self._warned.add(lora.lora_path)
            logger.warning(
                "kvoffloadd: nothing is stored or loaded for requests with the LoRA adapter at %s: what was loaded of "
                "its files is not known here",
                lora.lora_path,
            )

    def forget(self, number: int) -> None:
        """Makes the adapter's requests share nothing any more; the next request has all ranks load and report it."""
        former = self._named.pop(number, None)
        if former is not None:
            former.replaced = True

    def replaced(self, states: Collection[str]) -> None:
        """Marks adapters as replaced: some rank reported that it has, by itself, loaded others in place of these
        states.
        """
        for number in [number for number, named in self._named.items() if named.loaded.state in states]:
            self.forget(number)

    def _load(self, lora: Any, seen: str, add_lora: Callable[[Any], object] | None) -> NamedAdapter:
        if add_lora is None:
            return self._nameless(lora.lora_int_id)
        try:
            add_lora(lora)
        except Exception:  # its loaders may raise anything; vLLM tries again with the request, and answers it
            logger.exception("kvoffloadd: the LoRA adapter at %s can't be loaded", lora.lora_path)
        # Missing if this engine replaces vLLM's `add_lora`, which has `learn` called.
        named = self._named.setdefault(lora.lora_int_id, self._nameless(lora.lora_int_id))
        named.seen = seen
        return named

    def _contents(self, lora: Any, state: str) -> str:
        """Returns the name of a state with the user's choice of `fingerprint`. Empty: not known, or it is no longer
        there.
        """
        if not state or self._how is Fingerprint.AUTO:
            return state
        contents = state_at(lora, self._how)
        return contents if state_at(lora) == state else ""

    @staticmethod
    def _nameless(number: int) -> NamedAdapter:
        """Makes an adapter without a name: its requests share with each other alone, in vLLM's own prefix cache."""
        return NamedAdapter(LoadedAdapter(number, ""), secrets.token_hex(16))


def name_adapters(names: AdapterNames) -> None:
    """Makes vLLM's block hashes in this process name adapters by their loaded contents, too, from now on."""
    hashes: Any = importlib.import_module(_HASHES)
    engine: Any = importlib.import_module(_ENGINE).EngineCore
    extra_keys = _original(hashes._gen_lora_extra_hash_keys)
    add_lora, remove_lora, add_request = map(_original, (engine.add_lora, engine.remove_lora, engine.add_request))

    @functools.wraps(extra_keys)
    def with_salt(request: Any) -> list[tuple[str, ...]]:
        found: list[tuple[str, ...]] = extra_keys(request)
        named = names.adapter_of(request)
        return found if named is None else [*found, ("lora loaded", named.salt)]

    @functools.wraps(add_lora)
    def learning(self: Any, lora_request: Any) -> Any:
        states: list[str] = []  # where it fails, some ranks may have loaded it
        try:
            added = add_lora(self, lora_request)
            states = self.model_executor.collective_rpc(state_of, args=(lora_request.lora_int_id,))
        finally:
            names.learn(lora_request, states)
        return added

    @functools.wraps(remove_lora)
    def forgetting(self: Any, lora_id: int) -> Any:
        names.forget(lora_id)
        return remove_lora(self, lora_id)

    @functools.wraps(add_request)
    def settling(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        # The memory that adapters are loaded into may be taken away.
        names.settle(request, None if self.model_executor.is_sleeping else self.add_lora)
        return add_request(self, request, *arguments, **named)

    hashes._gen_lora_extra_hash_keys = _over(extra_keys, with_salt)
    engine.add_lora, engine.remove_lora = _over(add_lora, learning), _over(remove_lora, forgetting)
    engine.add_request = _over(add_request, settling)


def _original(function: Any) -> Any:
    return getattr(function, "original", function)


def _over(original: Any, ours: Any) -> Any:
    """Puts `ours` in the place of vLLM's function; one process may have several engines, one after the other."""
    ours.original = original
    return ours


# --- a rank's process ---


def state_at(lora: Any, how: Fingerprint = Fingerprint.AUTO) -> str:
    """Names the contents of a LoRARequest's files, and how they are read. Empty: not known."""
    contents = contents_at(lora.lora_path, how)
    return contents and f"{contents} 3d {lora.is_3d_lora_weight}"


def contents_at(path: str, how: Fingerprint = Fingerprint.AUTO) -> str:
    """Names the contents of an adapter's files. `path`: as vLLM has it, a place or a name on the hub. Empty: not
    known.
    """
    place = os.path.expanduser(path)
    if not os.path.exists(place):
        place = snapshot_of(path, file=_CONFIG) or ""
    try:
        return model_of(place, how) if place else ""
    except ContentsError:
        return ""


class RankAdapters:
    """The adapters that this rank has loaded, by vLLM's ids."""

    def __init__(self) -> None:
        self._states: dict[int, str] = {}
        self._alone: dict[int, Any] = {}  # LoRARequests that were loaded since the scheduler's last query of all ranks
        self._replaced: set[str] = set()
        self._unreported: set[str] = set()

    def note(self, lora: Any, state: str) -> None:
        """Records the load of a LoRARequest. `state`: empty where its files were written meanwhile."""
        number = lora.lora_int_id
        former = self._states.get(number, "")
        if former not in ("", state):
            self._replace(former)
        self._states[number] = state
        self._alone[number] = lora

    def state_of(self, number: int) -> str:
        """Returns the state for the scheduler, which queries all ranks when all have loaded it. Empty: not known.

        A state that was replaced once has no name again: requests may have been computed in part with its replacement.
        """
        self._alone.pop(number, None)
        state = self._states.get(number, "")
        return "" if state in self._replaced else state

    def is_loaded(self, adapter: LoadedAdapter | None) -> bool:
        """Returns whether this rank, and as far as it knows each other, computes with just this adapter, and always did
        so for requests of that name; without an adapter it does.
        """
        if adapter is None:
            return True
        if not adapter.state or adapter.state in self._replaced:
            return False
        alone = self._alone.get(adapter.number)
        if alone is not None and state_at(alone) != adapter.state:
            self._replace(adapter.state)  # another rank may have loaded it a moment later
            return False
        return self._states.get(adapter.number) == adapter.state

    def tell(self) -> set[str]:
        """Returns the states that were replaced since the last call."""
        states, self._unreported = self._unreported, set()
        return states

    def _replace(self, state: str) -> None:
        self._replaced.add(state)
        self._unreported.add(state)


RANK = RankAdapters()
"""This process's adapters."""


def state_of(_worker: Any, number: int) -> str:
    """Returns `RANK`'s state of an adapter: vLLM's executor calls this in each rank."""
    return RANK.state_of(number)


def note_what_is_loaded() -> None:
    """Starts to record the adapters that vLLM loads in this process."""
    manager: Any = importlib.import_module(_LOADER).WorkerLoRAManager
    load = _original(manager._load_adapter)

    @functools.wraps(load)
    def load_adapter(self: Any, lora_request: Any) -> Any:
        before = state_at(lora_request)
        adapter = load(self, lora_request)  # if it can't, vLLM keeps the adapter that it has
        after = state_at(lora_request)
        # Files of the hub are fetched during the load: each state has a separate place.
        RANK.note(lora_request, after if before in ("", after) else "")
        return adapter

    manager._load_adapter = _over(load, load_adapter)
