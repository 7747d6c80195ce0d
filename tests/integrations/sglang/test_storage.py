"""The storage as SGLang calls it, with the few types of SGLang's that it takes, through a real daemon."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.sharedstore import SharedStore
from tests.integrations.sglang.fakes import MambaPoolHost, MHATokenToKVPoolHost
from tests.integrations.sglang.fakesglang import ADAPTER, PoolHitPolicy, PoolTransfer, PoolTransferResult
from tests.integrations.sglang.test_pagestore import PAGE, PATIENCE_S, StartDaemon, names

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow


class StorageRank:
    """An engine's storage, started as SGLang starts it."""

    def __init__(self, daemon: Daemon, wait_s: float = 1.0, **changed: Any) -> None:
        extra = {"interface_v1": 1, "socket": str(daemon.socket), "timeout_s": 10.0, "wait_s": wait_s}
        config = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_size": 1,
            "attn_cp_size": 1,
            "dcp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "extra_config": extra,
        }
        self.kv = MHATokenToKVPoolHost(32, PAGE, [4096, 4096])
        self.states = MambaPoolHost(32, 1, [300, 212], together=False)
        made = importlib.import_module(ADAPTER).KVOffloaddStorage
        self.storage = made(SimpleNamespace(**config | changed), {})

    def start(self) -> StorageRank:
        self.storage.register_mem_pool_host(self.kv)
        self.storage.register_mem_host_pool_v2(self.kv, "kv")
        self.storage.register_mem_host_pool_v2(self.states, "mamba")
        self.storage.on_host_pools_registered()
        return self

    def slots(self, first: int, count: int) -> Any:
        return torch.from_numpy(self.kv.slots(range(first, first + count)))

    def state(self, keys: list[str], first: int) -> PoolTransfer:
        slots = torch.arange(first, first + len(keys))
        return PoolTransfer("mamba", slots, keys, PoolHitPolicy.TRAILING_PAGES)


def test_as_sglang_calls_it(sglang: SimpleNamespace, start_daemon: StartDaemon) -> None:
    rank, keys = StorageRank(start_daemon(memory="64MiB")).start(), names(6)
    storage = rank.storage
    for rows in (*rank.kv.rows, *rank.states.rows):
        rows[:6] = 9
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys[:4], rank.slots(0, 4)) == [True] * 4
    assert storage.batch_set_v2([rank.state(keys[2:3], 2)]) == {"mamba": [True]}
    assert storage.batch_exists(keys) == 4
    assert storage.exists(keys[0])
    found = storage.batch_exists_v2(keys, [PoolTransfer("mamba", None, ["?"], PoolHitPolicy.TRAILING_PAGES)])
    assert found == PoolTransferResult(3, {"kv": 4, "mamba": 3}, [3])
    assert storage.batch_get_v1(keys, rank.slots(10, 6)) == [True] * 4 + [False] * 2
    assert storage.batch_get_v2([rank.state(keys[2:3], 20)]) == {"mamba": [True]}
    assert [rows[13][0] for rows in rank.kv.rows] == [9, 9]
    assert [rows[20][0] for rows in rank.states.rows] == [9, 9]
    stats = storage.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([4, 1], [4, 1])
    assert all(speed > 0 for speed in stats.prefetch_bandwidth + stats.backup_bandwidth)
    storage.clear()
    assert storage.batch_exists(keys) == 0
    assert (storage.get("k"), storage.batch_get(["k"]), storage.set("k"), storage.batch_set(["k"])) == (
        *(None, [None]),
        *(False, False),
    )
    storage.close()
    storage.close()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, rank.slots(0, 6)) == [False] * 6


