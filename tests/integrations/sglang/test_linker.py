"""The linker as SGLang calls it, with the few types of SGLang's that it takes, through a real daemon."""

from __future__ import annotations

import importlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.daemons import Hold
from tests.integrations.sglang import fakes
from tests.integrations.sglang.fakedevice import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    SWAKVPool,
    components,
    entry,
    params,
    slots,
    torch,
)
from tests.integrations.sglang.fakesglang import ADAPTER, PoolHitPolicy, PoolTransfer
from tests.integrations.sglang.test_pagestore import PATIENCE_S, SHORT_S, StartDaemon, names

pytestmark = pytest.mark.slow

PAGE, PAGES = 4, 32


class LinkerRank:
    """An engine's linker, started as SGLang starts it."""

    def __init__(self, socket: Path, kvcache: Any = None, *parts: str, **options: Any) -> None:
        self.kvcache: Any = MHATokenToKVPool(PAGES, PAGE) if kvcache is None else kvcache
        made = importlib.import_module(ADAPTER).KVOffloaddLinker
        given = {"socket": str(socket), "timeout_s": 10.0, "job_deadline_s": 60.0} | options
        self.linker = made(
            SimpleNamespace(),
            params(self.kvcache, PAGE),
            components=components("FULL", *parts),
            extra_config=given,
            forward_stream=None,
        )

    @property
    def connected(self) -> bool:
        """Can anything be found?"""
        return bool(self.linker._pages.available)

    def fill(self, pages: range, value: float) -> None:
        """Fills pages as a model would."""
        for buffer in [*self.kvcache.k_buffer, *self.kvcache.v_buffer]:
            buffer[pages.start * PAGE : pages.stop * PAGE] = value

    def holds(self, pages: range) -> set[float]:
        """All values in some pages."""
        buffers = [*self.kvcache.k_buffer, *self.kvcache.v_buffer]
        return {float(one) for buffer in buffers for one in buffer[pages.start * PAGE : pages.stop * PAGE].unique()}

    def store(self, keys: list[str], at: int = 0) -> bool:
        """Stores to its end."""
        assert self.linker.offload([kv(keys, at)])
        until(lambda: self.linker.num_completed_offloads() == 1, "it is stored", PATIENCE_S)
        return bool(self.linker.pop_completed_offload())

    def found(self, keys: list[str], rid: str = "r") -> list[int]:
        return list(self.linker.lookup(rid, [PoolTransfer("kv", keys=keys)]))

    def load(self, keys: list[str], at: int, rid: str = "r") -> bool:
        return bool(self.linker.load(rid, [kv(keys, at)]))


def kv(keys: list[str], at: int, pool: str = "kv") -> PoolTransfer:
    return PoolTransfer(pool, keys=keys, device_indices=slots(range(at, at + len(keys)), PAGE))


StartRank = Callable[..., LinkerRank]


@pytest.fixture
def start_rank(sglang: SimpleNamespace) -> Iterator[StartRank]:
    """`start_rank(daemon, ...)`, closed at the end."""
    with ExitStack() as stack:

        def start(daemon: Daemon, *arguments: Any, **options: Any) -> LinkerRank:
            rank = LinkerRank(daemon.socket, *arguments, **options)
            stack.callback(rank.linker.close)
            return rank

        yield start


