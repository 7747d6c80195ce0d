"""Ready signals: waits until a worker's stream marks its blocks as final.

A signal is a u64 in shared memory that only grows: a worker's stream raises it after the work that a job depends on
(cuStreamWriteValue64 to registered host memory, see docs/PROTOCOL.md). Reading it costs no call and no GPU work, and
nothing remains of a worker that dies: no work that waits for the signal is ever queued on a GPU.

Ownership
    _lock       guards `_words`, `_waits`, `_newest_s`, `_fresh`, `_look_s`, `_leaving`. The loop adds and removes
                waits, the thread removes those that have ended.
    signals     are read by the thread alone, and without the lock: a page that is being punched out blocks the
                thread that touches it, for as long as its owner likes. So each user has a thread, and the loop
                keeps all deadlines. A wait that is cancelled during a poll ends after the poll.
    Wait        the loop calls `done`, and not once the wait is over; the rest never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvoffloadd.device.copyruns import read_words
from kvoffloadd.device.peruser import PerUser
from kvoffloadd.errors import UsageError
from kvoffloadd.model import Outcome, U64Array
from kvoffloadd.scheduling.lanes import DAEMON, Deliveries

POLL_MIN_S, POLL_MAX_S = 20e-6, 1e-3
_PATIENCE = 1 / 16
"""The pause before the next poll, as a share of the age of the youngest wait; up to `POLL_MAX_S`."""
_LONG_PATIENCE, _LONG_POLL_MAX_S = 1 / 1000, 10e-3
"""The same for waits that have lasted seconds."""
_LOOK_SHARE = 4
"""The pause after a poll is at least this multiple of the poll's duration."""


class ReadySignal(NamedTuple):
    """When a job may begin: once the u64 at `address`, which is aligned, is at least `value`."""

    address: int
    value: int


@dataclass(slots=True, eq=False)
class SignalWait:
    """One wait. `done`: None once it is over, so that it keeps nothing of a job alive."""

    ready: ReadySignal
    done: Callable[[Outcome], None] | None
    watcher: _Watcher
    began_s: float = field(default_factory=time.monotonic)

    def busy_s(self, now: float) -> float:
        """Returns the seconds that the thread has spent in its present poll; 0 while it pauses. `now`: of
        time.monotonic().
        """
        return self.watcher.busy_s(now)


_Heap = list[tuple[float, int, SignalWait]]


class _Words:
    """The distinct words with waits: one read of each serves all of its waits."""

    def __init__(self) -> None:
        self._count = 0
        self._addresses = np.zeros(16, np.uint64)
        self._least = np.zeros(16, np.uint64)  # for each word, the least value with a wait
        self._words: list[_Word] = []
        self._by_address: dict[int, _Word] = {}
        self._numbers = itertools.count()

    def add(self, wait: SignalWait) -> None:
        """Adds a wait. Its word is read from now on."""
        word = self._by_address.get(wait.ready.address)
        if word is None:
            if self._count == len(self._addresses):
                self._addresses, self._least = (np.resize(a, 2 * len(a)) for a in (self._addresses, self._least))
            word = self._by_address[wait.ready.address] = _Word(wait.ready.address, self._count)
            self._words.append(word)
            self._addresses[word.at] = word.address
            self._count += 1
        word.waits += 1
        _push(word.heap, (wait.ready.value, next(self._numbers), wait), word.waits)
        self._least[word.at] = word.heap[0][0]

    def discard(self, wait: SignalWait) -> None:
        """Removes a wait. Its word is read no more if this was its last wait."""
        word = self._by_address[wait.ready.address]
        word.waits -= 1
        if word.waits:
            return
        del self._by_address[word.address]
        self._count -= 1
        last = self._words.pop()
        if last is not word:
            self._words[word.at] = last
            for column in (self._addresses, self._least):
                column[word.at] = column[last.at]
            last.at = word.at

    def snapshot(self) -> _Snapshot:
        """Returns the words to read now."""
        return _Snapshot(list(self._words), self._addresses[: self._count].copy(), self._least[: self._count].copy())

    def ended(self, word: _Word, value: int, lost: bool) -> Iterator[tuple[SignalWait, Outcome]]:
        """Returns those of its waits that are over now, in the order of their values: DONE, or FAILED if the word is
        gone. The caller discards them.
        """
        while word.heap and (lost or word.heap[0][0] <= value):
            _, _, wait = heapq.heappop(word.heap)
            if wait.done is not None:
                yield wait, Outcome.FAILED if lost else Outcome.DONE
        if word.heap and self._by_address.get(word.address) is word:
            self._least[word.at] = word.heap[0][0]


class _Snapshot(NamedTuple):
    """Serves one poll, which needs no lock. `least`: for each word, the least value with a wait."""

    words: list[_Word]
    addresses: U64Array
    least: U64Array

    def due(self) -> list[tuple[_Word, int, bool]]:
        """Reads all of them. Returns the words that have reached their values, these values, and whether the words are
        gone.
        """
        values, gone = read_words(self.addresses)
        indices = np.flatnonzero(gone | (values >= self.least))
        return list(
            zip([self.words[i] for i in indices], values[indices].tolist(), gone[indices].tolist(), strict=True)
        )


@dataclass(slots=True, eq=False)
class _Word:
    """One word. `heap`: waits by value, including finished ones until they reach the top. `waits`: the others."""

    address: int
    at: int
    heap: _Heap = field(default_factory=list)
    waits: int = 0


def _push(heap: _Heap, entry: tuple[float, int, SignalWait], alive: int) -> None:
    """Adds a wait. Finished waits stay in a heap until they reach its top, or are as many as the others."""
    if len(heap) > 2 * alive + 16:
        heap[:] = [other for other in heap if other[2].done is not None]
        heapq.heapify(heap)
    heapq.heappush(heap, entry)


