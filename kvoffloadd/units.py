"""Converts sizes and times from and to text for people.

Binary units only: a GB is 7 % short of a GiB, and "GB" may mean either. Errors suggest the size that is probably meant.
"""

from __future__ import annotations

import math
import os
import re

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)
_DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", re.ASCII)
_LOOSE_UNIT = re.compile("([KMGTP])i?B?", re.ASCII | re.IGNORECASE)
"""A unit as other programs have it: GB, g, gib."""

BYTES_MAX = 1 << 62
"""The largest accepted size: sums of two still fit a signed 64-bit integer."""


def parse_bytes(text: str) -> int:
    """Parses a size in bytes, such as "4096", "64GiB" or "1.5 MiB".

    Raises:
        ValueError: not a size, an unknown unit, not a whole number of bytes, or more than `BYTES_MAX`.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError('is not a size; write bytes, or a number with KiB, MiB, GiB or TiB, like "64GiB"')
    number, unit = match.groups()
    if unit not in _UNITS:
        meant = _LOOSE_UNIT.fullmatch(unit)
        hint = f"; did you mean {number}{meant[1].upper()}iB?" if meant else ""
        raise ValueError(f'has the unknown unit "{unit}"; write B, KiB, MiB, GiB, TiB or PiB (powers of 1024){hint}')
    whole, _, digits = number.partition(".")
    parts: int = 10 ** len(digits)
    size, rest = divmod(int(whole + digits) * _UNITS[unit], parts)
    if rest:
        raise ValueError("is not a whole number of bytes")
    if size > BYTES_MAX:
        raise ValueError(f"is more than {format_bytes(BYTES_MAX)}")
    return size


def missing_unit(size: int, low: int, high: int) -> str:
    """Returns the end of an error about a size below `low`: the size with the unit that was probably left out. Empty:
    none makes it a size from `low` to `high`.
    """
    for unit in ("GiB", "MiB", "KiB"):
        if size > 0 and low <= size * _UNITS[unit] <= high:
            return f"; did you mean {size}{unit}?"
    return ""


def parse_seconds(text: str) -> float:
    """Parses a duration, such as "0.5". Raises ValueError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError('must be a number of seconds, like "0.5"')
    return value


def parse_duration(text: str) -> float:
    """Parses a duration with a unit, such as "90s", "20m", "1.5h" or "7d", in seconds. Raises ValueError for any other
    text.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError('must be a number with s, m, h or d, like "2h"')
    return float(match[1]) * _DURATIONS[match[2]]


def format_path(path: str | os.PathLike[str]) -> str:
    """Returns a path, or text with one, for people and for UTF-8 output: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def format_bytes(size: int) -> str:
    """Returns a size for people: whole numbers of a unit exactly ("64 GiB"), others with two decimals ("1.46 GiB")."""
    unit = max((name for name in _UNITS if name and abs(size) >= _UNITS[name]), key=_UNITS.__getitem__, default="B")
    whole, rest = divmod(size, _UNITS[unit])
    return f"{whole:,} {unit}" if rest == 0 else f"{size / _UNITS[unit]:.2f} {unit}"


def format_seconds(seconds: float) -> str:
    """Returns a duration for people: microseconds to days, with about three digits."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
