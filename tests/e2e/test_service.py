"""Tests the daemon under a service manager: when it sends which notice, what it is given, what a reload changes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client
from kvoffloadd.testing.daemon import KVOFFLOADD
from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import RawPeer
from tests.conftest import OTHER_UID
from tests.e2e import rank as ranks
from tests.e2e.users import Stranger, needs_root
from tests.notify import Manager, manager_in

pytestmark = pytest.mark.slow

WATCHDOG_S = 2.0

BLOCKED = """
import asyncio, signal, sys, time
from kvoffloadd import cli, daemon
class Daemon(daemon.Daemon):
    async def serve(self, read_config):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, time.sleep, 3600)
        return await super().serve(read_config)
daemon.Daemon = Daemon
sys.exit(cli.main(sys.argv[1:]))
"""
"""A daemon whose loop SIGUSR1 blocks."""

STUCK = BLOCKED.replace("time.sleep, 3600", "self.stick").replace(
    "    async def serve",
    """    def _start(self, loop):
        self.context = super()._start(loop)
        return self.context
    def stick(self):
        lane = getattr(self.context, "hash_lane")
        lane.submit(lambda: time.sleep(3600), print)
    async def serve""",
)
"""A daemon whose hash lane SIGUSR1 sticks."""


Serve = Callable[..., Daemon]


@pytest.fixture
def manager(socket_dir: Path) -> Iterator[Manager]:
    with manager_in(socket_dir) as manager:
        yield manager


@pytest.fixture
def serve(socket_dir: Path, manager: Manager) -> Iterator[Serve]:
    """`serve("--set", "...", program="", NAME="value")` -> a daemon with a service manager, just launched.

    `program`: what runs in place of the module.
    """
    services: list[Daemon] = []

    def start(*words: str, program: str = "", **variables: str) -> Daemon:
        variables["NOTIFY_SOCKET"] = manager.address
        run = ("-c", program) if program else KVOFFLOADD
        services.append(Daemon(socket_dir, "16MiB", options=words, environment=variables, program=run))
        services[-1].launch()
        return services[-1]

    yield start
    for service in services:
        service.kill()


# --- states ----------------------------------------------------------------------------------------------------------


def test_ready_comes_when_the_socket_answers_and_stopping_when_it_no_longer_will(
    serve: Serve, manager: Manager
) -> None:
    service = serve()
    notice = manager.until("READY")
    assert notice.fields["STATUS"] == f"serving at {service.socket}"
    with RawPeer(service.socket) as peer:
        peer.hello()
        service.signal(signal.SIGTERM)
        manager.until("STOPPING")
        extended_s = int(manager.until("EXTEND_TIMEOUT_USEC").fields["EXTEND_TIMEOUT_USEC"]) / 1e6
        assert extended_s > 30
        peer.end()
    assert service.wait() == 0, service.log()
    assert not service.socket.exists()


def test_a_start_that_fails_is_never_ready(serve: Serve, manager: Manager) -> None:
    service = serve("--policy", "none-such")
    assert service.wait() == 2
    assert "READY" not in {name for notice in manager.heard for name in notice.fields}
    assert manager.silent_for("READY", 0.1)
    assert service.says("memory.policy")


# --- the watchdog ----------------------------------------------------------------------------------------------------


def watched(serve: Serve, *words: str, program: str = "") -> Daemon:
    return serve(*words, program=program, WATCHDOG_USEC=str(round(WATCHDOG_S * 1e6)))


@pytest.mark.parametrize("loop", ["true", "false"], ids=["uvloop", "asyncio"])
def test_the_watchdog_hears_of_a_daemon_that_works(loop: str, serve: Serve, manager: Manager) -> None:
    service = watched(serve, "--set", f"server.use_uvloop={loop}")
    manager.until("READY")
    times = []
    for _ in range(4):
        manager.until("WATCHDOG", deadline_s=10 * WATCHDOG_S)
        times.append(time.monotonic())
    assert times[-1] - times[0] < 4 * WATCHDOG_S
    with Client(service.socket, namespace=None, role="observer") as client:
        until(lambda: len(client.status()["sessions"]) == 1, "its own pings leave no session behind")
    assert service.stop() == 0
    assert "watchdog" not in service.log()
    assert "session" not in service.log()  # what it does every few seconds is no event


def test_a_full_house_is_no_reason_to_be_killed(serve: Serve, manager: Manager) -> None:
    """The pings need no place, and take none."""
    service = watched(serve, "--set", "limits.sessions=1")
    manager.until("READY")
    with RawPeer(service.socket) as peer:
        peer.hello()
        while manager.listen(0.01):
            pass
        manager.until("WATCHDOG", deadline_s=10 * WATCHDOG_S)
        manager.until("WATCHDOG", deadline_s=10 * WATCHDOG_S)
    assert service.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR1], ids=["stopped", "blocked"])
def test_a_frozen_loop_tells_nothing(number: int, serve: Serve, manager: Manager) -> None:
    service = watched(serve, program=BLOCKED)
    manager.until("WATCHDOG")
    service.signal(number)
    while manager.listen(0.2):
        pass  # notices from before it froze
    assert manager.silent_for("WATCHDOG", WATCHDOG_S)
    # What systemd does then; what the daemon logs of it.
    service.signal(signal.SIGABRT)
    service.signal(signal.SIGCONT)
    assert service.wait() == -signal.SIGABRT
    if number == signal.SIGUSR1:
        assert service.says("Fatal Python error: Aborted")
        assert service.says("_run_once") or "uvloop" in service.log() or "asyncio" in service.log()


def test_a_stuck_lane_tells_nothing_and_is_named(serve: Serve, manager: Manager) -> None:
    service = watched(serve, program=STUCK)
    manager.until("WATCHDOG")
    service.signal(signal.SIGUSR1)
    while manager.listen(WATCHDOG_S / 3):
        pass
    assert manager.silent_for("WATCHDOG", WATCHDOG_S)
    assert service.says("watchdog: no answer within 0.5 s from: lane hash")
    with Client(service.socket, namespace=None, role="observer") as client:
        client.ping()  # so that a ping alone would not have shown it


def test_a_thread_that_hangs_in_a_lane_of_many_is_found(serve: Serve, manager: Manager) -> None:
    service = watched(serve, "--set", "memory.hash_threads=2", program=STUCK)
    manager.until("WATCHDOG")
    service.signal(signal.SIGUSR1)
    until(lambda: "has been busy with one piece of work" in service.log(), "it is said", deadline_s=3 * WATCHDOG_S)
    while manager.listen(0.1):
        pass
    assert manager.silent_for("WATCHDOG", WATCHDOG_S)


def test_a_hanging_disk_is_told_and_kills_nobody(serve: Serve, manager: Manager, socket_dir: Path) -> None:
    root, switch = socket_dir / "root", socket_dir / "faults"
    root.mkdir(mode=0o700)
    service = watched(
        serve, "--disk", f"{root}=64MiB", "--faults", f"disk={switch}", "--set", "disk.write_threads=1",
        "--set", "disk.min_free_bytes=0",
    )  # fmt: skip
    manager.until("WATCHDOG")
    (socket_dir / "new").write_text("write_delay_s=3600\n")
    (socket_dir / "new").replace(switch)
    with ranks.Rank(service.socket) as rank:
        rank.store_keys(ranks.new_keys(np.random.default_rng(1), 4))
        until(lambda: "does not answer" in service.log(), "it is said", deadline_s=4 * WATCHDOG_S)
        while manager.listen(0.01):
            pass
        manager.until("WATCHDOG", deadline_s=10 * WATCHDOG_S)
        assert service.says(f"disk {root}, lane write-root: does not answer")


# --- the store, the socket -------------------------------------------------------------------------------------------

# In addition to tests/test_systemd.py: systemd-socket-activate does not know the store; tests/service does.

needs_activate = pytest.mark.skipif(
    shutil.which("systemd-socket-activate") is None, reason="systemd-socket-activate is not installed"
)


@needs_activate
def test_a_given_socket_is_served_and_left_alone(socket_dir: Path) -> None:
    path = socket_dir / "kvo.sock"
    log_path = socket_dir / "log"
    with log_path.open("ab") as log:
        child = subprocess.Popen(
            ["systemd-socket-activate", f"--listen={path}", "--fdname=kvoffloadd", f"--setenv=PYTHONPATH={ROOT}",
             sys.executable, "-m", "kvoffloadd", "serve", "--socket", str(path), "--memory", "16MiB"],
            cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(path.exists, "it listens")
        with Client(path, namespace=None, role="observer", deadline_s=HANG_S, connect_deadline_s=HANG_S) as client:
            assert client.status()["pid"] == child.pid
            client.ping()
        child.terminate()
        assert child.wait(HANG_S) == 0, log_path.read_text()
        assert stat.S_ISSOCK(path.stat().st_mode)  # the process that gave it removes it
    finally:
        child.kill()
        child.wait()


@needs_activate
def test_a_socket_in_another_place_than_the_config_says_is_refused(socket_dir: Path) -> None:
    child = subprocess.Popen(
        ["systemd-socket-activate", f"--listen={socket_dir / 'a'}", f"--setenv=PYTHONPATH={ROOT}",
         sys.executable, "-m", "kvoffloadd", "serve", "--socket", str(socket_dir / "b"), "--memory", "16MiB"],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until((socket_dir / "a").exists, "it listens")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
        # Its file is there a moment before systemd-socket-activate listens.
        until(lambda: knock.connect_ex(str(socket_dir / "a")) == 0, "it can be connected to")
        _, errors = child.communicate(timeout=HANG_S)
    assert child.returncode == 2
    assert f"server.socket: is {socket_dir / 'b'}, but systemd listens at {socket_dir / 'a'}" in errors


INHERIT = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.dup2(int(sys.argv[1]), 3)
os.execv(sys.executable, [sys.executable, "-m", "kvoffloadd", *sys.argv[2:]])
"""


