"""Clients to which nobody gives a path look for the daemon, and stay with the one that they have found."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd import socketpath
from kvoffloadd.errors import ConfigError, ConnectionLostError, DaemonUnreachableError
from kvoffloadd.protocol import messages as m
from kvoffloadd.testing.wait import HANG_S
from tests.client.fake_daemon import FakeDaemon, FakeSession

MakeClient = Callable[..., Any]


@pytest.fixture
def places(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where clients look: this user's own socket, then the service's."""
    own, service = socket_dir / "own" / "kvoffloadd.sock", socket_dir / "service" / "kvoffloadd.sock"
    own.parent.mkdir(0o700)
    service.parent.mkdir()
    monkeypatch.setattr(socketpath, "SERVICE_FOLDER", socket_dir / "missing")
    monkeypatch.setattr(socketpath, "SERVICE_SOCKET", service)
    monkeypatch.setattr(socketpath, "own_socket", lambda _variables, _uid: own)
    monkeypatch.setattr(socketpath, "private_folders", lambda _variables, _uid: (own.parent,))
    return own, service


def test_a_place_that_is_made_later(
    make_client: MakeClient, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is started by cron may be older than the first session of its user."""
    own, _ = places
    found = [own.parent]
    monkeypatch.setattr(socketpath, "private_folders", lambda _variables, _uid: tuple(found))
    client = make_client(None, connect_deadline_s=0.0)
    with pytest.raises(DaemonUnreachableError):
        client.connect()
    session = own.parent.parent / "session"
    session.mkdir(0o700)
    found.append(session)
    with FakeDaemon(str(session / own.name)):
        client.connect()
        assert client.socket_path == str(session / own.name)
        client.close()


def test_the_variables_are_those_of_the_start(
    make_client: MakeClient, places: tuple[Path, Path], socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_client(None, connect_deadline_s=0.0)
    monkeypatch.setenv(socketpath.VARIABLE, "no path of a socket")
    with FakeDaemon(str(places[0])):
        client.connect()
        client.close()
    with pytest.raises(ConfigError, match=socketpath.VARIABLE):
        make_client(None)


def test_the_first_that_answers(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    own, service = places
    with FakeDaemon(str(service)):
        second = make_client(None)
        assert second.socket_path is None
        second.connect()
        assert second.socket_path == str(service)
        with FakeDaemon(str(own)):
            first = make_client(None)
            first.connect()
            assert first.socket_path == str(own)
            first.close()
        second.close()


def test_a_named_one_is_the_only_place(
    make_client: MakeClient, places: tuple[Path, Path], socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear that is meant for it empties no other daemon while it starts."""
    named = socket_dir / "named"
    monkeypatch.setenv(socketpath.VARIABLE, str(named))
    with FakeDaemon(str(places[0])) as own, FakeDaemon(str(places[1])) as service:
        with pytest.raises(DaemonUnreachableError, match=f"looked at {named} "):
            make_client(None, connect_deadline_s=0.0).connect()
        assert own.seen == service.seen == []
        with FakeDaemon(str(named)):
            client = make_client(None)
            client.connect()
            assert client.socket_path == str(named)
            client.close()


@pytest.mark.parametrize(
    ("how", "reason"), [("a link", "is a symbolic link"), ("a mode", "mode 755"), ("an owner", "belongs to uid")]
)
def test_a_private_directory_that_others_have_made_is_passed_over(
    make_client: MakeClient, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, how: str, reason: str
) -> None:
    """It could lead to any process of root or of this user, which would get the greeting; or hold clients up."""
    own, service = places
    if how == "a link":
        own.parent.rmdir()
        own.parent.symlink_to(service.parent.parent / "elsewhere")
        own.parent.readlink().mkdir(0o700)
    elif how == "a mode":
        own.parent.chmod(0o755)
    else:
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        monkeypatch.setattr(socketpath, "trusted_uids", lambda _variables, uid: frozenset((0, uid - 1)))
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting, FakeDaemon(str(service)):
        full.bind(str(own))
        full.listen(0)
        waiting.connect(str(own))
        client = make_client(None, connect_deadline_s=0.0)
        client.connect()
        assert client.socket_path == str(service)
        client.close()
        with pytest.raises(DaemonUnreachableError, match=reason):
            make_client(str(own), connect_deadline_s=0.0).connect()


def test_a_client_stays_with_what_it_has_found(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    """Its keys are there: a daemon that restarts finds its engines again, although another one answers meanwhile."""
    own, service = places
    client = make_client(None, connect_deadline_s=0.0)
    with FakeDaemon(str(service)):
        client.connect()
    with FakeDaemon(str(own)):
        with pytest.raises(DaemonUnreachableError, match=f"{service}: no such socket"):
            client.ping()
        with FakeDaemon(str(service)):
            client.ping()
            assert client.socket_path == str(service)
            client.close()


def hang_up(peer: FakeSession, _message: m.Hello) -> None:
    peer.hang_up()


def test_a_daemon_that_is_ending_is_not_kept_to(
    make_client: MakeClient, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has taken the connection, and answers no greeting."""
    own, service = places
    client = make_client(None, connect_deadline_s=0.0)
    with FakeDaemon(str(service)):
        with FakeDaemon(str(own)) as ending:
            monkeypatch.setattr(ending, "_on_hello", hang_up)
            with pytest.raises(ConnectionLostError):
                client.connect()
            assert client.socket_path is None
        client.connect()
        assert client.socket_path == str(service)
        client.close()


def test_where_it_has_looked(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    own, service = places
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(own))
    with pytest.raises(DaemonUnreachableError) as caught:
        make_client(None, connect_deadline_s=0.0).connect()
    for words in (f"{own} (connection refused", f"{service} (no such socket)", "KVOFFLOADD_SOCKET"):
        assert words in str(caught.value)


def test_a_daemon_that_is_about_to_start_is_waited_for(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    """The first look finds none, since the daemon starts only then."""
    own, _ = places
    client = make_client(None, connect_deadline_s=HANG_S, deadline_s=HANG_S)
    search, daemons = client._core._dialer._search, []

    def search_and_start() -> socket.socket:
        try:
            return search()  # type: ignore[no-any-return]
        except OSError:
            daemons.append(FakeDaemon(str(own)).__enter__())
            raise

    client._core._dialer._search = search_and_start
    client.connect()
    client.close()
    daemons[0].stop()


def test_one_that_takes_nobody_in_is_not_passed_by(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    """A daemon whose queue is full is there: what is meant for it is not for the next one."""
    own, service = places
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting, FakeDaemon(str(service)):
        full.bind(str(own))
        full.listen(0)
        waiting.connect(str(own))
        with pytest.raises(DaemonUnreachableError, match=f"{own}: the daemon does not accept connections"):
            make_client(None, connect_deadline_s=0.0).connect()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_process_of_another_user(
    make_client: MakeClient, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Nothing is sent to it. Here this user counts as another one."""
    own, _ = places
    monkeypatch.setattr(socketpath, "trusted_uids", lambda _variables, _uid: frozenset())
    monkeypatch.setattr(socketpath, "_owner", lambda _folder: None)
    with FakeDaemon(str(own)) as fake:
        client = make_client(str(own) if is_named else None, connect_deadline_s=0.0)
        with pytest.raises(DaemonUnreachableError, match=f"a process of uid {os.geteuid()} listens there"):
            client.connect()
    assert fake.seen == []


def test_a_process_of_a_user_without_a_number(
    make_client: MakeClient, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable can name that user: its number is one of many."""
    own, _ = places
    monkeypatch.setattr(socketpath, "unmapped_uid", os.geteuid)
    monkeypatch.setattr(socketpath, "_owner", lambda _folder: None)
    with FakeDaemon(str(own)) as fake, pytest.raises(DaemonUnreachableError) as caught:
        make_client(str(own), connect_deadline_s=0.0).connect()
    assert str(caught.value).endswith("stands for every user without one in this user namespace: map the daemon's user")
    assert socketpath.UID_VARIABLE not in str(caught.value)
    assert fake.seen == []
