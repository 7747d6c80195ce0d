"""vLLM's offloading manager: answers the scheduler's calls from the daemon's answers.

Nothing here waits, except for a reset. The first answer for a key is RETRY; the keys that a step looked up go out at
its end, one pin for each request, and the answers are there a step or two later. Keys that hit are pinned until they
are loaded, or the request is preempted, aborted, finished, or begins to compute those that were not loaded. The pins of
waiting requests fill half of the daemon's memory at most: other requests wait for room.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic, sleep, time
from types import MappingProxyType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffloadd.client import KeepHow
from kvoffloadd.integrations.vllm.adapters import LoadedAdapter, NamedAdapter
from kvoffloadd.integrations.vllm.config import Options
from kvoffloadd.integrations.vllm.event_thread import EventThread
from kvoffloadd.integrations.vllm.expectation import expected_until
from kvoffloadd.integrations.vllm.keys import PLAIN, KeyNames, by_group, hash_bytes_of, offload_key_of
from kvoffloadd.integrations.vllm.lookup_thread import LookupThread, PinRequest, UsedKeys
from kvoffloadd.integrations.vllm.requests import LookupState, RequestPhase, RequestState, admitted
from kvoffloadd.integrations.vllm.retainhints import RetainHints
from kvoffloadd.integrations.vllm.reusehints import ReuseHints
from kvoffloadd.integrations.vllm.worker import KeysLoadStoreSpec
from kvoffloadd.model import Tier

_YIELD_S = 0.00005
_EVENT_KEYS = 512  # a step: vLLM makes an object of each
_EVENTS_DUE_S = 0.2
_CLOSE_S = 5.0
_RESULTS = {
    LookupState.MISS: LookupResult.MISS,
    LookupState.HIT: LookupResult.HIT,
    LookupState.PENDING: LookupResult.HIT_PENDING,
    LookupState.ASKED: LookupResult.RETRY,
}

_SOURCES: Mapping[int, CacheHitSource] = MappingProxyType(
    {
        Tier.MEMORY: CacheHitSource.HOST,
        Tier.DISK: CacheHitSource.DISK,
        Tier.REMOTE: CacheHitSource.EXTERNAL_UNSPECIFIED,  # vLLM's word for remote stores
    }
)

_MEDIA: Mapping[int, Medium] = MappingProxyType({Tier.MEMORY: Medium.CPU, Tier.DISK: Medium.STORAGE})

_CONNECTED = "vllm:kvoffloadd_connected"
_LOOKED_UP = "vllm:kvoffloadd_looked_up_keys"
_HIT = "vllm:kvoffloadd_hit_keys"
_FROM_DISK = "vllm:kvoffloadd_disk_hit_keys"
_FROM_STORE = "vllm:kvoffloadd_remote_hit_keys"
_TIMED_OUT = "vllm:kvoffloadd_lookup_timeouts"
_FAILED_LOADS = "vllm:kvoffloadd_failed_loads"
_RECOMPUTED = "vllm:kvoffloadd_recomputed_tokens"
_KEPT = "vllm:kvoffloadd_kept_tokens"
_IGNORED_HINTS = "vllm:kvoffloadd_ignored_hints"
_LOST_CLAIMS = "vllm:kvoffloadd_lost_claims"


class _Told:
    """The state of a request that has reported its hits in the engine's own cache."""