def given(listener: socket.socket, socket_dir: Path) -> subprocess.Popen[bytes]:
    """A daemon with this listening socket, as a socket unit gives it."""
    words = ("serve", "--socket", str(socket_dir / "kvo.sock"), "--memory", "16MiB")
    with (socket_dir / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", INHERIT, str(listener.fileno()), *words],
            cwd=ROOT, env={**os.environ, "LISTEN_FDS": "1"}, pass_fds=[listener.fileno()], stdout=log, stderr=log,
        )  # fmt: skip


def test_clients_queue_while_there_is_no_daemon(socket_dir: Path) -> None:
    """The manager keeps the socket: a daemon is killed, a client comes, another daemon serves it."""
    path = socket_dir / "kvo.sock"
    children = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(16)
        try:
            children.append(given(listener, socket_dir))
            with Client(path, namespace=None, role="observer", deadline_s=HANG_S, connect_deadline_s=HANG_S) as client:
                first = client.status()["pid"]
            children[0].kill()
            children[0].wait()
            found: list[Any] = []

            def come() -> None:
                with Client(
                    path, namespace=None, role="observer", deadline_s=HANG_S, connect_deadline_s=HANG_S
                ) as client:
                    found.append(client.status()["pid"])

            comer = threading.Thread(target=come)
            comer.start()
            children.append(given(listener, socket_dir))
            comer.join(2 * HANG_S)
            assert found
            assert found[0] != first
            # The lock keeps a second one from taking half of the clients.
            third = given(listener, socket_dir)
            children.append(third)
            assert third.wait(HANG_S) == 2
            assert "another daemon uses" in (socket_dir / "log").read_text()
            with Client(path, namespace=None, role="observer") as client:
                assert client.status()["pid"] == found[0]
        finally:
            for child in children:
                child.kill()
                child.wait()


