"""A thread's link to the daemon. A daemon that is gone, restarts or refuses requests costs hits and raises no error."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from kvoffloadd.client import Client, Job, JobConnectionLostError, JobDeadlineError, KvCache, Ready, Registration
from kvoffloadd.client.connector import backoffs
from kvoffloadd.errors import ConnectionLostError, KvOffloadError, RemoteError
from kvoffloadd.integrations.common.bugs import log_bug
from kvoffloadd.integrations.common.keys import KEY_BYTES, Piece, most_keys, pieces
from kvoffloadd.model import Direction, U32Array
from kvoffloadd.protocol.messages import TOKEN_BYTES

R = TypeVar("R")

_RETRY_MAX_S = 2.0
_REFUSAL_LOGGED_S = 60.0
_AT_THE_BEGIN: Mapping[int, int] = MappingProxyType({})


class Submitted(NamedTuple):
    """The jobs of one `submit`, each with its keys. `whole`: every key of the call has a job."""

    jobs: list[tuple[Piece, Job]]
    whole: bool


class DaemonLink:
    """Keeps a client, its registration, and whether the daemon answers.

    One thread at a time calls its methods and has its client. Any thread may call `want_clear` and read `connected` and
    `clearing`. Pauses between attempts grow with each failure in a row, up to two seconds.
    """

    def __init__(
        self,
        client: Client,
        caches: KvCache,
        logger: logging.Logger,
        *,
        lost: str = "",
        refused: str = "",
        greet: Callable[[Client], object] = lambda client: client.ping(),
    ) -> None:
        """Stores its arguments; does not connect yet.

        Args:
            client: the client that makes the requests. The link closes it.
            caches: what `connect` and `submit` register with the daemon.
            logger: the engine's.
            lost: a warning, logged once until the daemon answers again. Empty: the warning of another link is enough.
            refused: a warning about refused requests, logged once a minute. Empty: refusals are not logged.
            greet: makes a request, because a connection that still stands does not prove that the daemon answers.
        """
        self.client = client
        self.connected = False
        """Whether the daemon answered last."""
        self.error: Exception | None = None
        """Why the last attempt failed; None: it did not, or there was none."""
        self._caches = caches
        self._logger = logger
        self._lost_warning, self._refusal_warning = lost, refused
        self._greet = greet
        self._registration: Registration | None = None
        self._former: Registration | None = None  # the daemon may still have its memory
        self._pauses = _pauses()
        self._retry_at = 0.0
        self._is_loss_logged = False
        self._refusal_logged_at = -_REFUSAL_LOGGED_S
        self._found: str | None = None  # the socket that was logged last
        self._wanted_clear = self._done_clear = b""  # tokens of the last clears

    @property
    def retry_in_s(self) -> float:
        """Returns how long to wait before the next attempt, in seconds; 0.0: it may be made now."""
        return max(self._retry_at - monotonic(), 0.0)

    # --- requests ----------------------------------------------------------------------------------

    def connect(self) -> None:
        """Connects and registers, or checks whether the daemon still answers, and requests a clear that is wanted. The
        link counts as connected only if all of it succeeds.
        """
        try:
            self._registered()  # repeated after every reconnect from now on
            self._greet(self.client)
            self._clear(self.client)
        except KvOffloadError as error:
            self.lost(error)
        else:
            self._succeeded()

    def attempt(self, call: Callable[[Client], object], *, reconnects: bool = False) -> bool:
        """Returns whether the daemon has answered. `reconnects`: connect to another daemon at once where this one went
        away.
        """
        try:
            call(self.client)
        except KvOffloadError as error:
            if reconnects and isinstance(error, ConnectionLostError):
                self.connect()
            elif self.connected and self.client.is_connected and isinstance(error, RemoteError):
                self._pause(error)
                self._log_refusal(error)
            else:
                self.lost(error)
            return False
        self._succeeded()
        return True

    def ask(self, call: Callable[[Client], R]) -> R | None:
        """Returns the answer; None: the daemon has given none."""
        answers: list[R] = []
        self.attempt(lambda client: answers.append(call(client)))
        return answers[0] if answers else None

    def pieces(
        self, counts: Mapping[int, int], first: Mapping[int, int] = _AT_THE_BEGIN, blocks_per_key: int = 0
    ) -> Iterator[tuple[Piece, dict[int, int]]]:
        """Yields pieces of a prompt with as many keys as one request may name, each with the position of every group's
        first key. `counts`: the keys of each group; `first`: their positions, 0 for groups that are not in it.
        """
        for piece in pieces(counts, most_keys(self.client.limits, self._caches, len(counts), blocks_per_key)):
            yield piece, {group: first.get(group, 0) + span.start for group, span in piece.items()}

    def submit(
        self,
        direction: Direction,
        groups: Mapping[int, tuple[bytes, U32Array]],
        first: Mapping[int, int] = _AT_THE_BEGIN,
        *,
        deadline_s: float,
        ready: Ready | None,
        **load_options: bool,
    ) -> Submitted:
        """Begins to store or load keys. The jobs may have their blocks, whatever went wrong, even a bug.

        Args:
            direction: whether keys are stored or loaded.
            groups: group -> packed keys and their blocks, (keys,) or (keys, blocks_per_key).
            first: as in `pieces`.
            deadline_s: as in `Client.store`, like `ready`.
            ready: when the blocks may be touched; None: now.
            load_options: options of `Client.load` alone.
        """
        load: Callable[..., Job] = self.client.load
        begin = self.client.store if direction is Direction.STORE else partial(load, **load_options)
        jobs: list[tuple[Piece, Job]] = []
        earlier: set[int] = set()
        requests: list[tuple[Piece, dict[int, int]]] = [({}, {})]  # until a daemon has reported how much fits a request

        def begin_all(_: Client) -> None:
            registration = self._registered()
            earlier.update(job.id for job in self.client.open_jobs())
            blocks_per_key = max((math.prod(blocks.shape[1:]) for _, blocks in groups.values()), default=1)
            requests[:] = self.pieces(
                {group: len(blocks) for group, (_, blocks) in groups.items()}, first, blocks_per_key
            )
            for piece, positions in requests:
                try:
                    job = begin(registration, _cut(groups, piece), first=positions, deadline_s=deadline_s, ready=ready)
                except (JobDeadlineError, JobConnectionLostError) as error:
                    jobs.append((piece, error.job))
                    raise
                jobs.append((piece, job))

        try:
            self.attempt(begin_all)
        except Exception as error:
            known = earlier.union(job.id for _, job in jobs)  # the request that failed may have begun its job, too
            begun = [job for job in self.client.open_jobs() if job.id not in known]
            jobs += zip((piece for piece, _ in requests[len(jobs) :]), begun, strict=False)
            if not jobs:
                raise
            log_bug(self._logger, "a request for further keys", error)
            self.lost(error)
        return Submitted(jobs, len(jobs) == len(requests))

    # --- clears ------------------------------------------------------------------------------------

    def want_clear(self, token: bytes = b"") -> None:
        """Requests a clear of the namespace, as soon as the daemon answers. `token`: 16 bytes that name this clear,
        which a daemon carries out once even if several clients request it; empty: a new token.
        """
        self._wanted_clear = token or secrets.token_bytes(TOKEN_BYTES)

    @property
    def clearing(self) -> bool:
        """Returns whether a clear is wanted that no daemon has carried out yet."""
        return self._wanted_clear != self._done_clear

    def clear(self) -> None:
        """Requests the clear that is wanted. The daemon carries it out once, even if the request is repeated."""
        if self.clearing:
            self.attempt(self._clear)

    # --- ends --------------------------------------------------------------------------------------

    def unregister(self) -> None:
        """Has the daemon release the memory, until `connect` or `submit` registers it again. Raises as the client's
        method.
        """
        if self._registration is not None:
            self._former, self._registration = self._registration, None
            self.client.unregister(self._former)

    def lost(self, error: Exception) -> None:
        """Records that the daemon does not answer, or has refused a connection, or that its state is unknown after a
        bug.
        """
        self.connected = False
        self._pause(error)
        if self._lost_warning:
            if not self._is_loss_logged:
                self._is_loss_logged = True
                self._logger.warning("kvoffloadd: %s: %s", self._lost_warning, error)
        elif isinstance(error, RemoteError):
            self._log_refusal(error)

    def close(self, deadline_s: float) -> None:
        """Ends the session. Blocks that the daemon has not given back by then stay its own until this process ends."""
        self.connected = False
        with suppress(KvOffloadError):
            self.client.close(deadline_s, force=True)

    # --- helpers -----------------------------------------------------------------------------------

    def _clear(self, client: Client) -> None:
        token = self._wanted_clear  # read once: another thread may want another clear at any time
        if token != self._done_clear:
            client.clear(wait_s=0.0, token=token)
            self._done_clear = token

    def _registered(self) -> Registration:
        """Returns the registration, and makes it if there is none. Raises as the client's methods."""
        if self._former is not None:
            self.client.unregister(self._former)  # does nothing if that was answered before
            self._former = None
        if self._registration is None:
            self._registration = self.client.register(self._caches)
        return self._registration

    def _succeeded(self) -> None:
        self.connected = True
        if self.client.socket_path != self._found:
            # Ranks and scheduler look for it one by one: the log shows whether they found the same.
            self._found = self.client.socket_path
            self._logger.info("kvoffloadd: the daemon is at %s", self._found)
        if self.error is None:
            return
        if self._is_loss_logged:
            self._logger.info("kvoffloadd: the daemon answers again")
        self.error = None
        self._is_loss_logged = False
        self._pauses = _pauses()
        self._retry_at = 0.0

    def _pause(self, error: Exception) -> None:
        self.error = error
        self._retry_at = monotonic() + next(self._pauses)

    def _log_refusal(self, error: RemoteError) -> None:
        if self._refusal_warning and monotonic() - self._refusal_logged_at >= _REFUSAL_LOGGED_S:
            self._refusal_logged_at = monotonic()
            self._logger.warning("kvoffloadd: %s: %s", self._refusal_warning, error)


def _pauses() -> Iterator[float]:
    return (min(pause_s * 8, _RETRY_MAX_S) for pause_s in backoffs())


def _cut(groups: Mapping[int, tuple[bytes, U32Array]], piece: Piece) -> dict[int, tuple[bytes, U32Array]]:
    return {
        group: (groups[group][0][span.start * KEY_BYTES : span.stop * KEY_BYTES], groups[group][1][span])
        for group, span in piece.items()
    }
