"""Saves claims for the next run, and restores those of the previous one. Event loop only.

Each root has the claims in a file, and the arena has them beside the saved namespaces. All of them are written after
each change, so the claims outlive the process, the arena and each root but the last. Of the claims that a start finds
in several places, those saved last count: others may have ended since.

A claim counts in the epoch in which it was saved: a clear ends it, wherever it was saved. A root's file is read before
anything is written there, see `RootLifecycle`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.keys import has_duplicates, keys_array
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.savedclaims import (
    RUN_BYTES,
    VERSION_MAX,
    PackedClaims,
    SavedClaim,
    SavedClaims,
    read_saved_claims,
)
from kvoffloadd.cache.memory.savedstate import SavedKeyspace
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.scheduling.lanes import CancelledWork
from kvoffloadd.storage.disk.files import describe_error
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.root import Root

log = logging.getLogger(__name__)

Place = tuple[bytes, int, str]

PAUSE_S = 1.0
BYTES_PER_S = 4 << 20
"""After a save the next one waits for this time, and until no more than this was written in a second: engines may make
claims all the time, and each save syncs a file on every root.
"""

RETRY_S = 10.0
"""After this time the claims are saved again if that failed, or if some root could not record them."""

DISK_BYTES = 32 << 20
ARENA_BYTES = 2 << 20
"""The maximum size of saved claims in a root, and beside the arena. What would lapse first is left out."""


class ClaimSaver:
    """Keeps what is saved of the claims up to date. `now`: the time, in seconds since 1970. A root that takes longer
    than `stuck_s` to record claims does not answer.
    """

    def __init__(
        self, cache: Cache, disk: DiskTier | None, stuck_s: float, now: Callable[[], float] = time.time
    ) -> None:
        self._cache = cache
        self._disk = disk
        self._stuck_s = stuck_s
        self._now = now
        self._run = secrets.token_bytes(RUN_BYTES)
        self._version = 0  # the highest that was saved or read; 0: there were no claims yet
        self._found: SavedClaims | None = None  # the latest that an earlier run has saved, of all that were read
        # Restored claims, by namespace, saved number and name: runs without a root in common give equal numbers.
        self._made: dict[Place, Claim] = {}
        self._has_begun = False
        self._changing = asyncio.Lock()  # held while claims are restored or packed: half of them must not be saved
        self._is_due = asyncio.Event()  # another save
        self._is_saving = self._is_closing = False
        self._is_whole = True  # nothing was left out of the last save
        self._writing: dict[Root, asyncio.Event] = {}  # the last write of each root, and whether it has ended
        self._failed: set[Root] = set()  # roots that could not record the claims the last time
        self._task: asyncio.Task[None] | None = None
        cache.retention.on_change = self._is_due.set
        if disk is not None:
            disk.arrivals.on_claims = self.read
            disk.arrivals.on_arrival = self._is_due.set

    @property
    def is_saved(self) -> bool:
        """Whether all claims are saved as they are, in every root that is not off; without roots, beside the arena."""
        return self._is_whole and not (self._is_due.is_set() or self._is_saving or self._failed)

    # --- restoring ---

    async def inherit(self, packed: bytes) -> None:
        """Takes note of the claims beside the arena, and keeps them there until they are saved again."""
        self._cache.saved_claims = packed
        await self.read(packed, "memory")

    async def read(self, packed: bytes, place: str) -> None:
        """Takes note of what is saved at this place; empty: nothing. `restore` restores the latest claims of earlier
        runs; if those of a root that comes after that are later, they replace what was restored.
        """
        saved = read_saved_claims(packed, place)
        if saved is None or saved.run == self._run:
            return
        self._version = max(self._version, saved.version)
        if self._found is not None and saved.version <= self._found.version:
            return
        self._found = saved
        if self._has_begun:
            await self.restore()

    async def restore(self) -> None:
        """Makes the claims again that were saved last, in their epoch, and as far as they are not over."""
        self._has_begun = True
        async with self._changing:
            if self._found is not None:
                await self._restore_all(self._found)
        self._is_due.set()

    async def _restore_all(self, saved: SavedClaims) -> None:
        retention, claims = self._cache.retention, saved.sound_claims
        before, opened = retention.counters.restored, dict[int, tuple[Keyspace, int]]()
        current = set(retention.claims)
        settled = {place for place, claim in self._made.items() if claim not in current or not claim.restored}
        retention.forget([claim for claim in current if claim.restored])  # of an earlier version
        named = {group.keyspace for claim in claims if claim.left_at(self._now()) > 0 for group in claim.groups}
        try:
            for keyspace in saved.keyspaces:
                if keyspace.number in named and (found := self._open(keyspace)) is not None:
                    opened[keyspace.number] = found, keyspace.epoch
                await asyncio.sleep(0)
            for claim in claims:
                self._restore(claim, opened, settled)
                await asyncio.sleep(0)
        finally:
            for its, _ in opened.values():
                self._cache.close_namespace(its.namespace)
        if saved.claims:
            log.info("%d of %d saved claims are restored", retention.counters.restored - before, len(saved.claims))

    @changing
    def _open(self, saved: SavedKeyspace) -> Keyspace | None:
        """Returns the keyspace of a saved one, with its namespace open; None: it can't be one of this run."""
        cache = self._cache
        if not self._is_current(saved.fingerprint, saved.epoch) or not all(saved.part_bytes):
            return None
        if max(saved.part_bytes) > cache.tier.payload_bytes_max:
            return None
        namespace = cache.open_namespace(saved.fingerprint, saved.uid, saved.label, saved.key_bytes)
        try:
            if (namespace.uid, namespace.key_bytes) == (saved.uid, saved.key_bytes):
                cache.check_groups(namespace, {saved.group})
                keyspace = cache.declare(namespace, saved.schema)
                compositions = dict(enumerate(saved.compositions))
                cache.set_part_bytes(keyspace, dict(enumerate(saved.part_bytes)), compositions)
                return keyspace
        except KvOffloadError as error:
            log.warning("claims of group %d of %s are not restored: %s", saved.group, namespace.name, error)
        cache.close_namespace(namespace)
        return None

    def _is_current(self, fingerprint: bytes, epoch: int) -> bool:
        """Returns whether this is the epoch of a namespace, and no merge is under way that ends it."""
        epochs = self._cache.epochs
        return epoch == epochs.of(fingerprint) and not epochs.is_rising(fingerprint)

    @changing
    def _restore(self, saved: SavedClaim, opened: Mapping[int, tuple[Keyspace, int]], settled: set[Place]) -> None:
        retention, left_s = self._cache.retention, saved.left_at(self._now())
        found = [(*opened[group.keyspace], group) for group in saved.groups if group.keyspace in opened]
        prompt = [
            (keyspace, group.first, keys_array(group.keys, keyspace.namespace.key_bytes))
            for keyspace, epoch, group in found
            # There may have been a clear since it was opened.
            if self._is_current(keyspace.namespace.fingerprint, epoch)
        ]
        if not prompt or left_s <= 0 or any(has_duplicates(keys) for _, _, keys in prompt):
            return
        namespace = prompt[0][0].namespace
        place = (namespace.fingerprint, saved.number, saved.name)
        if place in settled or retention.named(namespace, saved.name) is not None:
            return  # this run has ended or changed it, or another claim has taken its place
        ends_s = retention.clock() + left_s
        claim = Claim(saved.number, namespace, saved.name, saved.priority, ends_s, hits=saved.hits, restored=True)
        try:
            if retention.restore(claim, prompt):
                self._made[place] = claim
        except KvOffloadError as error:
            log.warning("a claim of %s is not restored: %s", namespace.name, error)

    # --- saving ---

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Begins to save claims, in a task of the daemon's that `spawn` runs."""
        self._task = spawn(self._keep_saved())

    async def close(self, deadline_s: float) -> None:
        """Saves the claims for the last time. Waits no longer than the deadline, if some root does not answer."""
        if self._task is not None:
            self._task.cancel()
        self._is_closing = True
        try:
            async with asyncio.timeout(deadline_s):
                await self.save()
        except (TimeoutError, MemoryError, KvOffloadError) as error:
            log.warning("the last claims could not be saved everywhere: %s", str(error) or type(error).__name__)

    async def _keep_saved(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if self._failed else None):
                    await self._is_due.wait()
            try:
                size_bytes = await self.save(None if self._is_due.is_set() else list(self._failed))
            except (MemoryError, KvOffloadError) as error:
                log.warning("claims could not be saved: %s", str(error) or type(error).__name__)
                await asyncio.sleep(RETRY_S)
            else:
                await asyncio.sleep(max(PAUSE_S, size_bytes / BYTES_PER_S))

    async def save(self, roots: Sequence[Root] | None = None) -> int:
        """Saves the claims as they are, beside the arena and at these roots (None: at all). Returns the bytes that each
        root has to write. After an exception, another save is due.
        """
        self._is_due.clear()
        self._is_saving = True
        try:
            async with self._changing:
                pieces = await self._pack()
            if roots is None:
                roots = self._disk.roots if self._disk is not None else []
            if pieces:
                await asyncio.gather(*(self._record(root, pieces) for root in roots))
        except BaseException:
            self._is_due.set()
            raise
        finally:
            self._is_saving = False
        return sum(map(len, pieces))

    async def _pack(self) -> list[bytes]:
        """Saves all claims beside the arena, and returns them in pieces for the roots; none if there never were any."""
        retention, packed = self._cache.retention, PackedClaims()
        if not retention.claims and not self._version:
            return []
        for claim in retention.claims:
            left_s = max(claim.ends_s - retention.clock(), 0.0)
            packed.add(claim, retention.prompt_of(claim), retention.hits(claim), left_s, self._now())
            await asyncio.sleep(0)
        # In one turn: claims that have ended meanwhile are left out, and all keyspaces are of one moment.
        packed.settle(retention.claims)
        self._version = min(max(self._version + 1, int(self._now() * 1e6)), VERSION_MAX)
        for_arena, is_whole = packed.pieces(self._version, self._run, ARENA_BYTES)
        self._cache.saved_claims = b"".join(for_arena)
        self._cache.save_state()
        if self._disk is not None:
            pieces, is_whole = packed.pieces(self._version, self._run, DISK_BYTES)
        else:
            pieces = for_arena
        self._is_whole = is_whole
        return pieces

    async def _record(self, root: Root, pieces: Sequence[bytes]) -> None:
        """Records the claims at a root, unless it is off: when it has come, another save is due. If that fails, it is
        tried again.
        """
        if root.state == RootState.OFF:
            self._failed.discard(root)
            return
        before, ended = self._writing.get(root), asyncio.Event()
        is_busy = before is not None and not before.is_set()  # it hangs, is slow, or `close` has cancelled the caller
        if is_busy and not self._is_closing:  # at the end it waits in the root's lane, behind the earlier one
            self._failed.add(root)
            return
        try:
            async with asyncio.timeout(self._stuck_s):
                self._writing[root] = ended
                await root.directory.record_claims(pieces, ended.set)
        except (OSError, KvOffloadError, CancelledWork, MemoryError) as error:
            if root not in self._failed:
                why = "it does not answer" if isinstance(error, TimeoutError) else describe_error(error)
                log.warning("disk %s: claims could not be recorded: %s", root.name, why)
            self._failed.add(root)
        else:
            self._failed.discard(root)
