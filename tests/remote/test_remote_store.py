"""Tests the daemon's side with real stores: hosts with an arena and an agent each, on hosts of a lab.

What a store does wrong, by itself or by others, gives no wrong byte here, and no memory that the store still writes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.agentwire.frames import HEADER_BYTES, Presence
from kvoffloadd.agentwire.names import era_prefix, key_names, marker_name
from kvoffloadd.errors import RemoteStoreError
from kvoffloadd.storage.remote.store import RemoteState
from kvoffloadd.storage.remote.transfers import Names, RemoteStatus
from kvoffloadd.testing.process import ROOT
from scripts.harness.lab import Host as LabHost
from tests.remote.cluster import Cluster
from tests.remote.objects import Object, put
from tests.remote.stranger import stranger
from tests.storage.remote.host import PARTS, SPACE, StoreHost, names_of, soon, until, value_of

pytestmark = pytest.mark.remote

OK, MISS, FAILED = RemoteStatus.OK, RemoteStatus.MISS, RemoteStatus.FAILED
CORRUPT = {RemoteStatus.HEADER, RemoteStatus.PAYLOAD}
QUIET_S = 3.0
MANY = 400
"""Keys: some megabytes, which take seconds over a slow link."""
each_engine = pytest.mark.parametrize("kind", ["mooncake", "valkey"])
MARKER = marker_name(SPACE.fingerprint, SPACE.generation, SPACE.era)


@dataclass
class Settings:
    """Takes the place of the engine for tests."""

    of_engine: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        return self.of_engine


@dataclass
class LabHosts:
    """`await hosts.open(0)` -> on the lab's host 0, ready. Audited and closed at the end."""

    cluster: Cluster
    folder: Path
    opened: list[StoreHost] = field(default_factory=list)

    async def open(self, number: int, **settings: Any) -> StoreHost:
        where = self.cluster.lab.hosts[number]
        host = StoreHost(
            Settings(self.cluster.settings(where)),  # type: ignore[arg-type]  # all that it asks of an engine
            engine_name=self.cluster.kind,
            slots=MANY,
            python=self._python(where),
            **settings,
        )
        self.opened.append(host)
        return await host.start()

    def _python(self, where: LabHost) -> str:
        """An interpreter that runs there: it becomes Python itself, as the daemon demands."""
        path = self.folder / f"python-{where.address}"
        words = " ".join([*where.enter, sys.executable])
        path.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {words} "$@"\n')
        path.chmod(0o700)
        return str(path)


@pytest.fixture
async def open_hosts(make_isolated: Callable[..., Cluster], tmp_path: Path) -> AsyncIterator[Callable[..., LabHosts]]:
    made: list[LabHosts] = []

    def make(kind: str, *options: str) -> LabHosts:
        made.append(LabHosts(make_isolated(kind, *options), tmp_path))
        return made[-1]

    yield make
    for hosts in made:
        for host in hosts.opened:
            await host.close()


Open = Callable[..., LabHosts]


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def wipe(host: StoreHost) -> None:
    host.pool.arena[:] = 0xA5


async def stays_wiped(host: StoreHost) -> None:
    """Nothing writes to its arena any more."""
    end = time.monotonic() + QUIET_S
    while time.monotonic() < end:
        assert (host.pool.arena == 0xA5).all()
        await asyncio.sleep(0.1)


async def first_bytes(host: StoreHost) -> None:
    """Some of what is fetched has come to the wiped arena."""
    await until(lambda: not bool((host.pool.arena == 0xA5).all()))


@each_engine
async def test_what_one_host_puts_another_one_gets(open_hosts: Open, kind: str, seed: int) -> None:
    hosts = open_hosts(kind)
    here, there = await hosts.open(0), await hosts.open(1)
    stored = here.fill(here.slots[:50], seed)
    assert await here.put(names_of(50), here.slots[:50]) == [OK] * 50
    found = await there.exists(names_of(51))
    assert found is not None
    assert found.marker == Presence.NO
    assert found.keys.tolist() == [Presence.YES] * 50 + [Presence.NO]
    result = await there.get(names_of(51), there.slots[100:151])
    assert result.status.tolist() == [OK] * 50 + [MISS]
    assert there.payloads(there.slots[100:150]) == stored