# --- reload ----------------------------------------------------------------------------------------------------------


class Configured:
    """A daemon with a config file, which tests change."""

    def __init__(self, serve: Serve, manager: Manager, folder: Path, text: str = "") -> None:
        self.path = folder / "kvoffloadd.toml"
        self.path.write_text(text)
        self.manager = manager
        self.service = serve("--config", str(self.path))
        manager.until("READY")

    def reload(self, text: str) -> str:
        """What the log has of it."""
        before = len(self.service.log())
        self.path.write_text(text)
        self.service.signal(signal.SIGHUP)
        self.manager.until("RELOADING")
        self.manager.until("READY")
        return until(lambda: found if "reloaded" in (found := self.service.log()[before:]) else "", "it is told")


@pytest.fixture
def configured(serve: Serve, manager: Manager, socket_dir: Path) -> Configured:
    return Configured(serve, manager, socket_dir)


def test_a_reload_changes_what_can_change_and_names_the_rest(configured: Configured) -> None:
    log = configured.reload('[log]\nlevel = "debug"\n[limits]\nsessions = 300\n[copy]\nthreads = 3\n')
    assert "log.level: info -> debug" in log
    assert "limits.sessions: 256 -> 300" in log
    assert "takes effect at the next start: copy.threads" in log
    with RawPeer(configured.service.socket) as peer:
        peer.hello()
        peer.ok("bye")
    until(lambda: " DEBUG " in configured.service.log(), "debug records are written")
    assert "limits.sessions: 300 -> 256; log.level: debug -> info" in configured.reload("")
    assert "nothing has changed" in configured.reload("")
    assert configured.service.stop() == 0


