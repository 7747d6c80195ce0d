"""One way to call all clients, so that each test runs on each of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import uvloop

from kvoffloadd.client import AsyncClient, Client, NamespaceSpec

NAMESPACE = NamespaceSpec(model="test")


class OnLoop:
    """An AsyncClient that is called like a Client: each call runs its loop until it returns."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop], *args: Any, **kwargs: Any) -> None:
        self._client = AsyncClient(*args, **kwargs)
        self._loop = new_loop()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._loop.run_until_complete(found(*args, **kwargs))

        return call

    def __enter__(self) -> OnLoop:
        self.connect()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def end(self) -> None:
        self._loop.close()


MAKERS: dict[str, Callable[..., Any]] = {
    "blocking": Client,
    "asyncio": functools.partial(OnLoop, asyncio.new_event_loop),
    "uvloop": functools.partial(OnLoop, uvloop.new_event_loop),
}
