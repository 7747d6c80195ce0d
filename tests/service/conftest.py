"""Fixtures of the tests with a real systemd: `make test-service`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.container import BINARY, REPOSITORY, USER, Container, why_not

SERVICE = f"kvoffloadd@{USER}.service"
SOCKET_UNIT = f"kvoffloadd@{USER}.socket"
CONFIG = Path("/etc/kvoffloadd/kvoffloadd.toml")
TEXT = """
[memory]
capacity_bytes = "64MiB"
slab_bytes = "1MiB"
"""


@pytest.fixture(scope="session")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """Booted, with what `make install` installs."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    files = tmp_path_factory.mktemp("installed")
    subprocess.run(
        ["make", "install", f"DESTDIR={files}", f"BINARY={BINARY}"], cwd=REPOSITORY, check=True, capture_output=True
    )
    made = Container(files)
    yield made
    made.close()


@pytest.fixture
def service(container: Container) -> Iterator[Container]:
    """The daemon's service, started as an operator would; gone at the end."""
    container.write(CONFIG, TEXT)
    container.run("systemctl", "start", SERVICE)
    yield container
    container.run("systemctl", "stop", SOCKET_UNIT, SERVICE)
    container.run("rm", "-rf", f"/etc/systemd/system/{SERVICE}.d")
    container.run("systemctl", "daemon-reload")
    container.try_run("systemctl", "reset-failed")
    container.run("rm", "-rf", "/run/kvoffloadd")
    container.run("systemd-tmpfiles", "--create")
