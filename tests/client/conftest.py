"""A fake daemon, clients of each flavour, and a watch over descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KvCache, Ref, SharedTensor
from kvoffloadd.model import U8Array
from tests.client.fake_daemon import FakeDaemon
from tests.client.flavours import MAKERS, NAMESPACE, OnLoop

ROOT = Path(__file__).parents[2]


def open_fds() -> list[str]:
    """This process's sockets and pidfds. (uvloop keeps a pipe for good; memfds go when pytest drops its fixtures.)"""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(target for target in targets if target.startswith("socket:") or "pidfd" in target)


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    """Every test here closes all that it opened."""
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def path(socket_dir: Path) -> str:
    return str(socket_dir / "s")


@pytest.fixture
def fake(path: str) -> Iterator[FakeDaemon]:
    with FakeDaemon(path) as daemon:
        yield daemon


@pytest.fixture(params=MAKERS)
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """`make(path, ...)` -> a client of this flavour, closed at the end whatever hangs on it."""
    made: list[Any] = []

    def make(path: str, **options: Any) -> Any:
        client = MAKERS[request.param](path, **{"namespace": NAMESPACE, "deadline_s": 5.0, **options})
        made.append(client)
        return client

    yield make
    for client in made:
        with suppress(Exception):
            client.close(0.0, force=True)
        if isinstance(client, OnLoop):
            client.end()


@pytest.fixture
def client(make_client: Callable[..., Any], fake: FakeDaemon, path: str) -> Any:
    """A connected client of each flavour."""
    client = make_client(path)
    client.connect()
    return client


@pytest.fixture
def keys() -> U8Array:
    """u8 (4, 32)."""
    return np.random.default_rng(7).integers(0, 256, (4, 32), dtype=np.uint8)


@pytest.fixture
def caches() -> KvCache:
    """One tensor of 8 blocks, one group."""
    tensor = SharedTensor.allocate(8, 4096)
    return KvCache([tensor], [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, 4096)])])


@pytest.fixture
def spawn(path: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`spawn(*flags)` -> a fake daemon that listens in a separate process."""
    children: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        with suppress(FileNotFoundError):
            os.unlink(path)
        command = [sys.executable, "-m", "tests.client.fake_daemon", "--socket", path, *flags]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
