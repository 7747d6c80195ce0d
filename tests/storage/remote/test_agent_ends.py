"""Agents that die, hang, stop or lie: the daemon lives, and has its memory back when the agent is dead, not before."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.model import HUGE_PAGE_BYTES, PAGE_BYTES, slot_pages
from kvoffloadd.storage.arenafile import _OWNER_AT as OWNER_AT
from kvoffloadd.storage.arenafile import file_bytes, open_pool
from kvoffloadd.storage.arenaowner import OWNER_BYTES, process
from kvoffloadd.storage.remote.agentprocess import agent_environment, spawn_agent
from kvoffloadd.storage.remote.store import RemoteState
from kvoffloadd.storage.remote.transfers import RemoteStatus
from tests.kernelsettings import reserved_pages
from tests.storage.remote.conftest import Open, children
from tests.storage.remote.host import FOREVER_S, PARTS, FaultyEngine, StoreHost, names_of, start, until
from tests.storage.remote.orphan import CAPACITY_BYTES

OK, FAILED, NOT_ASKED = RemoteStatus.OK, RemoteStatus.FAILED, RemoteStatus.NOT_ASKED
ROOT = Path(__file__).parent.parent.parent.parent


def is_dead(pid: int) -> bool:
    """And taken off the kernel's table."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_nothing_of_it_is_left_when_the_store_is_closed(open_host: Open) -> None:
    others = set(children())
    host = await open_host()
    pid = host.pid
    assert set(children()) - others == {pid}
    await host.close()
    assert is_dead(pid)
    assert host.store.state is RemoteState.CLOSED


@pytest.mark.parametrize("fault", ["hang", "crash", "stop", "raise"])
async def test_closing_does_not_wait_for_what_does_not_end(
    open_host: Open, engine: FaultyEngine, seed: int, fault: str
) -> None:
    others = set(children())
    host = await open_host(stuck_s=3600)
    engine.plant(f"get={fault}")
    _, got = host.begin_get(names_of(1), host.slots[:1])
    _, waits = host.begin_get(names_of(1), host.slots[1:2])
    await host.close()
    assert got.done()
    assert waits.done()
    assert set(children()) <= others


@pytest.mark.parametrize("operation", ["get", "put", "exists"])
@pytest.mark.parametrize("way", ["crash", "stop", "hang", "SIGKILL"])
async def test_its_end_in_the_middle_of_a_call(
    open_host: Open, engine: FaultyEngine, seed: int, operation: str, way: str
) -> None:
    """The call ends, once, after the agent; its memory is ours; and the next agent does what this one did not."""
    host = await open_host()
    payloads = host.fill(host.slots[:2], seed)
    assert await host.put(names_of(2), host.slots[:2]) == [OK, OK]
    pid = host.pid
    is_signal = way.startswith("SIG")
    engine.plant(f"{operation}={'hang' if is_signal else way}")
    host.set_stuck_s(0.3)
    ended: asyncio.Future[Any]
    if operation == "get":
        _, ended = host.begin_get(names_of(2), host.slots[8:10])
    elif operation == "put":
        _, ended = host.begin_put(names_of(2, first=5), host.slots[8:10])
    else:
        ended = host.loop.create_task(host.exists(names_of(1)))
        await asyncio.sleep(0)
    if is_signal:
        os.kill(pid, getattr(signal, way))
    result = await asyncio.wait_for(ended, FOREVER_S)
    assert is_dead(pid)
    if operation == "exists":
        assert result is None
    else:
        assert (result.status if operation == "get" else result).tolist() == [FAILED, FAILED]
    assert len(host.store.held_addresses()) == 0
    host.set_stuck_s(FOREVER_S)
    engine.plant()
    await until(lambda: host.store.starts == 2)
    assert host.pid != pid
    assert (await host.get(names_of(2), host.slots[8:10])).status.tolist() == [OK, OK]
    assert host.payloads(host.slots[8:10]) == payloads


