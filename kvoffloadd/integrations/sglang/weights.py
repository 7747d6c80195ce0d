"""Follows weights that are changed in place: pages that were computed before must not be found, nor stored, after.

SGLang keeps the contents of its storage through a change of weights. So from the first sign of a change on, all is a
miss; once SGLang has forgotten its own pages, too, the storage goes on under names of a new generation.

Weights that come from files are named by the files' contents, one load after the other since the start: engines that
have loaded the same share their pages again. Other weights have no name that another engine would know: their names are
unique to the engine. So are those of engines of several ranks, since each rank may have found other files, or failed to
load them: a page is computed by all of them together.
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
    """A follower of the weights."""

    def suspend(self) -> None:
        """Stops all use of pages: the weights change."""

    def renew(self, generation: int) -> None:
        """Continues: the weights have changed, and SGLang has no page left that was computed before. `generation`:
        u64.
        """

    def clear(self, token: bytes) -> None:
        """Drops pages of earlier weights that are stored elsewhere. `token`: alike in all ranks, so that none of them
        clears what another has stored since.
        """


class WeightChanges:
    """This rank's record of its weights. All methods come from the scheduler's thread, in each rank alike."""

    def __init__(self) -> None:
        self._followers: weakref.WeakSet[Suspendable] = weakref.WeakSet()
        self._engine: int | None = None
        self._changes = 0
        self._changing = False
        self._session = False
        self._flushed = False
        self._fingerprint: Fingerprint | None = None
        self._loaded = ""  # names the loads since the start
        self._unknown = False  # there were also changes that can't be named

    def number_engine(self, agree: Callable[[], int]) -> int:
        """Returns a number that this engine's ranks share, and no other engine has. `agree` finds it, once: each rank
        has it from then on, even if this rank's start fails afterwards.
        """
        if self._engine is None:
            self._engine = agree()
        return self._engine

    def follow(self, follower: Suspendable, fingerprint: Fingerprint) -> None:
        """Adds a follower, after `number_engine`. A follower that comes after a change does not begin with the names of
        the weights that the engine was started with. `fingerprint`: how files are named that weights come from.
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
        """Ends a session. Pages that were flushed in the session, after the last change, need no other flush."""
        self._session = False
        self._renew()

    def change(self) -> None:
        """Begins a change of weights, to some that can't be named."""
        self._changing = self._unknown = True
        self._flushed = False
        for follower in self._followers:
            follower.suspend()

    def load(self, source: Source, load_format: str | None, load: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Changes to the weights in these files; `load()` returns whether it has loaded them, and a message. Only
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
        """Records that SGLang has forgotten all pages."""
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
"""This process's weights; the process has one rank. `engine.watch_weights` reports changes to it."""
