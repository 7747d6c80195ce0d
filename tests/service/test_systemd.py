"""The service in a booted systemd: start, stop, kill, freeze, reload, and what clients notice of it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_service import BLOCKED
from tests.service.conftest import CONFIG, SERVICE, SOCKET_UNIT, TEXT
from tests.service.container import BINARY, PYTHON, SITE, SOURCE, USER, Container

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

SOCKET = Path("/run/kvoffloadd/kvoffloadd.sock")
WATCHDOG_S = 4
PEER = """
import sys, time
from kvoffloadd.client import Client
from kvoffloadd.errors import KvOffloadError
failed = served = 0
longest = 0.0
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    began = time.monotonic()
    try:
        with Client("/run/kvoffloadd/kvoffloadd.sock", namespace=None, role="observer", connect_deadline_s=0) as client:
            client.ping()
        served += 1
    except KvOffloadError as error:
        failed += 1
    time.sleep(0.0025)  # less often than the daemon's limit for one user
    longest = max(longest, time.monotonic() - began)
print(served, failed, round(longest, 2))
"""
"""Connects again and again, never twice for one ping, and counts what it could not do."""


def python(container: Container, *words: str, user: str = USER) -> list[str]:
    """This interpreter, inside."""
    paths = [f"LD_LIBRARY_PATH={PYTHON}/lib", f"PYTHONPATH={SOURCE}:{SITE}"]
    become = container.command("env", *paths, f"{PYTHON}/bin/python3", "-B", *words, user=user)
    return become


def status(container: Container) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(container.run(str(BINARY), "status", "--json", user=USER))
    return answer


def main_pid(container: Container) -> int:
    return int(container.show(SERVICE, "MainPID")["MainPID"])


def override(container: Container, text: str) -> None:
    """A drop-in of the unit; takes effect with the next start."""
    container.write(f"/etc/systemd/system/{SERVICE}.d/test.conf", f"[Service]\n{text}\n")
    container.run("systemctl", "daemon-reload")


def restarted(container: Container, pid: int, restarts: int) -> float:
    """Wait until another process is ready. Returns the seconds that it took."""
    began = time.monotonic()
    container.until(SERVICE, ActiveState="active", SubState="running", NRestarts=restarts)
    assert main_pid(container) not in (0, pid)
    return time.monotonic() - began


# --- the life of a service -------------------------------------------------------------------------------------------


def test_it_starts_as_its_user_and_answers(service: Container) -> None:
    shown = service.show(SERVICE, "ActiveState", "SubState", "StatusText", "Type", "WatchdogUSec", "NRestarts")
    assert shown == {
        "ActiveState": "active", "SubState": "running", "StatusText": f"serving at {SOCKET}", "Type": "notify",
        "WatchdogUSec": "30s", "NRestarts": "0",
    }  # fmt: skip
    answer = status(service)
    assert answer["pid"] == main_pid(service)
    assert answer["memory"]["capacity_bytes"] == 64 << 20
    assert service.run("stat", "--format=%U", f"/proc/{answer['pid']}").strip() == USER
    limits = service.run("cat", f"/proc/{answer['pid']}/limits")
    assert re.search(r"Max core file size\s+0\s+0", limits)
    # Asked for; whether it is given is the host's affair, which may lack CAP_SYS_RESOURCE itself.
    assert service.show(SERVICE, "LimitMEMLOCK")["LimitMEMLOCK"] == "infinity"


def test_who_may_reach_it(service: Container) -> None:
    modes = service.run("stat", "--format=%n %a %U %G", "/run/kvoffloadd", str(SOCKET), f"{SOCKET}.lock")
    assert modes.splitlines() == [
        f"/run/kvoffloadd 750 {USER} {USER}",
        f"{SOCKET} 660 {USER} {USER}",
        f"{SOCKET}.lock 600 {USER} {USER}",
    ]
    stranger = service.try_run(str(BINARY), "status", user="nobody")
    assert stranger.returncode == 3
    assert "permission denied" in stranger.stderr


def test_the_journal_has_priorities_and_names(service: Container) -> None:
    lines = [json.loads(line) for line in service.journal(SERVICE, "--output=json").splitlines()]
    ours = [line for line in lines if "serving at" in str(line.get("MESSAGE")) and line.get("_PID")]
    assert ours
    assert ours[-1]["PRIORITY"] == "6"
    assert ours[-1]["SYSLOG_IDENTIFIER"] == "kvoffloadd"


def test_it_stops_in_order(service: Container) -> None:
    service.run("systemctl", "stop", SERVICE)
    assert service.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert service.try_run("test", "-e", str(SOCKET)).returncode == 1
    assert "closed" in service.journal(SERVICE)


STORE = """
import sys
from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
tensor = SharedTensor.allocate(num_blocks=8, page_bytes=4096)
group = Group(group=0, kind=GroupKind.FULL, tokens_per_key=16, refs=[Ref(tensor=0, offset=0, length=4096)])
with Client("/run/kvoffloadd/kvoffloadd.sock", namespace=NamespaceSpec(model="m"), role="worker") as client:
    cache = client.register(KvCache([tensor], [group]))
    job = client.store(cache, {0: (bytes(32), [1])})
    print("asked", flush=True)
    print(client.wait(job, deadline_s=60).outcome.name)
