"""Weights that are changed in place: pages that were computed before must not be found, nor stored, after.

SGLang keeps what its storage has through a change of weights. So from the first sign of a change on, all is a miss;
once SGLang has forgotten its own pages, too, the storage goes on under names of a new generation.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Protocol


class Suspendable(Protocol):
    """What follows the weights."""

    def suspend(self) -> None:
        """They change."""

    def renew(self, generation: int) -> None:
        """They have changed, and SGLang has nothing left of what was computed before. `generation`: u64."""

    def clear(self) -> None:
        """What others have of the weights before is not wanted any more."""


class WeightChanges:
    """What this rank knows of its weights. All methods come from the scheduler's thread, in each rank alike."""

    def __init__(self) -> None:
        self._followers: weakref.WeakSet[Suspendable] = weakref.WeakSet()
        self._engine: int | None = None
        self._changes = 0
        self._changing = False
        self._session = False
        self._flushed = False

    def number_engine(self, agree: Callable[[], int]) -> int:
        """A number that this engine's ranks share, and no other engine has. `agree` finds it, once: whatever becomes of
        this rank's start afterwards, each rank has it from then on.
        """
        if self._engine is None:
            self._engine = agree()
        return self._engine

    def follow(self, follower: Suspendable) -> None:
        """`number_engine` was called before. One that comes after a change does not begin with the names of the weights
        that the engine was started with.
        """
        self._followers.add(follower)
        if self._changes:
            follower.renew(self._generation())
        if self._changing:
            follower.suspend()

    def session_begins(self) -> None:
        """From here to the end of the session weights change, by calls that are told or by none at all."""
        self._session = True
        self.change()

    def session_ends(self) -> None:
        """Pages that were flushed in the session, after the last change, need no other flush."""
        self._session = False
        self._renew()

    def change(self) -> None:
        """Weights are about to change."""
        self._changing = True
        self._flushed = False
        for follower in self._followers:
            follower.suspend()

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
            follower.clear()

    def _generation(self) -> int:
        digest = hashlib.blake2b(
            f"{self._engine} {self._changes}".encode(), digest_size=8, person=b"kvoffloadd"
        ).digest()
        return int.from_bytes(digest, "little")


WEIGHTS = WeightChanges()
"""Of this process, which has one rank. `engine.watch_weights` has it told."""
