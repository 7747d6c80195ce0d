"""Checks files and directories: the socket's, the pool file's, and the disk roots."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import shlex
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from kvoffloadd import socketpath
from kvoffloadd.checks import reaches_other_hosts, split_address
from kvoffloadd.config import EXPOSURE, NARROW_EXPOSURE, Config, DiskConfig, DiskRoot, MemoryConfig
from kvoffloadd.doctor.diagnosis import Diagnosis, Verdict, note, ok, problem
from kvoffloadd.doctor.host import Host
from kvoffloadd.linux.mounts import file_system
from kvoffloadd.storage.arenafile import block_bytes, file_bytes
from kvoffloadd.storage.disk.files import DiskError, DiskVersionError, Files, describe_error
from kvoffloadd.storage.disk.manifest import read_manifest_in
from kvoffloadd.storage.disk.opening import COPY_ON_WRITE, NO_SPACE, Abilities, open_root, probe
from kvoffloadd.units import format_bytes, format_path

ANSWER_S = 10.0
"""A disk that takes longer to answer counts as ill."""

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "ceph", "fuse", "fuseblk", "9p", "glusterfs", "lustre")
_OURS = {"lock", "manifest", "manifest.new", "claims", "claims.new", "segments", "lost+found"}
_VOLATILE = ("tmpfs", "ramfs", "overlay")
_SYSTEMS_FAULTS = (errno.EIO, errno.EROFS, errno.ENOLCK)
"""Errors of a disk or its mount, whatever the directory contains."""

_CHECK_THE_DISK = "check dmesg, SMART and the mount"
_ANOTHER_OR_EMPTY = "name another directory, or empty this one"


def check_socket(path: Path, host: Host, *, is_running: bool) -> Iterator[Diagnosis]:
    """Checks whether the daemon can make its socket there, and whether clients look for it there."""
    if is_running:
        yield ok("socket", f"{path}: a daemon answers there; a second one needs another socket")
    else:
        yield _check_new_socket(path, host)
    with contextlib.suppress(ValueError):  # of the variable, which is a problem of the config
        if path not in socketpath.client_sockets(host.environment, host.uid):
            remedy = f"set {socketpath.VARIABLE}={shlex.quote(str(path))} for them, or use --socket"
            yield note("clients", f"engines and commands do not look for the daemon at {path}", remedy)


def _check_new_socket(path: Path, host: Host) -> Diagnosis:
    folder = path.parent
    if folder in socketpath.private_folders(host.environment, host.uid) and os.path.lexists(folder):
        try:
            socketpath.check_private(folder, host.uid)
        except ValueError as error:
            found, _, remedy = str(error).partition("; ")
            return problem("socket", found, remedy)
    owner = (
        f"install -d -m 750 -o {_user(host.uid)} {folder} (service: systemd-tmpfiles --create), or use --socket PATH"
    )
    # A folder below one that may not be looked into counts as missing.
    existing = next(candidate for candidate in (folder, *folder.parents) if os.path.exists(candidate))
    if not existing.is_dir():
        return problem("socket", f"{existing} is not a directory", "choose another server.socket")
    if not os.access(existing, os.W_OK | os.X_OK):
        if existing == socketpath.SERVICE_FOLDER and (host.root / "run/systemd/system").is_dir():
            made = f"kvoffloadd@{_user(host.uid)} changes that when it starts; from a shell, use --socket PATH"
            return note("socket", f"{_user(host.uid)} may not write in {existing} yet", made)
        return problem("socket", f"{_user(host.uid)} may not write in {existing}", owner)
    if os.path.exists(path) and not path.is_socket():
        return problem("socket", f"{path} exists and is not a socket", "remove it, or choose another server.socket")
    if _is_locked(Path(f"{path}.lock")):
        return problem(
            "socket", f"another process holds {path}.lock", "stop that daemon, or choose another server.socket"
        )
    return ok("socket", f"{_user(host.uid)} can create {path}")


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def check_metrics(listen: str, *, is_running: bool) -> Iterator[Diagnosis]:
    """Checks whether metrics can be served there."""
    if not listen:
        yield note(
            "metrics", "are not served", 'set metrics.listen = "localhost:9477" if Prometheus should scrape them'
        )
        return
    place = split_address(listen)
    if reaches_other_hosts(listen):
        yield note("metrics", f"{listen}: {EXPOSURE}", NARROW_EXPOSURE)
    if is_running or isinstance(place, str):
        yield ok("metrics", f"at {listen}")
        return
    with socket.socket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            wrong = "address of this host" if error.errno == errno.EADDRNOTAVAIL else "port"
            yield problem("metrics", f"{listen}: {error.strerror}", f"choose another {wrong} in metrics.listen")
        else:
            yield ok("metrics", f"{listen} is free")


def check_pool(memory: MemoryConfig, host: Host, *, is_running: bool) -> Iterator[Diagnosis]:
    """Checks whether the memory tier can outlive the daemon, and the place of its file."""
    if not memory.pool_file:
        if (host.root / "run/systemd/system").is_dir():
            yield ok("warm restart", "systemd keeps the memory tier over a restart of the service")
        else:
            yield note("warm restart", "a restart loses the memory tier: there is neither systemd nor memory.pool_file",
                       'set memory.pool_file = "/dev/shm/kvoffloadd/pool" if a restart should keep it')  # fmt: skip
        return
    path = Path(memory.pool_file)
    folder = path.parent
    try:
        found = folder.stat()
    except OSError as error:
        yield problem("pool file", f"{folder}: {error.strerror}", _make(folder, host))
        return
    if not os.access(folder, os.W_OK | os.X_OK) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        yield problem("pool file", f"{folder} must be writable by {_user(host.uid)} alone", _make(folder, host))
        return
    room = os.statvfs(folder)
    needed = file_bytes(memory.capacity_bytes, memory.slab_bytes, max(room.f_bsize, 4096))
    free = room.f_bavail * room.f_frsize
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            free += os.fstat(file.fileno()).st_blocks * 512
            needed = file_bytes(memory.capacity_bytes, memory.slab_bytes, block_bytes(file.fileno()))
    except FileNotFoundError:
        pass  # the daemon makes it
    except OSError as error:
        yield problem("pool file", f"{path}: {error.strerror}", "remove it, or choose another memory.pool_file")
        return
    if not is_running and free < needed:
        yield problem("pool file", f"{path} needs {format_bytes(needed)}, but only {format_bytes(free)} are free",
                      "enlarge the file system (mount -o remount,size=), or reduce memory.capacity_bytes")  # fmt: skip
    else:
        yield ok("pool file", f"{path}: {format_bytes(needed)}")


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer


def check_disks(disk: DiskConfig, host: Host, answer_s: float = ANSWER_S) -> Iterator[Diagnosis]:
    """Checks each root, as far as that changes nothing."""
    if not disk.roots:
        yield ok("disk tier", "none: disk.roots is empty")
    yield from _for_each_root(disk, lambda root: _check_root(root, disk, host), answer_s)


def try_disks(disk: DiskConfig, host: Host, answer_s: float = ANSWER_S) -> Iterator[Diagnosis]:
    """Opens each root as a daemon does at its start, which makes what is absent, and closes it again. Yields problems
    alone. No daemon of this config may be running.
    """
    yield from _for_each_root(disk, lambda root: _try_root(root, host), answer_s)


def _for_each_root(
    disk: DiskConfig, work: Callable[[DiskRoot], Iterator[Diagnosis]], answer_s: float
) -> Iterator[Diagnosis]:
    """Does this work in a separate thread for each root, so that a disk that hangs is reported."""
    for root in disk.roots:
        try:
            answers = _within(answer_s, lambda root=root: list(work(root)))  # type: ignore[misc]
        except OSError as error:
            yield problem(_subject(root), f"can't be checked: {describe_error(error)}", _CHECK_THE_DISK)
        else:
            yield from [_slow(root, answer_s)] if answers is None else answers


def _try_root(root: DiskRoot, host: Host) -> Iterator[Diagnosis]:
    files, subject = Files(), _subject(root)
    try:
        fds = open_root(files, root.path, make_root=True, make_segments=True, make_lock=True)
    except BlockingIOError:
        yield problem(subject, "is in use by another process", "end that process, or name another directory")
        return
    except DiskError as error:
        # What the error advises is for a root, and what is wrong here lies in one.
        yield problem(subject, f"can't be opened: {str(error).partition(': name ')[0]}", _ANOTHER_OR_EMPTY)
        return
    except OSError as error:
        failed = root.path / os.fsdecode(error.filename or "lock")  # flock(2) names none
        where = "" if failed == root.path else f"{format_path(failed)}: "
        yield problem(
            subject, f"can't be opened: {where}{describe_error(error)}", _remedy(root.path, failed, error, host)
        )
        return
    try:
        read_manifest_in(files, fds[0])
    except DiskVersionError as error:
        yield problem(subject, str(error), "name another directory, or use the version of kvoffloadd that wrote this")
    except DiskError:
        pass  # a daemon starts with an empty root
    except OSError as error:
        yield problem(subject, f"can't be read: {describe_error(error)}", _CHECK_THE_DISK)
    finally:
        for fd in fds:
            files.close(fd)


def _remedy(root: Path, failed: Path, error: OSError, host: Host) -> str:
    """Returns the remedy for a path of a root, or the root itself, that can't be made or opened."""
    if error.errno in NO_SPACE:
        return "free space there, or name another directory"
    if error.errno in _SYSTEMS_FAULTS:
        return f"name another directory, or {_CHECK_THE_DISK}"
    if failed != root:
        return _ANOTHER_OR_EMPTY
    # Where the directory above is there, as in /proc, no command can make this one.
    is_absent = isinstance(error, FileNotFoundError) and not os.path.lexists(root.parent)
    return _make(root, host) if is_absent or isinstance(error, PermissionError) else "name another directory"