@each_engine
async def test_small_objects_of_eras(open_hosts: Open, kind: str) -> None:
    hosts = open_hosts(kind)
    here, there = await hosts.open(0), await hosts.open(1)
    assert await value_of(there.store, MARKER, soon()) is None
    await here.store.write_value(MARKER, b"era", soon(), if_absent=True, kept_s=3600.0)
    await there.store.write_value(MARKER, b"other", soon(), if_absent=True, kept_s=3600.0)
    assert await value_of(there.store, MARKER, soon()) == b"era"
    here.fill(here.slots[:3], 1)
    await here.put(names_of(3), here.slots[:3])
    found = await there.exists(names_of(3))
    assert found is not None
    assert found.marker == Presence.YES
    await here.store.remove([MARKER], soon())
    found = await there.exists(names_of(3))
    assert found is not None
    assert found.marker == Presence.NO
    assert found.keys.tolist() == [Presence.YES] * 3
    assert await here.store.sweep(era_prefix(SPACE.fingerprint, SPACE.generation, SPACE.era), soon()) == (3, "")
    assert (await there.get(names_of(3), there.slots[:3])).status.tolist() == [MISS] * 3


@each_engine
async def test_memory_of_a_late_get_is_kept_until_nothing_can_write_it(open_hosts: Open, kind: str, seed: int) -> None:
    """The link fails in the middle: the get ends with the agent, or with the call where that is enough."""
    hosts = open_hosts(kind)
    lab = hosts.cluster.lab
    reader, _, store = lab.hosts
    host = await hosts.open(0)
    here, all_names = host.slots, names_of(MANY)
    host.fill(here, seed)
    assert await host.put(all_names, here) == [OK] * MANY
    lab.slow(store, "4mbit")
    wipe(host)
    host.set_stuck_s(4.0)
    _, ended = host.begin_get(all_names, here)
    await first_bytes(host)
    agent = host.pid
    lab.cut(reader, store)
    result = await asyncio.wait_for(ended, 60)
    assert set(result.status.tolist()) <= {OK, FAILED}
    assert FAILED in result.status.tolist()
    if kind == "mooncake":
        assert not is_there(agent)
    wipe(host)
    lab.mend(reader)
    lab.fast(store)
    await stays_wiped(host)
    host.set_stuck_s(60.0)
    await until(lambda: host.store.state is RemoteState.OK and host.store.can_read())
    await until_comes(host, all_names)


async def until_comes(host: StoreHost, names: Names) -> None:
    """All of it, sooner or later: breakers and back-off take their time."""
    end = time.monotonic() + 60
    while (status := await host.get(names, host.slots[: len(names.keys)])).status.tolist() != [OK] * len(names.keys):
        assert time.monotonic() < end, status.status
        await asyncio.sleep(0.2)


async def test_what_others_write_into_a_store_is_noticed(open_hosts: Open, seed: int) -> None:
    """Sixteen bytes in a header, and sixteen in a payload: misses, counted, removed, and put again."""
    hosts = open_hosts("mooncake")
    here, there = await hosts.open(0), await hosts.open(1)
    master = hosts.cluster.stores[1].place
    stored = here.fill(here.slots[:4], seed)
    await here.put(names_of(4), here.slots[:4])
    names = key_names(SPACE, names_of(4).packed())
    outsider = hosts.cluster.lab.hosts[1]
    assert stranger(outsider, "scribble", master, names[1], "200") == 0
    assert stranger(outsider, "scribble", master, names[2], str(HEADER_BYTES + PARTS[0] + 100)) == 0
    result = await there.get(names_of(4), there.slots[:4])
    assert result.status.tolist() == [OK, RemoteStatus.HEADER, RemoteStatus.PAYLOAD, OK]
    await until_exists(here, names_of(4), [True, False, False, True])
    assert await here.put(names_of(4), here.slots[:4]) == [OK] * 4
    assert (await there.get(names_of(4), there.slots[:4])).status.tolist() == [OK] * 4
    assert there.payloads(there.slots[:4]) == stored


@each_engine
async def test_another_objects_bytes_and_another_size(open_hosts: Open, kind: str, seed: int) -> None:
    """Objects of others have our names: one as large as ours, one larger, one smaller."""
    hosts = open_hosts(kind)
    host = await hosts.open(0)
    names = key_names(SPACE, names_of(3).packed())
    alien = hosts.cluster.engine(1)
    sizes = (sum(PARTS), sum(PARTS) + 8, 512)
    objects = [Object(name, seed % 1000, (size,)) for name, size in zip(names, sizes, strict=True)]
    assert put(alien, *objects) == [each.size_bytes for each in objects]
    result = await host.get(names_of(3), host.slots[:3])
    assert result.status.tolist() == [RemoteStatus.HEADER, RemoteStatus.SIZE, RemoteStatus.SIZE]
    await until_exists(host, names_of(3), [False] * 3)


