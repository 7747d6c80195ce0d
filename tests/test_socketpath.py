"""Where the daemon's socket is, by variables, user and owners of directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvoffloadd import socketpath
from kvoffloadd.socketpath import (
    SERVICE_SOCKET,
    check_private,
    client_sockets,
    daemon_socket,
    own_socket,
    trusted_uids,
    unmapped_uid,
    why_no_daemon,
)

ME = os.geteuid()
NOBODY = 65534


@pytest.fixture(autouse=True)
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the service, which this test's user owns if it makes it."""
    folder = tmp_path / "service"
    monkeypatch.setattr(socketpath, "SERVICE_FOLDER", folder)
    monkeypatch.setattr(socketpath, "SESSIONS", tmp_path / "sessions")
    return folder


def may_be_daemon(peer_uid: int, path: Path, trusted: frozenset[int]) -> bool:
    return not why_no_daemon(peer_uid, path, trusted)


def test_root_has_the_services_and_others_have_their_own() -> None:
    assert own_socket({"XDG_RUNTIME_DIR": "/run/user/0"}, 0) == SERVICE_SOCKET
    assert own_socket({}, 1000) == Path("/tmp/kvoffloadd-1000/kvoffloadd.sock")


def test_who_owns_the_services_directory_has_the_services(service: Path) -> None:
    service.mkdir()
    assert own_socket({}, ME) == SERVICE_SOCKET
    assert own_socket({}, ME + 1) == Path(f"/tmp/kvoffloadd-{ME + 1}/kvoffloadd.sock")


def test_a_sessions_directory_counts_if_it_is_the_users(tmp_path: Path) -> None:
    """The tester may be root: then another user's directory stands for the one that counts."""
    uid = ME or NOBODY
    mine = tmp_path / "mine"
    mine.mkdir()
    if ME == 0:
        os.chown(mine, uid, uid)
    fallback = Path(f"/tmp/kvoffloadd-{uid}/kvoffloadd.sock")
    long = mine / ("x" * 100)
    own = {"XDG_RUNTIME_DIR": str(mine)}
    assert own_socket({"XDG_RUNTIME_DIR": str(mine)}, uid) == mine / "kvoffloadd" / "kvoffloadd.sock"
    assert client_sockets(own, uid) == (mine / "kvoffloadd" / "kvoffloadd.sock", fallback, SERVICE_SOCKET)
    mine.chmod(0o770)
    assert client_sockets(own, uid) == (fallback, SERVICE_SOCKET), "others could make the directory"
    mine.chmod(0o700)
    for unusable in ("", "mine", str(tmp_path / "missing"), "/", str(long), "/\0"):
        assert own_socket({"XDG_RUNTIME_DIR": unusable}, uid) == fallback


def test_the_order_in_which_clients_look() -> None:
    own = Path("/tmp/kvoffloadd-1000/kvoffloadd.sock")
    assert client_sockets({}, 1000) == (own, SERVICE_SOCKET)
    assert client_sockets({}, 0) == (SERVICE_SOCKET,)
    named = {socketpath.VARIABLE: "/srv/d.sock"}
    assert client_sockets(named, 1000) == (Path("/srv/d.sock"),), "what is meant for one reaches no other"
    assert daemon_socket(named, 0) == Path("/srv/d.sock")
    assert daemon_socket({socketpath.VARIABLE: ""}, 1000) == own


@pytest.mark.parametrize("text", ["d.sock", "@kvoffloadd", "/" + "x" * 107, "/a\0b"])
def test_a_variable_that_holds_no_path_of_a_socket(text: str) -> None:
    for sockets in (daemon_socket, client_sockets):
        with pytest.raises(ValueError, match=socketpath.VARIABLE):
            sockets({socketpath.VARIABLE: text}, 1000)


def test_whose_process_may_be_the_daemon(tmp_path: Path) -> None:
    assert trusted_uids({}, 1000) == trusted_uids({socketpath.UID_VARIABLE: ""}, 1000) == {0, 1000}
    assert trusted_uids({socketpath.UID_VARIABLE: "1001"}, 1000) == {0, 1000, 1001}
    for text in ("engine", "-1", "1 2", "4294967295", "²"):
        with pytest.raises(ValueError, match=socketpath.UID_VARIABLE):
            trusted_uids({socketpath.UID_VARIABLE: text}, 1000)
    assert may_be_daemon(1000, tmp_path / "d.sock", frozenset((0, 1000)))
    assert not may_be_daemon(1001, tmp_path / "d.sock", frozenset((0, 1000)))
    assert not may_be_daemon(1001, tmp_path / "missing" / "d.sock", frozenset((0, 1000)))