"""


def test_a_drain_gets_the_time_that_it_needs(service: Container) -> None:
    """The unit would allow two seconds; the copy that is under way takes six, and the config allows ten."""
    start = f"ExecStart=\nExecStart={BINARY} serve --config {CONFIG} --faults delay_s=6"
    override(service, f"TimeoutStopSec=2\n{start}")
    service.run("systemctl", "restart", SERVICE)
    with subprocess.Popen(python(service, "-c", STORE), stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "asked\n"
        began = time.monotonic()
        service.run("systemctl", "stop", SERVICE)
        seconds = time.monotonic() - began
        assert worker.communicate(timeout=60)[0] == "DONE\n"
    assert service.show(SERVICE, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert seconds > 2
    print(f"\nTimeoutStopSec=2, a drain of {seconds:.1f} s: Result=success")


def test_a_kill_is_followed_by_a_start(service: Container) -> None:
    pid = main_pid(service)
    service.run("kill", "-KILL", str(pid))
    seconds = restarted(service, pid, 1)
    print(f"\nkill -9: ready again after {seconds:.2f} s, of which RestartSec are 1")
    assert status(service)["pid"] != pid
    # What it held before the kill is another test's subject.


def test_a_wrong_config_is_not_tried_again(service: Container) -> None:
    service.run("systemctl", "stop", SERVICE)
    service.write(CONFIG, "[memory]\ncapacity_bytes = 5\n")
    assert service.try_run("systemctl", "start", SERVICE).returncode != 0
    service.until(SERVICE, ActiveState="failed", ExecMainStatus=2, NRestarts=0)
    assert "memory.capacity_bytes = 5: must be" in service.journal(SERVICE)


# --- frozen ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(service: Container) -> Container:
    """A daemon that systemd watches closely, and whose loop SIGUSR1 blocks."""
    service.write("/opt/kvoffloadd/blocked.py", BLOCKED)
    environment = f"Environment=LD_LIBRARY_PATH={PYTHON}/lib PYTHONPATH={SOURCE}:{SITE}"
    start = f"ExecStart=\nExecStart={PYTHON}/bin/python3 -B /opt/kvoffloadd/blocked.py serve --config {CONFIG}"
    override(service, f"WatchdogSec={WATCHDOG_S}\n{environment}\n{start}")
    service.run("systemctl", "restart", SERVICE)
    return service


@pytest.mark.parametrize("signal", ["STOP", "USR1"])
def test_a_frozen_loop_is_started_again(signal: str, watched: Container) -> None:
    pid = main_pid(watched)
    time.sleep(2 * WATCHDOG_S)  # time is the subject: it is left alone while it works
    assert main_pid(watched) == pid
    watched.run("kill", f"-{signal}", str(pid))
    began = time.monotonic()
    watched.until(SERVICE, NRestarts=1)
    restarted(watched, pid, 1)
    print(f"\nSIG{signal}: ready again after {time.monotonic() - began:.2f} s; WatchdogSec {WATCHDOG_S}, RestartSec 1")
    log = watched.journal(SERVICE)
    assert "Watchdog timeout" in log
    assert "Fatal Python error: Aborted" in log
    assert status(watched)["pid"] != pid


# --- reload ----------------------------------------------------------------------------------------------------------


def test_a_reload(service: Container) -> None:
    pid = main_pid(service)
    service.write(CONFIG, TEXT + '[log]\nlevel = "debug"\n')
    service.run("systemctl", "reload", SERVICE)
    _until(lambda: "log.level: info -> debug" in service.journal(SERVICE), "it is said")
    service.write(CONFIG, TEXT + '[log]\nlevel = "loud"\n')
    assert service.try_run("systemctl", "reload", SERVICE).returncode != 0
    assert 'log.level = "loud": must be one of' in service.journal(SERVICE)
    service.until(SERVICE, ActiveState="active", SubState="running")
    assert main_pid(service) == pid


def _until(fact: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not fact():
        assert time.monotonic() < end, what
        time.sleep(0.05)


# --- restarts that clients notice ------------------------------------------------------------------------------------


def _restart_while_pinged(container: Container) -> tuple[int, int, float]:
    """Pings served, pings failed, and the longest one, over a restart and a kill."""
    with subprocess.Popen(python(container, "-c", PEER, "9"), stdout=subprocess.PIPE, text=True) as peer:
        time.sleep(2)
        container.run("systemctl", "restart", SERVICE)
        container.run("kill", "-KILL", str(main_pid(container)))
        output, _ = peer.communicate(timeout=60)
    served, failed, longest = output.split()
    return int(served), int(failed), float(longest)


def test_without_a_socket_unit_connections_are_refused_during_a_restart(service: Container) -> None:
    served, failed, longest = _restart_while_pinged(service)
    print(f"\nwithout a socket unit: {served} pings, {failed} refused, the longest took {longest} s")
    assert served > 0
    assert failed > 0


def test_with_a_socket_unit_clients_queue(service: Container) -> None:
    service.run("systemctl", "stop", SERVICE)
    service.run("systemctl", "start", SOCKET_UNIT)
    modes = service.run("stat", "--format=%a %U %G", str(SOCKET)).strip()
    assert modes == f"660 {USER} {USER}"
    assert status(service)["pid"] == main_pid(service)  # which started it
    served, failed, longest = _restart_while_pinged(service)
    print(f"\nwith a socket unit: {served} pings, {failed} failed, the longest took {longest} s")
    assert served > 0
    # Those whose daemon ended under them fail: one for the restart, one for the kill. None is refused.
    assert failed <= 2
    assert service.run("stat", "--format=%a %U", "/run/kvoffloadd").strip() == f"750 {USER}"


def test_restarts_under_load(service: Container, tmp_path: Path) -> None:
    """Workers store and load and check every byte, while the service is restarted and killed."""
    words = (f"{SOURCE}/scripts", "stress", "--socket", str(SOCKET), "--memory", "64MiB", "--seconds", "20",
             "--workers", "2", "--disk-share", "0", "--json")  # fmt: skip
    with (
        (tmp_path / "out").open("w") as out,
        subprocess.Popen(python(service, *words), stdout=out, stderr=subprocess.STDOUT) as stress,
    ):
        time.sleep(5)
        for _ in range(2):
            service.run("systemctl", "restart", SERVICE)
            time.sleep(3)
        pid = main_pid(service)
        service.run("kill", "-KILL", str(pid))
        restarted(service, pid, 1)
        stress.wait(120)
    output = (tmp_path / "out").read_text()
    found = json.loads(output[output.index("{") :])
    kept = ("verified_loads", "wrong_bytes", "stray_bytes", "lost", "calls_lost", "reconnects", "reregistrations")
    print(f"\nunder load, 2 restarts and a kill: { {name: found[name] for name in kept} }")
    assert found["verified_loads"] > 0
    assert (found["wrong_bytes"], found["stray_bytes"], found["verify_findings"]) == (0, 0, 0)
    assert (found["findings"], found["errors"]) == ([], [])
    # It does not know that the daemon goes away on purpose; only that may have broken a promise.
    goes = "ConnectionLost|the lease ended with the daemon|draining"
    assert [one for one in found["said"] if not re.search(goes, one)] == []
    assert "0 findings" in service.run(str(BINARY), "verify", "--payloads", user=USER)


# --- hardening -------------------------------------------------------------------------------------------------------


def test_units_are_valid_and_closed(service: Container) -> None:
    for unit in (SERVICE, SOCKET_UNIT):
        done = service.try_run("systemd-analyze", "verify", unit)
        assert (done.returncode, done.stderr) == (0, "")
    output = service.run("systemd-analyze", "security", "--no-pager", SERVICE)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+) (\w+)", output)
    assert score is not None, output
    print(f"\nsystemd-analyze security: {score[1]} {score[2]}")
    assert float(score[1]) < 5.0
