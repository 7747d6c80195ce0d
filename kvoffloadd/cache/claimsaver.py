"""Saves claims for the next run, and restores those of the previous one. Event loop only.

Each root has the claims in a file, and the arena has them beside the saved namespaces. All of them are written after
each change, so the claims outlive the process, the arena and each root but the last. Of the claims that a start finds
in several places, those saved last count: others may have ended since.

A claim counts in the epoch in which it was saved: a clear ends it, wherever it was saved.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.changing import changing
from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.keys import has_duplicates, keys_array
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.savedclaims import RUN_BYTES, PackedClaims, SavedClaim, SavedClaims, read_saved_claims
from kvoffloadd.cache.memory.savedstate import SavedKeyspace
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.storage.disk.files import describe_error
from kvoffloadd.storage.disk.root import Root

log = logging.getLogger(__name__)

PAUSE_S = 0.1
BYTES_PER_S = 4 << 20
"""After a save the next one waits for this time, and until no more than this was written in a second."""

RETRY_S = 10.0
"""After this time the claims are saved again if some root could not record them."""

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
        self._found: SavedClaims | None = None  # the latest that an earlier run has saved, of all that were read
        self._has_begun = False
        self._run = secrets.token_bytes(RUN_BYTES)
        self._version = 0  # the highest that was saved or read; 0: there were no claims yet
        self._is_due = asyncio.Event()  # another save
        self._is_saving = False
        self._writing: dict[Root, asyncio.Event] = {}  # the last write of each root, and whether it has ended
        self._failed: set[Root] = set()  # roots that could not record the claims the last time
        cache.retention.on_change = self._is_due.set
        if disk is not None:
            disk.arrivals.on_claims = self.read

    @property
    def is_saved(self) -> bool:
        """Whether all claims are saved as they are, wherever they can be."""
        return not (self._is_due.is_set() or self._is_saving or self._failed)

    # --- restoring ---

    async def inherit(self, packed: bytes) -> None:
        """Takes note of the claims beside the arena, and keeps them there until they are saved again."""
        self._cache.saved_claims = packed
        await self.read(packed, "memory")

    async def read(self, packed: bytes, place: str) -> None:
        """Takes note of what is saved at this place; empty: nothing. `restore` restores the latest claims of earlier
        runs; those of a root that comes after that, and are later, are restored at once.
        """
        if self._has_begun:
            self._is_due.set()  # this root may lack what is saved elsewhere
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
        saved, counters = self._found, self._cache.retention.counters
        if saved is None:
            return
        before, opened = counters.restored, dict[int, Keyspace]()
        try:
            for keyspace in saved.keyspaces:
                if (found := self._open(keyspace)) is not None:
                    opened[keyspace.number] = found
                await asyncio.sleep(0)
            for claim in saved.claims:
                self._restore(claim, opened)
                await asyncio.sleep(0)
        finally:
            for its in opened.values():
                self._cache.close_namespace(its.namespace)
        self._is_due.set()
        if saved.claims:
            log.info("%d of %d saved claims are restored", counters.restored - before, len(saved.claims))

    @changing
    def _open(self, saved: SavedKeyspace) -> Keyspace | None:
        """Returns the keyspace of a saved one, with its namespace open; None: it can't be one of this run."""
        cache = self._cache
        if saved.epoch != cache.epochs.of(saved.fingerprint) or not all(saved.part_bytes):
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

    @changing
    def _restore(self, saved: SavedClaim, opened: Mapping[int, Keyspace]) -> None:
        retention, left_s = self._cache.retention, saved.left_at(self._now())
        prompt = [
            (keyspace, group.first, keys_array(group.keys, keyspace.namespace.key_bytes))
            for group in saved.groups
            if (keyspace := opened.get(group.keyspace)) is not None and not keyspace.retired
        ]
        if not prompt or left_s <= 0 or any(has_duplicates(keys) for _, _, keys in prompt):
            return
        namespace = prompt[0][0].namespace
        if retention.named(namespace, saved.name) is not None:
            return  # a claim of this run has taken its place
        ends_s = retention.clock() + left_s
        claim = Claim(saved.number, namespace, saved.name, saved.priority, ends_s, hits=saved.hits, restored=True)
        try:
            retention.restore(claim, prompt)
        except KvOffloadError as error:
            log.warning("a claim of %s is not restored: %s", namespace.name, error)

    # --- saving ---

    async def run(self) -> None:
        """Saves the claims whenever they have changed, until cancelled."""
        while True:
            roots: Sequence[Root] | None = None
            try:
                async with asyncio.timeout(RETRY_S if self._failed else None):
                    await self._is_due.wait()
            except TimeoutError:
                roots = list(self._failed)
            self._is_due.clear()
            size_bytes = await self.save(roots)
            await asyncio.sleep(max(PAUSE_S, size_bytes / BYTES_PER_S))

    async def close(self, deadline_s: float) -> None:
        """Saves the claims for the last time, `run` having been cancelled. Waits no longer than the deadline."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.save()

    async def save(self, roots: Sequence[Root] | None = None) -> int:
        """Saves the claims as they are, beside the arena and at these roots (None: at all). Returns the bytes that each
        root has to write.
        """
        retention = self._cache.retention
        if not retention.claims and not self._version:
            return 0
        if roots is None:
            roots = self._disk.roots if self._disk is not None else []
        self._version = version = max(self._version + 1, int(self._now() * 1e6))
        self._is_saving, packed = True, PackedClaims()
        try:
            for claim in retention.claims:
                if claim.is_in_force:
                    left_s = max(claim.ends_s - retention.clock(), 0.0)
                    packed.add(claim, retention.prompt_of(claim), retention.hits(claim), left_s, self._now())
                    await asyncio.sleep(0)
            self._cache.saved_claims = b"".join(packed.pieces(version, self._run, ARENA_BYTES))
            self._cache.save_state()
            pieces = packed.pieces(version, self._run, DISK_BYTES)
            await asyncio.gather(*(self._record(root, pieces) for root in roots))
        finally:
            self._is_saving = False
        return sum(map(len, pieces))

    async def _record(self, root: Root, pieces: Sequence[bytes]) -> None:
        """Records the claims at a root. If that fails, a later save does it; `read` causes one when a root comes."""
        if not root.accepted:
            self._failed.discard(root)
            return
        before, ended = self._writing.get(root), asyncio.Event()
        try:
            async with asyncio.timeout(self._stuck_s):
                if before is not None:  # it goes on even if its task was cancelled
                    await before.wait()
                self._writing[root] = ended
                await root.directory.record_claims(pieces, ended.set)
        except (OSError, MemoryError) as error:
            if root not in self._failed:
                why = "it does not answer" if isinstance(error, TimeoutError) else describe_error(error)
                log.warning("disk %s: claims could not be recorded: %s", root.name, why)
            self._failed.add(root)
        else:
            self._failed.discard(root)