def test_what_one_engine_stored_another_loads(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon(memory="64MiB")
    one, other, keys = start_rank(daemon), start_rank(daemon), names(6)
    one.fill(range(6), 7.0)
    assert one.found(keys) == []
    assert one.store(keys[:4])
    assert one.store(keys[:4]), "what is there counts as stored"
    assert other.found(keys) == [1, 2, 3, 4]
    assert other.load(keys[:4], 10)
    assert other.holds(range(10, 14)) == {7.0}
    assert other.holds(range(0, 10)) == other.holds(range(14, PAGES)) == {0.0}
    assert other.linker.start_layer_wise_loading() == -1
    assert other.linker.finish_layer_wise_loading(-1)
    assert not other.load(keys, 20), "a page that is not there is one to compute"
    assert not other.linker.offload([PoolTransfer("kv", keys=[])])


def test_the_storage_and_the_linker_share_keys(start_daemon: StartDaemon, sglang: Any, start_rank: StartRank) -> None:
    daemon, keys = start_daemon(memory="64MiB"), names(3)
    rank = start_rank(daemon)
    host: Any = fakes.MHATokenToKVPoolHost(8, PAGE, [PAGE * 2 * 2 * 8 * 2] * 2)
    host.layer_num, host.head_num, host.head_dim, host.v_head_dim = 2, 2, 8, 8
    host.dtype = torch.bfloat16
    config = {"tp_rank": 0, "tp_size": 1, "pp_size": 1, "attn_cp_size": 1, "dcp_size": 1, "is_mla_model": False}
    extra = {"interface_v1": 1, "socket": str(daemon.socket), "timeout_s": 10.0}
    made = importlib.import_module(ADAPTER).KVOffloaddStorage
    storage = made(SimpleNamespace(**config, extra_config=extra, enable_storage_metrics=False), {})
    storage.register_mem_pool_host(host)
    storage.on_host_pools_registered()
    layers = [*rank.kvcache.k_buffer, *rank.kvcache.v_buffer]
    for number, buffer in enumerate(layers):
        buffer[:] = number + 1
    assert rank.store(keys)
    assert storage.batch_exists(keys) == 3
    assert storage.batch_get_v1(keys, torch.from_numpy(host.slots(range(3)))) == [True] * 3
    in_host = [torch.from_numpy(half[:3].copy()).view(torch.bfloat16).reshape(3, 2, -1) for half in host.rows]
    assert [[half[:, layer].unique().tolist() for layer in range(2)] for half in in_host] == [
        [[1.0], [2.0]],
        [[3.0], [4.0]],
    ]
    more = names(2, "more")
    host.rows[0][4:6].view("<u2")[:] = torch.tensor(5.0, dtype=torch.bfloat16).view(torch.uint16).item()
    assert storage.batch_set_v1(more, torch.from_numpy(host.slots(range(4, 6)))) == [True] * 2
    assert rank.found(more) == [1, 2]
    assert rank.load(more, 20)
    keys_and_values = [float(buffer[20 * PAGE : 22 * PAGE].max()) for buffer in layers]
    assert keys_and_values == [5.0, 5.0, 0.0, 0.0]
    storage.close()


def test_of_a_window_the_last_pages_are_enough(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB"), SWAKVPool(PAGES, PAGE), "SWA"), names(5)
    assert {pool.value for pool in rank.linker.pools} == {"kv", "swa"}
    window = PoolTransfer("swa", keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)

    def found(rid: str) -> list[int]:
        return list(rank.linker.lookup(rid, [PoolTransfer("kv", keys=keys), window]))

    rank.kvcache.swa_kv_pool.k_buffer[2][:] = 3.0
    assert rank.linker.offload([kv(keys, 0), kv(keys[1:4], 1, "swa")])
    until(lambda: rank.linker.num_completed_offloads() == 1, "it is stored", PATIENCE_S)
    assert rank.linker.pop_completed_offload()
    assert found("r") == [3, 4]
    assert rank.linker.lookup("x", [PoolTransfer("kv", keys=keys)]) == [], "SGLang names both pools, or none"
    assert rank.linker.load("r", [kv(keys[:4], 10), kv(keys[2:4], 20, "swa")])
    pool = rank.kvcache.swa_kv_pool.k_buffer[2]
    assert (pool[20 * PAGE : 22 * PAGE] == 3.0).all()


def test_indexes_come_with_their_keys(
    start_daemon: StartDaemon, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = DSATokenToKVPool(PAGES, PAGE)
    indexes = entry("indexer", pool, pool.index_k_with_scale_buffer, PAGE, 1, source="kv")
    group = SimpleNamespace(num_layers=2, entries=[entry("kv", pool, pool.kv_buffer, PAGE, PAGE), indexes])
    linker = importlib.import_module(f"{ADAPTER}.linker")
    monkeypatch.setattr(linker, "resolve_hybrid_device_pool_group", lambda **_: group)
    rank, keys = start_rank(start_daemon(memory="64MiB"), pool), names(3)
    pool.index_k_with_scale_buffer[1][:3] = 9
    assert rank.store(keys)
    assert rank.found(keys) == [1, 2, 3]
    assert rank.load(keys, 10)
    assert (pool.index_k_with_scale_buffer[1][10:13] == 9).all()


def test_a_daemon_that_is_gone_is_a_miss(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon(memory="64MiB")
    rank, keys = start_rank(daemon), names(2)
    assert rank.store(keys)
    assert rank.found(keys) == [1, 2]
    daemon.kill()
    assert not rank.load(keys, 10)
    assert rank.found(keys) == []
    assert not rank.store(names(2, "new"))
    daemon.start()
    until(lambda: rank.connected, "it is connected", PATIENCE_S)
    rank.fill(range(2), 2.0)
    assert rank.store(keys)
    assert rank.load(keys, 10)
    assert rank.holds(range(10, 12)) == {2.0}


def test_no_daemon_at_the_start(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon(memory="64MiB")
    daemon.kill()
    rank, keys = start_rank(daemon), names(2)
    assert rank.found(keys) == []
    assert not rank.store(keys)
    daemon.start()
    until(lambda: rank.connected, "it is connected", PATIENCE_S)
    assert rank.store(keys)


def test_a_daemon_that_hangs_is_waited_for_once(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon(memory="64MiB")
    rank, keys = start_rank(daemon, timeout_s=SHORT_S), names(3)
    assert rank.store(keys)
    assert rank.found(keys) == [1, 2, 3]
    daemon.signal(signal.SIGSTOP)
    try:
        assert not rank.load(keys, 10), "known to be there, but nobody answers"
        assert not rank.connected
        assert rank.found(keys) == []
        assert rank.linker.offload([kv(names(3, "new"), 0)])
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: rank.connected, "it is connected", PATIENCE_S)
    until(lambda: rank.linker.num_completed_offloads() == 1, "its end is known", PATIENCE_S)
    assert not rank.linker.pop_completed_offload()
    assert rank.found(keys) == [1, 2, 3]


def test_all_ranks_load_or_none(
    start_daemon: StartDaemon, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon(memory="64MiB")
    rank, keys = start_rank(daemon), names(2)
    assert rank.store(keys)
    answers: list[bool] = []

    def others_can_not(good: bool) -> bool:
        answers.append(good)
        return False

    monkeypatch.setattr(f"{ADAPTER}.engine.all_agree", others_can_not)
    assert not rank.load(keys, 10)
    assert not rank.load(names(1, "not there"), 10)
    assert not rank.linker.load("r", [PoolTransfer("kv", keys=keys, device_indices="no slots")])
    assert not rank.linker.load("r", [])
    daemon.kill()
    assert not rank.load(keys, 10)
    assert answers == [True, False, False, False, False], "each time the others are told: they wait for it"
    assert rank.linker.cancel_queued_load("r") is False


def test_a_load_has_ended_when_it_says_so(start_daemon: StartDaemon, start_rank: StartRank, hold: Hold) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB", faults=hold.fault)), names(2)
    rank.fill(range(2), 3.0)
    assert rank.store(keys)
    with ThreadPoolExecutor(1) as scheduler:
        with hold:
            loading = scheduler.submit(rank.load, keys, 10)
            with pytest.raises(TimeoutError):
                loading.result(SHORT_S)
        assert loading.result(PATIENCE_S)
    assert rank.holds(range(10, 12)) == {3.0}


@pytest.mark.parametrize("ends", ["cancel_queued_load", "load"])
def test_pages_are_free_when_their_load_has_ended(
    ends: str, start_daemon: StartDaemon, start_rank: StartRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request is gone, another one can't be loaded by another rank."""
    rank, keys = start_rank(start_daemon(memory="64MiB"), overlap=True), names(2)
    rank.fill(range(2), 3.0)
    assert rank.store(keys)
    gate = threading.Event()
    rank.linker._loads.begin(lambda: gate.wait(PATIENCE_S))
    with ThreadPoolExecutor(1) as scheduler:
        if ends == "load":
            monkeypatch.setattr(f"{ADAPTER}.engine.all_agree", lambda good: False)
            ending = scheduler.submit(rank.load, keys, 10)
        else:
            assert rank.load(keys, 10)
            ending = scheduler.submit(rank.linker.cancel_queued_load, "r")
        with pytest.raises(TimeoutError):
            ending.result(0.05)
        gate.set()
        assert ending.result(PATIENCE_S) is (ends != "load")
    assert rank.holds(range(10, 12)) == {3.0}


def test_loads_beside_the_forward(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    daemon = start_daemon(memory="64MiB")
    rank, keys = start_rank(daemon, overlap=True), names(4)
    rank.fill(range(4), 5.0)
    assert rank.store(keys)
    counter = rank.linker.layer_done_counter
    assert rank.linker.start_layer_wise_loading() == -1
    assert rank.load(keys[:2], 10, "one")
    assert rank.load(keys[2:], 12, "other")
    index = rank.linker.start_layer_wise_loading()
    counter.futures[index][1].result(PATIENCE_S)
    assert rank.holds(range(10, 14)) == {5.0}
    assert rank.linker.finish_layer_wise_loading(index)
    assert not rank.linker.cancel_queued_load("one"), "it was started"
    assert rank.load(keys[:1], 10, "gone")
    assert rank.linker.cancel_queued_load("gone")
    assert rank.linker.start_layer_wise_loading() == -1
    assert rank.load(names(1, "not there"), 20), "it is not known yet"
    assert not rank.linker.finish_layer_wise_loading(rank.linker.start_layer_wise_loading())
    assert rank.load(keys[:1], 10)
    daemon.kill()
    rank.linker.finish_layer_wise_loading(rank.linker.start_layer_wise_loading())
    assert not rank.load(keys[:1], 10)
    rank.linker.reset()


def test_a_forward_that_waits_for_no_layer_finishes_when_its_loads_have_ended(
    start_daemon: StartDaemon, start_rank: StartRank
) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB"), overlap=True), names(2)
    rank.fill(range(2), 7.0)
    assert rank.store(keys)
    gate = threading.Event()
    rank.linker._loads.begin(lambda: gate.wait(PATIENCE_S))
    assert rank.load(keys, 10)
    index = rank.linker.start_layer_wise_loading()
    with ThreadPoolExecutor(1) as forward:
        finished = forward.submit(rank.linker.finish_layer_wise_loading, index)
        with pytest.raises(TimeoutError):
            finished.result(0.05)
        gate.set()
        assert finished.result(PATIENCE_S)
    assert rank.holds(range(10, 12)) == {7.0}


def test_a_flush_waits_for_what_is_under_way(start_daemon: StartDaemon, start_rank: StartRank) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB"), overlap=True), names(3)
    assert rank.store(keys)
    assert rank.load(keys, 10)
    assert rank.linker.offload([kv(names(3, "new"), 0)])
    rank.linker.reset()
    assert rank.linker.num_completed_offloads() == 0
    assert not rank.linker.cancel_queued_load("r")
    assert rank.found(names(3, "new")) == [1, 2, 3]


def test_weights_that_change_are_told(start_daemon: StartDaemon, start_rank: StartRank, sglang: Any) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB")), names(2)
    assert rank.store(keys)
    assert rank.found(keys) == [1, 2]
    assert sglang.updater().update_weights_from_disk("model", None)[0]
    assert rank.found(keys) == [], "though it is remembered"
    assert not rank.load(keys, 10)
    assert not rank.store(keys)
    rank.linker.reset()
    sglang.tree().reset()
    assert rank.found(keys) == []
    assert rank.store(keys)
    assert rank.found(keys, "another") == [1, 2]


def test_a_bug_is_a_miss_and_logged_once(
    start_daemon: StartDaemon,
    start_rank: StartRank,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rank, keys = start_rank(start_daemon(memory="64MiB")), names(2)
    assert rank.store(keys)
    caplog.clear()

    def boom(*_: Any) -> Any:
        raise LookupError("a bug")

    with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        patch.setattr(rank.linker._pages, "restorable", boom)
        patch.setattr(rank.linker._pages, "load", boom)
        patch.setattr(rank.linker._pages, "store", boom)
        assert [rank.found(keys, f"{number}") for number in range(3)] == [[], [], []]
        assert [rank.load(keys, 10) for _ in range(2)] == [False, False]
        assert not rank.store(keys)
    assert [record.message for record in caplog.records] == [
        "kvoffloadd: a bug in KVOffloaddLinker.lookup, please report it",
        "kvoffloadd: a bug in kvoffloadd-loads, please report it",
        "kvoffloadd: a bug in kvoffloadd-offloads, please report it",
    ]
    assert rank.found(keys) == [1, 2]


def test_what_was_not_tried_is_refused(sglang: Any, start_daemon: StartDaemon) -> None:
    socket = start_daemon(memory="64MiB").socket
    for options, words in (
        ({"overlap": 1}, "overlap must be true or false"),
        ({"job_deadline_s": 0}, "job_deadline_s"),
        ({"sockets": "/x"}, "sockets: not an option"),
    ):
        with pytest.raises(UsageError, match=words):
            LinkerRank(socket, **options)
    for owner, name, words in (
        (sglang.features, "enable_memory_saver", "--enable-memory-saver"),
        (sglang.memory, "enable_unified_memory", "--enable-unified-memory"),
        (sglang.parallel, "nnodes", "--nnodes 2"),
        (sglang.parallel, "attn_dcp_size", "--dcp-size 2"),
    ):
        was = getattr(owner, name)
        setattr(owner, name, 2 if isinstance(was, int) and not isinstance(was, bool) else True)
        with pytest.raises(UsageError, match=words):
            LinkerRank(socket)
        setattr(owner, name, was)
