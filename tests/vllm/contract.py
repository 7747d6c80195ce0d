"""What the adapter and vLLM take from each other. Not collected: `test_contract` runs it with each release's Python.

First what is there under which name, then vLLM's own scheduler with a real daemon and no model (`modelless`).
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.request import RequestStatus

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm import KVOffloaddConnector, KVOffloaddSpec, versions
from kvoffloadd.integrations.vllm import worker as worker_module
from kvoffloadd.integrations.vllm.adapters import LoadedAdapter, RankAdapters
from kvoffloadd.integrations.vllm.connector import FailingWorker, WorkerMetadata, _reaches, _scheduler_form, _states
from kvoffloadd.integrations.vllm.keys import PLAIN
from kvoffloadd.integrations.vllm.manager import KVOffloaddManager
from kvoffloadd.integrations.vllm.onehost import RankHost
from kvoffloadd.integrations.vllm.parts import by_heads
from kvoffloadd.integrations.vllm.worker import KeysLoadStoreSpec, KVOffloaddWorker
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import disk_settings, idle
from tests.e2e.unrecordable import epoch
from tests.vllm.damage import CHOICES, damaging
from tests.vllm.engine import by_connector, by_spec
from tests.vllm.modelless import BLOCK, HEADS, Modelless, is_connected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

StartDaemon = Callable[..., Daemon]
StartEngine = Callable[..., Modelless]

RELEASE = versions.check()
KINDS = ("dense", "hybrid")
HITS = [96, 96, 128]

OURS = {
    KVOffloaddConnector: set() if RELEASE.tells_of_sleep else {"unregister_kv_caches", "restore_kv_caches"},
    FailingWorker: {"transfer_results", "sleep", "wake"},
    WorkerMetadata: set(),
    KVOffloaddSpec: set(),
    KVOffloaddManager: {"load_failed", "load_succeeded", "allocated", "loads_again", "give_up", "expect"},
    KVOffloaddWorker: {"sleep", "wake"},
    KeysLoadStoreSpec: set(),
}
"""Public methods that vLLM does not call; every other one overrides vLLM's."""

