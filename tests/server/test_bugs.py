"""Which errors leave the cache's tables unsure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.memory import keys, lookup
from kvoffloadd.cache.memory.index import Index
from kvoffloadd.cache.policy import create_policy
from kvoffloadd.errors import KeyWidthError, LimitError
from kvoffloadd.server.bugs import leaves_cache_unsure


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def raiser(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def through_the_index(error: BaseException) -> BaseException:
    index = Index(10, 1)
    index.hash = raiser(error)  # type: ignore[method-assign]
    return raised(lambda: index.insert(0, np.zeros((1, 4), np.uint64)))


@pytest.mark.parametrize(
    "error", [IndexError(), MemoryError(), KeyError(), ValueError(), RuntimeError(), AssertionError()]
)
def test_what_nobody_raised_on_purpose_leaves_it_unsure(error: BaseException) -> None:
    assert leaves_cache_unsure(through_the_index(error))


@pytest.mark.parametrize("error", [LimitError("full"), OSError(5, "EIO"), TimeoutError()])
def test_what_was_raised_on_purpose_or_by_a_device_does_not(error: BaseException) -> None:
    assert not leaves_cache_unsure(through_the_index(error))


def test_only_what_came_through_the_cache_does() -> None:
    assert not leaves_cache_unsure(raised(raiser(IndexError())))
    assert not leaves_cache_unsure(IndexError())


def test_what_a_disk_meets_is_told_by_the_disk() -> None:
    disk: dict[str, Any] = {"__name__": "kvoffloadd.storage.disk.root"}
    exec("def fail(*_): raise IndexError", disk)
    index = Index(10, 1)
    index.hash = disk["fail"]  # type: ignore[method-assign]
    assert not leaves_cache_unsure(raised(lambda: index.insert(0, np.zeros((1, 4), np.uint64))))


def test_a_disk_that_calls_the_cache_back_tells_nothing_of_it() -> None:
    disk: dict[str, Any] = {"__name__": "kvoffloadd.storage.disk.root"}
    exec("def written(done): done()", disk)
    index = Index(10, 1)
    index.hash = raiser(IndexError())  # type: ignore[method-assign]
    assert leaves_cache_unsure(raised(lambda: disk["written"](lambda: index.insert(0, np.zeros((1, 4), np.uint64)))))


def test_pure_functions_change_nothing() -> None:
    assert isinstance(raised(lambda: keys.keys_array(bytes(9), 8)), KeyWidthError)
    for wrong in (
        lambda: keys.keys_array(None, 8),  # type: ignore[arg-type]
        lambda: lookup.restorable_boundaries([None]),  # type: ignore[list-item]
    ):
        assert not leaves_cache_unsure(raised(wrong))
    assert leaves_cache_unsure(raised(lambda: create_policy("lru", 1, 1).touch(np.array([5], np.uint32), None)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "room", ["kvoffloadd.device.signals", "kvoffloadd.device.host", "kvoffloadd.device.cuda.device"]
)
def test_what_a_device_is_short_of_is_told_by_the_device(room: str) -> None:
    device: dict[str, Any] = {"__name__": room}
    exec("def fail(*_): raise RuntimeError('can\\'t start new thread')", device)
    index = Index(10, 1)
    index.hash = device["fail"]  # type: ignore[method-assign]
    assert not leaves_cache_unsure(raised(lambda: index.insert(0, np.zeros((1, 4), np.uint64))))


@pytest.mark.parametrize("room", ["kvoffloadd.storage.memory", "kvoffloadd.lanes", "numpy"])
def test_what_is_no_room_of_its_own_below_the_cache_is_the_cache_s(room: str) -> None:
    below: dict[str, Any] = {"__name__": room}
    exec("def fail(*_): raise KeyError", below)
    index = Index(10, 1)
    index.hash = below["fail"]  # type: ignore[method-assign]
    assert leaves_cache_unsure(raised(lambda: index.insert(0, np.zeros((1, 4), np.uint64))))
