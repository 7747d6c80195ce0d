"""A forked child and its parent's clients."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import AsyncClient, Client, KvCache, Outcome
from kvoffloadd.errors import UsageError
from kvoffloadd.model import U8Array
from kvoffloadd.testing.wait import until
from tests.client.everycall import CALLS, Stage, public_calls
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_lifetime import fake_is_idle


def test_the_table_has_every_call() -> None:
    for cls in (Client, AsyncClient):
        assert set(CALLS) == public_calls(cls) - {"close"}


def in_child(work: Callable[[], None]) -> str:
    """What goes wrong when a forked child does this, as text."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(read)
            work()
        except BaseException:  # noqa: BLE001  the parent gets it as text
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    return text


class Awaited:
    """An AsyncClient whose calls are run without a loop: a child has no loop."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name == "open_jobs":
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                found(*args, **kwargs).send(None)
            except StopIteration as end:
                return end.value
            raise AssertionError(f"{name} waits for something")

        return call


@pytest.fixture
def stage(client: Any, fake: FakeDaemon, caches: KvCache, keys: U8Array) -> Stage:
    """A client of each flavour, with a store under way."""
    fake.manual_completion = True
    registration = client.register(caches)
    return Stage(client, caches, registration, keys, client.store(registration, {0: (keys, np.arange(4))}))


def childs(client: Any) -> Any:
    return client if isinstance(client, Client) else Awaited(client._client)


def test_a_child_is_told_to_make_its_own(stage: Stage, fake: FakeDaemon) -> None:
    pid = os.getpid()
    before = len(fake.seen)

    def work() -> None:
        on = Stage(childs(stage.client), stage.caches, stage.registration, stage.keys, stage.job)
        for name, call in CALLS.items():
            with pytest.raises(UsageError, match=f"made in process {pid}.*make a client of your own"):
                raise AssertionError(name, call(on))

    assert in_child(work) == ""
    fake_is_idle(fake)
    assert len(fake.seen) == before
    fake.soon(lambda: fake.complete(fake.peers[0], stage.job.id))
    assert stage.client.wait(stage.job, 60.0).outcome is Outcome.DONE
    assert fake.tags().count("hello") == 1


def close_twice(client: Any) -> None:
    childs(client).close()
    childs(client).close()


def leave(client: Any) -> None:
    childs(client).__exit__(None, None, None) if isinstance(client, Client) else childs(client).__aexit__(*[None] * 3)


ENDS: dict[str, Callable[[Any], None]] = {
    "close": lambda client: childs(client).close(),
    "close twice": close_twice,
    "close by force": lambda client: childs(client).close(0.0, force=True),
    "the end of `with`": leave,
    "no reference": lambda client: vars(client).clear(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_childs_end_is_not_its_parents(stage: Stage, fake: FakeDaemon, end: str) -> None:
    fds = [sock.fileno() for sock in stage.client._core._transport._sockets.values()]
    fds.append(stage.client._core._transport.current.pidfd)
    before = len(fake.seen)

    def work() -> None:
        for fd in fds:  # already: the child may never call anything
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        ENDS[end](stage.client)
        gc.collect()

    assert in_child(work) == ""
    fake_is_idle(fake)
    assert len(fake.seen) == before
    stage.client.ping()
    fake.soon(lambda: fake.complete(fake.peers[0], stage.job.id))
    assert stage.client.wait(stage.job, 60.0).outcome is Outcome.DONE
    assert fake.tags().count("hello") == 1
    assert "bye" not in fake.tags()


def test_a_client_that_never_connected_is_not_inherited_either(make_client: Callable[..., Any], path: str) -> None:
    client = make_client(path)

    def work() -> None:
        with pytest.raises(UsageError, match="make a client of your own"):
            childs(client).connect()
        childs(client).close()

    assert in_child(work) == ""


def test_a_childs_own_client_works(client: Any, fake: FakeDaemon, path: str) -> None:
    def work() -> None:
        with Client(path, namespace=None, role="observer") as own:
            own.ping()

    assert in_child(work) == ""
    assert fake.tags().count("hello") == 2
    client.ping()


PARENT = """
import os, sys
from kvoffloadd.client import Client, NamespaceSpec
client = Client(sys.argv[1], namespace=NamespaceSpec(model="m"))
client.connect()
if os.fork():
    print("ready", flush=True)
sys.stdin.read()
"""


def pids(observer: Client) -> set[int]:
    """Whose sessions the daemon has."""
    return {session["pid"] for session in observer.status()["sessions"]}


def test_the_daemon_learns_of_the_parents_death_though_a_child_lives(start_daemon: Callable[..., Any]) -> None:
    """Else what a dead engine holds would be held until the last process that it has forked ends."""
    daemon = start_daemon()
    command = [sys.executable, "-c", PARENT, str(daemon.socket)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        with Client(daemon.socket, namespace=None, role="observer") as observer:
            assert parent.pid in pids(observer)
            parent.kill()
            until(lambda: parent.pid not in pids(observer), "the session of the dead ends")