FIELDS = {
    "vllm.v1.kv_offload.config:OffloadingConfig": (
        "groups worker_kv_bytes_per_block extra_config engine_id model cache parallel replicated_layout "
        "canonical_layout kv_cache_layout"
    ),
    "vllm.v1.kv_offload.config:OffloadingGroupConfig": "group_id tokens_per_block layer_names",
    "vllm.v1.kv_offload.config:OffloadingModelConfig": "name dtype",
    "vllm.v1.kv_offload.config:OffloadingCacheConfig": "tokens_per_hash blocks_per_chunk",
    "vllm.v1.kv_offload.config:OffloadingParallelConfig": (
        "rank world_size tp_size pp_size pcp_size dcp_size is_parallelism_agnostic"
    ),
    "vllm.v1.kv_offload.base:CanonicalKVCaches": "tensors group_data_refs",
    "vllm.v1.kv_offload.base:CanonicalKVCacheTensor": "tensor",
    "vllm.v1.kv_offload.base:CanonicalKVCacheRef": "tensor_idx page_size_bytes mapping",
    "vllm.v1.kv_offload.base:CanonicalPageMapping": (
        "canonical_page_size_bytes local_page_size_bytes runs parallelism_agnostic"
    ),
    "vllm.v1.kv_offload.base:CopyRun": (
        "local_offset canonical_offset fragment_size num_fragments local_stride canonical_stride"
    ),
    "vllm.v1.kv_offload.base:TransferResult": "job_id success transfer_size transfer_time",
    "vllm.v1.kv_offload.base:PrepareStoreOutput": "keys_to_store store_spec evicted_keys",
    "vllm.v1.kv_offload.base:ReqContext": "req_id kv_transfer_params kv_hints _offload_key_positions",
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": "sliding_window extra_retained_tokens",
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": "attention_chunk_size",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "layer_names kv_cache_spec is_eagle_group",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorTransferResults": (
        "finished_sending finished_recving failed_recving"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestOffloadState": (
        "req req_context load_key_ranges group_states max_load_tokens max_offload_tokens num_locally_computed_tokens "
        "transfer_jobs partial_tail_boundary"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestGroupState": (
        "next_stored_chunk_idx offload_keys"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:TransferJobStatus": (
        "req_id pending_count keys is_store deferred_fence_block_ids fenced_block_ids"
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common:TransferJob": "req_id src_spec dst_spec",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common:OffloadingConnectorMetadata": "store_jobs",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common:OffloadingWorkerMetadata": (
        "completed_jobs transfer_stats"
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": "num_scheduled_tokens kv_connector_block_state",
    "vllm.v1.outputs:KVConnectorOutput": "finished_recving failed_recving kv_connector_worker_meta",
    "vllm.config:KVTransferConfig": "kv_load_failure_policy kv_connector_extra_config",
    "vllm.config:ModelConfig": (
        "model model_weights revision code_revision trust_remote_code dtype hf_config hf_config_path max_model_len "
        "hf_text_config multimodal_config generation_config model_impl model_class_overrides enable_sleep_mode "
        "enable_cumem_allocator"
    ),
    "vllm.config:LoadConfig": "load_format model_loader_extra_config",
    "vllm.config:SpeculativeConfig": "method model draft_model_config draft_load_config",
    "vllm.config:MultiModalConfig": "mm_encoder_fp8_scale_path",
    "vllm.config:ParallelConfig": "nnodes pipeline_parallel_size",
    "vllm.config:CacheConfig": "prefix_caching_hash_algo",
}
"""Dataclass -> fields that the adapter reads or sets."""


@pytest.mark.parametrize("ours", OURS, ids=lambda one: one.__name__)
def test_every_method_is_called_as_it_is_defined(ours: type) -> None:
    """No abstract one is missing, none overrides what is not there, and each takes what vLLM's own takes."""
    assert not getattr(ours, "__abstractmethods__", None)
    own = {name for name, found in vars(ours).items() if not name.startswith("_") and inspect.isroutine(_plain(found))}
    theirs = {name: found for base in ours.__mro__[:0:-1] for name, found in vars(base).items()}
    assert own - theirs.keys() == OURS[ours]
    for name in own & theirs.keys():
        _check_takes(inspect.signature(_plain(vars(ours)[name])), inspect.signature(_plain(theirs[name])), name)


def _plain(found: Any) -> Any:
    return found.__func__ if isinstance(found, classmethod | staticmethod) else found


def _check_takes(own: inspect.Signature, asked: inspect.Signature, name: str) -> None:
    defined, theirs = list(own.parameters.values()), list(asked.parameters.values())
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in defined):
        return
    assert [one.name for one in defined][: len(theirs)] == [one.name for one in theirs], (name, own, asked)
    assert all(one.default is not one.empty for one in defined[len(theirs) :]), (name, own, asked)


@pytest.mark.parametrize("path", FIELDS)
def test_fields(path: str) -> None:
    module, _, name = path.partition(":")
    there = {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}
    assert set(FIELDS[path].split()) <= there


def test_a_load_that_one_rank_lost_is_lost() -> None:
    """vLLM adds up what the ranks report."""
    one, other = WorkerMetadata({1: 1, 2: 1}, lost={"a"}), WorkerMetadata({1: 1}, lost={"b"})
    both = one.aggregate(other)
    assert (both.completed_jobs, both.lost) == ({1: 2, 2: 1}, {"a", "b"})
    assert both.aggregate(WorkerMetadata({2: 1})).lost == {"a", "b"}


