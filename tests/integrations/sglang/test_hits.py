"""What SGLang serves from its own levels counts in the daemon as used. The daemon is real."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.integrations.sglang import pagestore
from kvoffloadd.integrations.sglang.prefixes import Needed
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.sharedstore import SharedStore
from tests.integrations.sglang.fakesglang import ADAPTER, Node
from tests.integrations.sglang.test_pagestore import PAGE, PagestoreRank, StartDaemon, names

pytestmark = pytest.mark.slow

HEAD, TAIL, USERS = 5, 3, 60
"""Pages of a system prompt, and of what each of its users adds to it."""

THIRD = "512KiB"
"""Holds a third of all that the users have: 64 pages of 8 KiB."""


class AdmittingEngine:
    """A rank, and the part of SGLang that admits requests: the real `engine` module informs the adapter."""

    def __init__(self, sglang: SimpleNamespace, daemon: Daemon, **options: Any) -> None:
        self.rank = PagestoreRank(daemon, **options)
        self.store = self.rank.store
        self.daemon = daemon
        self._sglang = sglang
        importlib.import_module(f"{ADAPTER}.engine").tell_hits(self.store)
        self.adder = sglang.adder(sglang.tree())
        until(lambda: self.store.available, "it is connected")

    def admit(self, prefix: Node, **changed: Any) -> Any:
        """A request whose pages up to the end of `prefix` SGLang has."""
        request = self._sglang.request("r")
        request.last_node = prefix
        for name, value in changed.items():
            setattr(request, name, value)
        self.adder._account_prefill_cache_admission(request, prefix.pages * PAGE)
        return request

    @property
    def touched(self) -> int:
        """Returns the number of keys that were reported to the daemon as used."""
        return int(self.daemon.status()["cache"]["keys_touched"])


Start = Callable[..., AdmittingEngine]


@pytest.fixture
def start(sglang: SimpleNamespace) -> Iterator[Start]:
    """`start(daemon, ...)`, closed at the end."""
    with ExitStack() as stack:

        def begin(daemon: Daemon, **options: Any) -> AdmittingEngine:
            engine = AdmittingEngine(sglang, daemon, **options)
            stack.callback(engine.store.close)
            return engine

        yield begin


@pytest.mark.parametrize("policy", ["hit-density", "lru", "s3-fifo"])
def test_every_user_of_a_system_prompt_gets_it(start_daemon: StartDaemon, start: Start, policy: str) -> None:
    """SGLang has the head, and stores what each user adds to it; then it is started anew."""
    daemon = start_daemon("memory.slab_bytes=64KiB", f"memory.policy={policy}", memory=THIRD)
    engine, head = start(daemon), Node(names(HEAD, "system prompt"))
    assert engine.store.store([engine.rank.fill(head.keys)])["kv"].all()
    for user in range(USERS):
        tail = names(TAIL, f"user {user}")
        engine.admit(head)
        assert engine.store.restorable(tail).pages == 0
        assert engine.store.store([engine.rank.fill(tail, 10)])["kv"].all()
        assert engine.touched == (user + 1) * HEAD, "before the store, that needs room"
    other = start(daemon)
    for user in range(USERS):
        assert other.store.restorable([*head.keys, *names(TAIL, f"user {user}")]).pages >= HEAD
    last = [*head.keys, *names(TAIL, f"user {USERS - 1}")]
    assert other.store.load([other.rank.pages(last)])["kv"].all()
    assert all(other.rank.holds(last))


def test_what_only_sglang_serves_is_pushed(start_daemon: StartDaemon, start: Start, tmp_path: Path) -> None:
    """The default of `remote.push` pushes it when SGLang has used it again, without a lookup, a load or a store."""
    store, prompt = SharedStore(tmp_path), Node(names(9))
    here, there = (start_daemon(*store.settings("remote.push=second-use"), memory="64MiB") for _ in range(2))
    one, other = start(here), start(there)
    for daemon in (here, there):
        until(lambda: any(daemon.status()["remote"]["eras"].values()), "it may use the store")  # noqa: B023  at once
    assert one.store.store([one.rank.fill(prompt.keys)])["kv"].all()
    assert here.status()["remote"]["pushed"]["keys"] == 0
    one.admit(prompt)
    until(lambda: here.status()["remote"]["pushed"]["keys"] == 9, "the store has them")
    assert other.store.restorable(prompt.keys, wait_s=100.0).pages == 9


def test_it_is_told_of_what_sglang_had_itself(start_daemon: StartDaemon, start: Start) -> None:
    """Not of what it has from the storage, which a load has used, nor again of a request that was retracted."""
    engine = start(start_daemon(memory="64MiB"))
    root = Node(names(4))
    prompt = Node(names(3, "behind"), root)
    engine.store.store([engine.rank.fill([*root.keys, *prompt.keys])])

    def reported(**changed: Any) -> int:
        before = engine.touched
        engine.admit(prompt, **changed)
        engine.admit(Node(names(1, "of no use")))
        engine.store.store([engine.rank.fill(names(1, "the last"), 20)])
        return engine.touched - before

    assert reported() == 7
    assert reported(host_hit_length=3 * PAGE) == 7
    assert reported(host_hit_length=3 * PAGE, storage_hit_length=2 * PAGE) == 5
    assert reported(host_hit_length=3 * PAGE, host_hit_is_storage=True) == 4
    assert reported(retracted_stain=True) == 0
    assert reported(last_node=root) == 4, "what a linker has loaded is not in the tree yet"
    assert engine.adder.accounted.count(("r", 7 * PAGE)) == 6


def test_of_other_pools_what_a_prefix_needs_is_used(start_daemon: StartDaemon, start: Start) -> None:
    """SGLang has asked for this much: the state at the end, the last pages of a window."""
    engine, prompt = start(start_daemon(memory="64MiB"), windows=True), Node(names(6))
    rank, keys = engine.rank, prompt.keys
    rank.store.store([rank.fill(keys), rank.fill(keys, 10, "mamba"), rank.fill(keys, 20, "swa")])
    engine.admit(prompt)
    rank.store.store([rank.fill(keys[:1])])
    assert engine.touched == 6
    for window in (3, 2):
        rank.store.restorable(keys, [Needed("mamba", 1), Needed("swa", window)])
    engine.admit(prompt)
    rank.store.store([rank.fill(keys[:1])])
    assert engine.touched == 6 + 6 + 1 + 3


def test_an_engine_without_a_daemon_keeps_nothing(start_daemon: StartDaemon, start: Start) -> None:
    daemon = start_daemon(memory="64MiB")
    engine = start(daemon)
    daemon.kill()
    until(lambda: not engine.store.available, "it knows")
    engine.admit(Node(names(4)))
    assert not engine.store._used
    daemon.start()
    until(lambda: engine.store.available, "it is connected again")
    engine.store.suspend()
    engine.admit(Node(names(4)))
    assert not engine.store._used, "these are pages of weights that change"


def test_what_waits_to_be_told_of_ends_with_the_weights(start_daemon: StartDaemon, start: Start) -> None:
    """These pages have not been used by their new names."""
    engine = start(start_daemon(memory="64MiB"))
    engine.admit(Node(names(4)))
    engine.store.suspend()
    engine.store.renew(17)
    assert not engine.store._used


def test_many_prompts_are_told_in_requests_that_fit(
    start_daemon: StartDaemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of more than are remembered the last ones."""
    engine, keys = start(start_daemon("limits.keys_per_request=5", memory="64MiB")), names(12)
    assert engine.store.store([engine.rank.fill(keys)])["kv"].all()
    engine.admit(Node(keys))
    until(lambda: engine.touched == 12, "in time, without a store")
    assert engine.store._used.maxlen == pagestore._USED_MAX


