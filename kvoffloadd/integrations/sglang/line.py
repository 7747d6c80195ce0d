"""A line to the daemon: a client that is asked only while the daemon answers, so that one that is gone costs nothing.

Each of SGLang's threads has a line of its own, so that a long load never delays a lookup. Whoever asks never connects:
`keep`, which another thread calls, does. Ownership: whoever holds the mutex has the client, its registration and its
availability, and closes the client when it lets go of it, if the line was closed meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic
from typing import TypeVar

import numpy as np

from kvoffloadd.client import (
    Client,
    Job,
    JobConnectionLostError,
    JobDeadlineError,
    KeyState,
    KvCache,
    Outcome,
    Ready,
    Registration,
)
from kvoffloadd.errors import KvOffloadError, RemoteError
from kvoffloadd.integrations.common.availability import Availability
from kvoffloadd.integrations.common.keys import KEY_BYTES, Piece, most_keys, pieces
from kvoffloadd.model import BoolArray, Direction, U32Array

R = TypeVar("R")

logger = logging.getLogger("sglang.kvoffloadd")

Chunks = Mapping[int, tuple[bytes, U32Array]]
"""Group -> packed keys and their block ids (keys,)."""

_LOOK_S = 0.05
_CLOSE_S = 2.0
_WAIT_WARNING_S = 30.0
_REST_WARNING_S = 15.0
_REFUSAL_TOLD_S = 60.0


class Line:
    """All methods but `carry`, `rest` and `keep` return within the client's deadline, whatever the daemon does."""

    def __init__(self, client: Client, caches: KvCache, *, job_deadline_s: float, warning: str = "") -> None:
        """Connects to nothing yet. `warning`: logged when the daemon is lost; empty: another line's is enough."""
        self._up = threading.Event()
        self._resting = threading.Event()
        self._closed = threading.Event()
        self._client = client
        self._caches = caches
        self._job_deadline_s = job_deadline_s
        self._warning = warning
        self._registration: Registration | None = None
        self._daemon = Availability(logger)
        self._mutex = threading.Lock()
        self._carrying = threading.Lock()  # beneath the mutex: while anything is carried
        self._refusal_told_at = -_REFUSAL_TOLD_S

    @property
    def connected(self) -> bool:
        """Whether the daemon answered last."""
        return self._up.is_set()

    def ask(self, call: Callable[[Client], R]) -> R | None:
        """The answer; None: no daemon has given one."""
        if not self._up.is_set():
            return None
        with self._client_alone():
            if not self._up.is_set():  # lost while another call was under way
                return None
            try:
                return call(self._client)
            except KvOffloadError as error:
                self._failed(error)
                return None

    @property
    def shares_store(self) -> bool:
        """Whether the daemon that answered last has a store that hosts share."""
        return "remote" in self._client.features

    def most_keys(self, groups: int) -> int:
        """How many keys fit one request that names so many groups, without blocks."""
        return most_keys(self._client.limits, self._caches, groups)

    def carry(self, direction: Direction, chunks: Chunks, ready: Ready | None = None) -> dict[int, BoolArray]:
        """Copy pages. bool (keys,) for each group: what was loaded, or what the daemon has now or is just being given.

        `ready`: when the blocks may be touched; None: they may. It returns when the blocks are the engine's again,
        however long that takes: a daemon that hangs may still write to them.
        """
        done = {group: np.zeros(blocks.size, np.bool_) for group, (_, blocks) in chunks.items()}
        if not self._up.is_set():
            return done
        with self._client_alone(gives_way=True) as alone:
            if not alone:
                return done
            with self._carrying:
                if self._up.is_set() and self._registration is not None and not self._resting.is_set():
                    for piece, job in self._submit(self._registration, direction, chunks, ready):
                        self._take(piece, job, done)
        return done

    def keep(self) -> None:
        """Connect, or see whether the daemon still answers. Nothing while a call is under way: that one will learn."""
        if not self._mutex.acquire(blocking=False):
            return
        try:
            if not self._daemon.retry_in_s and not self._closed.is_set():
                self._connect()
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
        """Ends a `rest`."""
        self._resting.clear()

    def close(self, deadline_s: float) -> None:
        """End the session, or leave that to the call that is under way at the deadline. What the daemon has not given
        back by then stays its own until this process ends.
        """
        self._closed.set()
        self._up.clear()
        if self._mutex.acquire(timeout=deadline_s):
            self._let_go(deadline_s)

    # --- the mutex -------------------------------------------------------------------------------

    @contextmanager
    def _client_alone(self, *, gives_way: bool = False) -> Iterator[bool]:
        """Whether this thread has the mutex now. `gives_way`: not if the line rests before it is free."""
        alone = self._mutex.acquire(timeout=_LOOK_S)
        while not alone and not (gives_way and self._resting.is_set()):
            alone = self._mutex.acquire(timeout=_LOOK_S)
        try:
            yield alone
        finally:
            if alone:
                self._let_go()

    def _let_go(self, close_s: float = _CLOSE_S) -> None:
        """Releases the mutex."""
        if self._closed.is_set():
            self._up.clear()
            with suppress(KvOffloadError):
                self._client.close(close_s, force=True)
        self._mutex.release()

    # --- with the mutex --------------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            if self._registration is None:
                self._registration = self._client.register(self._caches)  # from now on after every reconnect again
            self._client.ping()  # a connection that still stands does not prove that anybody answers
        except KvOffloadError as error:
            if isinstance(error, RemoteError):
                self._tell_refusal(error)
            self._lost(error)
        else:
            self._daemon.succeeded()
            self._up.set()

    def _submit(
        self, registration: Registration, direction: Direction, chunks: Chunks, ready: Ready | None
    ) -> list[tuple[Piece, Job]]:
        """Jobs that may have the blocks, whatever went wrong."""
        jobs: list[tuple[Piece, Job]] = []
        # A load that waited for a store that hosts share would keep SGLang's one thread from all others.
        begin = self._client.store if direction is Direction.STORE else partial(self._client.load, local=True)
        most = most_keys(self._client.limits, self._caches, len(chunks), blocks_per_key=1)
        for piece in pieces({group: blocks.size for group, (_, blocks) in chunks.items()}, most):
            named = {
                group: (chunks[group][0][some.start * KEY_BYTES : some.stop * KEY_BYTES], chunks[group][1][some])
                for group, some in piece.items()
            }
            try:
                jobs.append((piece, begin(registration, named, deadline_s=self._job_deadline_s, ready=ready)))
            except (JobDeadlineError, JobConnectionLostError) as error:
                jobs.append((piece, error.job))
                self._lost(error)
                break
            except KvOffloadError as error:
                self._failed(error)
                break
        return jobs

    def _take(self, piece: Piece, job: Job, done: dict[int, BoolArray]) -> None:
        """Wait until the job has ended. Nothing of a job whose end was not told counts."""
        waiting_since = monotonic()
        while not job.done:
            try:
                self._client.wait(job, _WAIT_WARNING_S)
            except JobDeadlineError:
                waited_s = monotonic() - waiting_since
                logger.warning("kvoffloadd: still waiting for the daemon to end a %s: %.0f s", job.direction, waited_s)
        result = job.result
        if result is None or result.outcome is Outcome.LOST:
            self._up.clear()
            return
        for at, (group, some) in enumerate(piece.items()):
            copied = result.valid(at)
            if job.direction is Direction.STORE:
                copied |= np.isin(result.states[at], (KeyState.HIT, KeyState.PENDING))
            done[group][some] = copied

    def _failed(self, error: KvOffloadError) -> None:
        if isinstance(error, RemoteError):
            self._tell_refusal(error)
        else:
            self._lost(error)

    def _tell_refusal(self, error: RemoteError) -> None:
        if monotonic() - self._refusal_told_at >= _REFUSAL_TOLD_S:
            self._refusal_told_at = monotonic()
            logger.warning("kvoffloadd: the daemon has refused a request: %s", error)

    def _lost(self, error: KvOffloadError) -> None:
        self._up.clear()
        self._daemon.failed(error, self._warning)
