"""Closes descriptors that peers have sent, in a thread per user.

The close that drops the last reference to a file runs code of its file system or protocol, and may take as long as a
peer likes (a TCP socket that lingers; a file of a FUSE server that never answers FLUSH). No other part of the daemon
closes a descriptor that came from a peer, or a socket with a queue that may hold one. Before Linux 6.16 peers can put
descriptors there before they are admitted: each such connection costs one of the daemon's own for as long as that
user's thread is stuck, and nothing bounds their number.

Ownership: the event loop alone, except for the threads, which close numbers and touch nothing else. Each user has a
separate thread, so that one user's descriptors delay no other user. They are daemon threads: the process ends without
them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvoffloadd.errors import BusyError, LimitError
from kvoffloadd.linux.sockets import carries_nothing
from kvoffloadd.scheduling.lanes import Deliveries
from kvoffloadd.scheduling.stuckdetector import StuckDetector

log = logging.getLogger(__name__)

STRANGERS = -1
"""The key of the thread that closes for all users that were never admitted."""

LOOK_S = 1.0
STUCK_S = 5.0
"""A user is turned away if descriptors wait for this long and none of them has been closed."""

SPARE = 64
"""The descriptors that a user may have here above `limits.fds`, for frames that get a specific error."""

_Batch = tuple["Sequence[int]", "Callable[[None], None]"]


@dataclass(slots=True, eq=False)
class _Queue:
    """The work of one closing thread."""

    batches: queue.SimpleQueue[_Batch] = field(default_factory=queue.SimpleQueue)
    held: int = 0  # descriptors that its users have sent and that are not closed
    waiting: int = 0  # batches that the thread has not finished
    since_s: float = 0.0  # when the thread began the first of them, or last closed one
    patience: StuckDetector = field(default_factory=lambda: StuckDetector(LOOK_S))
    stuck: bool = False  # its thread does not return from a close


class DescriptorCloser:
    """Closes descriptors off the loop. `uids`: users that get their threads at once: later that may be impossible."""

    def __init__(self, loop: asyncio.AbstractEventLoop, uids: Iterable[int] = ()) -> None:
        self._loop = loop
        self._deliveries = Deliveries("closer", loop)
        self._queues: dict[int, _Queue] = {}
        self._timer: asyncio.TimerHandle | None = None
        for uid in (STRANGERS, *uids):
            self._start(uid)

    def admit(self, uid: int) -> None:
        """Makes a separate thread for this user, which closes the user's descriptors from now on.

        Raises:
            LimitError: the user's thread is stuck.
            BusyError: no thread can be made for the user.
        """
        if uid not in self._queues:
            try:
                self._start(uid)
            except RuntimeError as error:
                raise BusyError(f"the daemon can't start a thread for uid {uid}: {error}") from None
        _check_moves(self._queues[uid], uid)

    def _start(self, uid: int) -> None:
        if uid not in self._queues:
            made = _Queue()
            work = (made.batches, self._deliveries)
            threading.Thread(target=_close_numbers, args=work, name=f"kvo-close-{uid}", daemon=True).start()
            self._queues[uid] = made

    def hold(self, uid: int, count: int) -> None:
        """Adds `count` to this user's descriptors, until `close`."""
        self._of(uid).held += count

    def check(self, uid: int, cap: int) -> None:
        """Raises LimitError if this user has more than `cap` descriptors here, and some to spare, or the user's thread
        is stuck.
        """
        user_queue = self._of(uid)
        _check_moves(user_queue, uid)
        if user_queue.held > cap + SPARE:
            raise LimitError(
                f"uid {uid} has sent {user_queue.held} descriptors that are not closed yet; the cap is {cap}"
            )

    def close(self, uid: int, fds: Sequence[int], done: Callable[[], None] | None = None) -> None:
        """Closes held descriptors off the loop, in this order and after all earlier ones. `done` is called afterwards,
        on the loop.
        """
        if not fds:
            return
        user_queue = self._of(uid)

        def closed(_: None) -> None:
            user_queue.held -= len(fds)
            user_queue.waiting -= 1
            user_queue.since_s = time.monotonic()
            if done is not None:
                done()

        if not user_queue.waiting:
            user_queue.since_s = time.monotonic()
        user_queue.waiting += 1
        user_queue.batches.put((fds, closed))
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def close_socket(self, uid: int, sock: socket.socket, done: Callable[[], None] | None = None) -> None:
        """Closes a socket with its queue, at once if no descriptors are in it. The loop must not watch it any more.
        `done`: as for `close`, or called at once.
        """
        if not carries_nothing(sock):
            self.hold(uid, 1)
            self.close(uid, [sock.detach()], done)
            return
        sock.close()
        if done is not None:
            done()

    def _of(self, uid: int) -> _Queue:
        return self._queues.get(uid) or self._queues[STRANGERS]

    def _look(self) -> None:
        """Finds the threads that close nothing."""
        self._timer, now = None, time.monotonic()
        for uid, q in self._queues.items():
            was_stuck, q.stuck = q.stuck, q.patience.is_over(now - q.since_s if q.waiting else 0.0, now, STUCK_S)
            if q.stuck and not was_stuck:
                log.warning("a descriptor that uid %d has sent can't be closed: its sessions are refused", uid)
        if any(q.waiting for q in self._queues.values()):
            self._timer = self._loop.call_later(LOOK_S, self._look)


def _check_moves(user_queue: _Queue, uid: int) -> None:
    if user_queue.stuck:
        raise LimitError(
            f"a descriptor that uid {uid} has sent can't be closed (a lingering socket, or a file system that does not "
            "answer); until it is closed, this uid is refused"
        )


def _close_numbers(batches: queue.SimpleQueue[_Batch], deliveries: Deliveries) -> None:
    """Runs in a closing thread."""
    while True:
        fds, closed = batches.get()
        for fd in fds:
            try:
                os.close(fd)
            except OSError as error:  # the descriptor is gone in any case; EBADF is a bug in the daemon
                if error.errno == errno.EBADF:
                    log.error("a descriptor was closed twice")
        deliveries.put(closed, None)
        del fds, closed
