"""Pages through a real daemon, without SGLang: what was stored is loaded, and nothing that goes wrong raises."""

from __future__ import annotations

import hashlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.client.results import Cleared
from kvoffloadd.integrations.sglang import sharedlink
from kvoffloadd.integrations.sglang.hostpool import host_pools
from kvoffloadd.integrations.sglang.pagestore import Pages, PageStore, Purpose
from kvoffloadd.integrations.sglang.pools import TpRank
from kvoffloadd.integrations.sglang.prefixes import Needed
from kvoffloadd.model import Direction
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.conftest import SEED
from tests.e2e.daemons import Hold
from tests.e2e.disk import Switch
from tests.e2e.sharedstore import SharedStore
from tests.e2e.unrecordable import WAYS, Unrecordable, epoch, requests
from tests.integrations.sglang.fakes import HostPool, MambaPoolHost, MHATokenToKVPoolHost

pytestmark = pytest.mark.slow

NAMESPACE = NamespaceSpec(model="m", dtype="bfloat16", layout="sglang test", parallel="tp1", key_bytes=32)
PAGE = 64
PAGES = 64
SHORT_S = 1.0
PATIENCE_S = 100.0


def names(count: int, of: str = "") -> list[str]:
    """Names pages as SGLang does."""
    return [hashlib.sha256(f"{of} {at}".encode()).hexdigest() for at in range(count)]


class PagestoreRank:
    """An engine's rank: its pools, and what stores their pages."""

    def __init__(
        self,
        daemon: Daemon,
        rank: int = 0,
        ranks: int = 1,
        timeout_s: float = 10.0,
        *,
        windows: bool = False,
        states: bool = True,
    ) -> None:
        self.pools: dict[str, HostPool] = {"kv": MHATokenToKVPoolHost(PAGES, PAGE, [4096, 4096])}
        if states:
            self.pools["mamba"] = MambaPoolHost(PAGES, 1, [300, 212], together=False)
        if windows:
            self.pools["swa"] = MHATokenToKVPoolHost(PAGES, PAGE, [2048, 2048])

        def client(purpose: Purpose) -> Client:
            role: Any = "scheduler" if purpose == "lookups" else "worker"
            return Client(daemon.socket, namespace=NAMESPACE, role=role, deadline_s=timeout_s, connect_deadline_s=0.0)

        self.store = PageStore(
            host_pools(self.pools, TpRank(rank, ranks), replicated=False), client, job_deadline_s=60.0
        )

    def pages(self, keys: list[str], at: int = 0, pool: str = "kv") -> Pages:
        """Pages from `at` on."""
        return Pages(pool, keys, self.pools[pool].slots(range(at, at + len(keys))))

    def fill(self, keys: list[str], at: int = 0, pool: str = "kv", salt: int = 0) -> Pages:
        """Fills pages as a model would, with bytes that follow from the key."""
        for nth, key in enumerate(keys):
            for run, rows in enumerate(self.pools[pool].rows):
                rows[at + nth] = content(key, run, rows.shape[1], salt)
        return self.pages(keys, at, pool)

    def holds(self, keys: list[str], at: int = 0, pool: str = "kv", salt: int = 0) -> list[bool]:
        """Returns which pages hold what belongs to their keys."""
        rows = self.pools[pool].rows
        return [
            all((row[at + nth] == content(key, run, row.shape[1], salt)).all() for run, row in enumerate(rows))
            for nth, key in enumerate(keys)
        ]


