"""Hints of vLLM's requests that their keys are to be kept for a time, from the beginning of a request to its end:
`kvoffloadd.retain` in `kv_transfer_params`, and vLLM's hints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from kvoffloadd.integrations.common.claims import Directive
from kvoffloadd.integrations.common.hints import RETAIN, HintReader
from kvoffloadd.integrations.vllm.claims import RequestKeys
from kvoffloadd.integrations.vllm.keys import KeyNames

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

logger = logging.getLogger("vllm.kvoffloadd")


@dataclass(slots=True, eq=False)
class _Hinted:
    """The state of a request with hints. `in_prompt`: how many keys its prompt has; None: it was never scheduled."""

    context: ReqContext
    directives: Sequence[Directive]
    in_prompt: int | None = None


class RetainHints:
    """Keeps what requests ask to retain, from their beginning to their end. All methods belong to the scheduler's
    thread.
    """

    def __init__(self) -> None:
        self._reader = HintReader(logger)
        self._unscheduled: dict[str, _Hinted] = {}

    def begin(self, context: ReqContext) -> int:
        """Reads the hints of a new request. Returns how many of them are ignored."""
        params, hints = context.kv_transfer_params, context.kv_hints
        asked = params.get(RETAIN, UNSET) if params else UNSET
        if hints is None and asked is UNSET:
            return 0
        found = self._reader.read(() if hints is None else hints.actions, asked, "kv_transfer_params")
        if found.directives:
            hinted = self._unscheduled[context.req_id] = _Hinted(context, found.directives)
            context.set_state(hinted)
        return found.ignored

    def scheduled(self, requests: Iterable[str]) -> None:
        """Records that requests are about to run for the first time: from now on they get keys of their output, too."""
        for request in requests:
            hinted = self._unscheduled.pop(request, None)
            if hinted is not None:
                hinted.in_prompt = len(_positions(hinted.context))

    def finished(self, context: ReqContext, names: KeyNames) -> RequestKeys | None:
        """Returns what a request that has ended wants retained; None: nothing, or it never ran."""
        self._unscheduled.pop(context.req_id, None)
        hinted, ends = context.get_state(_Hinted), _positions(context)
        if hinted is None or hinted.in_prompt is None or not ends:
            return None
        return RequestKeys(hinted.directives, list(ends), list(ends.values()), hinted.in_prompt, names)


def _positions(context: ReqContext) -> dict[Any, int]:
    """Returns where the keys that vLLM has given a request end, in tokens, the first key first."""
    ends: dict[Any, int] = context._offload_key_positions
    return ends