async def test_memory_of_a_failed_get_is_not_ours_before_the_agents_end(
    open_host: Open, engine: FaultyEngine, seed: int
) -> None:
    """Its bytes still come, long after the store's client has given up."""
    host = await open_host(stuck_s=3600)
    host.fill(host.slots[:2], seed)
    assert await host.put(names_of(2), host.slots[:2]) == [OK, OK]
    pid = host.pid
    engine.plant("exists=hang", "get=late")
    lookup = host.loop.create_task(host.exists(names_of(1)))
    await asyncio.sleep(0)
    transfer, got = host.begin_get(names_of(2), host.slots[8:10], time.monotonic() + 0.2)
    await until(lambda: host.store.state is RemoteState.STUCK)
    # It has failed, the agent lives, and it does write: this is what must not be given to another key.
    before = host.fill(host.slots[8:10], seed + 1)
    await until(lambda: host.payloads(host.slots[8:10]) != before)
    assert not transfer.cancel()
    assert sorted(host.store.held_addresses().tolist()) == sorted(host.slots[8:10].ravel().tolist())
    assert not got.done()
    assert not host.store.can_read()
    assert host.store.check() == []
    # What it still has to answer is waited for; then it is ended.
    engine.plant("get=late")
    assert await lookup is not None
    result = await asyncio.wait_for(got, FOREVER_S)
    assert result.status.tolist() == [FAILED, FAILED]
    assert is_dead(pid)
    before = host.fill(host.slots[8:10], seed + 2)
    await until(lambda: host.store.starts == 2)
    assert host.payloads(host.slots[8:10]) == before
    engine.plant()
    assert (await host.get(names_of(2), host.slots[8:10])).status.tolist() == [OK, OK]


async def test_calls_that_wait_when_it_dies_are_not_asked(open_host: Open, engine: FaultyEngine) -> None:
    host = await open_host(get_threads=1)
    engine.plant("get=hang")
    begun = host.begin_get(names_of(1), host.slots[:1])[1]
    waiting = host.begin_get(names_of(1), host.slots[1:2])[1]
    os.kill(host.pid, signal.SIGKILL)
    assert (await waiting).status.tolist() == [NOT_ASKED]
    assert (await begun).status.tolist() == [FAILED]
    assert (await host.get(names_of(1), host.slots[:1])).status.tolist() == [NOT_ASKED]  # there is no agent
    assert await host.exists(names_of(1)) is None


async def test_it_is_started_again_and_again(open_host: Open, engine: FaultyEngine) -> None:
    """And later each time; also when it is idle. Nothing of those before is kept."""
    host = await open_host()
    pids = set()
    descriptors = list_proc(os.getpid(), "fd")
    for number in range(1, 5):
        assert host.store.starts == number
        pids.add(host.pid)
        os.kill(host.pid, signal.SIGKILL)
        await until(lambda number=number: host.store.starts == number + 1)  # type: ignore[misc]
    assert len(pids) == 4
    assert len(list_proc(os.getpid(), "fd")) == len(descriptors)
    assert host.store.figures()["agent"]["ends"] == 4
    assert host.store._agent._backoff_s == pytest.approx(0.05 * 2**4)


async def test_one_that_stops_while_nobody_asks_is_found_at_the_next_call(open_host: Open) -> None:
    host = await open_host()
    os.kill(host.pid, signal.SIGSTOP)
    host.set_stuck_s(0.3)
    assert await host.exists(names_of(1), time.monotonic() + 0.05) is None
    await until(lambda: host.store.figures()["agent"]["ends"] == 1)
    host.set_stuck_s(FOREVER_S)
    await until(lambda: host.store.starts == 2)
    assert await host.exists(names_of(1)) is not None


async def test_the_arena_names_it_as_long_as_it_lives(open_host: Open, engine: FaultyEngine) -> None:
    """The process that takes the arena over reads this, and waits."""
    host = await open_host()

    def named() -> bytes:
        return os.pread(host.pool.fd, OWNER_BYTES, OWNER_AT + OWNER_BYTES)

    assert named() == process(host.pid)
    pid = host.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: host.store.starts == 2)
    assert host.pid != pid
    assert named() == process(host.pid)
    engine.plant("start=hang")
    os.kill(host.pid, signal.SIGKILL)
    await until(lambda: host.pid != 0 and named() == process(host.pid))  # it has the arena before it is ready
    assert host.store.starts == 2
    host.store._agent._closing = True  # no further one
    os.kill(host.pid, signal.SIGKILL)
    await until(lambda: host.pid == 0)
    assert named() == bytes(OWNER_BYTES)


async def test_signals_for_all_do_not_end_it(open_host: Open) -> None:
    """A terminal or systemd sends these to the daemon and its agent alike; the daemon drains."""
    host = await open_host()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(host.pid, number)
    assert await host.exists(names_of(1)) is not None
    assert host.store.figures()["agent"]["ends"] == 0


# --- starts ---


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("REFUSED", "planted: REFUSED (fault: store)"), ("raise", "RuntimeError: planted (fault: store)")],
)
async def test_an_engine_that_does_not_start_says_why_and_is_tried_again(
    engine: FaultyEngine, fault: str, reason: str
) -> None:
    engine.plant(f"start={fault}")
    host = await start(engine)
    await until(lambda: host.store.figures()["agent"]["ends"] >= 2)
    assert host.store.state is RemoteState.STARTING
    assert host.store.reason == reason
    engine.plant()
    await until(host.store.can_read)
    assert host.store.reason == ""
    await host.close()