def content(key: str, run: int, size: int, salt: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([int(key[:8], 16), run, salt]).integers(1, 256, size, np.uint8)


@pytest.fixture
def start_rank() -> Iterator[Callable[..., PagestoreRank]]:
    """`start_rank(daemon, ...)`, closed at the end."""
    with ExitStack() as stack:

        def start(daemon: Daemon, *arguments: Any, **named: Any) -> PagestoreRank:
            rank = PagestoreRank(daemon, *arguments, **named)
            stack.callback(rank.store.close)
            return rank

        yield start


StartRank = Callable[..., PagestoreRank]
StartDaemon = Callable[..., Daemon]


def test_what_one_engine_stored_another_loads(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon(memory="64MiB")
    one, other, keys = start_rank(daemon), start_rank(daemon), names(10)
    assert one.store.restorable(keys).pages == 0
    assert one.store.store([one.fill(keys[:6])])["kv"].all()
    assert one.store.store([one.pages(keys[:6])])["kv"].all(), "what is there counts as stored"
    assert other.store.restorable(keys).pages == 6
    assert other.store.restorable(keys[1:]).pages == 5
    done = other.store.load([other.pages(keys, at=20)])["kv"]
    assert done.tolist() == other.holds(keys, at=20) == [True] * 6 + [False] * 4
    assert [moved.pages for moved in other.store.moved(Direction.LOAD)] == [6]
    assert other.store.moved(Direction.LOAD) == []
    one.store.clear()
    assert other.store.restorable(keys).pages == 0


def test_states_end_prefixes(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB")), names(8)
    state = Needed("mamba", 1)
    assert all(done.all() for done in rank.store.store([rank.fill(keys), rank.fill(keys[2:3], 9, "mamba")]).values())
    rank.store.store([rank.fill(keys[5:6], 4, "mamba")])
    found = rank.store.restorable(keys, [state])
    assert (found.pages, found.lengths, found.by_pool) == (6, (3, 6), {"kv": 8, "mamba": 6})
    assert rank.store.restorable(keys, [Needed("mamba")]).pages == 0
    done = rank.store.load([rank.pages(keys[:6], 30), rank.pages(keys[5:6], 40, "mamba")])
    assert done["kv"].all()
    assert rank.holds(keys[:6], 30) == [True] * 6
    assert rank.holds(keys[5:6], 40, "mamba") == [True]


def test_a_key_is_there_with_all_ranks_parts(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon, keys = start_daemon(memory="64MiB"), names(3)
    ranks = [start_rank(daemon, rank, 2) for rank in range(2)]
    ranks[0].store.store([ranks[0].fill(keys, salt=0)])
    assert ranks[0].store.restorable(keys).pages == 0
    ranks[1].store.store([ranks[1].fill(keys, salt=1)])
    for salt, rank in enumerate(ranks):
        assert rank.store.restorable(keys).pages == 3
        assert rank.store.load([rank.pages(keys, at=10)])["kv"].all()
        assert rank.holds(keys, 10, salt=salt) == [True] * 3


def test_other_weights_other_names(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon, keys = start_daemon(memory="64MiB"), names(3)
    one, other = start_rank(daemon), start_rank(daemon)
    one.store.store([one.fill(keys)])
    one.store.suspend()
    assert one.store.restorable(keys).pages == 0
    assert not one.store.store([one.fill(names(3, "new"))])["kv"].any()
    assert not one.store.load([one.pages(keys)])["kv"].any()
    one.store.renew(17)
    assert one.store.restorable(keys).pages == 0
    one.store.store([one.fill(keys, salt=1)])
    assert one.store.restorable(keys).pages == 3
    assert other.store.load([other.pages(keys)])["kv"].all()
    assert other.holds(keys) == [True] * 3, "its weights are those of before"


def test_many_keys_take_many_requests(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon("limits.keys_per_request=7", memory="64MiB")
    rank, keys = start_rank(daemon), names(30)
    rank.store.store([rank.fill(keys[:23]), rank.fill(keys[4:20], 4, "mamba")])
    assert rank.store.restorable(keys).pages == 23
    assert rank.store.restorable(keys, [Needed("mamba", 2)]).lengths == tuple(range(6, 21))
    assert rank.store.load([rank.pages(keys, 30), rank.pages(keys[4:20], 30, "mamba")])["kv"].tolist() == (
        [True] * 23 + [False] * 7
    )
    assert rank.holds(keys[:23], 30) == [True] * 23


def test_slots_that_are_no_pages(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB")), names(3)
    pages = rank.fill(keys)
    assert not rank.store.store([Pages("kv", keys, pages.slots[:-1])])["kv"].any()
    assert not rank.store.store([Pages("kv", keys, pages.slots + 1)])["kv"].any()
    assert rank.store.restorable(keys).pages == 0


def test_from_disk(start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path) -> None:
    daemon, keys = start_daemon(memory="64MiB", options=("--disk", f"{tmp_path}/root=256MiB")), names(12)
    rank = start_rank(daemon)
    rank.store.store([rank.fill(keys), rank.fill(keys[3:4], 1, "mamba")])
    with Client(daemon.socket, namespace=NAMESPACE, role="observer") as observer:
        observer.drain(60.0)
    daemon.stop()
    daemon.start()
    state = Needed("mamba", 1)
    until(
        lambda: rank.store.restorable(keys, [state]).lengths == (4,),
        "it is connected, and finds them again",
        PATIENCE_S,
    )
    assert rank.store.load([rank.pages(keys, 20), rank.pages(keys[3:4], 9, "mamba")])["kv"].all()
    assert rank.holds(keys, 20) == [True] * 12


class PagestoreHosts:
    """Two that share a store: a daemon and a rank each. `switch`: for faults of the second one's store."""

    def __init__(
        self, folder: Path, start_daemon: StartDaemon, start_rank: StartRank, *, windows: bool = False
    ) -> None:
        shared = SharedStore(folder)
        self.switch = Switch(folder)
        self.daemons = [
            start_daemon(*shared.settings(), memory="64MiB", **faults)
            for faults in ({}, {"faults": f"remote={self.switch.path}"})
        ]
        self.here, self.there = (start_rank(daemon, windows=windows) for daemon in self.daemons)
        for daemon in self.daemons:
            until(lambda: any(_remote(daemon)["eras"].values()), "it may use the store")  # noqa: B023  at once

    def share(self, *pages: Pages) -> None:
        """The first host has them, and then the store."""
        before = _remote(self.daemons[0])["pushed"]["keys"]
        assert all(done.all() for done in self.here.store.store(pages).values())
        count = before + sum(len(those.keys) for those in pages)
        until(lambda: _remote(self.daemons[0])["pushed"]["keys"] == count, "the store has them")

    def fetched(self) -> int:
        """Keys that came to the second host."""
        return int(_remote(self.daemons[1])["fetched"]["keys"])


def _remote(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["remote"]
    return found


def test_from_another_host(start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path) -> None:
    hosts, keys = PagestoreHosts(tmp_path, start_daemon, start_rank), names(12)
    hosts.share(hosts.here.fill(keys[:9]))
    there = hosts.there
    there.store.store([there.fill(keys[:2])])
    assert there.store.restorable(keys).pages == 2, "who does not wait asks nobody"
    assert there.store.restorable(keys, wait_s=PATIENCE_S).pages == 9
    assert hosts.fetched() == 7, "what is here does not come"
    done = there.store.load([there.pages(keys, 20)])["kv"]
    assert done.tolist() == there.holds(keys, 20) == [True] * 9 + [False] * 3
    assert there.store.restorable(keys).pages == 9, "it is here now"


def test_of_states_from_another_host_the_last_one_is_needed(
    start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path
) -> None:
    hosts, keys = PagestoreHosts(tmp_path, start_daemon, start_rank), names(12)
    fill, there = hosts.here.fill, hosts.there
    hosts.share(fill(keys[:9]), fill(keys[2:3], 1, "mamba"))
    hosts.share(fill(keys[6:7], 2, "mamba"))
    found = there.store.restorable(keys, [Needed("mamba", 1)], PATIENCE_S)
    assert (found.pages, found.lengths) == (7, (7,))
    assert hosts.fetched() == 7 + 1
    done = there.store.load([there.pages(keys[:7], 20), there.pages(keys[6:7], 9, "mamba")])
    assert all(pages.all() for pages in done.values())
    assert there.holds(keys[:7], 20) == [True] * 7
    assert there.holds(keys[6:7], 9, "mamba") == [True]


def test_of_windows_nothing_comes_from_another_host(
    start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path
) -> None:
    """The daemon does not know how long they are: it might bring pages in vain."""
    hosts, keys = PagestoreHosts(tmp_path, start_daemon, start_rank, windows=True), names(12)
    hosts.share(hosts.here.fill(keys[:9]), hosts.here.fill(keys[7:9], 7, "swa"))
    window = Needed("swa", 2)
    assert hosts.here.store.restorable(keys, [window]).lengths == (9,)
    assert hosts.there.store.restorable(keys, [window], PATIENCE_S).pages == 0
    assert _remote(hosts.daemons[1])["asked"] == 0


def test_a_store_that_is_late_is_waited_for_so_long_and_no_longer(
    start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path
) -> None:
    """What is on its way then is a hit for no request before it has come."""
    hosts, keys, more = PagestoreHosts(tmp_path, start_daemon, start_rank), names(12), names(5, "more")
    hosts.share(hosts.here.fill(keys[:9]))
    hosts.share(hosts.here.fill(more))
    there, store = hosts.there, hosts.there.store
    hosts.switch.set("get=hang")
    begun = time.monotonic()
    assert store.restorable(keys, wait_s=SHORT_S).pages == 0
    assert SHORT_S <= time.monotonic() - begun < PATIENCE_S
    assert store.restorable(keys).pages == 0
    assert store.restorable(keys, wait_s=SHORT_S).pages == 0
    asked: list[int] = []
    asking = threading.Thread(target=lambda: asked.append(store.restorable(more, wait_s=2 * PATIENCE_S).pages))
    asking.start()
    asking.join(SHORT_S / 10)
    assert asking.is_alive()
    with store.at_rest():
        asking.join(PATIENCE_S)
    assert asked == [0], "SGLang's flush does not wait for it"
    assert not store.load([there.pages(keys[:9], 20)])["kv"].any(), "it ends, although the store hangs"
    assert hosts.fetched() == 0
    hosts.switch.set()
    until(lambda: store.restorable(keys).pages == 9, "it has come")
    assert store.load([there.pages(keys[:9], 20)])["kv"].all()
    assert there.holds(keys[:9], 20) == [True] * 9
    hosts.daemons[1].kill()
    assert store.restorable(names(9, "other"), wait_s=PATIENCE_S).pages == 0


def test_loads_wait_for_no_store(start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path) -> None:
    """SGLang has one thread that loads: what it loads from a store that hangs would keep it from all else."""
    hosts, keys, others = PagestoreHosts(tmp_path, start_daemon, start_rank), names(9), names(4, "mine")
    hosts.share(hosts.here.fill(keys))
    there, store = hosts.there, hosts.there.store
    store.store([there.fill(others)])
    hosts.switch.set("get=hang")
    assert store.restorable(keys, wait_s=SHORT_S).pages == 0
    done = store.load([there.pages(keys + others, 20)])["kv"]
    assert done.tolist() == [False] * 9 + [True] * 4
    assert there.holds(others, 29) == [True] * 4
    done = store.load([there.pages(names(9, "never asked for"), 20)])["kv"]
    assert not done.any()
    assert hosts.fetched() == 0, "the store still hangs"
    hosts.switch.set()  # else what it holds is charged until the agent counts as stuck


def test_what_another_engine_is_storing_is_not_there(
    start_daemon: StartDaemon, start_rank: StartRank, hold: Hold
) -> None:
    daemon, keys = start_daemon(memory="64MiB", faults=hold.fault), names(5)
    one, other = start_rank(daemon), start_rank(daemon)
    assert one.store.store([one.fill(keys[:2])])["kv"].all()
    pages = one.fill(keys[2:], at=10)
    with hold:
        storing = threading.Thread(target=one.store.store, args=([pages],))
        storing.start()
        until(lambda: daemon.status()["running"]["jobs"] == 1, "it is under way")
        assert other.store.restorable(keys).pages == 2
    storing.join(PATIENCE_S)
    assert other.store.restorable(keys).pages == 5


def test_without_a_daemon_nothing_is_asked_and_it_is_found_again(
    start_daemon: StartDaemon, start_rank: StartRank
) -> None:
    daemon, keys = start_daemon(memory="64MiB"), names(5)
    rank = start_rank(daemon)
    rank.store.store([rank.fill(keys)])
    daemon.kill()
    assert rank.store.restorable(keys).pages == 0, "the first one learns it"
    assert not rank.store.connected
    assert not rank.store.load([rank.pages(keys)])["kv"].any()
    assert not rank.store.store([rank.pages(keys)])["kv"].any()
    daemon.start()
    until(lambda: rank.store.connected, "it is connected again", PATIENCE_S)
    assert rank.store.store([rank.pages(keys)])["kv"].all()
    assert rank.store.restorable(keys).pages == 5


def test_a_daemon_that_refuses_the_memory_is_told_of(
    start_daemon: StartDaemon, start_rank: StartRank, caplog: pytest.LogCaptureFixture
) -> None:
    rank = start_rank(start_daemon("limits.mapped_bytes=64KiB", memory="64MiB"))
    assert rank.store.restorable(names(3)).pages == 0
    assert not rank.store.store([rank.fill(names(3))])["kv"].any()
    assert any("has refused a request" in message and "mapped_bytes" in message for message in caplog.messages)


def test_a_clear_waits_for_a_daemon(start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path) -> None:
    """SGLang reports it to its user as done."""
    daemon, keys = start_daemon(memory="64MiB", options=("--disk", f"{tmp_path}/root=256MiB")), names(5)
    rank, other = start_rank(daemon), start_rank(daemon)
    rank.store.store([rank.fill(keys)])
    with Client(daemon.socket, namespace=NAMESPACE, role="observer") as observer:
        observer.drain(60.0)
    daemon.stop()
    rank.store.clear()
    daemon.start()
    until(lambda: rank.store.connected and other.store.connected, "both are connected", PATIENCE_S)
    until(lambda: rank.store.store([rank.fill(keys[:1])])["kv"].all(), "it has cleared", PATIENCE_S)
    assert other.store.restorable(keys).pages == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_clear_that_can_not_be_recorded_is_one_clear(
    start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path, way: str
) -> None:
    """The engine goes on at once, and what others store after it stays."""
    place = Unrecordable(way, tmp_path)
    daemon = start_daemon(*place.settings(), memory="64MiB", faults=place.faults)
    rank, other, keys = start_rank(daemon, timeout_s=SHORT_S), start_rank(daemon), names(5)
    until(lambda: rank.store.connected and other.store.connected, "both are connected", PATIENCE_S)
    assert rank.store.store([rank.fill(keys)])["kv"].all()
    place.spoil()
    rank.store.clear()
    until(lambda: rank.store.available, "it has its cache back", PATIENCE_S)
    assert other.store.restorable(keys).pages == 0
    assert other.store.store([other.fill(keys)])["kv"].all()
    cleared, asked = epoch(daemon), requests(daemon)
    assert daemon.status()["clears"] == {"unrecorded": 1, "places": [place.place]}
    until(lambda: requests(daemon) >= asked + 20, "all lines have been kept a few times", PATIENCE_S)
    assert (epoch(daemon), other.store.restorable(keys).pages, rank.store.restorable(keys).pages) == (cleared, 5, 5)
    place.mend()
    until(lambda: daemon.status()["clears"]["unrecorded"] == 0, "the daemon has recorded it", PATIENCE_S)
    assert (epoch(daemon), other.store.restorable(keys).pages) == (cleared, 5)


def test_ranks_that_ask_for_one_clear_clear_once(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    """What one of them has stored since stays when another asks, late."""
    daemon, keys, token = start_daemon(memory="64MiB"), names(5), b"the same weights"
    one, late = start_rank(daemon), start_rank(daemon)
    for rank in (one, late):
        rank.store.suspend()
    for rank in (one, late):
        rank.store.renew(17)
        rank.store.clear(token)
        until(lambda: rank.store.available, "it has its cache back", PATIENCE_S)  # noqa: B023  at once
        assert rank.store.restorable(keys).pages == (5 if rank is late else 0)
        assert rank.store.store([rank.fill(keys)])["kv"].all()
    assert one.store.restorable(keys).pages == 5


def test_a_clear_that_is_answered_late_is_one_clear(
    start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path
) -> None:
    """It is unknown whether the daemon has heard of it: it is asked again, until there is an answer."""
    daemon, keys = start_daemon(memory="64MiB"), names(5)
    rank, other = start_rank(daemon, timeout_s=SHORT_S), start_rank(daemon)
    until(lambda: rank.store.connected and other.store.connected, "both are connected", PATIENCE_S)
    daemon.signal(signal.SIGSTOP)
    try:
        rank.store.clear()
        assert not rank.store.available, "it was not answered in time"
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: epoch(daemon) > 0, "the daemon has cleared", PATIENCE_S)
    assert other.store.store([other.fill(keys)])["kv"].all()
    until(lambda: rank.store.available, "the clear is answered", PATIENCE_S)
    assert rank.store.restorable(keys).pages == 5


def test_a_clear_that_is_wanted_while_another_is_answered(
    start_daemon: StartDaemon, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread wants it: one comes after the other."""
    daemon = start_daemon(memory="64MiB")
    rank = start_rank(daemon)
    until(lambda: rank.store.connected, "it is connected", PATIENCE_S)
    clear, epochs = Client.clear, list[int]()

    def clear_and_want_another(client: Client, **how: Any) -> Cleared:
        cleared = clear(client, **how)
        epochs.append(epoch(daemon))
        if len(epochs) == 1:
            rank.store._lookups._link.want_clear(b"another clear...")
        return cleared

    monkeypatch.setattr(Client, "clear", clear_and_want_another)
    rank.store.clear()
    until(lambda: rank.store.available, "both are done", PATIENCE_S)
    assert len(epochs) == 2
    assert epochs[0] < epochs[1]


def test_a_daemon_that_comes_later(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon, keys = start_daemon(memory="64MiB"), names(5)
    daemon.stop()
    rank = start_rank(daemon)
    assert rank.store.restorable(keys).pages == 0
    daemon.start()
    until(lambda: rank.store.connected, "it is connected", PATIENCE_S)
    assert rank.store.store([rank.fill(keys)])["kv"].all()


def test_a_daemon_that_hangs_has_its_pages_until_it_is_dead(
    start_daemon: StartDaemon, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a stopped daemon has begun it may go on with: its pages are not given back while it lives."""
    monkeypatch.setattr(sharedlink, "_WAIT_WARNING_S", SHORT_S / 10)
    daemon, keys = start_daemon(memory="64MiB"), names(5)
    rank = start_rank(daemon, timeout_s=SHORT_S)
    rank.store.store([rank.fill(keys)])
    daemon.signal(signal.SIGSTOP)
    answers: list[Any] = []
    loading = threading.Thread(target=lambda: answers.append(rank.store.load([rank.pages(keys, 20)])))
    loading.start()
    assert rank.store.restorable(keys).pages == 0
    until(lambda: not rank.store.connected, "it is known that the daemon does not answer", PATIENCE_S)
    begun = time.monotonic()
    for _ in range(1000):
        assert rank.store.restorable(keys).pages == 0
    spent_s = time.monotonic() - begun
    assert spent_s < 1000 * SHORT_S, "a thousand lookups did not each wait"
    loading.join(3 * SHORT_S)
    assert loading.is_alive()
    daemon.kill()
    loading.join(HANG_S)
    assert not answers[0]["kv"].any()


@pytest.mark.parametrize("direction", list(Direction))
def test_at_rest_nothing_is_under_way(
    start_daemon: StartDaemon,
    start_rank: StartRank,
    hold: Hold,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
) -> None:
    """It begins when the last copy has ended, and within it none begins."""
    monkeypatch.setattr(sharedlink, "_REST_WARNING_S", 0.05)
    daemon = start_daemon(memory="64MiB", faults=hold.fault)
    rank, keys = start_rank(daemon), names(4)
    assert rank.store.store([rank.fill(keys[:2])])["kv"].all()
    calls = {Direction.LOAD: (rank.store.load, keys[:2]), Direction.STORE: (rank.store.store, keys[2:])}
    move, moved = calls[direction]
    pages = rank.fill(moved, at=10)
    with hold:
        mover = threading.Thread(target=move, args=([pages],))
        mover.start()
        until(lambda: daemon.status()["running"]["jobs"] == 1, "it is under way")
        held = threading.Event()

        def rest() -> None:
            with rank.store.at_rest():
                held.set()

        resting = threading.Thread(target=rest)
        resting.start()
        until(lambda: "flush waits for the daemon" in caplog.text, "it waits")
        assert not held.is_set()
    for thread in (mover, resting):
        thread.join(PATIENCE_S)
    assert held.is_set()
    with rank.store.at_rest():
        assert not move([pages])["kv"].any()
    assert move([pages])["kv"].all()


def test_killed_at_any_time_nothing_wrong_is_loaded(
    start_daemon: StartDaemon, start_rank: StartRank, tmp_path: Path
) -> None:
    print("random seed:", SEED)
    rng = random.Random(SEED)
    daemon = start_daemon(memory="64MiB", options=("--disk", f"{tmp_path}/root=256MiB"))
    rank = start_rank(daemon)
    stop = threading.Event()
    wrong: list[str] = []

    def work() -> None:
        for round_ in range(10_000):
            if stop.wait(0.0 if rank.store.connected else 0.1):  # a daemon that starts needs the processor
                return
            keys = names(8, str(round_ % 5))
            for rows in rank.pools["kv"].rows:
                rows[20:28] = 0
            found = rank.store.restorable(keys).pages
            done = rank.store.load([rank.pages(keys[:found], 20)])["kv"] if found else np.empty(0, bool)
            held = rank.holds(keys[:found], 20)
            wrong.extend(key for key, ok, good in zip(keys, done, held, strict=False) if ok and not good)
            rank.store.store([rank.fill(keys)])

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for _ in range(8):
            until(lambda: rank.store.connected, "it is connected", PATIENCE_S)
            time.sleep(rng.random() * 0.2)
            daemon.kill()
            daemon.start()
    finally:
        stop.set()
        worker.join(PATIENCE_S)
    assert not worker.is_alive()
    assert wrong == []
