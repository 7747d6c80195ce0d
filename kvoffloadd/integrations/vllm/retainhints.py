"""Hints of requests that their keys are to be kept for a time: `kvoffloadd.retain` in `kv_transfer_params`, and
`kv.retain` among vLLM's hints.

vLLM 0.32 and 0.33 carry hints to connectors, and know no action themselves. `kv.retain` is read as vLLM's repository
defines it in `vllm/v1/kv_hints/retain.py` (November 2026).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvoffloadd.integrations.vllm.claims import Directive, RequestKeys, RequestPart
from kvoffloadd.integrations.vllm.keys import KeyNames
from kvoffloadd.protocol.messages import CLAIM_NAME_CHARS_MAX, RETAIN_S_MAX, Priority, RetainSeconds

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

logger = logging.getLogger("vllm.kvoffloadd")

RETAIN = "kvoffloadd.retain"
"""Key in the `kv_transfer_params` of a request."""

ACTION, MAJOR = "kv.retain", "1"
"""Type of an action among vLLM's hints, and the major number of its versions that are known."""

ACTIONS_MAX, DIRECTIVES_MAX = 16, 128
"""Limits of a request, those of vLLM's definition: what is beyond them is ignored."""

_NAME_CHARS_MAX = CLAIM_NAME_CHARS_MAX - 8  # a number may come behind
_KINDS_MAX = 32
_SHOWN_CHARS = 120

_Tokens = Annotated[int, Meta(ge=0)]


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """What `kvoffloadd.retain` has."""

    seconds: RetainSeconds
    priority: Priority | None = None
    name: Annotated[str, Meta(max_length=_NAME_CHARS_MAX)] = ""
    start: _Tokens = 0
    end: _Tokens | None = None

    def __post_init__(self) -> None:
        _check_range(self.start, self.end)


class _Directive(msgspec.Struct, forbid_unknown_fields=True):
    """What a directive of `kv.retain` has. `duration` None: without end; `end` None: that of the request's output."""

    priority: Priority
    start: _Tokens | UnsetType = UNSET
    end: _Tokens | UnsetType | None = UNSET
    duration: Annotated[float, Meta(ge=0, le=RETAIN_S_MAX)] | None = None
    covers_output: bool = False

    def __post_init__(self) -> None:
        if self.covers_output and (self.start is not UNSET or self.end is not UNSET):
            raise ValueError("covers_output goes with neither start nor end")
        _check_range(self.begin, self.last)

    @property
    def begin(self) -> int:
        """Returns its first token."""
        return 0 if self.start is UNSET else self.start

    @property
    def last(self) -> int | None:
        """Returns the token that it ends before, if it names one."""
        return None if self.end is UNSET else self.end


class _Payload(msgspec.Struct):
    """What an action `kv.retain` has. `scope`: a session, which this daemon's claims do not know."""

    directives: list[Any]
    scope: str | None = None


@dataclass(slots=True, eq=False)
class _Hinted:
    """The state of a request with hints. `in_prompt`: how many keys its prompt has; None: it was never scheduled."""

    context: ReqContext
    directives: Sequence[Directive]
    in_prompt: int | None = None


