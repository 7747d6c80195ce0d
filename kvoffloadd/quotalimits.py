"""The quotas of the config file: a minimum and a maximum of memory for the keys of a user, or of some namespaces."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

from kvoffloadd import checks
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.suggestion import did_you_mean
from kvoffloadd.units import format_bytes


@dataclass(frozen=True, slots=True, repr=False)
class QuotaLimits:
    """What one quota grants. `name`: the id of a user, or a shell pattern of names of namespaces. A maximum of 0: there
    is none.
    """

    name: str
    memory_min_bytes: int = 0
    memory_max_bytes: int = 0

    def __repr__(self) -> str:
        chosen = [f"{key.name} {format_bytes(size)}" for key in fields(self)[1:] if (size := getattr(self, key.name))]
        return f"{self.name} ({', '.join(chosen) or 'no limits'})"

    def __post_init__(self) -> None:
        low, high = self.memory_min_bytes, self.memory_max_bytes
        if high and low > high:
            shown = format_bytes(low), format_bytes(high)
            raise ValueError(f"has the memory_min_bytes {shown[0]}, more than its memory_max_bytes, {shown[1]}")


_KEYS = tuple(key.name for key in fields(QuotaLimits)[1:])
_SIZES = {"memory_min_bytes": checks.size(0), "memory_max_bytes": checks.size(PAGE_BYTES)}


def of_users(value: object) -> tuple[QuotaLimits, ...]:
    """Quotas of users, by name or id."""
    return _quotas(value, _uid)


def of_namespaces(value: object) -> tuple[QuotaLimits, ...]:
    """Quotas of namespaces, by shell patterns of their names; a namespace has the first one that matches."""
    return _quotas(value, str)


def _uid(name: str) -> str:
    if name.isascii() and name.isdigit():
        return str(checks.uids([int(name)])[0])
    try:
        return str(pwd.getpwnam(name).pw_uid)
    except (KeyError, ValueError):
        raise ValueError("is no user of this machine") from None


def _quotas(value: object, name_of: Callable[[str], str]) -> tuple[QuotaLimits, ...]:
    if not isinstance(value, dict) or not all(isinstance(limits, dict) for limits in value.values()):
        raise ValueError('must be tables, like [quotas.users.alice] with memory_max_bytes = "8GiB"')
    problems, quotas = list[str](), list[QuotaLimits]()
    for key, limits in value.items():
        try:
            quotas.append(_quota(name_of(key), limits))
            if [quota.name for quota in quotas].count(quotas[-1].name) > 1:
                raise ValueError("is the same user as one before")
        except ValueError as error:
            problems.append(f'"{key}" {error}')
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(quotas)


def _quota(name: str, limits: dict[str, object]) -> QuotaLimits:
    sizes = {}
    for key, size in limits.items():
        if key not in _SIZES:
            raise ValueError(f"has the unknown key {key}{did_you_mean(key, _KEYS)}")
        try:
            sizes[key] = _SIZES[key](size)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    if not sizes:
        raise ValueError(f"has no limits; known are {', '.join(_KEYS)}")
    return QuotaLimits(name, **sizes)


def contradictions(quotas: Sequence[QuotaLimits], memory_bytes: int) -> Iterator[str]:
    """Yields what is wrong with all quotas together."""
    granted = sum(quota.memory_min_bytes for quota in quotas)
    if granted > memory_bytes:
        yield (
            f"quotas: all memory_min_bytes together are {format_bytes(granted)}, more than memory.capacity_bytes, "
            f"{format_bytes(memory_bytes)}"
        )