def _slow(root: DiskRoot, answer_s: float) -> Diagnosis:
    return problem(_subject(root), f"does not answer within {answer_s:.0f} s", _CHECK_THE_DISK)


def _within(limit_s: float, work: Callable[[], list[Diagnosis]]) -> list[Diagnosis] | None:
    """Returns the result of `work`, or raises its exception; None: it does not return in time. Its thread does not keep
    the process alive.
    """
    done: Future[list[Diagnosis]] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  end of a thread: whoever waits must learn of any exception
            done.set_exception(error)

    thread = threading.Thread(target=run, name="kvo-doctor-disk", daemon=True)
    thread.start()
    thread.join(limit_s)
    return done.result() if done.done() else None


def _subject(root: DiskRoot) -> str:
    return f"disk {format_path(root.path)}"


def _check_root(root: DiskRoot, disk: DiskConfig, host: Host) -> Iterator[Diagnosis]:
    subject, files = _subject(root), Files()
    try:
        fd = files.open_directory(root.path)
    except FileNotFoundError:
        if os.access(root.path.parent, os.W_OK | os.X_OK):
            yield ok(subject, "does not exist yet; the daemon creates it")
            room = os.statvfs(root.path.parent)
            yield from (one for one in _judge_room(root, disk, room) if one.verdict is not Verdict.OK)
            return
        remedy = f"correct the path, or mount its file system; then {_make(root.path, host)}"
        yield problem(subject, "does not exist", remedy)
        return
    except NotADirectoryError:
        yield problem(subject, "is not a directory", "name a directory of its own, of mode 700")
        return
    except DiskError as error:
        yield problem(subject, str(error).removeprefix(f"{format_path(root.path)} "), _make_its_own(root.path, host))
        return
    except OSError as error:
        yield problem(subject, describe_error(error), _remedy(root.path, root.path, error, host))
        return
    try:
        able = probe(files, fd, None if disk.direct else False)
        room, kind = files.space(fd), file_system(fd, host.text("proc/self/mountinfo"))
    except OSError as error:
        yield problem(subject, f"can't be written: {describe_error(error)}",
                      f"check the mount options; in the unit, set ReadWritePaths={root.path}")  # fmt: skip
        return
    finally:
        os.close(fd)
    yield from _judge_room(root, disk, room)
    yield from _judge_file_system(subject, disk, kind, able)