def test_a_config_that_is_wrong_changes_nothing(configured: Configured) -> None:
    for text in ("[limits]\nsessions = 0\n", "[limits\n", "[limits]\nno_such_key = 4\n"):
        log = configured.reload(text)
        assert "ERROR" in log
        assert "not reloaded, nothing has changed" in log
    configured.path.unlink()
    configured.service.signal(signal.SIGHUP)
    configured.manager.until("READY")
    assert configured.service.says("can't be read: No such file or directory")
    with RawPeer(configured.service.socket) as peer:
        peer.hello()
    assert configured.service.stop() == 0


@needs_root
def test_users_who_are_not_allowed_any_more_have_to_go(configured: Configured) -> None:
    allowed = f"[server]\nallowed_uids = [{OTHER_UID}, {OTHER_UID + 1}]\n"
    configured.reload(allowed)
    socket = configured.service.socket
    os.chmod(socket.parent, 0o755)
    os.chmod(socket, 0o666)
    strangers = [Stranger.connect(socket, OTHER_UID + n) for n in (0, 1)]
    with RawPeer(socket) as ours:
        for peer in (ours, *(stranger.peer for stranger in strangers)):
            peer.hello()
        configured.reload(f"[server]\nallowed_uids = [{OTHER_UID + 1}]\n")
        assert f"uid {OTHER_UID} is not in server.allowed_uids" in strangers[0].peer.turned_away("forbidden")
        strangers[1].peer.ok("ping")
        ours.ok("ping")
    for stranger in strangers:
        stranger.close()


@needs_root
def test_users_whose_handles_of_gpu_memory_are_opened(configured: Configured) -> None:
    allowed, named = f"[server]\nallowed_uids = [{OTHER_UID}]\n", {"device": bytes(16), "handles": bytes(64)}
    configured.reload(allowed)
    socket = configured.service.socket
    os.chmod(socket.parent, 0o755)
    os.chmod(socket, 0o666)
    stranger = Stranger.connect(socket, OTHER_UID)
    stranger.peer.hello()
    stranger.peer.refused("forbidden", "attach_ipc", **named)
    configured.reload(f"{allowed}[cuda]\nipc_uids = [{OTHER_UID}]\n")
    stranger.peer.refused("bad_memory", "attach_ipc", **named)  # there is no such GPU
    configured.reload(allowed)
    stranger.peer.refused("forbidden", "attach_ipc", **named)
    stranger.close()


