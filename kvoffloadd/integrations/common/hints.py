"""Reads what requests ask to be kept for a time: `kvoffloadd.retain`, and engines' hint `kv.retain`.

Engines carry hints to storages as envelopes of actions, and know no action themselves. `kv.retain` is read as vLLM's
repository defines it in `vllm/v1/kv_hints/retain.py` (November 2026); SGLang's envelopes have the same form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kvoffloadd.integrations.common.claims import Directive, RequestPart
from kvoffloadd.protocol.messages import CLAIM_NAME_CHARS_MAX, RETAIN_S_MAX, Priority, RetainSeconds

RETAIN = "kvoffloadd.retain"
"""Type of kvoffloadd's own action, and the word for it where a request's parameters can have one."""

ACTION = "kv.retain"
"""Type of the action that engines' projects define."""

MAJOR = "1"
"""Major number of the versions of both actions that are known."""

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


class ReadHints(NamedTuple):
    """What a request wants retained, and how many of its hints are ignored."""

    directives: list[Directive]
    ignored: int


class HintReader:
    """Reads the hints of an engine's requests. Warns once of each kind that it ignores."""

    def __init__(self, logger: logging.Logger) -> None:
        """Takes the engine's logger."""
        self._logger = logger
        self._warned: set[str] = set()  # kinds of hints

    def read(self, actions: Sequence[Any], asked: object = UNSET, where: str = "") -> ReadHints:
        """Reads all that a request asks.

        Args:
            actions: of its envelope, each with `action_type`, `action_version` and `payload`.
            asked: the value of `kvoffloadd.retain` elsewhere in the request; UNSET: there is none.
            where: the place of that value, for the log.
        """
        found: list[Directive] = []
        ignored = read = 0
        if asked is not UNSET:
            try:
                found += asked_for(asked)
            except ValueError as error:
                ignored += 1
                self._warn(f'"{RETAIN}" in {where}', str(error))
        for action in actions:
            name, version = str(action.action_type), str(action.action_version)
            kind = f"the hint {name} {version}"
            parse = _PARSERS.get(name)
            if parse is None or version.split(".")[0] != MAJOR:
                ignored += 1
                self._warn(kind, "it is not known")
                continue
            read += 1
            try:
                if read > ACTIONS_MAX:
                    raise ValueError(f"a request has at most {ACTIONS_MAX} such hints")
                found += parse(action.payload, DIRECTIVES_MAX - len(found))
            except ValueError as error:
                ignored += 1
                self._warn(kind, str(error))
        return ReadHints(found, ignored)

    def _warn(self, kind: str, why: str) -> None:
        if kind not in self._warned and len(self._warned) < _KINDS_MAX:
            self._warned.add(kind)
            shown = (repr(text)[1:-1][:_SHOWN_CHARS] for text in (kind, why))  # users' words may be in both
            self._logger.warning("kvoffloadd: %s is ignored: %s", *shown)


def asked_for(value: object, most: int = DIRECTIVES_MAX) -> list[Directive]:
    """Reads the value of `kvoffloadd.retain`: seconds, a map, or a list of maps. Raises ValueError. Returns at most so
    many directives.
    """
    entries = value if isinstance(value, list) else [value if isinstance(value, dict) else {"seconds": value}]
    if len(entries) > DIRECTIVES_MAX:
        raise ValueError(f"it has more than {DIRECTIVES_MAX} entries")
    found = msgspec.convert(entries, list[_Asked])
    return [Directive(each.seconds, each.priority, each.name, each.start, each.end) for each in found[:most]]


def directives_of(payload: object, most: int = DIRECTIVES_MAX) -> list[Directive]:
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


_PARSERS: MappingProxyType[str, Callable[[object, int], list[Directive]]] = MappingProxyType(
    {ACTION: directives_of, RETAIN: asked_for}
)


def _wanted(each: _Directive) -> Directive:
    seconds = RETAIN_S_MAX if each.duration is None else each.duration
    part = RequestPart.OUTPUT if each.covers_output else RequestPart.WHOLE
    return Directive(seconds, each.priority, start=each.begin, end=each.last, part=part)


def _check_range(start: int, end: int | None) -> None:
    if end is not None and end <= start:
        raise ValueError("end must be above start")