def _judge_file_system(subject: str, disk: DiskConfig, kind: str, able: Abilities) -> Iterator[Diagnosis]:
    if kind in _NETWORK or kind in _VOLATILE:
        why = "each access waits for the network" if kind in _NETWORK else "a restart may lose it, and tmpfs is memory"
        yield note(subject, f"is on {kind}: {why}", "use a local file system: ext4 or XFS on NVMe")
    if not able.allocates:
        text = f"{kind or 'its file system'} has no fallocate(2), so each new segment is filled with zeros first"
        yield note(subject, text, "use ext4 or XFS")
    if kind == COPY_ON_WRITE and not able.in_place:
        text = f"{kind} does not give files the attribute C (NOCOW), so each segment is made anew instead of used again"
        yield note(subject, text, "use ext4 or XFS")
    if not able.direct and disk.direct != False:  # noqa: E712 - "auto" is no flag
        text = (
            f"{kind or 'its file system'} does not support O_DIRECT, so the page cache holds every byte a second time"
        )
        if disk.direct is True:
            yield problem(subject, text, 'set disk.direct = "auto", or use ext4 or XFS')
        else:
            yield note(subject, text, "use ext4 or XFS, or set disk.direct = false if this is intended")


def _judge_room(root: DiskRoot, disk: DiskConfig, room: os.statvfs_result) -> Iterator[Diagnosis]:
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    held = sum(map(_held_bytes, (root.path / "segments").glob("*")))
    usable = max(0, free + held - disk.min_free_bytes)
    size = f"{format_bytes(root.capacity_bytes)} of a file system of {format_bytes(total)}"
    if usable < root.capacity_bytes:
        yield note(_subject(root), f"{size}: {format_bytes(usable)} can be used, since disk.min_free_bytes stay free",
                   "reduce the capacity, or free space")  # fmt: skip
    else:
        yield ok(_subject(root), size)