def test_caps_hold_for_all_and_limits_for_new_sessions(configured: Configured) -> None:
    with RawPeer(configured.service.socket) as old:
        assert old.hello()["limits"]["keys_per_request"] == 16_384
        configured.reload("[limits]\nkeys_per_request = 1\nsessions = 2\n")
        old.ok("ping")
        with RawPeer(configured.service.socket) as new:
            assert new.hello()["limits"]["keys_per_request"] == 1
            with RawPeer(configured.service.socket) as third:
                assert "sessions" in third.turned_away("limit")
            configured.reload("[limits]\nsessions = 1\n")
            old.ok("ping")
            new.ok("ping")  # who is above a new cap keeps what he has
        configured.reload("")
        with RawPeer(configured.service.socket) as again:
            again.hello()


def test_a_storm_of_reloads(configured: Configured) -> None:
    for _ in range(200):
        configured.service.signal(signal.SIGHUP)
    with RawPeer(configured.service.socket) as peer:
        peer.hello()
    assert configured.service.stop() == 0


def test_sighup_during_the_start_kills_nobody(serve: Serve, manager: Manager) -> None:
    service = serve("--set", "memory.prefault_threads=1")
    until(lambda: b"SigIgn" in Path(f"/proc/{service.pid}/status").read_bytes(), "it runs")
    ignored = 1 << (signal.SIGHUP - 1)

    def handled() -> bool:
        text = Path(f"/proc/{service.pid}/status").read_text()
        masks = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith(("SigIgn", "SigCgt"))]
        return any(mask & ignored for mask in masks)

    until(handled, "SIGHUP does not kill any more")
    service.signal(signal.SIGHUP)
    manager.until("READY")
    assert service.stop() == 0


def test_without_systemd_nothing_of_it_is_said(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    assert "systemd" not in daemon.log()


# --- the log in bad times --------------------------------------------------------------------------------------------


def test_a_storm_of_refused_peers_is_a_few_lines(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("limits.sessions=2")
    with RawPeer(daemon.socket) as peer:
        peer.hello()
        for _ in range(300):
            with RawPeer(daemon.socket) as refused:
                refused.turned_away("limit")
    lines = until(
        lambda: found if len(found := re.findall(".*refused pid.*\n", daemon.log())) >= 10 else [], "ten are logged"
    )
    assert len(lines) == 10
    assert f"refused pid {os.getpid()} of uid {os.getuid()}: uid {os.getuid()} uses 2 of 2 sessions" in lines[0]
    assert daemon.stop() == 0
    assert daemon.says("290 more in the last 60 s, of: refused pid")


def test_a_storm_of_disk_errors_is_a_few_lines(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    root, switch = tmp_path / "root", tmp_path / "faults"
    root.mkdir(mode=0o700)
    daemon = start_daemon(
        "disk.min_free_bytes=0", f'disk.roots=[{{path="{root}",capacity="64MiB"}}]', "disk.retry_s=0.05",
        "disk.segment_bytes=1MiB", faults=f"disk={switch}",
    )  # fmt: skip
    with ranks.Rank(daemon.socket) as rank:
        rank.store_keys(ranks.new_keys(np.random.default_rng(1), 64))
        until(lambda: daemon.status()["disk"]["records"] == 64, "all is on disk")
        (tmp_path / "new").write_text("write=EIO\nread=EIO\nopen=EIO\n")
        (tmp_path / "new").replace(switch)
        for number in range(20):
            rank.store_keys(ranks.new_keys(np.random.default_rng(2 + number), 64))
        until(lambda: daemon.status()["disk"]["roots"][0]["state"] != "ok", "the disk is off or read-only")
        time.sleep(2)  # forty attempts to bring it back
        assert daemon.says("disk")
        about_disk = [line for line in daemon.log().splitlines() if "disk" in line]
        assert 1 <= len(about_disk) < 40
    switch.unlink()
