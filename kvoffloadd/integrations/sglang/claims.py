"""Pages that requests want retained: which of each pool, and the queue of those that are yet to be claimed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.integrations.common.claims import FEATURE, TOO_OLD, Directive, WantedClaim, in_order, requests_of
from kvoffloadd.integrations.sglang import counters
from kvoffloadd.integrations.sglang.pools import KV, PagePool
from kvoffloadd.integrations.sglang.sharedlink import SharedLink
from kvoffloadd.model import U8Array

logger = logging.getLogger("sglang.kvoffloadd")

_WAITING_MAX = 1024
"""Limit of requests that wait to be claimed. Beyond it the oldest are lost."""


@dataclass(frozen=True, slots=True)
class RetainedPages:
    """What a request that has ended wants retained. `keys`: of its pages that SGLang has, from the first token on;
    `in_prompt`: how many of them end in the prompt.
    """

    directives: Sequence[Directive]
    keys: Sequence[str]
    in_prompt: int

    def spans(self, page_tokens: int, trailing: Mapping[str, int]) -> Iterator[tuple[Directive, dict[str, slice]]]:
        """Yields the pages of each directive that covers any, by pool. `trailing`: for each pool besides keys and
        values, how many of its last pages a prefix needs; 0: all.
        """
        ends = np.arange(1, len(self.keys) + 1) * page_tokens
        in_prompt = np.arange(len(self.keys)) < self.in_prompt
        for directive in in_order(self.directives):
            covered = np.flatnonzero(directive.covers(ends, in_prompt, page_tokens))
            if covered.size:
                begin, end = int(covered[0]), int(covered[-1]) + 1
                # A conversation goes on behind the answer, or behind the prompt. The prompt alone finds one page less,
                # since its last token is always computed.
                shortest = self.in_prompt if begin < self.in_prompt < end else end
                needed = {
                    pool: slice(max(begin, shortest - 1 - last) if last else begin, end)
                    for pool, last in trailing.items()
                }
                yield directive, {KV: slice(begin, end)} | needed


class ClaimQueue:
    """Claims what requests want retained. The scheduler's thread adds requests, and another one sends them."""

    def __init__(self, link: SharedLink, pools: Mapping[str, PagePool]) -> None:
        """Takes the link that carries the claims, and the rank's pools."""
        self._link = link
        self._pools = pools
        self._waiting: deque[RetainedPages] = deque()
        self._missed = False  # a daemon without claims was noticed

    def add(self, wanted: RetainedPages) -> None:
        """Queues what a request wants. Returns at once."""
        self._waiting.append(wanted)
        if len(self._waiting) > _WAITING_MAX:
            self._waiting.popleft()
            counters.LOST_CLAIMS.inc()

    def clear(self) -> None:
        """Drops all: the pages have other names from now on."""
        self._waiting.clear()

    def send(self, packed: Callable[[Sequence[str]], U8Array], trailing: Mapping[str, int]) -> None:
        """Claims all that wait. They are lost if the daemon does not answer. `packed`: returns u8 (keys, KEY_BYTES) for
        SGLang's names; `trailing`: as in `RetainedPages`.
        """
        while (wanted := self._next()) is not None:
            if not self._link.supports(FEATURE):
                self._lose(too_old=self._link.connected)
                continue
            claims = self._claims(wanted, packed(wanted.keys), trailing)
            made = [self._link.attempt(request) for request in requests_of(claims, self._link.pieces)]
            if not all(made):
                self._lose(too_old=False)

    def _next(self) -> RetainedPages | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _claims(self, wanted: RetainedPages, names: U8Array, trailing: Mapping[str, int]) -> Iterator[WantedClaim]:
        others = {pool: trailing.get(pool, 0) for pool in self._pools if pool != KV}
        for directive, pages in wanted.spans(self._pools[KV].tokens, others):
            spans = {self._pools[pool].group: span for pool, span in pages.items()}
            yield WantedClaim(
                directive,
                {group: names[span] for group, span in spans.items()},
                {group: span.start for group, span in spans.items()},
            )

    def _lose(self, *, too_old: bool) -> None:
        counters.LOST_CLAIMS.inc()
        if too_old and not self._missed:
            self._missed = True
            logger.warning(TOO_OLD)
