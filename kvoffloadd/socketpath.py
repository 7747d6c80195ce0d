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

SESSIONS = Path("/run/user")
"""Where systemd makes the directories of users' sessions, by number: the usual XDG_RUNTIME_DIR."""

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
    """Returns the directories in which this user's socket may be, outside of /run/kvoffloadd. The first is that of a
    daemon with these variables; but a daemon in a session has an XDG_RUNTIME_DIR that a client without a session lacks,
    and the other way round.
    """
    session = Path(environment.get("XDG_RUNTIME_DIR", ""), "kvoffloadd")
    usual, lasting = SESSIONS / str(uid) / "kvoffloadd", Path(f"/tmp/kvoffloadd-{uid}")
    own = session if _is_private_place(session, uid) else lasting
    others = (usual, lasting) if _is_private_place(usual, uid) else (lasting,)
    return tuple(dict.fromkeys((own, *others)))


def _is_private_place(folder: Path, uid: int) -> bool:
    """Returns whether nobody but this user can make this directory: `su` and `runuser` can leave another user's
    XDG_RUNTIME_DIR.
    """
    fits = folder.is_absolute() and len(os.fsencode(folder / _NAME)) <= PATH_BYTES_MAX
    return fits and _owner(folder.parent) == uid and not _is_open_to_others(folder.parent)


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
    not hold the number of one user.
    """
    text = environment.get(UID_VARIABLE, "")
    known = {0, uid} - {unmapped_uid()}
    if not text:
        return frozenset(known)
    if not (text.isascii() and text.isdigit() and int(text) <= checks.UID_MAX):
        raise ValueError(f'{UID_VARIABLE} = "{text}": must be the number of a user')
    if int(text) == unmapped_uid():
        raise ValueError(f"{UID_VARIABLE} = {text}: {STANDS_FOR_MANY}")
    return frozenset({*known, int(text)})


def unmapped_uid() -> int | None:
    """Returns the number that the kernel shows for each user who has none in this user namespace; None: all have one.
    See user_namespaces(7).
    """
    try:
        if sum(int(line.split()[2]) for line in _UID_MAP.read_text(encoding="ascii").splitlines()) >= _ALL_UIDS:
            return None
        return int(_UNMAPPED.read_text(encoding="ascii"))
    except (OSError, ValueError, IndexError):
        return 65534


STANDS_FOR_MANY = "stands for every user without a number in this user namespace"
"""What is wrong with `unmapped_uid` where one user is meant."""

_ALL_UIDS = (1 << 32) - 1
_UID_MAP = Path("/proc/self/uid_map")
_UNMAPPED = Path("/proc/sys/kernel/overflowuid")


def why_no_daemon(peer_uid: int, path: Path, trusted: frozenset[int]) -> str:
    """Returns why a process of this user that listens at `path` does not count as the daemon. Empty: it does, being of
    a trusted user, or of the owner of the socket's directory, unless others could have made that directory, as in /tmp.
    """
    if peer_uid in trusted:
        return ""
    listens = f"a process of uid {peer_uid} listens there"
    if peer_uid != _owner(path.parent):
        return f"{listens}, and not of root, of this user, or of the directory's owner"
    real = Path(os.path.realpath(path))
    could_be_others = {*path.parent.parents, *real.parent.parents}
    if peer_uid == unmapped_uid():  # the owner may be one such user, and the process another's
        could_be_others |= {path.parent, real.parent}
    open_folders = sorted(filter(_is_open_to_others, could_be_others))
    return f"{listens}, and others may write to {open_folders[0]}" if open_folders else ""


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
