"""The daemon ends if an error has left the cache's tables half-written, and for no other error."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.cache.memory.changing import CacheTornError, changing
from kvoffloadd.errors import LimitError
from kvoffloadd.server.context import Context

WHY = "a bug in the cache, whose tables may be half-written: IndexError: list index out of range"


def broken_off() -> None:
    with changing:
        [][7]


def not_in_a_change() -> None:
    [][7]


@pytest.fixture
def ends() -> list[str]:
    """The reasons for which the daemon was ended."""
    return []


@pytest.fixture
def context(ends: list[str]) -> Any:
    made: Any = SimpleNamespace(fatal=ends.append, tasks=set())
    for name in ("end_if_torn", "on_loop_error", "spawn", "_ended"):
        setattr(made, name, getattr(Context, name).__get__(made))
    return made


def raised(call: Any) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_a_change_that_broke_off_ends_it(context: Any, ends: list[str]) -> None:
    context.end_if_torn(raised(broken_off))
    assert ends == [WHY]


@pytest.mark.parametrize("error", [IndexError("7"), MemoryError(), LimitError("full"), OSError(5, "EIO")], ids=repr)
def test_no_other_error_does(context: Any, ends: list[str], error: Exception) -> None:
    context.end_if_torn(error)
    context.end_if_torn(raised(not_in_a_change))
    assert ends == []


def test_what_followed_does(context: Any, ends: list[str]) -> None:
    """A request gives back what it took, and another error comes of that."""

    def request() -> None:
        try:
            broken_off()
        finally:
            raise KeyError("it has nothing to give back")

    context.end_if_torn(raised(request))
    assert ends == [WHY]


@pytest.mark.parametrize(("call", "reasons"), [(broken_off, [WHY]), (not_in_a_change, [])])
async def test_callbacks_and_tasks_are_judged(context: Any, ends: list[str], call: Any, reasons: list[str]) -> None:
    loop = context.loop = asyncio.get_running_loop()
    loop.set_exception_handler(context.on_loop_error)
    loop.call_soon(call)
    await asyncio.sleep(0)
    assert ends == reasons

    async def work() -> None:
        call()

    await asyncio.wait([context.spawn(work())])
    await asyncio.sleep(0)
    assert ends == 2 * reasons
    await asyncio.wait([context.spawn(work(), errors_are_handled=True)])
    await asyncio.sleep(0)
    assert ends == 3 * reasons, "who was to handle it may have gone"


def test_it_is_no_error_that_was_raised_on_purpose() -> None:
    assert type(raised(broken_off)) is CacheTornError