async def test_an_engine_that_there_is_not(engine: FaultyEngine) -> None:
    host = await start(engine, engine_name="nonesuch")
    await until(lambda: host.store.reason != "")
    assert "unknown engine 'nonesuch'" in host.store.reason
    assert "fault: operator" in host.store.reason
    await host.close()


@pytest.mark.parametrize("fault", ["crash", "hang", "stop"])
async def test_one_that_is_never_ready_is_ended(engine: FaultyEngine, fault: str) -> None:
    engine.plant(f"start={fault}")
    host = await start(engine, start_s=0.5)
    await until(lambda: host.store.figures()["agent"]["ends"] >= 1)
    host.store._agent._start_s = FOREVER_S
    engine.plant()
    await until(host.store.can_read)
    await host.close()


async def test_a_python_that_there_is_not(engine: FaultyEngine) -> None:
    host = await start(engine, python="/nonesuch/python")
    await until(lambda: "can't be started" in host.store.reason)
    await host.close()


async def test_closing_while_it_starts(engine: FaultyEngine) -> None:
    host = await start(engine)
    await host.close()
    host = await start(engine)
    await asyncio.sleep(0.05)
    await host.close()
    host = StoreHost(engine)  # never started
    await host.close()


# --- what it has ---


def test_it_does_not_have_what_systemd_told_the_daemon() -> None:
    environment = {"NOTIFY_SOCKET": "x", "LISTEN_FDS": "1", "WATCHDOG_USEC": "1", "PATH": "p", "PYTHONPATH": "q"}
    kept = agent_environment("", environment)
    assert kept == {"PATH": "p", "PYTHONPATH": f"{ROOT}:q"}
    assert agent_environment("/other/python", environment) == {"PATH": "p", "PYTHONPATH": "q"}


def read_proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def list_proc(pid: int, name: str) -> list[str]:
    return [str(path) for path in Path(f"/proc/{pid}/{name}").iterdir()]


async def test_it_has_no_descriptors_but_its_own(open_host: Open) -> None:
    """Neither the daemon's, nor, once it has mapped them, the arena's under a number that a library could use."""
    keep = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(keep, True)
    try:
        host = await open_host()
    finally:
        os.close(keep)
    links = [os.readlink(path) for path in list_proc(host.pid, "fd")]
    assert not any("zero" in link for link in links)
    assert sum("arena" in link for link in links) <= 1  # Python's own, for the mapping
    infos = [read_proc(host.pid, f"fdinfo/{os.path.basename(path)}") for path in list_proc(host.pid, "fd")]
    assert not any("lock:" in info for info in infos)  # it would be the daemon's, and outlive it
    maps = read_proc(host.pid, "smaps").split("\n7")
    arena = [part for part in maps if "kvoffloadd-arena" in part]
    assert len(arena) == 1
    assert {"dc", "dd"} <= set(arena[0].partition("VmFlags:")[2].split("\n")[0].split())  # no fork, no dump
    size_kb = int(arena[0].partition("Size:")[2].split()[0])
    assert size_kb << 10 == host.pool.capacity_bytes
    assert read_proc(host.pid, "oom_score_adj").strip() == "500"


# --- daemons that die ---


