"""Commands to which nobody gives a path: a daemon and its clients meet, whoever the user is, and nobody comes between.

The paths are those of the system, so each test has a mount namespace in which /run and /tmp are empty.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mountnamespace import OTHER, USER, MountNamespace, stop, why_not

pytestmark = pytest.mark.skipif(bool(why_not(("/run", "/tmp"))), reason=why_not(("/run", "/tmp")))

MEMORY = ("--memory", "16MiB")
OWN = f"/tmp/kvoffloadd-{USER}/kvoffloadd.sock"
SERVICE = "/run/kvoffloadd/kvoffloadd.sock"
FOR_ALL = ("--set", "server.socket_mode=0o666", "--set", f"server.allowed_uids=[{USER}]")


@pytest.fixture
def host() -> Iterator[MountNamespace]:
    with MountNamespace() as namespace:
        yield namespace


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "daemon.log"


def served(done: subprocess.CompletedProcess[str]) -> str:
    """The boot id in a status, which names the daemon that has answered."""
    assert (done.returncode, done.stderr) == (0, ""), done
    return str(json.loads(done.stdout)["boot_id"])


def facts(host: MountNamespace, path: str) -> list[str]:
    """Owner and mode."""
    return host.run("stat", "--format=%u %a", path).stdout.split()


def test_the_first_command_of_a_plain_user(host: MountNamespace, log: Path) -> None:
    daemon = host.serve(*MEMORY, log=log, uid=USER)
    assert f"serving at {OWN}," in log.read_text()
    assert facts(host, os.path.dirname(OWN)) == [str(USER), "700"]
    served(host.kvoffloadd("status", "--json", uid=USER))
    assert host.kvoffloadd("drain", uid=USER).returncode == 0
    again = host.kvoffloadd("serve", *MEMORY, uid=USER)
    assert again.returncode == 2
    assert f"another daemon uses {OWN}" in again.stderr
    examined = json.loads(host.kvoffloadd("doctor", *MEMORY, "--json", uid=USER).stdout)["checks"]
    assert [one["found"] for one in examined if one["subject"] == "socket"] == [
        f"{OWN}: a daemon answers there; a second one needs another socket"
    ]
    assert stop(daemon) == 0
    gone = host.kvoffloadd("status", uid=USER)
    assert (gone.returncode, gone.stdout) == (3, "")
    assert f"no daemon found: looked at {OWN} (no such socket), {SERVICE} (no such socket)" in gone.stderr
    assert "KVOFFLOADD_SOCKET" in gone.stderr


def test_the_directory_of_a_session(host: MountNamespace, log: Path) -> None:
    host.run("install", "-d", "-m", "700", "-o", str(USER), f"/run/user/{USER}")
    session = {"XDG_RUNTIME_DIR": f"/run/user/{USER}"}
    host.serve(*MEMORY, log=log, uid=USER, environment=session)
    own = f"/run/user/{USER}/kvoffloadd/kvoffloadd.sock"
    assert f"serving at {own}," in log.read_text()
    assert facts(host, os.path.dirname(own)) == [str(USER), "700"]
    served(host.kvoffloadd("status", "--json", uid=USER, environment=session))
    shown = host.kvoffloadd("config", "show", uid=USER, environment=session)
    assert f'socket = "{own}"' in shown.stdout
    # What `su` and `runuser` leave is another user's.
    shown = host.kvoffloadd("config", "show", uid=OTHER, environment=session)
    assert f'socket = "/tmp/kvoffloadd-{OTHER}/kvoffloadd.sock"' in shown.stdout


def test_root_and_the_user_of_the_service(host: MountNamespace, log: Path) -> None:
    """Who owns /run/kvoffloadd has it from root: a unit's user, or that of a container."""
    daemon = host.serve(*MEMORY, log=log)
    assert f"serving at {SERVICE}," in log.read_text()
    by_root = served(host.kvoffloadd("status", "--json"))
    kept_out = host.kvoffloadd("status", uid=USER)
    assert kept_out.returncode == 3
    assert f"{OWN} (no such socket), {SERVICE} (permission denied" in kept_out.stderr
    assert stop(daemon) == 0
    host.run("chown", str(USER), "/run/kvoffloadd", f"{SERVICE}.lock")
    host.serve(*MEMORY, log=log, uid=USER)
    assert log.read_text().count(f"serving at {SERVICE},") == 2
    found = served(host.kvoffloadd("status", "--json", uid=USER))
    assert found == served(host.kvoffloadd("status", "--json")) != by_root


def test_own_before_the_services(host: MountNamespace, log: Path) -> None:
    """A socket that a killed daemon has left is none that answers."""
    host.run("install", "-d", "-m", "755", "/run/kvoffloadd")
    host.serve(*MEMORY, *FOR_ALL, log=log)
    service = served(host.kvoffloadd("status", "--json"))
    assert served(host.kvoffloadd("status", "--json", uid=USER)) == service
    own = host.serve(*MEMORY, log=log, uid=USER)
    assert served(host.kvoffloadd("status", "--json", uid=USER)) != service
    own.kill()
    own.wait()
    assert facts(host, OWN)[0] == str(USER), "it is still there"
    assert served(host.kvoffloadd("status", "--json", uid=USER)) == service


