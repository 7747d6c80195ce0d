"""The boundary to SGLang's threads: a bug here costs a request its computation, not the engine its life."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvoffloadd.integrations.common.bugs import log_bug

R = TypeVar("R")

logger = logging.getLogger("sglang.kvoffloadd")


def or_else(answer: Callable[..., R]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Returns a decorator with which a method never raises. `answer` makes its result of its arguments then. Each bug
    is logged once.
    """

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def guarded(self: object, *arguments: Any, **named: Any) -> R:
            try:
                return method(self, *arguments, **named)
            except Exception as error:  # noqa: BLE001  the boundary, logged
                log_bug(logger, method.__qualname__, error)
                return answer(*arguments, **named)

        return guarded

    return decorate
