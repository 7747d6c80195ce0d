"""Tests what the daemon sends to systemd and takes from it, without a systemd."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.linux.systemd import Systemd
from kvoffloadd.testing.wait import HANG_S
from tests.notify import Manager, manager_in

ME = str(os.getpid())


Tell = Callable[..., Systemd]


@pytest.fixture
def told() -> Iterator[Tell]:
    """`told(manager, NAME="value")`: what such an environment makes; closed at the end."""
    made = []

    def tell(manager: Manager, **variables: str) -> Systemd:
        made.append(Systemd.from_environment({"NOTIFY_SOCKET": manager.address, **variables}))
        return made[-1]

    yield tell
    for systemd in made:
        systemd.close()


@pytest.fixture
def manager(socket_dir: Path) -> Iterator[Manager]:
    with manager_in(socket_dir) as manager:
        yield manager


def said(manager: Manager) -> dict[str, str]:
    notice = manager.listen(1.0)
    assert notice is not None
    return notice.fields


def test_without_systemd_every_verb_does_nothing() -> None:
    systemd = Systemd.from_environment({})
    assert systemd.watchdog_s is None
    assert not systemd.listens
    assert systemd.take("pool") is None
    assert systemd.listening() is None
    systemd.close_rest()
    verbs = (systemd.reloading, systemd.stopping, systemd.ready, systemd.beat)
    assert not any(verb() for verb in verbs)
    assert not systemd.store("pool", 0)
    assert not systemd.forget("pool")
    assert not systemd.extend(1.0)


def test_states_are_assignments(manager: Manager, told: Tell) -> None:
    systemd = told(manager)
    assert systemd.ready("serving")
    assert said(manager) == {"READY": "1", "STATUS": "serving"}
    systemd.ready()
    assert said(manager) == {"READY": "1"}
    systemd.beat()
    assert said(manager) == {"WATCHDOG": "1"}
    systemd.stopping("draining")
    assert said(manager) == {"STOPPING": "1", "STATUS": "draining"}
    systemd.extend(1.5)
    assert said(manager) == {"EXTEND_TIMEOUT_USEC": "1500000"}
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    systemd.reloading()
    fields = said(manager)
    assert fields["RELOADING"] == "1"
    assert before_us <= int(fields["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def test_a_status_is_one_line_whatever_is_in_it(manager: Manager, told: Tell) -> None:
    told(manager).status("all is\nwell\nMAINPID=1")
    assert said(manager) == {"STATUS": "all is well MAINPID=1"}


def test_an_abstract_address(told: Tell) -> None:
    with Manager(f"@kvoffloadd-test-{os.getpid()}") as manager:
        told(manager).ready()
        assert said(manager) == {"READY": "1"}


@pytest.mark.parametrize("address", ["/no/such/socket", "vsock:2:1234"])
def test_an_address_that_does_not_work_is_said_once(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvoffloadd"):
        systemd = Systemd.from_environment({"NOTIFY_SOCKET": address})
        assert not systemd.ready()
        assert not systemd.beat()
    assert len(caplog.records) == 1
    assert address in caplog.text


def test_a_manager_that_does_not_read_stops_nobody(manager: Manager, told: Tell) -> None:
    systemd = told(manager)
    started = time.monotonic()
    answers = [systemd.beat() for _ in range(2000)]
    assert time.monotonic() - started < HANG_S
    assert answers[0]
    assert not answers[-1]
    while manager.listen(0.01) is not None:
        pass
    assert systemd.beat()


def test_a_manager_that_is_gone_stops_nobody(socket_dir: Path, caplog: pytest.LogCaptureFixture, told: Tell) -> None:
    with manager_in(socket_dir) as manager:
        systemd = told(manager)
    with caplog.at_level(logging.WARNING, "kvoffloadd"):
        assert not systemd.beat()
    assert "systemd can't be notified" in caplog.text


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ME}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog(variables: dict[str, str], seconds: float | None) -> None:
    assert Systemd.from_environment(variables).watchdog_s == seconds


def test_the_environment_is_unset() -> None:
    names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "FDSTORE")
    environment = {**dict.fromkeys(names, ""), "HOME": "/"}
    Systemd.from_environment(environment)
    assert environment == {"HOME": "/"}


def test_descriptors_of_another_process_are_not_ours() -> None:
    systemd = Systemd.from_environment({"LISTEN_PID": "1", "LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"})
    assert systemd.take("a") is None


def test_the_store_gets_the_descriptor(manager: Manager, told: Tell) -> None:
    fd = os.memfd_create("pool")
    os.write(fd, b"kept")
    systemd = told(manager)
    assert systemd.store("pool", fd)
    os.close(fd)
    notice = manager.listen(1.0)
    assert notice is not None
    assert notice.fields == {"FDSTORE": "1", "FDNAME": "pool", "FDPOLL": "0"}
    (copy,) = notice.fds
    assert os.pread(copy, 10, 0) == b"kept"
    systemd.forget("pool")
    assert said(manager) == {"FDSTOREREMOVE": "1", "FDNAME": "pool"}


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "ü", "x" * 256])
def test_names_that_systemd_would_not_take(name: str, manager: Manager, told: Tell) -> None:
    with pytest.raises(UsageError):
        told(manager).store(name, 0)


def test_inherited_descriptors(manager: Manager, tmp_path: Path, socket_dir: Path) -> None:
    """A separate process inherits them as from systemd: from 3 on, in the order of their names."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(socket_dir / "s"))
    listener.listen()
    memory = [os.memfd_create(name) for name in ("one", "two", "rest", "rest")]
    code = """
import fcntl, os, socket, sys
from kvoffloadd.linux.systemd import Systemd
os.environ["LISTEN_PID"] = str(os.getpid())
systemd = Systemd.from_environment()
assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in range(3, 8))
assert not {name for name in os.environ if name.startswith("LISTEN_")}
name = lambda fd: os.readlink(f"/proc/self/fd/{fd}").split(":")[1].split()[0]
assert systemd.take("none") is None
assert [name(systemd.take("pool")), name(systemd.take("pool")), systemd.take("pool")] == ["one", "two", None]
sock = systemd.listening()
assert sock.getsockname() == sys.argv[1] and not sock.getblocking() and systemd.gave_listener
assert systemd.listening() is None
systemd.close_rest()
print([fd for fd in range(3, 8) if not os.path.exists(f"/proc/self/fd/{fd}")])
links = [os.readlink(link) for fd in os.listdir("/proc/self/fd") if os.path.lexists(link := f"/proc/self/fd/{fd}")]
assert sum("memfd:" in link for link in links) == 2, links
"""
    order = [memory[0], listener.fileno(), memory[1], memory[2], memory[3]]
    # From high numbers down to 3 and on, so that none is overwritten before it is copied.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in order]
    script = tmp_path / "inherit.py"
    script.write_text(code)
    moves = " ".join(f"{3 + index}<&{fd} {fd}<&-" for index, fd in enumerate(high))
    done = subprocess.run(
        ["bash", "-c", f'exec {sys.executable} {script} {socket_dir / "s"} {moves}'],
        env={
            **os.environ, "NOTIFY_SOCKET": manager.address, "PYTHONPATH": str(Path(__file__).parent.parent),
            "LISTEN_FDS": "5", "LISTEN_FDNAMES": "pool:kvo.socket:pool:rest:rest",
        },
        pass_fds=high, capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    for fd in [*high, *memory]:
        os.close(fd)
    listener.close()
    assert (done.returncode, done.stdout.strip()) == (0, "[6, 7]"), done.stderr
    assert said(manager) == {"FDSTOREREMOVE": "1", "FDNAME": "rest"}
    assert manager.listen(0.05) is None