@pytest.mark.parametrize("chunk", [16, 32, 48])
def test_windows_and_states_reach_as_far_as_vllm_looks(chunk: int) -> None:
    """This also holds where a rank gets the spec of each layer, in wrappers, and its scheduler that of the first."""
    common = {"block_size": 16, "num_kv_heads": HEADS, "head_size": 8, "dtype": torch.float32}
    full, sliding = FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=100)
    wrapped = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": sliding, "b": sliding})
    kept = dataclasses.replace(sliding, extra_retained_tokens=30)
    chunked = ChunkedLocalAttentionSpec(**common, attention_chunk_size=64)
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    aligned = dataclasses.replace(state, mamba_cache_mode="align")
    states = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": aligned, "b": aligned})
    specs = [full, sliding, wrapped, kept, chunked, state, states]
    groups = [KVCacheGroupSpec(["a", "b"], spec) for spec in specs]
    found_specs = [group.kv_cache_spec for group in _scheduler_form(KVCacheConfig(1, [], groups)).kv_cache_groups]
    assert found_specs == [full, sliding, sliding, kept, chunked, state, aligned]
    reaches = _reaches(found_specs)
    keys = [-(-reaches[at] // chunk) if at in reaches else None for at in range(len(specs))]
    assert keys == [_window_rule()(spec, chunk) for spec in found_specs]
    assert _states(found_specs) == [6]


def _window_rule() -> Callable[..., int | None]:
    """vLLM's own, wherever it is."""
    package = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
    for name in ("config", "scheduler"):
        found = getattr(importlib.import_module(f"{package}.{name}"), "get_sliding_window_size_in_chunks", None)
        if found is not None:
            return cast(Callable[..., int | None], found)
    raise AssertionError("vLLM has no such rule any more")


# --- driven by vLLM's scheduler -----------------------------------------------------------------------


@pytest.fixture(scope="session")
def tiny() -> str:
    """A model's folder: its configuration is all that is read."""
    return os.environ["KVOFFLOADD_TINY_MODEL"]


@pytest.fixture
def engine(start_daemon: StartDaemon, tiny: str) -> Iterator[StartEngine]:
    """`engine(kind, route, settings, **extra)` -> one whose daemon, with these settings, has answered."""
    made: list[Modelless] = []

    def start(
        kind: str = "dense",
        route: Callable[..., dict[str, Any]] = by_connector,
        settings: Iterable[str] = (),
        **extra: Any,
    ) -> Modelless:
        daemon = start_daemon("memory.verify_loads=true", *settings, memory="64MiB")
        made.append(Modelless(tiny, kind, daemon, route(daemon.socket, BLOCK, **extra)))
        until(lambda: len(daemon.sessions()) == 2, "scheduler and worker are there")
        until(lambda: made[-1].generate([[3] * 40]) and _keys(daemon), "something was stored")
        made[-1].forget()
        return made[-1]

    yield start
    for one in made:
        one.close()


def _keys(daemon: Daemon) -> int:
    return int(daemon.status()["cache"]["keys"])


@pytest.mark.parametrize(("how", "counted"), [("soon", "keys_soon"), ("drop", "keys_done")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_says_of_its_keys_comes_with_its_end(
    engine: StartEngine, asked: list[list[int]], kind: str, how: str, counted: str
) -> None:
    one = engine(kind)

    def hints() -> int:
        return int(one.daemon.status()["cache"][counted])

    for number, ends in enumerate((3, 6), 1):  # what was computed, then what was loaded
        one.generate(asked[:1], params={"kvoffloadd.keep": how})
        one.generate(asked[1:2], params={"kvoffloadd.keep": "for ever"})
        groups = len(one.cache.kv_cache_groups)
        until(lambda: hints() >= 3 * number, "the daemon knows")  # noqa: B023  it ends within the loop's turn
        assert hints() in range(ends, groups * ends + 1)
        assert one.scheduler.connector.scheduler.manager._keeping._requests == {}
        one.forget()


@pytest.fixture
def asked() -> list[list[int]]:
    """Prompts with a tail that fills no block."""
    rng = random.Random(4)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (101, 110, 129)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_is_loaded(engine: StartEngine, asked: list[list[int]], kind: str) -> None:
    """Every byte that a model would read is looked at."""
    one = engine(kind)
    for hits in ([0, 0, 0], HITS, HITS):
        assert one.generate(asked) == hits
        one.forget()
        one.scribble()
    private = {"_load_jobs", "_unsubmitted_store_jobs", "_connector_worker_meta", "worker", "spec"}
    assert private <= vars(one.worker.connector_worker).keys()
    scheduler = {"_req_status", "manager", "config", "_jobs", "_block_id_to_pending_jobs"}
    assert scheduler <= vars(one.scheduler.connector.scheduler).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_heads(engine: StartEngine, asked: list[list[int]], kind: str) -> None:
    """The layout is vLLM's canonical one. Every byte that a model would read is looked at."""
    one = engine(kind, canonical_layout=True)
    for hits in ([0, 0, 0], HITS, HITS):
        assert one.generate(asked) == hits
        one.forget()
        one.scribble()
    registered = one.worker.connector_worker.worker._transfer_thread._link._caches
    assert [group.part for group in registered.groups] == list(range(HEADS)) * len(one.cache.kv_cache_groups)
    assert {group.parts for group in registered.groups} == {HEADS}


def test_a_replica_stores_nothing(engine: StartEngine, asked: list[list[int]]) -> None:
    """Another rank has the same bytes, and stores them; vLLM hears of each rank that it has ended."""
    one = engine(canonical_layout=True)
    one.worker.connector_worker.worker._writes = False
    stored = _keys(one.daemon)
    for _ in range(2):
        assert one.generate(asked) == [0, 0, 0]
        one.forget()
    assert _keys(one.daemon) == stored


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_load_is_computed(engine: StartEngine, asked: list[list[int]], kind: str) -> None:
    """The daemon is killed when loads have been promised."""
    one = engine(kind)
    one.generate(asked)
    one.forget()
    one.scribble()
    begin = one.worker.start_load_kv

    def kill_first(context: Any) -> None:
        if one.worker._connector_metadata.load_jobs and one.daemon.alive:
            one.daemon.signal(signal.SIGKILL)
            one.daemon.wait()
        begin(context)

    one.worker.start_load_kv = kill_first
    one.generate(asked)
    assert one.failed
    assert not one.daemon.alive
    one.forget()
    assert one.generate(asked) == [0, 0, 0]


def test_a_rank_loads_nothing_for_another_state_of_an_adapter(
    engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was named before this rank loaded something else: it computes."""
    monkeypatch.setattr(worker_module, "RANK", rank := RankAdapters())
    for state in ("old files", "new files"):
        rank.note(SimpleNamespace(lora_int_id=1), state)
    assert rank.state_of(1) == "new files"
    worker = engine().worker.connector_worker.worker
    for state in ("old files", ""):
        spec = KeysLoadStoreSpec([], (0,), PLAIN, LoadedAdapter(1, state))
        assert worker.submit_load(99, spec, None)
        (ended,) = worker.get_finished()
        assert (ended.job_id, ended.success, ended.partial) == (99, False, False)


FAILED, KEPT, RECOMPUTED = (f"vllm:kvoffloadd_{what}" for what in ("failed_loads", "kept_tokens", "recomputed_tokens"))


def counters(one: Modelless) -> Counter[str]:
    """What the manager counts from now on."""
    manager = one.scheduler.connector.scheduler.manager
    found: Counter[str] = Counter()
    get_stats = manager.get_stats

    def note() -> Any:
        stats = get_stats()
        found.update({} if stats is None else stats.reduce())
        return stats

    manager.get_stats = note
    return found


def damage_loads(one: Modelless, monkeypatch: pytest.MonkeyPatch, which: str, loads: int = 1) -> None:
    """See `damaging`."""
    one.daemon.expected_in_log = "checksum"
    pid = one.daemon.pid
    submit = damaging(KVOffloaddWorker.submit_load, pid, CHOICES[which], loads)
    monkeypatch.setattr(KVOffloaddWorker, "submit_load", submit)


@pytest.mark.parametrize(
    ("kind", "which", "kept"),
    [
        ("dense", "first", [0, 0, 0, 0]),
        ("dense", "middle", [32, 32, 64, 96]),
        ("dense", "end", [64, 64, 96, 192]),
        ("hybrid", "middle", [32, 32, 64, 64]),
        ("hybrid", "end", [64, 64, 96, 64]),
        ("hybrid", "window", [64, 64, 96, 64]),
    ],
)
def test_of_a_load_that_failed_in_part_what_is_right_is_kept(
    engine: StartEngine,
    asked: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    which: str,
    kept: list[int],
) -> None:
    """One key of each prompt is damaged: what is behind it is computed, and stored; every byte is looked at.

    Of windows vLLM stores those at the ends of prompts, and a prompt ended at token 64: there the long one goes on.
    """
    one = engine(kind)
    asked = [*asked, asked[1][::-1] + asked[2]]
    one.generate([prompt[:70] for prompt in asked])
    one.generate(asked)
    one.forget()
    one.scribble()
    counted = counters(one)
    damage_loads(one, monkeypatch, which)
    assert one.generate(asked) == kept
    assert (counted[FAILED], counted[KEPT]) == (len(asked), sum(kept))
    assert counted[KEPT] + counted[RECOMPUTED] == sum(HITS) + 224
    one.forget()
    one.scribble()
    assert one.generate(asked) == [*HITS, 224]
    assert counted[FAILED] == len(asked)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_that_fail_in_part_hold_nobody_up(
    engine: StartEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """There are more prompts than the engine has blocks for at a time: a request without blocks for a second load
    computes.
    """
    one = engine(kind)
    rng = random.Random(5)
    asked = [[rng.randrange(3, 500) for _ in range(580)] for _ in range(8)]
    one.generate([prompt[:292] for prompt in asked])
    one.generate(asked)
    one.forget()
    one.scribble()
    counted = counters(one)
    damage_loads(one, monkeypatch, "middle")
    kept = one.generate(asked)
    assert set(kept) <= {0, 288}
    assert (counted[FAILED], counted[KEPT], counted[RECOMPUTED]) == (8, sum(kept), 8 * 576 - sum(kept))


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_that_was_lost_is_computed(
    engine: StartEngine, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """And not tried again: the daemon, which has all of it, may have hung for a minute."""
    one = engine(kind)
    one.generate(asked)
    one.forget()
    one.scribble()
    counted = counters(one)
    finished, submit = KVOffloaddWorker.get_finished, KVOffloaddWorker.submit_load
    loads = []

    def note(worker: KVOffloaddWorker, job: int, *arguments: Any) -> bool:
        loads.append(job)
        return submit(worker, job, *arguments)

    def lose(worker: KVOffloaddWorker) -> list[Any]:
        results: list[Any] = finished(worker)
        return [dataclasses.replace(one, success=one.job_id not in loads) for one in results]

    monkeypatch.setattr(KVOffloaddWorker, "submit_load", note)
    monkeypatch.setattr(KVOffloaddWorker, "get_finished", lose)
    assert one.generate(asked) == [0, 0, 0]
    assert len(loads) == len(asked)
    assert (counted[FAILED], counted[KEPT], counted[RECOMPUTED]) == (len(asked), 0, sum(HITS))


def test_nobody_loads_for_ever(engine: StartEngine, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load finds its last key damaged: the third one is the last."""
    one = engine()
    long = [prompt * 3 for prompt in asked]
    one.generate(long)
    one.forget()
    one.scribble()
    counted = counters(one)
    damage_loads(one, monkeypatch, "end", loads=9)
    assert one.generate(long) == [0, 0, 0]
    assert (counted[FAILED], counted[KEPT]) == (9, 0)
    assert counted[RECOMPUTED] == sum(len(prompt) // BLOCK * BLOCK for prompt in long)


@pytest.mark.parametrize("loads", [1, 2])
def test_an_abort_after_a_failed_load_leaves_nothing(
    engine: StartEngine, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch, loads: int
) -> None:
    """The abort comes before the request asks again, or while it loads the second time."""
    one = engine()
    one.generate(asked)
    one.forget()
    counted = counters(one)
    damage_loads(one, monkeypatch, "end")
    began = []
    submit = KVOffloaddWorker.submit_load

    def note(*arguments: Any) -> bool:
        began.append(arguments)
        return submit(*arguments)

    monkeypatch.setattr(KVOffloaddWorker, "submit_load", note)
    names = one.add(asked[2:])
    connector = one.scheduler.connector
    while len(began) < loads or (loads == 1 and not one.failed):
        one.step()
    one.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def ended() -> bool:
        one.step()
        return not one.scheduler.requests and not connector.scheduler.manager._requests

    until(ended, "the request is gone")
    until(lambda: _leased(one.daemon) == 0, "it pins nothing")
    assert not connector._failed | connector._lost | connector._offered
    assert (counted[FAILED], counted[KEPT], counted[RECOMPUTED]) == (1, 0, 0)


def test_one_load_finds_a_damaged_key_for_all_that_share_it(
    engine: StartEngine, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' answer was that it is there, too: they ask anew."""
    one = engine()
    one.generate(asked[2:])
    one.forget()
    one.scribble()
    counted = counters(one)
    damage_loads(one, monkeypatch, "end")
    one.generate([asked[2] + [at] * 40 for at in range(3, 9)])
    assert counted[FAILED] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_reset(engine: StartEngine, asked: list[list[int]], kind: str) -> None:
    """Nothing old hits."""
    one = engine(kind)
    one.generate(asked)
    assert one.scheduler.reset_prefix_cache(reset_connector=True)
    one.generate([[5]])  # a step, which informs the workers
    assert one.generate(asked) == [0, 0, 0]
    one.forget()
    assert one.generate(asked) == HITS


def test_a_reset_while_loads_run(engine: StartEngine, asked: list[list[int]]) -> None:
    """vLLM raises before it has reset the connector: old keys hit until it is called again."""
    one = engine()
    one.generate(asked)
    one.forget()
    one.add(asked)
    while not any(found.status is RequestStatus.WAITING_FOR_REMOTE_KVS for found in one.scheduler.requests.values()):
        one.step()
    before = epoch(one.daemon)
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert epoch(one.daemon) == before
    one.generate([])
    one.forget()
    assert one.generate(asked) == HITS
    assert one.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert epoch(one.daemon) > before
    assert one.generate(asked) == [0, 0, 0]


def test_a_namespace_that_is_cleared_from_outside(engine: StartEngine, asked: list[list[int]]) -> None:
    """The engine keeps its names: what it computes from now on hits."""
    one = engine()
    one.generate(asked)
    one.forget()
    (row,) = one.daemon.status()["namespaces"]
    cleared = one.daemon.observer.clear(namespaces=row["namespace"])
    assert (cleared.namespaces, cleared.keys) == (1, row["keys"])
    assert one.generate(asked) == [0, 0, 0]
    one.forget()
    assert one.generate(asked) == HITS


@pytest.mark.parametrize("kind", KINDS)
def test_hits_are_told_by_their_tier(engine: StartEngine, asked: list[list[int]], tmp_path: Path, kind: str) -> None:
    """vLLM takes them like this: where a key was when it was looked up, and later that it is in memory."""
    one = engine(kind, settings=disk_settings((tmp_path / "disk", 64 << 20)))
    one.generate(asked)
    idle(one.daemon)
    one.daemon.stop()
    one.daemon.start()
    until(lambda: one.generate([[4] * 40]) and _keys(one.daemon), "the rank has registered, and stores")
    until(lambda: one.generate([[3]]) and is_connected(one), "its lookups reach the daemon")
    by_tier = Counter[str]()
    sources = one.scheduler.connector.get_external_cache_hit_sources

    def note(*arguments: Any) -> Any:
        found = sources(*arguments)
        by_tier.update({source.value: tokens for source, tokens in found.items()})
        return found

    one.scheduler.connector.get_external_cache_hit_sources = note
    for tier in ("disk", "host"):
        one.forget()
        one.scribble()
        by_tier.clear()
        assert one.generate(asked) == HITS
        assert by_tier == {tier: sum(HITS)}


def test_what_computes_pins_nothing(engine: StartEngine, asked: list[list[int]]) -> None:
    """Also where vLLM does not say that it has begun, as it does of no request that was preempted before."""
    one = engine()
    manager = one.scheduler.connector.scheduler.manager
    wanted: list[Any] = []
    prepare = manager.prepare_store

    def note(keys: Any, context: Any) -> Any:
        wanted.extend(keys)
        return prepare(keys, context)

    manager.prepare_store = note
    one.generate(asked)
    context = ReqContext("resumed")

    def hits() -> bool:
        found = [manager.lookup(key, context) for key in wanted]
        manager.on_schedule_end(ScheduleEndContext([], []))
        return set(found) == {LookupResult.HIT}

    until(hits, "its keys are pinned")
    assert _leased(one.daemon) == len(wanted)
    assert manager.prepare_store(wanted, context).keys_to_store == []
    until(lambda: _leased(one.daemon) == 0, "it pins nothing")
    manager.on_request_finished(context)


def _leased(daemon: Daemon) -> int:
    return int(daemon.status()["leases"]["keys"])


tells_of_sleep = pytest.mark.skipif(not RELEASE.tells_of_sleep, reason="this vLLM tells no connector of sleep")


@tells_of_sleep
@pytest.mark.parametrize("kind", KINDS)
def test_sleep(engine: StartEngine, asked: list[list[int]], kind: str) -> None:
    """Asleep, the daemon has none of the KV cache's memory and moves nothing; awake, it goes on."""
    one = engine(kind)
    one.generate(asked)
    other = [prompt[::-1] for prompt in asked]
    stored = _keys(one.daemon)
    for _ in range(2):
        one.worker.unregister_kv_caches()
        assert _mapped(one.daemon) == 0
    one.forget()
    one.scribble()
    assert one.generate(asked) == [0, 0, 0]  # a load fails
    assert len(one.failed) == len(asked)
    one.generate(other)  # and a store is dropped
    assert _keys(one.daemon) == stored
    assert _mapped(one.daemon) == 0
    one.forget()
    one.scribble()
    for _ in range(2):
        one.worker.restore_kv_caches()
    assert one.generate(asked) == HITS
    assert one.generate(other) == [0, 0, 0]
    assert _keys(one.daemon) > stored


@tells_of_sleep
def test_a_store_that_waits_for_the_next_step_is_not_sent_after_a_sleep(
    engine: StartEngine, asked: list[list[int]]
) -> None:
    """Its blocks hold something else by then."""
    one = engine()
    stored = _keys(one.daemon)
    one.add(asked)
    while not one.step():
        pass
    assert one.worker.connector_worker._unsubmitted_store_jobs
    one.worker.unregister_kv_caches()
    assert not one.worker.connector_worker._unsubmitted_store_jobs
    one.scheduler.reset_prefix_cache(reset_running_requests=True)
    one.scribble()
    one.worker.restore_kv_caches()
    one.generate([])
    one.forget()
    assert one.generate(asked) == HITS  # computed, and stored, after the sleep: every byte was looked at
    assert _keys(one.daemon) > stored


@tells_of_sleep
def test_a_daemon_that_dies_while_the_engine_sleeps(engine: StartEngine, asked: list[list[int]]) -> None:
    one = engine()
    one.generate(asked)
    one.worker.unregister_kv_caches()
    one.daemon.kill()
    one.daemon.start()
    one.forget()
    one.worker.restore_kv_caches()

    def hit() -> bool:
        found = one.generate(asked)
        one.forget()
        one.scribble()
        return found == HITS

    until(hit, "it is used again", 30.0)


def _mapped(daemon: Daemon) -> int:
    return sum(int(device["mapped_bytes"]) for device in daemon.status()["devices"].values())


@pytest.mark.skipif(RELEASE.number == "0.32", reason="loads within the step came with 0.33")
@pytest.mark.parametrize("kind", KINDS)
def test_loads_within_the_step(engine: StartEngine, asked: list[list[int]], kind: str) -> None:
    """Only the spec does this: what a step loads is there when it computes."""
    one = engine(kind, by_spec, sync_load_budget_bytes=1 << 30)
    expedited = []
    submit = one.worker.connector_worker.worker.submit_load

    def note(*arguments: Any, **named: Any) -> bool:
        expedited.append(named.get("expedited", False))
        return bool(submit(*arguments, **named))

    one.worker.connector_worker.worker.submit_load = note
    one.generate(asked)
    one.forget()
    one.scribble()
    assert one.generate(asked) == HITS
    assert expedited == [True] * len(asked)


# --- what is refused -------------------------------------------------------------------------------------


def test_loads_within_the_step_are_refused_where_they_may_fail(engine: StartEngine) -> None:
    with pytest.raises(UsageError, match="sync_load_budget_bytes"):
        engine(sync_load_budget_bytes=1 << 20)


def test_canonical_layout_is_refused_where_nobody_tells_of_heads(engine: StartEngine) -> None:
    """Only the spec refuses it; both refuse parts that are no whole heads."""
    with pytest.raises(UsageError, match="canonical_layout needs KVOffloaddConnector"):
        engine("dense", by_spec, canonical_layout=True)
    with pytest.raises(UsageError, match="canonical_parts"):
        engine(canonical_layout=True, canonical_parts=4)


def test_layers_that_the_scheduler_is_not_told_of_are_refused(engine: StartEngine) -> None:
    """Where vLLM can map the pages of a group's first layer, and not those of another one."""
    one = engine(canonical_layout=True)
    latent = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    longer = dataclasses.replace(latent, head_size=32)
    compressed = dataclasses.replace(latent, tokens_per_state=4)
    for other, agree in ((longer, True), (compressed, False)):
        layers = {"a": latent, "b": other}
        group = KVCacheGroupSpec(list(layers), UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=layers))
        cache = dataclasses.replace(one.cache, kv_cache_groups=[group])
        offloading = build_offloading_config(one.config, generate_scheduler_kv_cache_config([cache]))
        assert by_heads(offloading)
        assert by_heads(build_offloading_config(one.config, cache)) == agree
        with nullcontext() if agree else pytest.raises(UsageError, match="layers that share block tables differ"):
            KVOffloaddConnector(one.config, KVConnectorRole.WORKER, cache)


@pytest.mark.parametrize("role", KVConnectorRole)
def test_nodes_are_refused(engine: StartEngine, role: KVConnectorRole) -> None:
    """They are where one engine has ranks on several, but not where each has a separate replica."""
    one = engine()
    parallel = one.config.parallel_config
    parallel.nnodes = 2
    with pytest.raises(UsageError, match="--nnodes 2"):
        KVOffloaddConnector(one.config, role, one.cache)
    parallel.data_parallel_size = 2
    parallel.data_parallel_size_local = 1
    KVOffloaddConnector(one.config, role, one.cache).shutdown()


def test_nodes_are_refused_by_the_spec_alone(engine: StartEngine) -> None:
    one = engine("dense", by_spec)
    one.config.parallel_config.nnodes = 2
    with set_current_vllm_config(one.config), pytest.raises(UsageError, match="--nnodes 2"):
        one.worker.register_kv_caches(one.layers)


def test_ranks_on_other_hosts_are_refused(engine: StartEngine) -> None:
    """It does not matter where Ray has placed them: each reports its host before the first request."""
    one = engine()
    here = one.worker.get_handshake_metadata()
    scheduler = one.scheduler.connector
    scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): here, (1, 0): here})
    other = RankHost("00000000-0000-0000-0000-000000000000")
    with pytest.raises(UsageError, match=r"--distributed-executor-backend ray .*: PP 0 TP 1, PP 1 TP 0\."):
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): here, (1, 0): other, (0, 1): other})


