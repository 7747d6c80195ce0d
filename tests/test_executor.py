"""The daemon's threads for what runs off the loop now and then."""

from __future__ import annotations

import threading

import pytest

from kvoffloadd.daemon import EXECUTOR_THREADS, _executor
from kvoffloadd.errors import ConfigError


def beside() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvo-beside")]


def test_all_of_them_are_there_at_once() -> None:
    executor = _executor()
    assert len(beside()) == EXECUTOR_THREADS
    executor.shutdown()


def test_too_few_of_them_are_an_error_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = threading.Thread.start, 0

    def few(thread: threading.Thread) -> None:
        nonlocal made
        made += 1
        if made == EXECUTOR_THREADS - 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", few)
    with pytest.raises(ConfigError, match="can't start new thread"):
        _executor()
    for thread in beside():
        thread.join(20)
    assert beside() == []
