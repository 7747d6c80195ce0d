"""A link that threads share, and use only while the daemon answers, so that a daemon that is gone costs nothing.

Each purpose has a separate one, so that a long load never delays a lookup. Requests never connect: `keep`, which
another thread calls, does. Ownership: the thread that holds the mutex has the inner link, and closes it when it
releases the mutex, if the shared one was closed meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TypeVar

import numpy as np

from kvoffloadd.client import Client, Job, JobDeadlineError, KeyState, KvCache, Outcome, Ready
from kvoffloadd.integrations.common.keys import Piece
from kvoffloadd.integrations.common.link import DaemonLink
from kvoffloadd.model import BoolArray, Direction, U32Array

R = TypeVar("R")

logger = logging.getLogger("sglang.kvoffloadd")

Chunks = Mapping[int, tuple[bytes, U32Array]]
"""Group -> packed keys and their block ids (keys,)."""

_LOOK_S = 0.05
_CLOSE_S = 2.0
_WAIT_WARNING_S = 30.0
_REST_WARNING_S = 15.0


class SharedLink:
    """Shares a link. Whatever the daemon does, all methods but `carry`, `rest` and `keep` return within the client's
    deadline, or three more if they meet a `keep` whose greeting, ping and clear are answered late.
    """

    def __init__(self, client: Client, caches: KvCache, *, job_deadline_s: float, warning: str = "") -> None:
        """Stores its arguments; does not connect yet. `warning`: logged when the daemon is lost; empty: another link's
        is enough.
        """
        self._resting = threading.Event()
        self._closed = threading.Event()
        self._job_deadline_s = job_deadline_s
        self._link = DaemonLink(client, caches, logger, lost=warning, refused="the daemon has refused a request")
        self._mutex = threading.Lock()
        self._carrying = threading.Lock()  # beneath the mutex: during each copy

    @property
    def connected(self) -> bool:
        """Whether the daemon answered last."""
        return self._link.connected and not self._closed.is_set()

    def ask(self, call: Callable[[Client], R]) -> R | None:
        """Returns the answer; None: no daemon has given one."""
        with self._taken() as link:
            return None if link is None else link.ask(call)

    def attempt(self, call: Callable[[Client], object]) -> bool:
        """Returns whether the daemon has answered."""
        with self._taken() as link:
            return link is not None and link.attempt(call)

    def supports(self, feature: str) -> bool:
        """Returns whether the daemon answered last, and has this feature."""
        return self.connected and feature in self._link.client.features

    def pieces(self, counts: Mapping[int, int], first: Mapping[int, int]) -> Iterator[tuple[Piece, dict[int, int]]]:
        """Yields the keys that each request may name: see `DaemonLink.pieces`."""
        return self._link.pieces(counts, first)

    def clear(self, token: bytes) -> None:
        """Drops the keys of the namespace; where no daemon answers, in a later `keep`. `token`: see `DaemonLink`."""
        self._link.want_clear(token)
        with self._taken() as link:
            if link is not None:
                link.clear()

    @property
    def clearing(self) -> bool:
        """Whether a clear is wanted that no daemon has carried out yet."""
        return self._link.clearing

    def carry(self, direction: Direction, chunks: Chunks, ready: Ready | None = None) -> dict[int, BoolArray]:
        """Copies pages. Returns bool (keys,) for each group: what was loaded, or what the daemon has or is just being
        given.

        `ready`: when the blocks may be touched; None: now. It returns when the engine owns the blocks again, however
        long that takes: a daemon that hangs may still write to them.
        """
        done = {group: np.zeros(blocks.size, np.bool_) for group, (_, blocks) in chunks.items()}
        with self._taken(gives_way=True) as link:
            if link is None:
                return done
            with self._carrying:
                if not self._resting.is_set():
                    # A load that waited for a store that hosts share would keep SGLang's one thread from all others.
                    begun = link.submit(direction, chunks, deadline_s=self._job_deadline_s, ready=ready, local=True)
                    for _, job in begun.jobs:  # all of them first: no bug gives pages back that a job still has
                        self._await(job)
                    for piece, job in begun.jobs:
                        self._take(piece, job, done)
        return done

    def keep(self) -> None:
        """Connects, or checks whether the daemon still answers. Does nothing during a call, which finds that out
        itself.
        """
        if not self._mutex.acquire(blocking=False):
            return
        try:
            # Refused requests put the next attempt off, but a link that counts as connected is checked all the same.
            if (self._link.connected or not self._link.retry_in_s) and not self._closed.is_set():
                self._link.connect()
        finally:
            self._let_go()

    def rest(self) -> None:
        """Returns when nothing is carried, however long that takes. Until `resume` nothing is, and `carry` waits for
        nothing: not even for a `keep` that waits for a daemon that hangs.
        """
        self._resting.set()
        waiting_since = monotonic()
        while not self._carrying.acquire(timeout=_REST_WARNING_S):
            waited_s = monotonic() - waiting_since
            logger.warning("kvoffloadd: SGLang's flush waits for the daemon to end a copy: %.0f s", waited_s)
        self._carrying.release()

    def resume(self) -> None:
        """Ends the effect of `rest`."""
        self._resting.clear()

    def close(self, deadline_s: float) -> None:
        """Ends the session, or leaves that to the call that is under way at the deadline. Blocks that the daemon has
        not given back by then stay its own until this process ends.
        """
        self._closed.set()
        if self._mutex.acquire(timeout=deadline_s):
            self._let_go(deadline_s)

    # --- the mutex -------------------------------------------------------------------------------

    @contextmanager
    def _taken(self, *, gives_way: bool = False) -> Iterator[DaemonLink | None]:
        """Yields the link, with the mutex. None: no daemon answers. `gives_way`: None, too, if this one rests before
        the mutex is free.
        """
        if not self.connected:
            yield None
            return
        alone = self._mutex.acquire(timeout=_LOOK_S)
        while not alone and not (gives_way and self._resting.is_set()):
            alone = self._mutex.acquire(timeout=_LOOK_S)
        try:
            # The daemon may have been lost during another call.
            yield self._link if alone and self.connected else None
        finally:
            if alone:
                self._let_go()

    def _let_go(self, close_s: float = _CLOSE_S) -> None:
        """Releases the mutex. If the link was closed meanwhile, its holder closes the client."""
        if self._closed.is_set():
            self._link.close(close_s)
        self._mutex.release()

    # --- with the mutex --------------------------------------------------------------------------

    def _await(self, job: Job) -> None:
        """Returns when the job has ended."""
        waiting_since = monotonic()
        while not job.done:
            try:
                self._link.client.wait(job, _WAIT_WARNING_S)
            except JobDeadlineError:
                waited_s = monotonic() - waiting_since
                logger.warning("kvoffloadd: still waiting for the daemon to end a %s: %.0f s", job.direction, waited_s)

    def _take(self, piece: Piece, job: Job, done: dict[int, BoolArray]) -> None:
        """Records how a job has ended. One that ended without a report counts as not done."""
        result = job.result
        if result is None or result.outcome is Outcome.LOST:
            self._link.connected = False  # until `keep` has checked whether there is a daemon
            return
        for index, (group, span) in enumerate(piece.items()):
            copied = result.valid(index)
            if job.direction is Direction.STORE:
                copied |= np.isin(result.states[index], (KeyState.HIT, KeyState.PENDING))
            done[group][span] = copied