def test_requests_whose_loads_fail_are_recomputed(engine: StartEngine) -> None:
    """An explicit "fail" looks like vLLM's default, and is replaced, too. An option leaves the policy as it is."""

    def recomputes(policy: dict[str, str], **extra: Any) -> bool:
        one = engine("dense", lambda *arguments, **more: by_connector(*arguments, **more) | policy, **extra)
        return bool(one.scheduler.recompute_kv_load_failures)

    given = {"kv_load_failure_policy": "fail"}
    assert recomputes({})
    assert recomputes(given)
    assert not recomputes(given, recompute_failed_loads=False)


def test_an_engine_without_prefix_caching_is_refused(engine: StartEngine) -> None:
    """It does not matter what turned it off. An option allows such an engine."""
    one = engine()
    one.config.cache_config.enable_prefix_caching = False
    with pytest.raises(UsageError, match="--no-enable-prefix-caching"):
        KVOffloaddConnector(one.config, KVConnectorRole.WORKER, one.cache)
    one.config.kv_transfer_config.kv_connector_extra_config["without_prefix_caching"] = True
    KVOffloaddConnector(one.config, KVConnectorRole.WORKER, one.cache)


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_sleep_that_nobody_tells_of_is_refused(engine: StartEngine, option: str) -> None:
    """The spec refuses it; so does the connector, where vLLM has no hooks."""
    one = engine("dense", by_spec)
    setattr(one.config.model_config, option, True)
    with set_current_vllm_config(one.config), pytest.raises(UsageError, match="sleep"):
        one.worker.register_kv_caches(one.layers)
    one = engine()
    setattr(one.config.model_config, option, True)
    if RELEASE.tells_of_sleep:
        KVOffloaddConnector(one.config, KVConnectorRole.WORKER, one.cache)
        assert KVOffloaddConnector.supports_sleep_mode(one.config.kv_transfer_config)
    else:
        with pytest.raises(UsageError, match="sleep"):
            KVOffloaddConnector(one.config, KVConnectorRole.WORKER, one.cache)
