"""The clock of `bench_sglang`, and what is made of its timings; SGLang is not needed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.sglang.bench import DEAD, FIGURES, FILE, OUR, figures_of, options_of
from scripts.sglang.timed import CLASSES, SCHEDULER, StorageTimer


class Storage:
    """Has calls that are timed."""

    def batch_exists(self, keys: int) -> int:
        """Takes time, not the processor's."""
        time.sleep(0.02)
        return keys


class Tree:
    """SGLang's tree, which requests wait for."""

    def __init__(self) -> None:
        self.answers = iter((False, False, True))

    def prefetch_from_storage(self, _request: str) -> None: ...

    def check_prefetch_progress(self, _request: str) -> bool:
        return next(self.answers)


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[StorageTimer]:
    before = signal.getsignal(signal.SIGUSR2)
    yield StorageTimer(tmp_path)
    signal.signal(signal.SIGUSR2, before)


def test_calls_are_timed_by_thread(clock: StorageTimer, tmp_path: Path) -> None:
    def prefetch_thread_func() -> None:
        assert made().batch_exists(7) == 7

    made = type("Timed", (Storage,), {})
    clock.time(made, "batch_exists")
    clock.time(made, "there_is_none")
    thread = threading.Thread(target=prefetch_thread_func)
    thread.start()
    thread.join()
    made().batch_exists(1)
    Storage().batch_exists(1)  # the original is not touched
    tree = type("TimedTree", (Tree,), {})
    clock.await_prefetches(tree)
    one = tree()
    one.prefetch_from_storage("r1")
    while not one.check_prefetch_progress("r1"):
        pass
    assert int((tmp_path / "pid").read_text()) == os.getpid()
    os.kill(os.getpid(), signal.SIGUSR2)
    timings = json.loads((tmp_path / "timings.json").read_text())
    calls = {(thread, method): times for thread, method, times in timings["calls"]}
    assert {name: len(times) for name, times in calls.items()} == {
        ("prefetch_thread_func", "batch_exists"): 1,
        (SCHEDULER, "batch_exists"): 1,
    }
    took, processor = calls[SCHEDULER, "batch_exists"][0]
    assert took >= 0.02 > processor >= 0
    assert len(timings["waits_s"]) == 1
    assert timings["processor_s"][SCHEDULER] >= 0
    os.kill(os.getpid(), signal.SIGUSR2)
    assert json.loads((tmp_path / "timings.json").read_text())["calls"] == [], "it begins anew"


def test_figures() -> None:
    timings = {
        "calls": [
            ["prefetch_thread_func", "batch_exists", [[0.004, 0.002], [0.002, 0.001]]],
            ["backup_thread_func", "batch_set_v1", [[0.010, 0.004]]],
            [SCHEDULER, "get_stats", [[0.001, 0.001]]],
            [SCHEDULER, "match_prefix", [[0.006, 0.006]]],
        ],
        "waits_s": [0.001, 0.003, 0.002],
        "processor_s": {SCHEDULER: 1.0, "prefetch_thread_func": 0.004, "kvoffloadd-lines": 0.002},
    }
    assert figures_of(timings, 2) == pytest.approx(
        {
            "scheduler_ms": 0.5, "hooks_ms": 3.0, "wait_ms": 2.0, "lookup_ms": 3.0, "lookup_processor_ms": 1.5,
            "store_ms": 5.0, "store_processor_ms": 2.0, "threads_processor_ms": 3.0,
        }
    )  # fmt: skip
    assert figures_of(timings, 2).keys() == FIGURES.keys()


@pytest.mark.parametrize("who", [OUR, DEAD, FILE])
def test_options_name_timed_classes(who: str, tmp_path: Path) -> None:
    options = options_of(who, "storage", tmp_path / "s", tmp_path)
    config = json.loads(options["hicache_storage_backend_extra_config"])
    assert config["module_path"] == "scripts.sglang.timed"
    assert config["class_name"] in CLASSES
    assert config["timings"] == str(tmp_path)
    assert ("interface_v1" in config) == (who != FILE)
