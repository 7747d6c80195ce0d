"""Whose the socket's path is: at a start, and while what is there is removed and replaced."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvoffloadd.errors import ConfigError, TryAgainError
from kvoffloadd.server import socketplace as module
from kvoffloadd.server.socketplace import SocketPlace, is_ending
from kvoffloadd.testing.wait import HANG_S, until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLDER_S", 0.0)


@pytest.fixture
def path(socket_dir: Path) -> Path:
    return socket_dir / "kvo.sock"


@contextmanager
def placed(path: Path, mode: int = 0o660) -> Iterator[SocketPlace]:
    """A daemon's place, and its listening socket."""
    place = SocketPlace(path, mode)
    place.claim()
    with place.listen():
        yield place
    place.close()


def reaches(path: Path, listener: socket.socket) -> bool:
    """Whether who connects to the path comes out at this socket."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.bind(b"\0" + os.urandom(8).hex().encode())
        peer.connect(str(path))
        accepted, name = listener.accept()
        accepted.close()
        return bool(name == peer.getsockname())


# --- what is lost is made again --------------------------------------------------------------------------------------


def test_a_socket_that_is_there_is_left_there(path: Path) -> None:
    with placed(path) as place:
        assert place.look() is None
        assert place.look() is None


@pytest.mark.parametrize("lost", ["socket", "socket and lock", "directory"])
def test_a_socket_that_is_gone_is_made_again(socket_dir: Path, lost: str) -> None:
    folder = socket_dir / "run"
    path = folder / "kvo.sock"
    with placed(path, 0o600) as place:
        path.unlink()
        if lost != "socket":
            Path(f"{path}.lock").unlink()
        if lost == "directory":
            folder.rmdir()
        again = place.look()
        assert again is not None
        with again:
            assert reaches(path, again)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert place.look() is None
            with pytest.raises(ConfigError, match="another daemon uses"):
                SocketPlace(path, 0o600).claim()
            place.remove()
            assert not path.exists()


def test_a_lock_that_is_gone_is_taken_again(path: Path) -> None:
    with placed(path) as place:
        Path(f"{path}.lock").unlink()
        assert place.look() is None
        with pytest.raises(ConfigError, match=f"process {os.getpid()} holds"):
            SocketPlace(path, 0o660).claim()


def test_a_socket_of_a_dead_process_is_replaced(path: Path) -> None:
    with placed(path) as place:
        path.unlink()
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        again = place.look()
        assert again is not None
        with again:
            assert reaches(path, again)


# --- what is another's is left alone ---------------------------------------------------------------------------------


def test_a_file_in_its_place_is_left_alone(path: Path) -> None:
    with placed(path) as place:
        path.unlink()
        path.write_text("precious")
        for _ in range(2):
            with pytest.raises(ConfigError, match="exists and is not a socket"):
                place.look()
        place.remove()
        assert path.read_text() == "precious"
        path.unlink()
        again = place.look()
        assert again is not None
        again.close()


def test_a_live_socket_in_its_place_is_left_alone(path: Path) -> None:
    with placed(path) as place:
        path.unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(str(path))
            other.listen()
            with pytest.raises(ConfigError, match="another process listens"):
                place.look()
            place.remove()
            other.accept()[0].close()  # the look's own
            assert reaches(path, other)


def test_a_second_daemon_that_came_after_the_lock_was_removed_keeps_the_place(path: Path) -> None:
    with placed(path) as first:
        path.unlink()
        Path(f"{path}.lock").unlink()
        with placed(path) as second:
            with pytest.raises(ConfigError, match="another daemon has taken"):
                first.look()
            first.remove()
            assert path.exists()
            assert second.look() is None


def test_a_daemon_that_has_not_begun_to_listen_keeps_its_socket(path: Path) -> None:
    """It came after the lock of another one was removed, which was still starting."""
    first, second = SocketPlace(path, 0o660), SocketPlace(path, 0o660)
    first.claim()
    Path(f"{path}.lock").unlink()
    second.claim()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        with pytest.raises(ConfigError, match="another daemon has taken"):
            first.listen()
        bound.listen()
        assert reaches(path, bound)
    first.close()
    second.close()


def test_a_socket_of_the_service_manager_can_t_be_made_again(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(path))
        given.listen()
        place = SocketPlace(path, 0o660, given)
        place.claim()
        assert place.listen() is given
        assert place.look() is None
        place.remove()
        assert path.exists()
        path.unlink()
        with pytest.raises(ConfigError, match="restart its socket unit"):
            place.look()
        place.close()


# --- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(socket_dir: Path, umask: int) -> None:
    path = socket_dir / "a" / "b" / "kvo.sock"
    before = os.umask(umask)
    try:
        with placed(path):
            modes = [stat.S_IMODE(one.stat().st_mode) for one in (path.parent.parent, path.parent, path)]
    finally:
        os.umask(before)
    assert modes == [0o750, 0o750, 0o660]


def test_a_directory_that_is_there_keeps_its_mode(socket_dir: Path) -> None:
    folder = socket_dir / "run"
    folder.mkdir(mode=0o700)
    with placed(folder / "kvo.sock"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


# --- who holds the lock ----------------------------------------------------------------------------------------------


def test_a_holder_that_ends_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLDER_S", HANG_S)
    first = SocketPlace(path, 0o660)
    first.claim()
    monkeypatch.setattr("time.sleep", lambda _: first.close())
    second = SocketPlace(path, 0o660)
    second.claim()
    second.close()


def test_a_holder_that_nobody_reaches_will_end_or_make_its_socket(path: Path) -> None:
    first = SocketPlace(path, 0o660)
    first.claim()
    with pytest.raises(TryAgainError, match=f"process {os.getpid()} holds .* and no daemon listens at"):
        SocketPlace(path, 0o660).claim()
    first.close()


def test_a_holder_that_is_being_killed_is_told_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with placed(path):
        monkeypatch.setattr(module, "is_ending", lambda pid: pid == os.getpid())
        with pytest.raises(TryAgainError, match=f"process {os.getpid()} holds .* is ending but has not ended"):
            SocketPlace(path, 0o660).claim()


def test_a_lock_without_a_name_is_a_live_daemon_s(path: Path) -> None:
    """A former release takes it like this."""
    with open(f"{path}.lock", "w", encoding="ascii") as lock, socket.socket(socket.AF_UNIX) as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match=r"another daemon uses .* \(a process holds"):
            SocketPlace(path, 0o660).claim()


def test_which_processes_are_ending() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not is_ending(os.getpid())
    assert not is_ending(child.pid)
    child.send_signal(signal.SIGKILL)
    until(lambda: is_ending(child.pid), "it is a zombie")
    child.communicate()
    assert not is_ending(child.pid)


@pytest.mark.parametrize(
    ("status", "stat_fields", "ends"),
    [
        ("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\nCoreDumping:\t0\n", "D 1 1 1 0 -1 4194560", False),
        ("SigPnd:\t0000000000000100\nShdPnd:\t0000000000000000\n", "D 1 1 1 0 -1 4194560", True),
        ("SigPnd:\t0000000000000000\nShdPnd:\t0000000000004100\n", "S 1 1 1 0 -1 4194560", True),
        ("SigPnd:\t0000000000004000\nShdPnd:\t0000000000000000\n", "S 1 1 1 0 -1 4194560", False),
        ("CoreDumping:\t1\n", "S 1 1 1 0 -1 4194560", True),
        ("", "R 1 1 1 0 -1 4194564", True),
        ("", "Z 1 1 1 0 -1 4194560", True),
    ],
)
def test_what_the_kernel_tells_of_an_end(tmp_path: Path, status: str, stat_fields: str, ends: bool) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "status").write_text(f"Name:\tpython\n{status}")
    (folder / "stat").write_text(f"7 (a) Z (b) {stat_fields} 1 1\n")
    assert is_ending(7, tmp_path) is ends


def test_the_log_tells_once_that_nobody_can_connect(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import asyncio

    from kvoffloadd.scheduling.lanes import Lane
    from kvoffloadd.server.socketplace import keep_socket

    looks: list[str] = ["no", "no", "other", "", "no"]
    made = socket.socket(socket.AF_UNIX)
    replaced: asyncio.Queue[socket.socket] = asyncio.Queue()

    class Fake(SocketPlace):
        def look(self) -> socket.socket | None:
            reason = looks.pop(0) if looks else ""
            if reason:
                raise ConfigError(reason)
            return None if looks else made

    async def watch() -> None:
        lane = Lane("socket", 1, asyncio.get_running_loop())
        task = asyncio.create_task(keep_socket(Fake(path, 0o660), lane, replaced.put_nowait))
        assert await replaced.get() is made
        await asyncio.sleep(0)
        task.cancel()
        await lane.close(HANG_S)

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING, "kvoffloadd"):
        patch.setattr(module, "LOOK_S", 0.0)
        patch.setattr(logging.getLogger("kvoffloadd"), "propagate", True)
        asyncio.run(watch())
    made.close()
    logged = [record.getMessage() for record in caplog.records]
    errors = [text.removeprefix("new connections are not possible: ") for text in logged if text.startswith("new")]
    assert errors == ["no", "other", "no"]
    assert logged[len(errors)].startswith("the socket was removed from its path")


# --- the directory of a user's own socket ---------------------------------------------------------------------------


def test_a_users_own_directory_is_made_for_that_user_alone(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may not enter it, under any umask. One that somebody else may enter is refused, and stays as it is."""
    folder = socket_dir / "own"
    monkeypatch.setattr("kvoffloadd.socketpath.private_folders", lambda _variables, _uid: (folder,))
    before = os.umask(0o777)
    try:
        with placed(folder / "kvo.sock"):
            assert folder.stat().st_mode & 0o7777 == 0o700
    finally:
        os.umask(before)
    folder.chmod(0o711)
    with pytest.raises(ConfigError, match=r"server\.socket: other users may enter .*; chmod 700 it"):
        SocketPlace(folder / "kvo.sock", 0o660).claim()
    assert folder.stat().st_mode & 0o7777 == 0o711
