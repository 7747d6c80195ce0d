"""Paths of the daemon's socket: where a daemon makes it if its config names none, and where clients look for it.

Both sides derive them from the same facts: two variables, the user, and who owns /run/kvoffloadd.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from kvoffloadd import checks
from kvoffloadd.linux.sockets import PATH_BYTES_MAX

Environment = Mapping[str, str]

VARIABLE = "KVOFFLOADD_SOCKET"
UID_VARIABLE = "KVOFFLOADD_DAEMON_UID"
SERVICE_FOLDER = Path("/run/kvoffloadd")
"""The directory that root makes, and that systemd gives to the service's user; nobody else can make it."""

_NAME = "kvoffloadd.sock"
SERVICE_SOCKET = SERVICE_FOLDER / _NAME


def daemon_socket(environment: Environment, uid: int) -> Path:
    """Returns the path of the socket that this user's daemon makes if neither option nor config names one. Raises
    ValueError if the variable does not hold a path of a socket.
    """
    return named_socket(environment) or own_socket(environment, uid)


def client_sockets(environment: Environment, uid: int) -> tuple[Path, ...]:
    """Returns the paths at which this user's clients look for a daemon, in this order: the one that is named alone, so
    that no request reaches another daemon while that one starts. Raises as `daemon_socket`.
    """
    named = named_socket(environment)
    if named is not None:
        return (named,)
    if own_socket(environment, uid) == SERVICE_SOCKET:
        return (SERVICE_SOCKET,)
    return (*(folder / _NAME for folder in private_folders(environment, uid)), SERVICE_SOCKET)


def named_socket(environment: Environment) -> Path | None:
    """Returns the path in the variable; None: it is not set, or empty. Raises as `daemon_socket`."""
    text = environment.get(VARIABLE, "")
    if not text:
        return None
    try:
        return checks.socket_path(text)
    except ValueError as error:
        raise ValueError(f'{VARIABLE} = "{text}": {error}') from None


def own_socket(environment: Environment, uid: int) -> Path:
    """Returns the path that daemon and clients of this user share by default. Root, and the user that owns
    /run/kvoffloadd, have the service's.
    """
    if uid == 0 or _owner(SERVICE_FOLDER) == uid:
        return SERVICE_SOCKET
    return private_folders(environment, uid)[0] / _NAME


def private_folders(environment: Environment, uid: int) -> tuple[Path, ...]:
    """Returns the directories for this user's socket outside of /run/kvoffloadd. A daemon takes the first. Its clients
    may lack the XDG_RUNTIME_DIR of a session, or it may lack theirs. That variable counts only if its directory is this
    user's alone: `su` and `runuser` can leave another user's there.
    """
    lasting = Path(f"/tmp/kvoffloadd-{uid}")
    folder = Path(environment.get("XDG_RUNTIME_DIR", ""), "kvoffloadd")
    fits = folder.is_absolute() and len(os.fsencode(folder / _NAME)) <= PATH_BYTES_MAX
    if fits and _owner(folder.parent) == uid and not _is_open_to_others(folder.parent):
        return (folder, lasting)
    return (lasting,)


def check_private(folder: Path, uid: int) -> None:
    """Checks that a private directory is this user's alone: anybody can make one of its name in /tmp.

    Raises ValueError with the reason and the remedy, or OSError if there is none.
    """
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode):
        raise ValueError(f"{folder} is a symbolic link; {_REMEDY}")
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{folder} is not a directory; {_REMEDY}")
    if found.st_uid != uid:
        raise ValueError(f"{folder} belongs to uid {found.st_uid}; {_REMEDY}")
    if found.st_mode & 0o077:
        raise ValueError(f"other users may enter {folder}, which has mode {found.st_mode & 0o7777:o}; chmod 700 it")


_REMEDY = f"remove it, or name another place in {VARIABLE}"


def trusted_uids(environment: Environment, uid: int) -> frozenset[int]:
    """Returns the users whose process may be the daemon of this user's clients. Raises ValueError if the variable does
    not hold a uid.
    """
    text = environment.get(UID_VARIABLE, "")
    if not text:
        return frozenset((0, uid))
    if not (text.isascii() and text.isdigit() and int(text) <= checks.UID_MAX):
        raise ValueError(f'{UID_VARIABLE} = "{text}": must be the number of a user')
    return frozenset((0, uid, int(text)))


def may_be_daemon(peer_uid: int, path: Path, trusted: frozenset[int]) -> bool:
    """Returns whether a process of this user that listens at `path` counts as the daemon: it is of a trusted user, or
    of the owner of the socket's directory, unless others could have made that directory, as in /tmp.
    """
    if peer_uid in trusted:
        return True
    real = Path(os.path.realpath(path))
    above = {*path.parent.parents, *real.parent.parents}
    return peer_uid == _owner(path.parent) and not any(map(_is_open_to_others, above))


def _is_open_to_others(folder: Path) -> bool:
    """Returns whether users other than its owner may write there. An access list shows in the bits of the group."""
    try:
        return bool(os.stat(folder).st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return True


def _owner(folder: Path) -> int | None:
    try:
        return os.stat(folder).st_uid
    except (OSError, ValueError):  # ValueError: a NUL character
        return None