def test_the_owner_of_a_directory_that_not_everybody_can_make(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes of / and /proc are the same on all hosts."""
    monkeypatch.setattr(socketpath, "_owner", lambda folder: 1001)
    assert may_be_daemon(1001, Path("/proc/d.sock"), frozenset((0, 1000)))
    assert not may_be_daemon(1002, Path("/proc/d.sock"), frozenset((0, 1000)))
    assert not may_be_daemon(1001, Path("/tmp/a/d.sock"), frozenset((0, 1000)))
    assert not may_be_daemon(1001, Path("/tmp/a/b/d.sock"), frozenset((0, 1000)))


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o2775, 0o1777])
def test_a_directory_in_which_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """Whoever may write above the socket's directory could have made it. Its own mode only lets others in."""
    folder = tmp_path / "shared" / "theirs"
    folder.mkdir(parents=True)
    seen = socketpath._is_open_to_others
    monkeypatch.setattr(socketpath, "_owner", lambda folder: 1001)
    monkeypatch.setattr(
        socketpath, "_is_open_to_others", lambda one: one.is_relative_to(tmp_path) and seen(one)
    )  # the tests' folder is in /tmp
    folder.chmod(mode)
    assert may_be_daemon(1001, folder / "d.sock", frozenset((0, 1000)))
    folder.parent.chmod(mode)
    assert not may_be_daemon(1001, folder / "d.sock", frozenset((0, 1000)))


def test_users_without_a_number_are_not_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the same number in a user namespace: the owner of a directory may be one, and a process that
    listens there another, unless the owner alone can write to it.
    """
    some_have_numbers(tmp_path, monkeypatch)
    nobody = unmapped_uid()
    assert nobody is not None
    assert trusted_uids({}, nobody) == {0}, "not even one's own"
    with pytest.raises(ValueError, match="stands for every user without a number"):
        trusted_uids({socketpath.UID_VARIABLE: str(nobody)}, 1000)
    folder = tmp_path / "theirs"
    folder.mkdir(0o750)
    seen = socketpath._is_open_to_others
    monkeypatch.setattr(socketpath, "_owner", lambda folder: nobody)
    monkeypatch.setattr(socketpath, "_is_open_to_others", lambda one: one.is_relative_to(tmp_path) and seen(one))
    assert may_be_daemon(nobody, folder / "d.sock", frozenset((0, 1000)))
    folder.chmod(0o1777)
    assert f"others may write to {folder}" in why_no_daemon(nobody, folder / "d.sock", frozenset((0, 1000)))
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert not may_be_daemon(nobody, link / "d.sock", frozenset((0, 1000)))


def some_have_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user namespace of a container without root."""
    (folder / "uid_map").write_text("         0       1000          1\n         1     100000      65536\n")
    monkeypatch.setattr(socketpath, "_UID_MAP", folder / "uid_map")


def test_where_all_have_numbers_nobody_is_a_user_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uid_map").write_text("         0          0 4294967295\n")
    monkeypatch.setattr(socketpath, "_UID_MAP", tmp_path / "uid_map")
    assert unmapped_uid() is None
    assert trusted_uids({socketpath.UID_VARIABLE: "65534"}, 1000) == {0, 1000, 65534}
    assert trusted_uids({}, 65534) == {0, 65534}


def test_the_number_of_those_who_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    some_have_numbers(tmp_path, monkeypatch)
    monkeypatch.setattr(socketpath, "_UNMAPPED", tmp_path / "overflowuid")
    assert unmapped_uid() == 65534
    (tmp_path / "overflowuid").write_text("99\n")
    assert unmapped_uid() == 99


def test_what_is_wrong_with_a_listener() -> None:
    reason = why_no_daemon(1001, Path("/proc/d.sock"), frozenset((0, 1000)))
    assert reason == "a process of uid 1001 listens there, and not of root, of this user, or of the directory's owner"


def test_a_client_without_a_session_looks_in_the_sessions_directory(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of cron has no session, nor a unit with `User=`. A daemon that has no session, either, is not there."""
    uid = ME or NOBODY
    monkeypatch.setattr(socketpath, "SESSIONS", socket_dir)  # a short path
    session = socket_dir / str(uid)
    session.mkdir()
    session.chmod(0o700)
    if ME == 0:
        os.chown(session, uid, uid)
    there, lasting = session / "kvoffloadd/kvoffloadd.sock", Path(f"/tmp/kvoffloadd-{uid}/kvoffloadd.sock")
    assert own_socket({}, uid) == lasting
    assert client_sockets({}, uid) == (lasting, there, SERVICE_SOCKET)
    assert client_sockets({"XDG_RUNTIME_DIR": str(session)}, uid) == (there, lasting, SERVICE_SOCKET)
    session.chmod(0o770)
    assert client_sockets({}, uid) == (lasting, SERVICE_SOCKET)


def test_a_link_into_a_directory_where_everybody_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    (open_to_all / "theirs").mkdir()
    link = tmp_path / "link"
    link.symlink_to(open_to_all / "theirs")
    monkeypatch.setattr(socketpath, "_owner", lambda folder: 1001)
    monkeypatch.setattr(socketpath, "_is_open_to_others", lambda folder: folder == open_to_all)
    assert not may_be_daemon(1001, link / "d.sock", frozenset((0, 1000)))
    assert may_be_daemon(1001, tmp_path / "d.sock", frozenset((0, 1000)))


def test_a_private_directory(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    with pytest.raises(FileNotFoundError):
        check_private(folder, ME)
    folder.mkdir(0o700)
    check_private(folder, ME)
    for mode in (0o701, 0o710, 0o755, 0o1777):
        folder.chmod(mode)
        with pytest.raises(ValueError, match="chmod 700 it"):
            check_private(folder, ME)
    folder.chmod(0o700)
    with pytest.raises(ValueError, match=f"belongs to uid {ME}"):
        check_private(folder, ME + 1)
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(ValueError, match="symbolic link"):
        check_private(link, ME)
    (tmp_path / "file").touch(0o700)
    with pytest.raises(ValueError, match="is not a directory"):
        check_private(tmp_path / "file", ME)