def test_what_another_host_has_stored_is_found(
    sglang: SimpleNamespace, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """It is found as a whole: SGLang asks once, and loads what was found."""
    store, keys = SharedStore(tmp_path), names(6)
    daemons = [start_daemon(*store.settings(), memory="64MiB") for _ in range(2)]
    here, there = (StorageRank(daemon, wait_s=PATIENCE_S).start() for daemon in daemons)
    for daemon in daemons:
        until(lambda: any(daemon.status()["remote"]["eras"].values()), "it may use the store")  # noqa: B023  at once
    for rows in (*here.kv.rows, *here.states.rows):
        rows[:6] = 9
    assert here.storage.batch_set_v1(keys[:5], here.slots(0, 5)) == [True] * 5
    assert here.storage.batch_set_v2([here.state(keys[3:4], 3)]) == {"mamba": [True]}
    until(lambda: daemons[0].status()["remote"]["pushed"]["keys"] == 6, "the store has them")
    found = there.storage.batch_exists_v2(keys, [PoolTransfer("mamba", None, ["?"], PoolHitPolicy.TRAILING_PAGES)])
    assert found == PoolTransferResult(4, {"kv": 4, "mamba": 4}, [4])
    assert there.storage.batch_get_v1(keys[:4], there.slots(10, 4)) == [True] * 4
    assert there.storage.batch_get_v2([there.state(keys[3:4], 20)]) == {"mamba": [True]}
    assert [rows[13][0] for rows in there.kv.rows] == [9, 9]
    assert [rows[20][0] for rows in there.states.rows] == [9, 9]
    assert there.storage.batch_exists(keys) == 5, "keys and values alone"
    for rank in (here, there):
        rank.storage.close()


def test_whatever_goes_wrong_is_a_miss(sglang: SimpleNamespace, start_daemon: StartDaemon) -> None:
    rank, keys = StorageRank(start_daemon(memory="64MiB")).start(), names(2)
    storage = rank.storage
    assert storage.batch_exists(["no digest"]) == 0
    assert storage.batch_set_v1(["no digest"], rank.slots(0, 1)) == [False]
    assert storage.batch_get_v1(keys, None) == [False, False]
    assert storage.batch_set_v2([PoolTransfer("swa", rank.slots(0, 2), keys)]) == {"swa": [False, False]}
    assert storage.batch_get_v2([PoolTransfer("mamba", None, keys)]) == {"mamba": [False, False]}
    unknown = PoolTransfer("mamba", None, keys, PoolHitPolicy.BLOCK_GROUPS)
    assert storage.batch_exists_v2(keys, [unknown]) == PoolTransferResult(0, {}, [])
    storage.close()


def test_at_rest_while_sglang_forgets_its_pages(sglang: SimpleNamespace, start_daemon: StartDaemon) -> None:
    rank, keys = StorageRank(start_daemon(memory="64MiB")).start(), names(2)
    stored = []
    controller = sglang.controller()
    controller.meanwhile = lambda: stored.append(rank.storage.batch_set_v1(keys, rank.slots(0, 2)))
    controller.reset()
    assert stored == [[False, False]]
    assert rank.storage.batch_set_v1(keys, rank.slots(0, 2)) == [True, True]
    rank.storage.close()


def test_weights_that_change_are_told(sglang: SimpleNamespace, start_daemon: StartDaemon) -> None:
    rank, keys = StorageRank(start_daemon(memory="64MiB")).start(), names(2)
    storage = rank.storage
    assert storage.batch_set_v1(keys, rank.slots(0, 2)) == [True, True]
    sglang.tree().reset()
    assert storage.batch_exists(keys) == 2
    assert sglang.updater().update_weights_from_disk("model", None)[0]
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, rank.slots(0, 2)) == [False, False]
    sglang.tree().reset()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, rank.slots(0, 2)) == [True, True]
    assert storage.batch_exists(keys) == 2
    storage.close()


def test_what_was_not_tried_is_refused(sglang: SimpleNamespace, start_daemon: StartDaemon) -> None:
    daemon = start_daemon(memory="64MiB")
    for name, flag in (("pp_size", "--pp-size 2"), ("attn_cp_size", "--attn-cp-size 2"), ("dcp_size", "--dcp-size 2")):
        with pytest.raises(UsageError, match=flag):
            StorageRank(daemon, **{name: 2})
    sglang.parallel.nnodes = 2
    with pytest.raises(UsageError, match="on one host, and --nnodes 2"):
        StorageRank(daemon)
    sglang.parallel.nnodes = 1
    rank = StorageRank(daemon).start()
    with pytest.raises(UsageError, match="--speculative-algorithm"):
        rank.storage.register_mem_host_pool_v2(rank.kv, "draft")
    with pytest.raises(UsageError, match="too late"):
        rank.storage.register_mem_host_pool_v2(rank.kv, "kv")
    rank.storage.close()
