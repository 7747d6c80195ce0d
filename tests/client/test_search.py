"""Clients to which nobody gives a path look for the daemon, and stay with the one that they have found."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd import socketpath
from kvoffloadd.errors import DaemonUnreachableError
from kvoffloadd.testing.wait import HANG_S
from tests.client.fake_daemon import FakeDaemon

MakeClient = Callable[..., Any]


@pytest.fixture
def places(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The socket that the variable names, and the service's, which is this user's own, too."""
    named, service = socket_dir / "named", socket_dir / "service" / "kvoffloadd.sock"
    service.parent.mkdir()
    monkeypatch.setattr(socketpath, "SERVICE_FOLDER", service.parent)
    monkeypatch.setattr(socketpath, "SERVICE_SOCKET", service)
    monkeypatch.setenv(socketpath.VARIABLE, str(named))
    return named, service


def test_the_first_that_answers(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    named, service = places
    with FakeDaemon(str(service)):
        second = make_client(None)
        assert second.socket_path is None
        second.connect()
        assert second.socket_path == str(service)
        with FakeDaemon(str(named)):
            first = make_client(None)
            first.connect()
            assert first.socket_path == str(named)
            first.close()
        second.close()


def test_a_client_stays_with_what_it_has_found(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    """Its keys are there: a daemon that restarts finds its engines again, although another one answers meanwhile."""
    named, service = places
    client = make_client(None, connect_deadline_s=0.0)
    with FakeDaemon(str(service)):
        client.connect()
    with FakeDaemon(str(named)):
        with pytest.raises(DaemonUnreachableError, match=f"{service}: no such socket"):
            client.ping()
        with FakeDaemon(str(service)):
            client.ping()
            assert client.socket_path == str(service)
            client.close()


def test_where_it_has_looked(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    named, service = places
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(named))
    with pytest.raises(DaemonUnreachableError) as caught:
        make_client(None, connect_deadline_s=0.0).connect()
    for words in (f"{named} (connection refused", f"{service} (no such socket)", "KVOFFLOADD_SOCKET"):
        assert words in str(caught.value)


def test_a_daemon_that_is_about_to_start_is_waited_for(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    """The first look finds none, since the daemon starts only then."""
    named, _ = places
    client = make_client(None, connect_deadline_s=HANG_S, deadline_s=HANG_S)
    search, daemons = client._core._dialer._search, []

    def search_and_start() -> socket.socket:
        try:
            return search()  # type: ignore[no-any-return]
        except OSError:
            daemons.append(FakeDaemon(str(named)).__enter__())
            raise

    client._core._dialer._search = search_and_start
    client.connect()
    client.close()
    daemons[0].stop()


def test_one_that_takes_nobody_in_is_not_passed_by(make_client: MakeClient, places: tuple[Path, Path]) -> None:
    """A daemon whose queue is full is there: what is meant for it is not for the next one."""
    named, service = places
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting, FakeDaemon(str(service)):
        full.bind(str(named))
        full.listen(0)
        waiting.connect(str(named))
        with pytest.raises(DaemonUnreachableError, match=f"{named}: the daemon does not accept connections"):
            make_client(None, connect_deadline_s=0.0).connect()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_process_of_another_user(
    make_client: MakeClient, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """Nothing is sent to it. Here this user counts as another one."""
    named, _ = places
    monkeypatch.setattr(socketpath, "trusted_uids", lambda _variables, _uid: frozenset())
    monkeypatch.setattr(socketpath, "_owner", lambda _folder: None)
    with FakeDaemon(str(named)) as fake:
        client = make_client(str(named) if is_named else None, connect_deadline_s=0.0)
        with pytest.raises(DaemonUnreachableError, match=f"a process of uid {os.geteuid()} listens there"):
            client.connect()
    assert fake.seen == []
