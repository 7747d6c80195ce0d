"""The units of docs/OPERATIONS.md for Mooncake's master and store, and the daemon's with them, as they are written.

Wants the Python of `make test-remote`, which has Mooncake.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.testing.wait import until
from scripts.harness.stores import why_no_mooncake
from tests.service.conftest import CONFIG, SERVICE, TEXT
from tests.service.container import BINARY, SITE, Container

pytestmark = pytest.mark.service

OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
SYSTEM = Path("/etc/systemd/system")
MASTER, STORE = "mooncake-master.service", "mooncake-store.service"
OURS = {
    "/opt/mooncake/lib/python3.11/site-packages": str(SITE),
    "--global_segment_size=64GB": "--global_segment_size=64MB",
    "systemctl edit kvoffloadd@ENGINE": f"{SYSTEM}/{SERVICE}.d/remote.conf",
    "kvoffloadd.toml": str(CONFIG),
}
"""What is different here."""
REMOTE_S = 90.0


def documented() -> dict[Path, str]:
    """Files of the section about remote stores: a comment names each, and what follows is in it."""
    section = OPERATIONS.read_text(encoding="utf-8").split("## Remote store\n")[1].split("\n## ")[0]
    files: dict[Path, str] = {}
    path = None
    for line in section.splitlines():
        if not line.startswith("    "):
            path = None if line.strip() else path
            continue
        text = line.removeprefix("    ")
        for there, here in OURS.items():
            text = text.replace(there, here)
        if found := re.fullmatch(r"# (/\S+)(?:,.*)?", text):
            path = Path(found[1])
            files[path] = ""
        elif path is not None:
            files[path] += text + "\n"
    return files


@pytest.fixture(scope="module")
def host(container: Container) -> Container:
    """Makes a host with the addresses of the documents."""
    if reason := why_no_mooncake():
        pytest.skip(reason)
    container.run("useradd", "--system", "mooncake")
    for address in ("10.0.0.1/32", "10.0.0.7/32"):
        container.add_address(address)
    return container


@pytest.fixture
def site(host: Container) -> Iterator[Container]:
    """Master, store and daemon run."""
    container, files = host, documented()
    assert {SYSTEM / MASTER, SYSTEM / STORE, CONFIG, SYSTEM / f"{SERVICE}.d/remote.conf"} <= set(files)
    for path, text in files.items():
        container.write(path, text + (TEXT if path == CONFIG else ""))
    container.run("systemctl", "daemon-reload")
    container.run("systemctl", "start", MASTER, STORE, SERVICE)
    yield container
    container.run("systemctl", "stop", SERVICE, STORE, MASTER)
    container.run("rm", "-rf", *map(str, files))
    container.run("systemctl", "daemon-reload")


def remote(container: Container) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(container.run(str(BINARY), "status", "--json"))["remote"]
    return found


def shares(container: Container) -> bool:
    return bool(remote(container)["state"] == "ok")


def test_the_units_of_the_documents(site: Container) -> None:
    for unit in (MASTER, STORE, SERVICE):
        assert site.try_run("systemd-analyze", "verify", unit).stderr == ""
        site.until(unit, ActiveState="active", SubState="running")
    until(lambda: shares(site), "the daemon has its store", REMOTE_S, every_s=0.5)
    for unit in (STORE, MASTER):
        site.run("systemctl", "kill", "--signal=KILL", unit)
        site.until(unit, ActiveState="active", SubState="running", NRestarts=1)
    until(lambda: shares(site), "the daemon has its store again", REMOTE_S, every_s=0.5)
    assert site.show(SERVICE, "NRestarts") == {"NRestarts": "0"}


def test_an_agent_that_is_killed_is_followed_by_another_one(site: Container) -> None:
    """The daemon, in the same cgroup, goes on: also if it was the kernel, for want of memory (`OOMPolicy`)."""
    until(lambda: shares(site), "the daemon has its store", REMOTE_S, every_s=0.5)
    pid, agent = site.show(SERVICE, "MainPID")["MainPID"], remote(site)["agent"]
    site.run("kill", "-KILL", str(agent["pid"]))
    until(lambda: shares(site) and remote(site)["agent"]["pid"] != agent["pid"], "another agent", REMOTE_S, every_s=0.5)
    assert site.show(SERVICE, "MainPID", "NRestarts") == {"MainPID": pid, "NRestarts": "0"}
    assert site.show(SERVICE, "OOMPolicy") == {"OOMPolicy": "continue"}