def test_sglang_lives_with_a_bug_of_ours(start_daemon: StartDaemon, start: Start, caplog: Any) -> None:
    """Whatever it may have changed: its scheduler goes on."""
    engine = start(start_daemon(memory="64MiB"))
    with caplog.at_level(logging.ERROR):
        engine.admit(Node(names(2)), last_node="no node")
    assert "a bug in _tell_hits" in caplog.text
    assert engine.adder.accounted == [("r", 2 * PAGE)]


@pytest.mark.parametrize("seat", ["storage", "linker"])
def test_either_seat_is_told(start_daemon: StartDaemon, sglang: SimpleNamespace, seat: str) -> None:
    """Started as SGLang starts it."""
    daemon, head, tail = start_daemon(memory="64MiB"), Node(names(4)), names(2, "tail")
    tests = importlib.import_module(f"tests.integrations.sglang.test_{seat}")
    rank: Any = tests.StorageRank(daemon).start() if seat == "storage" else tests.LinkerRank(daemon.socket)
    begun: Any = getattr(rank, seat)

    def store(keys: list[str]) -> bool:
        return all(begun.batch_set_v1(keys, rank.slots(0, len(keys)))) if seat == "storage" else rank.store(keys)

    until(lambda: begun._pages.available, "it is connected")
    assert store(head.keys)
    request = sglang.request("r")
    request.last_node = head
    sglang.adder(sglang.tree())._account_prefill_cache_admission(request, head.pages * sglang.tree.page_size)
    assert store(tail)
    assert daemon.status()["cache"]["keys_touched"] == 4
    begun.close()


def test_one_rank_is_enough(start_daemon: StartDaemon, sglang: SimpleNamespace) -> None:
    """Each page would count as used as often as there are ranks."""
    daemon, engine = start_daemon(memory="64MiB"), importlib.import_module(f"{ADAPTER}.engine")
    storages = importlib.import_module("tests.integrations.sglang.test_storage")
    reports = []
    for number in (1, 0):
        sglang.parallel.attn_tp_rank = number
        rank = storages.StorageRank(daemon).start()
        reports.append(rank.storage._pages in engine._TOLD_OF_HITS)
        rank.storage.close()
    assert reports == [False, True]