class _Watcher:
    """The waits of one user, and the thread that polls. `name`: the thread's."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waits: dict[SignalWait, None] = {}
        self._words = _Words()
        self._newest_s = 0.0
        self._fresh = False
        self._look_s: float | None = None  # since when the thread polls
        self._leaving: list[Callable[[Outcome], None]] = []
        self._deliveries = Deliveries(name, loop)
        self._closing = False
        # At once: when the first job waits, it may be impossible to make a thread.
        threading.Thread(target=self._poll, name=f"kvo-{name}", daemon=True).start()

    def __len__(self) -> int:
        return len(self._waits)

    def busy_s(self, now: float) -> float:
        with self._lock:
            return 0.0 if self._look_s is None else max(now - self._look_s, 0.0)

    def wait(self, ready: ReadySignal, done: Callable[[Outcome], None]) -> SignalWait:
        wait = SignalWait(ready, done, self)
        with self._lock:
            self._waits[wait] = None
            self._words.add(wait)
            self._newest_s = wait.began_s
            self._fresh = True
            self._changed.notify()
        return wait

    def cancel(self, wait: SignalWait) -> bool:
        with self._lock:
            done = self._end(wait)
            if done is None:
                return False
            if self._look_s is not None:
                self._leaving.append(done)
                return False
            return True

    def _end(self, wait: SignalWait) -> Callable[[Outcome], None] | None:
        """Removes a wait. Returns the callback for its end; None: it was over."""
        done, wait.done = wait.done, None
        if done is not None:
            del self._waits[wait]
            self._words.discard(wait)
        return done

    def close(self) -> None:
        with self._lock:
            self._closing = True
            dropped = [done for wait in list(self._waits) if (done := self._end(wait)) is not None]
            if self._look_s is not None:
                self._leaving += dropped
                dropped = []
            self._changed.notify()
        for done in dropped:
            self._deliveries.put(done, Outcome.CANCELLED)

    # --- the thread -----------------------------------------------------------------------------------

    def _poll(self) -> None:
        while not self._closing:
            began_s = time.monotonic()
            due = self._look(began_s)
            with self._lock:
                self._look_s = None
                ended = [(done, Outcome.CANCELLED) for done in self._leaving]
                self._leaving.clear()
                ended += self._over(due)
                lasted_s = began_s - self._newest_s
            self._deliver(ended)
            del due, ended  # or the jobs would live until the next look
            with self._lock:
                if not self._fresh and not self._closing:
                    self._changed.wait(_pause_s(lasted_s, time.monotonic() - began_s) if self._waits else None)

    def _look(self, began_s: float) -> list[tuple[_Word, int, bool]]:
        """Returns what has ended so far. While memory is short, returns nothing: the next poll finds it."""
        with contextlib.suppress(MemoryError):
            with self._lock:
                self._look_s, self._fresh = began_s, False
                snapshot = self._words.snapshot()
            return snapshot.due()
        return []

    def _deliver(self, ended: list[tuple[Callable[[Outcome], None], Outcome]]) -> None:
        for done, outcome in ended:
            self._deliveries.put(done, outcome)

    def _over(self, due: list[tuple[_Word, int, bool]]) -> list[tuple[Callable[[Outcome], None], Outcome]]:
        """Ends the waits that are due. Returns their callbacks and outcomes."""
        over = [end for word, value, lost in due for end in self._words.ended(word, value, lost)]
        return [(done, outcome) for wait, outcome in over if (done := self._end(wait)) is not None]


class Signals:
    """All waits of the daemon. Each admitted user has a thread that reads the words of that user; see `PerUser`, also
    for `trusted`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, trusted: Collection[int] | None = None) -> None:
        self._watchers = PerUser(lambda suffix: _Watcher(f"signals{suffix}", loop), trusted)
        self._closing = False

    def __len__(self) -> int:
        """Returns the number of waits under way."""
        return sum(map(len, self._watchers))

    def admit(self, uid: int) -> None:
        """Makes this user's thread. Raises RuntimeError if none can be made."""
        self._watchers.admit(uid)

    def wait(self, ready: ReadySignal, done: Callable[[Outcome], None], uid: int = DAEMON.uid) -> SignalWait:
        """Calls `done` on the loop, never within this call, once: with DONE when the worker is ready, with FAILED when
        the word's page is gone, with CANCELLED at `close`. `uid`: the owner of the memory. The caller keeps the
        deadline.

        The caller ensures that the address stays mapped until then, or until `cancel`.

        Raises:
            UsageError: closed.
        """
        if self._closing:
            raise UsageError("signals: closed")
        return self._watchers.of(uid).wait(ready, done)

    def cancel(self, wait: SignalWait) -> bool:
        """Ends a wait. Returns True if its signal is not read any more, and `done` is not called. False: `done` was or
        will be called, with CANCELLED if nothing else came before; the signal may be read until then.
        """
        return wait.watcher.cancel(wait)

    def close(self) -> None:
        """Cancels all waits and ends the threads."""
        self._closing = True
        for watcher in self._watchers:
            watcher.close()


def _pause_s(lasted_s: float, look_s: float) -> float:
    """Returns the pause until the next poll, if the youngest wait has lasted `lasted_s`, and the last poll took
    `look_s`.
    """
    pause_s = max(min(lasted_s * _PATIENCE, POLL_MAX_S), min(lasted_s * _LONG_PATIENCE, _LONG_POLL_MAX_S), POLL_MIN_S)
    return max(pause_s, min(_LOOK_SHARE * look_s, POLL_MAX_S))