class KVOffloaddManager(OffloadingManager):
    """One engine's manager. All methods belong to the scheduler's thread."""

    def __init__(
        self,
        lookup_thread: LookupThread,
        group_ids: Sequence[int],
        options: Options,
        event_thread: EventThread | None = None,
        *,
        has_windows: bool = False,
        names: KeyNames = PLAIN,
    ) -> None:
        """Stores its arguments. `group_ids`: the engine's groups, in vLLM's order. `event_thread`: where KV cache
        events are enabled. `has_windows`: whether some groups need the end of a prefix alone. `names`: of keys, before
        any reset.
        """
        self._has_windows = has_windows
        self._lookup_thread = lookup_thread
        self._event_thread = event_thread
        self._events_due_until = 0.0
        self._hash_bytes = 0
        # Keys stored anew after a reset, until all that were stored before have been reported as removed.
        self._stored_anew: set[OffloadKey] | None = None
        self._group_ids = tuple(group_ids)
        self._options = options
        self._requests: dict[str, RequestState] = {}
        self._fresh: dict[str, RequestState] = {}
        self._keeping = ReuseHints()
        self._retaining = RetainHints()
        self._lost_claims = 0  # of those that the thread has counted, how many were told
        self._used: dict[OffloadKey, UsedKeys] = {}  # in this step, by the last key: it names all before it
        self._outstanding: set[PinRequest] = set()
        self._names = names
        self._stats = OffloadingConnectorStats()
        self._connected: bool | None = None

    # --- lookups -------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Reads what the request asks to retain. Returns a context that stores only computed blocks."""
        if ignored := self._retaining.begin(req_context):
            self._stats.increase_counter(_IGNORED_HINTS, ignored)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Returns RETRY first; HIT: the key is pinned."""
        self._learn()
        if not _shares(req_context):
            return LookupResult.MISS
        self._keeping.note(req_context, (key,))
        state = self._state_of(req_context)
        if state is None:
            return LookupResult.MISS
        had_given_up = state.given_up
        answer = state.lookup(key, monotonic(), self._options.timeout_s, self._options.wait_s)
        if state.fresh:
            self._fresh[req_context.req_id] = state
        if state.given_up and not had_given_up:
            self._stats.increase_counter(_TIMED_OUT)
        return _RESULTS[answer]

    def expect(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Records that another engine stores these keys of a request's prompt: see `expectation`."""
        state = self._state_of(req_context)
        if state is not None:
            state.expected.update(keys)

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Returns where the key was when it was looked up: by now it is in the host's memory."""
        state = self._requests.get(req_context.req_id)
        return _SOURCES[Tier.MEMORY if state is None else state.tiers.get(key, Tier.MEMORY)]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Sends the step's lookups."""
        self._retaining.scheduled(context.new_req_ids)
        for request in context.new_req_ids:
            state = self._requests.get(request)
            if state is not None and not state.loading:
                self._forget(state.settle())
        for request in context.preempted_req_ids:
            state = self._requests.get(request)
            if state is not None and not state.loading:
                self._drop(state)
        fresh, self._fresh = self._fresh, {}
        for state in admitted(fresh.values(), self._requests.values(), self._lookup_thread.half_tier_keys, monotonic()):
            self._hash_bytes = hash_bytes_of(state.fresh[0])
            pin = state.ask(self._names)
            self._outstanding.add(pin)
            self._stats.increase_counter(_LOOKED_UP, sum(map(len, pin.groups.values())))
            self._lookup_thread.ask(pin)
        if self._used:
            self._lookup_thread.touch(self._used.values())
            self._used = {}
        if self._outstanding:
            # That thread needs the interpreter for some microseconds at a time, and would wait 5 ms for each of them.
            sleep(_YIELD_S)

    def has_pending_work(self) -> bool:
        """Returns whether answers or events are due: the engine must go on, to take them."""
        self._learn()
        if self._outstanding:
            return True
        if self._event_thread is None or not self._hash_bytes:
            return False
        return self._event_thread.has_news or monotonic() < self._events_due_until

    # --- loads ---------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> KeysLoadStoreSpec:
        """Returns the keys to load. The request's pins last until `complete_load`."""
        state = self._requests.setdefault(req_context.req_id, RequestState(req_context.req_id))
        state.phase = RequestPhase.LOADING
        return KeysLoadStoreSpec(keys, self._group_ids, self._names, _loaded_of(req_context))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Records the end of a load, successful or not."""
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        self._drop(state)
        state.loaded.update(keys)
        if state.phase is RequestPhase.ENDING:
            del self._requests[req_context.req_id]

    def load_failed(self, request: str, tokens: range, keys: Collection[OffloadKey], *, partial: bool) -> None:
        """Records that a request's load of these tokens failed: see `RequestState.fail`."""
        self._stats.increase_counter(_FAILED_LOADS)
        state = self._requests.setdefault(request, RequestState(request))
        self._fresh.pop(request, None)
        self._forget(state.fail(tokens, partial=partial))
        if partial:
            # Other requests have the same keys as hits. Each of them would find out by its own load.
            for other in self._requests.values():
                if not other.loading and any(other.answers.get(key) is LookupState.HIT for key in keys):
                    self._drop(other)

    def loads_again(self, request: str) -> bool:
        """Returns whether the request had a failed load, which a load of the present hits will replace."""
        state = self._requests.get(request)
        return state is not None and bool(state.failed_tokens) and not state.given_up

    def give_up(self, request: str) -> None:
        """Makes nothing hit for the request any more."""
        state = self._requests.get(request)
        if state is not None:
            self._drop(state)
            state.given_up = True

    def load_succeeded(self, request: str) -> None:
        """Records that a request's load brought all of its keys."""
        state = self._requests.get(request)
        if state is not None:
            self._account(state)

    def allocated(self, request: str, prefix_tokens: int, *, loads: bool) -> None:
        """Records that a request has got blocks, and has that many tokens, or `loads` the last of them."""
        state = self._requests.get(request)
        if state is not None:
            state.prefix_tokens = prefix_tokens
            if not loads:
                self._account(state)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Records that the engine's own cache had these keys, of each group in the order of the prompt, for a request
        that has got its blocks. The first time in a request's life that counts as a use of each, whatever follows: keys
        that it finds after a preemption may be its own.
        """
        if req_context.get_state(_Told) is not None:
            return
        req_context.set_state(_Told())
        if keys and self._lookup_thread.connected and _shares(req_context):
            named = list(keys)
            self._used[named[-1]] = UsedKeys(named, self._names, req_context.get_offload_key_position)

    # --- stores --------------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Plans stores of all keys that are not known to be there. Ranks reserve by themselves; keys without room are
        dropped there.
        """
        state = self._requests.get(req_context.req_id)
        if state is not None and not state.loading:
            self._forget(state.settle())  # it computes; one that was preempted before is in no `new_req_ids`
        stores = self._lookup_thread.connected and _shares(req_context)
        wanted = list(keys) if stores else []
        if state is not None:
            wanted = [key for key in wanted if not state.is_there(key)]
        self._keeping.note(req_context, keys, stores=int(bool(wanted)))
        spec = KeysLoadStoreSpec(wanted, self._group_ids, self._names, _loaded_of(req_context))
        if self._event_thread is not None and wanted:
            self._hash_bytes = hash_bytes_of(wanted[0])
            self._event_thread.expect(dict(spec.groups))
            if self._stored_anew is not None:
                self._stored_anew.update(wanted)
        return PrepareStoreOutput(wanted, spec, [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Records the end of a store. The daemon reports a moment later which keys it has got."""
        self._events_due_until = monotonic() + _EVENTS_DUE_S
        self._keep(self._keeping.stored(req_context))

    # --- events --------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Yields what can be loaded from now on, or no more: some of it, if there is much, and the rest in later steps.

        vLLM keeps what it knows of a key until it is removed from all media: `removal_expected`.
        """
        if self._event_thread is None or not self._hash_bytes:
            return
        for news in self._event_thread.news(_EVENT_KEYS):
            former = news.generation != self._names.generation
            if not former:
                self._stored_anew = None
            elif not news.removed:
                continue  # true before the reset
            names = replace(self._names, generation=news.generation)
            named = (offload_key_of(key, news.group, names, self._hash_bytes) for key in news.keys)
            keys = [OffloadKey(key) for key in named if key is not None]
            if former and self._stored_anew and news.tier == Tier.MEMORY:
                # For the same hash vLLM has noted by now an event that it is about to report; it would forget that.
                keys = [key for key in keys if key not in self._stored_anew]
            if keys:
                yield OffloadingEvent(
                    keys, _MEDIA[news.tier], news.removed, locality=Locality.LOCAL, removal_expected=True
                )

    # --- the ends ------------------------------------------------------------------------------------

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Releases its pins, unless a load still needs them. Claims what it asks to retain."""
        self._keep(self._keeping.finished(req_context))
        wanted = self._retaining.finished(req_context, self._names)
        if wanted is not None and _shares(req_context):
            self._lookup_thread.retain(wanted)
        state = self._requests.get(req_context.req_id)
        if state is None:
            return
        if state.loading:
            state.phase = RequestPhase.ENDING
        else:
            self._drop(state)
            del self._requests[req_context.req_id]

    def reset_cache(self) -> None:
        """Starts a new epoch of the namespace, and new names: keys that are still being stored are never found."""
        for state in self._requests.values():
            self._drop(state)
            state.loaded.clear()
        self._keeping.clear()
        self._used.clear()
        self._requests = {
            name: state for name, state in self._requests.items() if state.phase is not RequestPhase.ENDING
        }
        # With counted generations two engines of one namespace would agree on names.
        self._names = replace(self._names, generation=secrets.randbits(64) | 1)
        self._lookup_thread.clear(self._options.timeout_s)
        if self._event_thread is not None:
            self._event_thread.renew(self._names.generation)
            self._stored_anew = set()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Returns counts since the last call."""
        if self._connected is not self._lookup_thread.connected:
            self._connected = self._lookup_thread.connected
            self._stats.set_gauge(_CONNECTED, int(self._connected))
        if (lost := self._lookup_thread.lost_claims) > self._lost_claims:
            self._stats.increase_counter(_LOST_CLAIMS, lost - self._lost_claims)
            self._lost_claims = lost
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadingConnectorStats()
        return stats

    def shutdown(self) -> None:
        """Ends the session, and with it every pin."""
        if self._event_thread is not None:
            self._event_thread.close(_CLOSE_S)
        self._lookup_thread.close(_CLOSE_S)

    # --- helpers -------------------------------------------------------------------------------------

    def _state_of(self, req_context: ReqContext) -> RequestState | None:
        """Returns the state of a request, from its first lookup on; None: no daemon can answer."""
        state = self._requests.get(req_context.req_id)
        if state is None and self._lookup_thread.connected:
            end_of = req_context.get_offload_key_position if self._has_windows else None
            until = expected_until(req_context.kv_transfer_params, time(), monotonic())
            state = self._requests[req_context.req_id] = RequestState(req_context.req_id, end_of, expected_until=until)
        return state

    def _learn(self) -> None:
        if not self._lookup_thread.has_answers:
            return
        for pin in self._lookup_thread.answers():
            if pin.abandoned:
                continue
            if not pin.promoting:
                self._outstanding.discard(pin)
            state = self._requests.get(pin.request)
            if state is None or pin not in state.pins:
                continue
            if not self._lookup_thread.connected:
                state.expected_until = 0.0
            hits = state.learn(pin, self._names, monotonic())
            self._stats.increase_counter(_HIT, hits.total())
            self._stats.increase_counter(_FROM_DISK, hits[Tier.DISK])
            self._stats.increase_counter(_FROM_STORE, hits[Tier.REMOTE])

    def _account(self, state: RequestState) -> None:
        if state.failed_tokens:
            kept, recomputed = state.account()
            self._stats.increase_counter(_KEPT, kept)
            self._stats.increase_counter(_RECOMPUTED, recomputed)

    def _keep(self, hint: tuple[KeepHow, list[OffloadKey]] | None) -> None:
        if hint is not None:
            how, keys = hint
            self._lookup_thread.keep(by_group(keys, self._names), how)

    def _drop(self, state: RequestState) -> None:
        self._fresh.pop(state.request, None)
        self._forget(state.forget())

    def _forget(self, pins: Iterable[PinRequest]) -> None:
        for pin in pins:
            self._outstanding.discard(pin)
            self._lookup_thread.forget(pin)


def _shares(context: ReqContext) -> bool:
    adapter = context.get_state(NamedAdapter)
    return adapter is None or adapter.is_shared


def _loaded_of(context: ReqContext) -> LoadedAdapter | None:
    adapter = context.get_state(NamedAdapter)
    return None if adapter is None else adapter.loaded


def metric_definitions() -> dict[str, Any]:
    """Returns the manager's counters: name -> description. vLLM asserts that every name it is given was defined."""
    return {
        _CONNECTED: OffloadingGaugeMetadata("1 if the scheduler's line to the daemon is up."),
        _LOOKED_UP: OffloadingCounterMetadata("Keys that the daemon was asked for."),
        _HIT: OffloadingCounterMetadata("Keys that were there, and pinned."),
        _FROM_DISK: OffloadingCounterMetadata("Keys that were there, and came from disk."),
        _FROM_STORE: OffloadingCounterMetadata("Keys that were there, and came from the store that hosts share."),
        _TIMED_OUT: OffloadingCounterMetadata("Requests that gave up waiting for keys."),
        _FAILED_LOADS: OffloadingCounterMetadata("Loads of requests that failed, whole or in part."),
        _RECOMPUTED: OffloadingCounterMetadata("Tokens that were to be loaded, and were recomputed."),
        _KEPT: OffloadingCounterMetadata("Tokens of failed loads that were not recomputed after all."),
        _IGNORED_HINTS: OffloadingCounterMetadata("Hints to retain keys, or unknown ones, that were ignored."),
        _LOST_CLAIMS: OffloadingCounterMetadata("Requests whose claims were lost, whole or in part."),
    }