async def until_exists(host: StoreHost, names: Names, expected: list[bool]) -> None:
    end = time.monotonic() + 30
    while True:
        found = await host.exists(names)
        if found is not None and [each == Presence.YES for each in found.keys.tolist()] == expected:
            return
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


@each_engine
async def test_a_put_that_is_given_up_damages_nobody(open_hosts: Open, kind: str, seed: int) -> None:
    """The store gives its place to others. Its bytes must not come after that, so its process ends first."""
    hosts = open_hosts(kind)
    lab = hosts.cluster.lab
    writer, other = await hosts.open(0), await hosts.open(1)
    writer.fill(writer.slots, seed)
    lab.slow(lab.hosts[0], "4mbit")
    writer.set_stuck_s(1.5)
    _, ended = writer.begin_put(names_of(MANY), writer.slots)
    status = await asyncio.wait_for(ended, 60)
    assert FAILED in status.tolist()
    others = names_of(MANY, first=10_000)
    stored = other.fill(other.slots, seed + 1)
    assert set(await other.put(others, other.slots)) <= {OK, RemoteStatus.NO_SPACE}
    lab.fast(lab.hosts[0])
    await asyncio.sleep(QUIET_S)
    wipe(other)
    result = await other.get(others, other.slots)
    assert set(result.status.tolist()) <= {OK, MISS}
    came = other.payloads(other.slots)
    assert all(came[at] == stored[at] for at, each in enumerate(result.status.tolist()) if each == OK)
    assert OK in result.status.tolist()


@each_engine
async def test_the_store_dies_and_comes_back(open_hosts: Open, kind: str, seed: int) -> None:
    """Mooncake's master, or the server: misses and failures meanwhile, quickly; then all is as before, without keys."""
    hosts = open_hosts(kind)
    host = await hosts.open(0)
    server = hosts.cluster.stores[-1]
    host.fill(host.slots[:5], seed)
    assert await host.put(names_of(5), host.slots[:5]) == [OK] * 5
    server.kill()
    found = await host.exists(names_of(5), time.monotonic() + 0.5)
    assert found is None or set(found.keys.tolist()) <= {Presence.UNKNOWN}
    result = await host.get(names_of(5), host.slots[10:15])
    assert set(result.status.tolist()) <= {FAILED, RemoteStatus.NOT_ASKED}
    with pytest.raises(RemoteStoreError):
        await value_of(host.store, MARKER, time.monotonic() + 10)
    server.start()
    await until_exists(host, names_of(5), [False] * 5)
    end = time.monotonic() + 60
    while await host.put(names_of(5), host.slots[:5]) != [OK] * 5:
        assert time.monotonic() < end
        await asyncio.sleep(0.2)
    await until_comes(host, names_of(5))


async def test_a_store_that_starts_later(open_hosts: Open, seed: int) -> None:
    """The daemon does not wait for it, and reports meanwhile why there is none."""
    hosts = open_hosts("mooncake")
    for store in hosts.cluster.stores:
        store.kill()
    opening = asyncio.ensure_future(hosts.open(0))
    await until(lambda: bool(hosts.opened) and "does not answer" in hosts.opened[0].store.reason)
    assert hosts.opened[0].store.state is RemoteState.STARTING
    hosts.cluster.stores[1].start()
    hosts.cluster.stores[0].start()
    host = await opening
    host.fill(host.slots[:5], seed)
    assert await host.put(names_of(5), host.slots[:5]) == [OK] * 5


async def test_an_agent_that_dies_in_the_middle(open_hosts: Open, seed: int) -> None:
    """SIGKILL, SIGSEGV (Mooncake has its own handlers) or SIGSTOP hits it. The daemon lives, and the next one works."""
    hosts = open_hosts("mooncake")
    lab = hosts.cluster.lab
    host = await hosts.open(0)
    stored = host.fill(host.slots, seed)
    assert await host.put(names_of(MANY), host.slots) == [OK] * MANY
    for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
        lab.slow(lab.hosts[2], "4mbit")
        wipe(host)
        host.set_stuck_s(4.0 if number == signal.SIGSTOP else 60.0)
        _, ended = host.begin_get(names_of(MANY), host.slots)
        await first_bytes(host)
        agent = host.pid
        os.kill(agent, number)
        result = await asyncio.wait_for(ended, 60)
        assert FAILED in result.status.tolist()
        assert not is_there(agent)
        wipe(host)
        host.set_stuck_s(60.0)
        lab.fast(lab.hosts[2])
        await stays_wiped(host)
        await until(lambda: host.store.state is RemoteState.OK)
        await until_comes(host, names_of(MANY))
    assert host.payloads(host.slots) == stored
