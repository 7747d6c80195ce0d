"""Weights that are changed in place: pages that were computed before must not be found, nor stored, after.

SGLang keeps what its storage has through a change of weights. So from the first sign of a change on, all is a miss;
once SGLang has forgotten its own pages, too, the storage goes on under names of a new generation.

Weights that come from files are named by what is in these, one load after the other since the start: engines that have
loaded the same share their pages again. Of other weights nobody knows what they are: their names are the engine's own.
So are those of engines of several ranks, of which each may have found other files, or failed to load them: a page is
computed by all of them together.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Callable
from typing import Protocol

from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint
from kvoffloadd.integrations.common.naming import digest_of
from kvoffloadd.integrations.sglang.files import FilesAtStart, Source
from kvoffloadd.protocol.messages import TOKEN_BYTES

logger = logging.getLogger("sglang.kvoffloadd")


class Suspendable(Protocol):
    """What follows the weights."""

    def suspend(self) -> None:
        """They change."""

    def renew(self, generation: int) -> None:
        """They have changed, and SGLang has nothing left of what was computed before. `generation`: u64."""

    def clear(self, token: bytes) -> None:
        """What others have of the weights before is not wanted any more. `token`: alike in all ranks, so that none of
        them clears what another has stored since.
        """


class WeightChanges:
    """What this rank knows of its weights. All methods come from the scheduler's thread, in each rank alike."""

    def __init__(self) -> None:
        self._followers: weakref.WeakSet[Suspendable] = weakref.WeakSet()
        self._engine: int | None = None
        self._changes = 0
        self._changing = False
        self._session = False
        self._flushed = False
        self._fingerprint: Fingerprint | None = None
        self._loaded = ""  # names what was loaded since the start
        self._unknown = False  # something else was, too

    def number_engine(self, agree: Callable[[], int]) -> int:
        """A number that this engine's ranks share, and no other engine has. `agree` finds it, once: whatever becomes of
        this rank's start afterwards, each rank has it from then on.
        """
        if self._engine is None:
            self._engine = agree()
        return self._engine

    def follow(self, follower: Suspendable, fingerprint: Fingerprint) -> None:
        """`number_engine` was called before. One that comes after a change does not begin with the names of the weights
        that the engine was started with. `fingerprint`: how files are named that weights come from.
        """
        self._followers.add(follower)
        self._fingerprint = fingerprint
        if self._changes:
            follower.renew(self._generation())
        if self._changing:
            follower.suspend()

    def session_begins(self) -> None:
        """Begins a session in which weights change until its end, by calls that are reported or by none at all."""
        self._session = True
        self.change()

    def session_ends(self) -> None:
        """Pages that were flushed in the session, after the last change, need no other flush."""
        self._session = False
        self._renew()

    def change(self) -> None:
        """Weights are about to change, to some that nobody can name."""
        self._changing = self._unknown = True
        self._flushed = False
        for follower in self._followers:
            follower.suspend()

    def load(self, source: Source, load_format: str | None, load: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Change to the weights in these files; `load()` returns whether it has loaded them, and a message. Only
        engines of one rank call it: the ranks of others might load different files.
        """
        known, files = not self._unknown, FilesAtStart()
        if self._fingerprint is not None:
            files.look([source])
        self.change()
        loaded, message = load()
        if known and loaded and self._fingerprint is not None:
            try:
                self._loaded = digest_of((self._loaded, load_format, files.identity(source, self._fingerprint)))
            except ContentsError as error:
                logger.warning("kvoffloadd: this engine shares with no other after a change of weights: %s", error)
            else:
                self._unknown = False
        return loaded, message

    def flush(self) -> None:
        """SGLang has forgotten all pages."""
        self._flushed = True
        self._renew()

    def _renew(self) -> None:
        if not self._changing or self._session or not self._flushed:
            return
        self._changing = False
        self._changes += 1
        for follower in self._followers:
            follower.renew(self._generation())
            if self._unknown:  # under names that engines share, others may still be at the weights before
                follower.clear(self._digest(TOKEN_BYTES))

    def _generation(self) -> int:
        return int.from_bytes(self._digest(8), "little")

    def _digest(self, size_bytes: int) -> bytes:
        """Returns a digest of these weights' name."""
        name = f"{self._engine} {self._changes}" if self._unknown else f"loaded {self._loaded}"
        return hashlib.blake2b(name.encode(), digest_size=size_bytes, person=b"kvoffloadd").digest()


WEIGHTS = WeightChanges()
"""Of this process, which has one rank. `engine.watch_weights` has it told."""
