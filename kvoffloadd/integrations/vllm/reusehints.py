"""Hints of requests for their keys when they have ended: whether these will be used again soon, or not at all."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvoffloadd.client import KeepHow

logger = logging.getLogger("vllm.kvoffloadd")

KEEP = "kvoffloadd.keep"
"""Key in the `kv_transfer_params` of a request."""

_HOW: dict[object, KeepHow] = {"soon": "soon", "drop": "drop"}


@dataclass(slots=True, eq=False)
class _Kept:
    how: KeepHow
    keys: dict[OffloadKey, None] = field(default_factory=dict)  # in the order in which vLLM has named them
    stores: int = 0  # under way
    finished: bool = False


class ReuseHints:
    """The keys of those requests that give a hint, until the request and its last store have ended."""

    def __init__(self) -> None:
        self._requests: dict[str, _Kept] = {}
        self._warned = False

    def note(self, context: ReqContext, keys: Iterable[OffloadKey], *, stores: int = 0) -> None:
        """Adds keys to a request, and a number of stores under way."""
        if not context.kv_transfer_params or KEEP not in context.kv_transfer_params:
            return
        kept = self._requests.get(context.req_id)
        if kept is None:
            value = context.kv_transfer_params[KEEP]
            how = _HOW.get(value) if isinstance(value, str) else None
            if how is None:
                self._warn(value)
                return
            kept = self._requests[context.req_id] = _Kept(how)
        kept.keys.update(dict.fromkeys(keys))
        kept.stores += stores

    def stored(self, context: ReqContext) -> tuple[KeepHow, list[OffloadKey]] | None:
        """Records that a store has ended. If the request has, too, and it was the last store, returns the hint, and all
        its keys in the order of the prompt.
        """
        if (kept := self._requests.get(context.req_id)) is not None:
            kept.stores -= 1
        return self._complete(context)

    def finished(self, context: ReqContext) -> tuple[KeepHow, list[OffloadKey]] | None:
        """Records that the request has ended. Returns what `stored` does, if no store is under way."""
        if (kept := self._requests.get(context.req_id)) is not None:
            kept.finished = True
        return self._complete(context)

    def clear(self) -> None:
        """Drops all: the keys have other names from now on."""
        self._requests.clear()

    def _complete(self, context: ReqContext) -> tuple[KeepHow, list[OffloadKey]] | None:
        kept = self._requests.get(context.req_id)
        if kept is None or not kept.finished or kept.stores > 0:
            return None
        del self._requests[context.req_id]
        return kept.how, sorted(kept.keys, key=lambda key: _place(context, key))

    def _warn(self, value: object) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                'kvoffloadd: "%s" in kv_transfer_params is %r and is ignored; it is one of %s', KEEP, value, list(_HOW)
            )


def _place(context: ReqContext, key: OffloadKey) -> float:
    """Returns where a key ends in the prompt, in tokens."""
    end = context.get_offload_key_position(key)
    return math.inf if end is None else end
