"""The scheduler's line to the daemon: a thread that asks what was queued, so that the scheduler never waits.

Ownership: the thread alone has the client. The scheduler's thread queues commands and takes answers; a `Question` is
the scheduler's until it is queued, the thread's until it is answered, and the scheduler's again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.client import KeyState
from kvoffloadd.client.dialer import backoffs
from kvoffloadd.errors import ConnectionLostError, DeadlineError, KvOffloadError, RemoteError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvoffloadd.client import Client, Found, KvCache, Registration

logger = logging.getLogger("vllm.kvoffloadd")

_PROMOTION_POLL_S = 0.002
_HEARTBEAT_S = 1.0
_BACKOFF_MAX_S = 2.0


@dataclass(slots=True, eq=False)
class Question:
    """Keys of one request that are pinned together. `states`: group -> u8 KeyState per key, once it is answered.

    `promoting`: it will be answered once more, when keys have come from disk. `lease`: what to release, 0: nothing.
    """

    request: str
    groups: dict[int, list[bytes]]
    states: dict[int, bytes] = field(default_factory=dict)
    promoting: bool = False
    lease: int = 0
    abandoned: bool = False
    found: Found | None = None


class Asker:
    """Pins for a scheduler. All methods return at once; `answers` are what came since the last call."""

    def __init__(self, client: Client, groups: KvCache) -> None:
        """`groups`: what the engine's ranks register, without memory."""
        self._client = client
        self._groups = groups
        self._registration: Registration | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: deque[Question] = deque()
        self._promoting: list[Question] = []
        self._clearing = False
        self._closing = False
        self._warned = False
        self._pauses: Iterator[float] = backoffs()
        self._retry_at = 0.0
        self.connected = False
        """Whether the daemon could be asked last. Written by the thread, read by anybody."""
        self._thread = threading.Thread(target=self._run, name="kvoffloadd-asker", daemon=True)
        self._thread.start()

    # --- for the scheduler's thread ----------------------------------------------------------------

    def ask(self, question: Question) -> None:
        """Pin its keys."""
        self._commands.put(lambda: self._ask(question))

    def forget(self, question: Question) -> None:
        """Release its lease, whenever it comes."""
        question.abandoned = True
        self._commands.put(lambda: self._release(question))

    def clear(self) -> None:
        """Drop every key of the namespace, before anything that is asked from now on; as soon as there is a daemon."""
        self.connected = False  # what is looked up from now on misses until it is done

        def begin() -> None:
            self._clearing = True
            self._clear()

        self._commands.put(begin)

    def answers(self) -> Iterator[Question]:
        """Questions that were answered, once or anew."""
        while self._answers:
            yield self._answers.popleft()

    def close(self, deadline_s: float) -> None:
        """End the session, and with it every lease."""

        def stop() -> None:
            self._closing = True

        self._commands.put(stop)
        self._thread.join(deadline_s)

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._attempt(self._connect)
        while not self._closing:
            try:
                self._commands.get(timeout=_PROMOTION_POLL_S if self._promoting else _HEARTBEAT_S)()
            except queue.Empty:
                self._idle()
            if self._promoting:
                self._look_for_promotions()
        with suppress(KvOffloadError):
            self._client.close(_HEARTBEAT_S, force=True)

    def _connect(self) -> None:
        if self._registration is None:
            self._registration = self._client.register(self._groups)  # from now on after every reconnect again
        else:
            self._client.connect()

    def _idle(self) -> None:
        if self._promoting:
            return
        if self._clearing:
            self._clear()
        elif self.connected:
            self._attempt(self._client.ping)  # a death is to be known before the next request is promised anything
        elif monotonic() >= self._retry_at:
            self._attempt(self._connect)

    def _ask(self, question: Question) -> None:
        if question.abandoned:
            return
        found: list[Found] = []
        if self.connected and not self._clearing:
            packed = {group: b"".join(keys) for group, keys in question.groups.items()}
            self._attempt(lambda: found.append(self._client.pin(packed)))
        if not found:
            self._answer(question, None)
            return
        question.found = found[0]
        question.lease = found[0].lease
        question.promoting = not found[0].ready
        self._answer(question, found[0])
        if question.promoting:
            self._promoting.append(question)

    def _answer(self, question: Question, found: Found | None) -> None:
        if found is None:
            question.states = {group: bytes(len(keys)) for group, keys in question.groups.items()}
        else:
            question.states = {
                group: states.tobytes() for group, states in zip(question.groups, found.states, strict=True)
            }
        self._answers.append(question)

    def _look_for_promotions(self) -> None:
        waiting, self._promoting = self._promoting, []
        for question in waiting:
            found = question.found
            if question.abandoned or found is None:
                continue
            try:
                anew = self._client.wait_ready(found, _PROMOTION_POLL_S / 4)
            except DeadlineError:
                self._promoting.append(question)
                continue
            except KvOffloadError as error:
                self._failed(error)
                anew = None
            question.promoting = False
            question.found = anew
            self._answer(question, anew)

    def _release(self, question: Question) -> None:
        lease, question.lease = question.lease, 0
        if lease:
            # One that ended with its daemon, or its instance, is none to release; the library knows.
            self._attempt(lambda: self._client.release(lease))

    def _clear(self) -> None:
        done: list[object] = []
        self._attempt(lambda: done.append(self._client.clear()))
        if done:
            self._clearing = False
            self.connected = True

    def _attempt(self, call: Callable[[], object]) -> None:
        try:
            call()
        except ConnectionLostError:
            # A daemon that was started anew may be there already. What was asked counts as a miss all the same.
            self._attempt_once(self._connect)
        except KvOffloadError as error:
            self._failed(error)
        else:
            self._succeeded()

    def _attempt_once(self, call: Callable[[], object]) -> None:
        try:
            call()
        except KvOffloadError as error:
            self._failed(error)
        else:
            self._succeeded()

    def _succeeded(self) -> None:
        if self._warned:
            logger.info("kvoffloadd: the daemon answers again")
        self.connected = not self._clearing
        self._warned = False
        self._pauses = backoffs()
        self._retry_at = 0.0

    def _failed(self, error: KvOffloadError) -> None:
        refused = isinstance(error, RemoteError) and self.connected
        if not refused:
            self.connected = False
            self._retry_at = monotonic() + min(next(self._pauses) * 8, _BACKOFF_MAX_S)
        if not self._warned:
            self._warned = True
            what = "a lookup was refused" if refused else "no cache until the daemon answers"
            logger.warning("kvoffloadd: %s: %s", what, error)


def states_of(question: Question) -> dict[tuple[int, bytes], KeyState]:
    """(group, key) -> state, of an answered question."""
    return {
        (group, key): KeyState(int(state))
        for group, keys in question.groups.items()
        for key, state in zip(keys, np.frombuffer(question.states[group], np.uint8), strict=True)
    }