def _held_bytes(file: Path) -> int:
    try:
        return file.stat().st_blocks * 512
    except OSError:  # a daemon may remove it meanwhile
        return 0


def _make_its_own(folder: Path, host: Host) -> str:
    """Returns the remedy for a link, or for a directory that others may enter. A directory with other contents, such as
    /, must not be closed to them.
    """
    if folder.is_symlink():
        return f'set path = "{os.path.realpath(folder)}" in disk.roots'
    try:
        is_ours = set(os.listdir(folder)) <= _OURS
    except OSError:
        is_ours = False
    return _make(folder if is_ours else folder / "kvoffloadd", host)


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _make(folder: Path, host: Host) -> str:
    return f"install -d -m 700 -o {_user(host.uid)} {folder}"


def check_account(config: Config, host: Host) -> Iterator[Diagnosis]:
    """Reports the account that the daemon would run as."""
    if host.uid == socketpath.unmapped_uid():
        remedy = "run it as a user with another number, or without a user namespace"
        yield problem("user", f"uid {host.uid} {socketpath.STANDS_FOR_MANY}", remedy)
    elif host.uid == 0:
        remedy = "run it, and this command, as the engines' user: runuser -u ENGINE -- kvoffloadd doctor"
        yield note("user", "root", remedy)
    else:
        others = (
            f"; also served: uids {', '.join(map(str, config.server.allowed_uids))}"
            if config.server.allowed_uids
            else ""
        )
        yield ok("user", f"{_user(host.uid)}{others}")