def test_a_variable_and_what_wins_over_it(host: MountNamespace, log: Path, tmp_path: Path) -> None:
    named = "/tmp/place/d.sock"
    variable = {"KVOFFLOADD_SOCKET": named}
    host.serve(*MEMORY, log=log, uid=USER, environment=variable)
    assert f"serving at {named}," in log.read_text()
    served(host.kvoffloadd("status", "--json", uid=USER, environment=variable))
    assert host.kvoffloadd("status", uid=USER, environment={"KVOFFLOADD_SOCKET": ""}).returncode == 3

    def shown(*words: str, **variables: str) -> str:
        out = host.kvoffloadd("config", "show", *words, uid=USER, environment=variables).stdout
        (line,) = (line for line in out.splitlines() if line.startswith("socket = "))
        return line.removeprefix("socket = ").strip('"')

    file = "/tmp/kvoffloadd.toml"
    host.run("sh", "-c", f"echo '[server]\nsocket = \"/tmp/key.sock\"' > {file}")
    assert shown(KVOFFLOADD_SOCKET=named) == named
    assert shown(KVOFFLOADD_SOCKET="") == OWN
    assert shown("--config", file, KVOFFLOADD_SOCKET=named) == "/tmp/key.sock"
    assert shown("--config", file, "--socket", "/tmp/option.sock", KVOFFLOADD_SOCKET=named) == "/tmp/option.sock"
    checked = host.kvoffloadd("config", "check", file, uid=USER, environment=variable)
    assert (checked.returncode, checked.stdout) == (0, f"{file}: ok\nsocket: /tmp/key.sock\n")
    option = host.kvoffloadd("status", "--socket", "/tmp/option.sock", uid=USER, environment=variable)
    assert (option.returncode, "/tmp/option.sock: no such socket" in option.stderr) == (3, True)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("relative.sock", "must be an absolute path"),
        ("@abstract", "must be an absolute path"),
        ("/" + 120 * "x", "may have at most 107"),
    ],
)
def test_a_variable_that_is_wrong(host: MountNamespace, value: str, reason: str) -> None:
    variable = {"KVOFFLOADD_SOCKET": value}
    for command in (["serve"], ["status"], ["top", "--once"], ["config", "show"], ["flags", "vllm"]):
        done = host.kvoffloadd(*command, uid=USER, environment=variable)
        assert (done.returncode, done.stdout) == (2, ""), command
        assert f'KVOFFLOADD_SOCKET = "{value}": ' in done.stderr
        assert reason in done.stderr
    examined = host.kvoffloadd("doctor", "--json", uid=USER, environment=variable)
    assert examined.returncode == 1
    assert f'KVOFFLOADD_SOCKET = \\"{value}\\": ' in examined.stdout


def test_nobody_else_poses_as_the_daemon(host: MountNamespace, log: Path) -> None:
    """Anybody can make a directory of any name in /tmp. A path that is named is checked, too."""
    theirs = "/tmp/theirs/d.sock"
    for path in (OWN, theirs):
        host.serve(*MEMORY, *FOR_ALL, "--socket", path, log=log, uid=OTHER)
        host.run("chmod", "755", os.path.dirname(path))
    told = {"KVOFFLOADD_DAEMON_UID": str(OTHER)}
    for words in ((), ("--socket", OWN)):
        for variables in ({}, told):
            done = host.kvoffloadd("status", *words, uid=USER, environment=variables)
            assert (done.returncode, done.stdout) == (3, "")
            assert f"{os.path.dirname(OWN)} belongs to uid {OTHER}" in done.stderr
    done = host.kvoffloadd("status", "--socket", theirs, uid=USER)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"a process of uid {OTHER} listens there" in done.stderr
    served(host.kvoffloadd("status", "--json", "--socket", theirs, uid=USER, environment=told))
    wrong = host.kvoffloadd("status", uid=USER, environment={"KVOFFLOADD_DAEMON_UID": "engine"})
    assert (wrong.returncode, 'KVOFFLOADD_DAEMON_UID = "engine": must be' in wrong.stderr) == (2, True)
    refused = host.kvoffloadd("serve", *MEMORY, uid=USER)
    assert refused.returncode == 2
    assert f"{os.path.dirname(OWN)} belongs to uid {OTHER}" in refused.stderr


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (f"ln -s /tmp/mine {os.path.dirname(OWN)}", "is a symbolic link"),
        (f"install -d -m 755 {os.path.dirname(OWN)}", "has mode 755; chmod 700 it"),
        (f"touch {os.path.dirname(OWN)}", "is not a directory"),
    ],
)
def test_a_directory_that_is_not_the_users_alone(host: MountNamespace, made: str, reason: str) -> None:
    assert host.run("sh", "-c", f"mkdir -m 700 /tmp/mine && {made}", uid=USER).returncode == 0
    refused = host.kvoffloadd("serve", *MEMORY, uid=USER)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert reason in refused.stderr
    examined = json.loads(host.kvoffloadd("doctor", *MEMORY, "--json", uid=USER).stdout)
    (found,) = (one for one in examined["checks"] if one["subject"] == "socket")
    assert found["verdict"] == "problem"
    assert found["found"] + "; " + found["remedy"] in refused.stderr