class RetainHints:
    """Keeps what requests ask to retain, from their beginning to their end. All methods belong to the scheduler's
    thread.
    """

    def __init__(self) -> None:
        self._unscheduled: dict[str, _Hinted] = {}
        self._warned: set[str] = set()  # kinds of hints

    def begin(self, context: ReqContext) -> int:
        """Reads the hints of a new request. Returns how many of them are ignored."""
        params, hints = context.kv_transfer_params, context.kv_hints
        if hints is None and (not params or RETAIN not in params):
            return 0
        found: list[Directive] = []
        ignored = 0
        if params and RETAIN in params:
            try:
                found += asked_for(params[RETAIN])
            except ValueError as error:
                ignored += 1
                self._warn(f'"{RETAIN}" in kv_transfer_params', str(error))
        if hints is not None:
            ignored += self._read(hints.actions, found)
        if found:
            hinted = self._unscheduled[context.req_id] = _Hinted(context, found)
            context.set_state(hinted)
        return ignored

    def scheduled(self, requests: Iterable[str]) -> None:
        """Records that requests are about to run for the first time: from now on they get keys of their output, too."""
        for request in requests:
            hinted = self._unscheduled.pop(request, None)
            if hinted is not None:
                hinted.in_prompt = len(_positions(hinted.context))

    def finished(self, context: ReqContext, names: KeyNames) -> RequestKeys | None:
        """Returns what a request that has ended wants retained; None: nothing, or it never ran."""
        self._unscheduled.pop(context.req_id, None)
        hinted, ends = context.get_state(_Hinted), _positions(context)
        if hinted is None or hinted.in_prompt is None or not ends:
            return None
        return RequestKeys(hinted.directives, list(ends), list(ends.values()), hinted.in_prompt, names)

    def _read(self, actions: Sequence[Any], found: list[Directive]) -> int:
        """Adds the directives of actions. Returns how many actions are ignored."""
        ignored = read = 0
        for action in actions:
            name, version = str(action.action_type), str(action.action_version)
            kind = f"the hint {name} {version}"
            if name != ACTION or version.split(".")[0] != MAJOR:
                ignored += 1
                self._warn(kind, "it is not known")
                continue
            read += 1
            try:
                if read > ACTIONS_MAX:
                    raise ValueError(f"a request has at most {ACTIONS_MAX} such hints")
                found += directives_of(action.payload, DIRECTIVES_MAX - len(found))
            except ValueError as error:
                ignored += 1
                self._warn(kind, str(error))
        return ignored

    def _warn(self, kind: str, why: str) -> None:
        if kind not in self._warned and len(self._warned) < _KINDS_MAX:
            self._warned.add(kind)
            shown = (repr(text)[1:-1][:_SHOWN_CHARS] for text in (kind, why))  # users' words may be in both
            logger.warning("kvoffloadd: %s is ignored: %s", *shown)


def asked_for(value: object) -> list[Directive]:
    """Reads the value of `kvoffloadd.retain`: seconds, a map, or a list of maps. Raises ValueError."""
    entries = value if isinstance(value, list) else [value if isinstance(value, dict) else {"seconds": value}]
    if len(entries) > DIRECTIVES_MAX:
        raise ValueError(f"it has more than {DIRECTIVES_MAX} entries")
    found = msgspec.convert(entries, list[_Asked])
    return [Directive(each.seconds, each.priority, each.name, each.start, each.end) for each in found]


def directives_of(payload: object, most: int) -> list[Directive]:
    """Reads the payload of an action `kv.retain`, at most so many directives of it. Those that ask for nothing, of
    priority 0 or for no time, are left out. Raises ValueError, as vLLM's definition wants it, also if a priority is
    higher than one for earlier tokens: nobody finds keys without those before them.
    """
    found = msgspec.convert(msgspec.convert(payload, _Payload).directives[:most], list[_Directive])
    found.sort(key=lambda each: (each.covers_output, each.begin))
    priorities = [each.priority for each in found]
    if priorities != sorted(priorities, reverse=True):
        raise ValueError("a priority is higher than one for earlier tokens")
    return [_wanted(each) for each in found if each.priority and each.duration != 0]


def _wanted(each: _Directive) -> Directive:
    seconds = RETAIN_S_MAX if each.duration is None else each.duration
    part = RequestPart.OUTPUT if each.covers_output else RequestPart.WHOLE
    return Directive(seconds, each.priority, start=each.begin, end=each.last, part=part)


def _check_range(start: int, end: int | None) -> None:
    if end is not None and end <= start:
        raise ValueError("end must be above start")


def _positions(context: ReqContext) -> dict[Any, int]:
    """Returns where the keys that vLLM has given a request end, in tokens, the first key first."""
    ends: dict[Any, int] = context._offload_key_positions
    return ends
