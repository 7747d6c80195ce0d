"""Checks the arguments of calls, besides keys and block ids, and explains what is wrong before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from math import isnan
from numbers import Real
from typing import Any, TypeVar

import msgspec

from kvoffloadd.errors import UsageError

T = TypeVar("T")

IDS_END = 1 << 62
CURSORS_END = 1 << 48
SMALL_END = 1 << 31


def integer(value: Any, what: str, end: int = SMALL_END) -> int:
    """Returns an int from 0 to below `end`; accepts any integer type, numpy's too. Raises UsageError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < end or isinstance(value, bool):
        raise UsageError(f"{what} must be an integer from 0 to {end - 1}, not {value!r:.80}")
    return number


def seconds(value: object, what: str = "deadline_s") -> float:
    """Returns a number of seconds; a negative one has already passed. Raises UsageError."""
    if not isinstance(value, Real) or isnan(value):
        raise UsageError(f"{what} must be a number of seconds, not {value!r:.80}")
    return float(value)


def seconds_within(value: object, what: str, most: float) -> float:
    """Returns a number of seconds that the protocol can carry. Raises UsageError."""
    number = seconds(value, what)
    if not 0 < number <= most:
        raise UsageError(f"{what} must be above 0 and at most {most} seconds, not {value!r:.80}")
    return number


def instance_of(cls: type[T], value: object, what: str) -> T:
    """Returns `value`. Raises UsageError if it is no instance of `cls`."""
    if not isinstance(value, cls):
        raise UsageError(f"{what} must be a {cls.__name__}, not {value!r:.80}")
    return value


def several(value: Iterable[T], what: str) -> list[T]:
    """Returns the items as a list. Raises UsageError if `value` is not iterable."""
    try:
        return list(value)
    except TypeError:
        raise UsageError(f"{what} must be a sequence, not {value!r:.80}") from None


def by_group(value: Mapping[int, T], what: str) -> list[tuple[int, T]]:
    """Returns the items of a mapping that has groups as keys. Raises UsageError."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a mapping from group to {what}, not {value!r:.80}")
    return [(integer(group, "a group"), item) for group, item in value.items()]


def first_of(first: int | Mapping[int, int], group: int) -> int:
    """Returns the index of a group's first key. Raises UsageError."""
    start: object = first.get(group, 0) if isinstance(first, Mapping) else first
    return integer(start, "first")


def check_message(message: msgspec.Struct, what: str) -> None:
    """Checks each field against the protocol. Raises UsageError."""
    try:
        fields: Any = msgspec.to_builtins(message, builtin_types=(bytes,))
        msgspec.convert(fields, type(message), builtin_types=(bytes,))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{what}: {error}") from None