def orphan(pool_file: Path, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A process with an agent, and the agent's pid."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.remote.orphan", str(pool_file), str(folder)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert child.stdout is not None
    return child, int(child.stdout.readline())


def await_death(pidfd: int) -> bool:
    with contextlib.closing(os.fdopen(pidfd)):
        return bool(select.select([pidfd], [], [], FOREVER_S)[0])


@pytest.mark.parametrize("stopped", [False, True])
def test_it_dies_with_the_daemon_and_the_next_daemon_waits_for_that(tmp_path: Path, stopped: bool) -> None:
    """Its get has not ended. Stopped or not: the kernel ends it."""
    child, pid = orphan(tmp_path / "pool", tmp_path)
    try:
        pidfd = os.pidfd_open(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        child.kill()
        child.wait(FOREVER_S)
        pool = open_pool(tmp_path / "pool", CAPACITY_BYTES, CAPACITY_BYTES, lambda size_bytes: None)
        assert pool.is_old
        # Not "soon": it was dead before the pool was opened.
        assert select.select([pidfd], [], [], 0)[0]
        os.close(pidfd)
        pool.close()
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("stopped", [False, True])
def test_it_dies_with_the_daemon_before_it_can_ask_for_that(stopped: bool) -> None:
    """However early it was stopped: this one never asks."""
    code = """
import os, sys
from kvoffloadd.storage.remote.agentprocess import spawn_agent
made = spawn_agent(["sleep", "3600"], dict(os.environ))
print(made.child.pid, flush=True)
sys.stdin.read()
"""
    daemon = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert daemon.stdout is not None
    pid = int(daemon.stdout.readline())
    pidfd = os.pidfd_open(pid)
    try:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        daemon.kill()
        daemon.communicate()
        assert await_death(pidfd)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_an_agent_that_outlived_its_daemon_is_ended_before_its_memory_is_used(tmp_path: Path) -> None:
    """Were the kernel not to do it."""
    agent = subprocess.Popen(["sleep", "3600"])
    try:
        pool = open_pool(tmp_path / "pool", CAPACITY_BYTES, CAPACITY_BYTES, lambda size_bytes: None)
        pool.record_agent(agent.pid)
        pool.close()
        pool = open_pool(tmp_path / "pool", CAPACITY_BYTES, CAPACITY_BYTES, lambda size_bytes: None)
        assert agent.wait(FOREVER_S) == -signal.SIGKILL
        assert pool.is_old
        pool.close()
    finally:
        agent.kill()
        agent.wait()


def test_it_ends_when_the_thread_that_made_it_ends() -> None:
    """Why the supervisor makes agents in a thread that lives as long as they do."""
    code = f"""
import os, select, sys, threading
from kvoffloadd.storage.remote.agentprocess import agent_command, spawn_agent
made = []
def make():
    made.append(spawn_agent(agent_command(""), dict(os.environ)))
    made[0].sock.setblocking(True)
    made[0].sock.recv(1000)
thread = threading.Thread(target=make)
thread.start()
thread.join()
print(bool(select.select([made[0].pidfd], [], [], {FOREVER_S})[0]), made[0].child.wait())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "-9"]


def test_what_is_no_agent_is_told() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvoffloadd.agent"], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "only the daemon starts it" in done.stderr


def test_a_spawn_that_fails_leaves_nothing() -> None:
    with pytest.raises(OSError, match="nonesuch"):
        spawn_agent(["/nonesuch"], {})


@pytest.mark.parametrize("left", range(4))
def test_a_spawn_without_descriptors_leaves_nothing(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its pipes and sockets there still are descriptors for."""
    made, real_pipe, real_pair = [0], os.pipe2, socket.socketpair

    def counted(make: Callable[..., Any]) -> Callable[..., Any]:
        def one(*arguments: Any) -> Any:
            if made[0] == left:
                raise OSError(errno.EMFILE, "too many open files")
            made[0] += 1
            return make(*arguments)

        return one

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "pipe2", counted(real_pipe))
    monkeypatch.setattr(socket, "socketpair", counted(real_pair))
    with pytest.raises(OSError, match=r"too many|nonesuch"):
        spawn_agent(["/nonesuch"], {})
    assert set(os.listdir("/proc/self/fd")) == before


def test_on_uvloop(engine: FaultyEngine, seed: int) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def run() -> None:
        host = await StoreHost(engine).start()
        payloads = host.fill(host.slots[:3], seed)
        assert await host.put(names_of(3), host.slots[:3]) == [OK] * 3
        assert (await host.get(names_of(3), host.slots[8:11])).status.tolist() == [OK] * 3
        assert host.payloads(host.slots[8:11]) == payloads
        engine.plant("get=hang")
        _, got = host.begin_get(names_of(1), host.slots[8:9])
        os.kill(host.pid, signal.SIGKILL)
        assert (await got).status.tolist() == [FAILED]
        await until(lambda: host.store.starts == 2)
        await host.close()

    uvloop.run(run())


async def test_an_arena_of_huge_pages(engine: FaultyEngine, seed: int) -> None:
    slots, pages = 64, sum(map(slot_pages, PARTS))
    capacity_bytes = slots * pages * PAGE_BYTES
    with reserved_pages(file_bytes(capacity_bytes, capacity_bytes, HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES):
        host = await StoreHost(engine, slots=slots, reserved=True).start()
        payloads = host.fill(host.slots[:3], seed)
        assert await host.put(names_of(3), host.slots[:3]) == [OK] * 3
        assert (await host.get(names_of(3), host.slots[-3:])).status.tolist() == [OK] * 3
        assert host.payloads(host.slots[-3:]) == payloads
        await host.close()
