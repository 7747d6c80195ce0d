"""What callers pass besides keys and block ids. What can't be asked is refused in words, before anything is asked."""

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
    """An int from 0 to below `end`; of whatever type, numpy's too. Raises UsageError."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < end or isinstance(value, bool):
        raise UsageError(f"{what} must be an integer from 0 to {end - 1}, not {value!r:.80}")
    return number


def seconds(value: object, what: str = "deadline_s") -> float:
    """A number of seconds; below 0 is over already. Raises UsageError."""
    if not isinstance(value, Real) or isnan(value):
        raise UsageError(f"{what} must be a number of seconds, not {value!r:.80}")
    return float(value)


def seconds_within(value: object, what: str, most: float) -> float:
    """A number of seconds that the protocol can carry. Raises UsageError."""
    number = seconds(value, what)
    if not 0 < number <= most:
        raise UsageError(f"{what} must be above 0 and at most {most} seconds, not {value!r:.80}")
    return number


def instance_of(cls: type[T], value: object, what: str) -> T:
    """Raises UsageError."""
    if not isinstance(value, cls):
        raise UsageError(f"{what} must be a {cls.__name__}, not {value!r:.80}")
    return value


def several(value: Iterable[T], what: str) -> list[T]:
    """Raises UsageError for what is no iterable."""
    try:
        return list(value)
    except TypeError:
        raise UsageError(f"{what} must be a sequence, not {value!r:.80}") from None


def by_group(value: Mapping[int, T], what: str) -> list[tuple[int, T]]:
    """The items of a mapping from group to something. Raises UsageError."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} must be a mapping from group to {what}, not {value!r:.80}")
    return [(integer(group, "a group"), one) for group, one in value.items()]


def first_of(first: int | Mapping[int, int], group: int) -> int:
    """The index of a group's first key. Raises UsageError."""
    start: object = first.get(group, 0) if isinstance(first, Mapping) else first
    return integer(start, "first")


def check_message(message: msgspec.Struct, what: str) -> None:
    """That each field is what the protocol says. Raises UsageError."""
    try:
        fields: Any = msgspec.to_builtins(message, builtin_types=(bytes,))
        msgspec.convert(fields, type(message), builtin_types=(bytes,))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{what}: {error}") from None
