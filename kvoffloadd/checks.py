"""Checks of single config values: each takes a value from TOML, and returns the typed value or raises ValueError."""

from __future__ import annotations

import ipaddress
import os
import pwd
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvoffloadd.linux.sockets import PATH_BYTES_MAX
from kvoffloadd.suggestion import closest
from kvoffloadd.units import BYTES_MAX, format_bytes, missing_unit, parse_bytes

T = TypeVar("T")
Check = Callable[[object], T]

UID_MAX = (1 << 32) - 2  # (uid_t)-1 means "no user" to the kernel


def count(low: int, high: int) -> Check[int]:
    """An integer from `low` to `high`. A bool is no integer."""

    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError("must be an integer")
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return check


def size(low: int, high: int = BYTES_MAX, multiple: int = 1) -> Check[int]:
    """Bytes, as an integer or as text with a unit; a multiple of `multiple`."""

    def check(value: object) -> int:
        if isinstance(value, str):
            value = parse_bytes(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError('must be a number of bytes or text like "64GiB"')
        if not low <= value <= high:
            hint = missing_unit(value, low, high) if value < low else ""
            raise ValueError(f"must be from {format_bytes(low)} to {format_bytes(high)}{hint}")
        if value % multiple:
            raise ValueError(f"must be a multiple of {multiple} bytes")
        return value

    return check


def seconds(low: float, high: float) -> Check[float]:
    """Seconds from `low` to `high`."""

    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:  # NaN
            raise ValueError("must be a number of seconds")
        if not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g} seconds")
        return float(value)

    return check


def share(high: float) -> Check[float]:
    """A share, from 0 to `high`."""

    def check(value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
            raise ValueError(f"must be a share from 0 to {high:g}")
        return float(value)

    return check


def flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def flag_or_auto(value: object) -> bool | str:
    """True, false or "auto"."""
    if value == "auto":
        return "auto"
    if not isinstance(value, bool):
        raise ValueError('must be true, false or "auto"')
    return value


def choice(*names: str, also: Mapping[str, str] = MappingProxyType({})) -> Check[str]:
    """One of a few words. `also`: other words that people use, and which of the names is meant."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            close = also.get(value) or closest(value, names) if isinstance(value, str) else ""
            hint = f'; did you mean "{close}"?' if close else ""
            raise ValueError("must be one of " + ", ".join(f'"{name}"' for name in names) + hint)
        return value

    return check


def name(value: object) -> str:
    """Text; empty: the default."""
    if not isinstance(value, str):
        raise ValueError("must be text in quotes")
    return _utf8(value)


def _utf8(text: str) -> str:
    """Returns text that may be sent to others, as UTF-8. Text from a command line may hold bytes that are not UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise ValueError("must be UTF-8") from None


def absolute_path(value: object) -> Path:
    """An absolute path, unchanged: it may lead to a place on another machine."""
    if not isinstance(value, str) or not value:
        raise ValueError("must be a path in quotes")
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    try:
        # The path as system calls take it, independent of this process's encoding: the same bytes.
        path = Path(os.fsdecode(value.encode("utf-8", "surrogateescape")))
    except UnicodeError:
        raise ValueError("must not contain a lone surrogate") from None
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    return path


def numa_nodes(value: object) -> str | tuple[int, ...]:
    """Numbers of NUMA nodes, "auto" or "off"."""
    if value in ("auto", "off"):
        return str(value)
    numbers = value if isinstance(value, list) else []
    if not numbers or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError('must be "auto", "off", or a list of NUMA nodes, like [0, 1]')
    return tuple(sorted(set(numbers)))


def path_or_empty(value: object) -> str:
    """An absolute path as text, or an empty one."""
    return "" if value == "" else str(absolute_path(value))


def text_path_or_empty(value: object) -> str:
    """The text of a path, or an empty one. It must be UTF-8, because it is passed to another process."""
    return "" if value == "" else _utf8(str(absolute_path(value)))


def socket_path(value: object) -> Path:
    """An absolute path that fits a socket address."""
    path = absolute_path(value)
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise ValueError(f"has {length} bytes; the path of a socket may have at most {PATH_BYTES_MAX}")
    return path


def listen_address(value: object) -> str:
    """The address to listen at: "host:port", an absolute path of a socket, or nothing."""
    if not isinstance(value, str):
        raise ValueError("must be text in quotes")
    if value:
        split_address(value)
    return value


def split_address(text: str) -> tuple[str, int] | str:
    """Host and port, or the path of a socket. Raises ValueError."""
    if text.startswith("/"):
        return str(socket_path(text))
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError('must be an absolute path, or a host and a port, like "localhost:9477"')
    host = {"localhost": "127.0.0.1"}.get(host, host.removeprefix("[").removesuffix("]"))
    try:
        ipaddress.ip_address(host)
    except ValueError:
        hint = f'; did you mean "0.0.0.0:{port}", all addresses of this host?' if not host else ""
        raise ValueError(f"must name an address of this host: localhost, 0.0.0.0 or [::]{hint}") from None
    return host, int(port)


def reaches_other_hosts(text: str) -> bool:
    """Returns whether processes on other hosts may connect to this address, which `split_address` accepts."""
    place = split_address(text)
    return not isinstance(place, str) and not ipaddress.ip_address(place[0]).is_loopback


def socket_mode(value: object) -> int:
    """Permission bits for the socket."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("must be an octal number like 0o660")
    if value & ~0o666 or value & 0o600 != 0o600:
        hint = f"; did you mean 0o{value}?" if 600 <= value <= 666 and set(str(value)) <= set("046") else ""
        raise ValueError(f"is 0o{value:o}, must be from 0o600 to 0o666, without execute bits{hint}")
    return value


def uids(value: object) -> tuple[int, ...]:
    """User ids from a list of ids and names; names are looked up now."""
    if not isinstance(value, list):
        raise ValueError('must be a list of user ids and names, like [1000, "vllm"]')
    found = []
    for user in value:
        if isinstance(user, str):
            try:
                found.append(pwd.getpwnam(user).pw_uid)
            except KeyError:
                raise ValueError(f'names the user "{user}", which does not exist on this machine') from None
        elif isinstance(user, int) and not isinstance(user, bool) and 0 <= user <= UID_MAX:
            found.append(user)
        else:
            raise ValueError(f"contains {user!r}, which is neither a user id nor a user name")
    return tuple(sorted(set(found)))


def sized_paths(low: int) -> Check[tuple[tuple[Path, int], ...]]:
    """Paths, each with the bytes that may lie there: at least `low`. All problems are reported at once."""
    keys: dict[str, Check[Any]] = {"path": absolute_path, "capacity": size(low)}

    def check(value: object) -> tuple[tuple[Path, int], ...]:
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise ValueError('must be a list like [{ path = "/nvme0/kvoffloadd", capacity = "1TiB" }]')
        problems: list[str] = []
        found = []
        for number, entry in enumerate(value, 1):
            read: dict[str, Any] = {}
            problems += [
                f'entry {number}: "{key}" is unknown; known are path, capacity' for key in entry if key not in keys
            ]
            for key, check_one in keys.items():
                try:
                    if key not in entry:
                        raise ValueError("is missing")
                    read[key] = check_one(entry[key])
                except ValueError as error:
                    problems.append(f"entry {number}: {key} {error}")
            found.append(read)
        if problems:
            raise ValueError("; ".join(problems))
        return tuple((read["path"], read["capacity"]) for read in found)

    return check
