"""The directory of a root: its lock, its manifest, and the check that it is still the same directory.

Blocking methods run in threads. Those of `perform` only read the fields, which change while none of them is under way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from kvoffloadd.linux.mounts import file_system
from kvoffloadd.scheduling.lanes import Again, Lane, LaneExecutor
from kvoffloadd.storage.disk.claimsfile import CLAIMS_NAME, read_claims, write_claims
from kvoffloadd.storage.disk.files import (
    DiskError,
    DiskVersionError,
    Files,
    describe_error,
    is_segment_name,
    lacks_resources,
)
from kvoffloadd.storage.disk.format import KeyspaceId, SegmentHeader
from kvoffloadd.storage.disk.manifest import Manifest, read_manifest, write_manifest
from kvoffloadd.storage.disk.opening import (
    COPY_ON_WRITE,
    Abilities,
    has_manifest,
    open_root,
    probe,
    what_changed,
    what_is_missing,
)
from kvoffloadd.storage.disk.replacedfile import remove
from kvoffloadd.storage.disk.segment import SegmentMaker, try_pages, try_segment
from kvoffloadd.storage.tombstone import Tombstone
from kvoffloadd.units import format_path

T = TypeVar("T")

log = logging.getLogger(__name__)

CONFIRM_S: Final = 24 * 3600
"""A manifest without other news is rewritten once the last confirmation is this much later."""

FIRST: Final = -1
"""The urgency of work that all other work waits for."""


class RootDirectory:
    """`direct`: O_DIRECT, None to use it where the file system allows. `min_free_bytes`: free space of the file system
    that new segments leave. `lane`: reads and writes the manifest.
    """

    def __init__(self, path: Path, files: Files, direct: bool | None, min_free_bytes: int, lane: Lane) -> None:
        self.path, self.name = path, format_path(path)
        self.files = files
        self.lane = lane
        self.accepted = False  # the caller has checked that it is no copy of a root in use
        self.last_progress_s = time.monotonic()
        self.segments_fd = -1  # as the other descriptors: -1 while the directory is closed
        self.abilities = Abilities(direct=False)
        self.file_system = ""  # its type, as mounts(5) has it
        self.size_bytes = 0  # of the file system
        self.manifest: Manifest | None = None  # the manifest on disk
        self._wants_direct = direct
        self._min_free_bytes = min_free_bytes
        # Not the loop's own threads: a disk that hangs would block them for all other roots, unnoticed.
        self._executor = LaneExecutor(lane, FIRST)
        self._directory_fd = self._lock_fd = -1
        self._uuid = b""  # of the first root here, which alone may return; empty: any may come
        self._device = 0  # st_dev of its directory
        # Whether these parts of it were removed, and not only unmounted or moved: a directory is emptied bit by bit.
        self._lost_segments = self._lost_lock = False
        self._writing = asyncio.Lock()  # held while the manifest is read or written
        self._writes: set[asyncio.Task[None]] = set()  # of manifests: the one under way, and the one that waits for it
        self._waiting: asyncio.Task[None] | None = None  # the waiting one
        self._next: Manifest | None = None  # its manifest
        self._using: set[asyncio.Task[Any]] = set()  # of `perform`

    async def perform(self, lane: Lane, work: Callable[[], T | Again], ended: Callable[[], None] | None = None) -> T:
        """Runs work that uses the directory's descriptors, before all else that waits in the lane. It continues if this
        call is cancelled; `wait_idle` waits for its end, and `ended` is called then.
        """
        task = lane.loop.create_task(lane.perform(work, urgent=FIRST))
        self._using.add(task)
        if ended is not None:
            task.add_done_callback(lambda _: ended())
        task.add_done_callback(self._used)
        return await asyncio.shield(task)

    def _used(self, task: asyncio.Task[Any]) -> None:
        self._using.discard(task)
        if not task.cancelled():
            task.exception()  # the caller of `perform` has received it

    async def wait_idle(self) -> None:
        """Waits until no work of `perform` is under way."""
        while self._using:
            await asyncio.wait(set(self._using))

    def on_progress(self) -> None:
        """Notes the end of one of many calls made together: the disk answers. May be called from any thread."""
        self.last_progress_s = time.monotonic()

    @property
    def is_direct(self) -> bool:
        """Whether files are opened with O_DIRECT."""
        return self.abilities.direct

    def open(self) -> None:
        """Opens and locks the directory, made if it is new; blocks. A root with removed contents begins anew.

        Raises:
            OSError, DiskError: it can't be used, or another process uses it.
        """
        # A root that existed before and is absent now is on an unmounted file system: nothing may be made there.
        new, anew = not self._uuid, self._begins_anew()
        try:
            fds = open_root(
                self.files,
                self.path,
                make_root=new,
                make_segments=new or anew,
                make_lock=new or anew or has_manifest(self.files, self.path),
            )
        except BlockingIOError:
            raise DiskError(f"{self.name} is in use by another process") from None
        except FileNotFoundError:
            if new:
                raise
            raise DiskError(what_is_missing(self.files, self.path)) from None
        try:
            self.abilities = probe(self.files, fds[0], self._wants_direct)
            self._device = self.files.fstat(fds[0]).st_dev
            self.file_system, space = file_system(fds[0]), self.files.space(fds[0])
            self.size_bytes = space.f_blocks * space.f_frsize
        except BaseException:
            self._close(*fds)
            raise
        if anew:
            self._uuid = b""
        self._lost_segments = self._lost_lock = False
        self._directory_fd, self.segments_fd, self._lock_fd = fds

    def _begins_anew(self) -> bool:
        """Returns whether the previous root is gone for ever, and this is its place."""
        try:
            is_gone = self._lost_segments or (self._lost_lock and not has_manifest(self.files, self.path))
            return is_gone and self.files.stat(self.path).st_dev == self._device
        except FileNotFoundError:
            return False

    async def load_manifest(self) -> bool:
        """Reads the manifest. Returns False if there is no trustworthy one, so that nothing here may be served: clears
        are not known. Then `create_manifest` makes a new one, after the old contents are removed.

        Raises:
            OSError, DiskError: the root differs from the previous one, has a newer version, or can't be read.
        """
        async with self._writing:  # a write of the manifest from before the root was detached may still run
            try:
                self.manifest = await read_manifest(self._here, self._executor, self.files)
            except DiskVersionError:
                raise
            except DiskError as error:
                log.warning("disk %s: %s: its contents are not served", self.name, error)
                self.manifest = None
        if self.manifest is None:
            if self._uuid:
                raise DiskError(f"{self.name} no longer has a manifest: is its file system mounted?")
            self.manifest = Manifest(root_uuid=secrets.token_bytes(16), base_epoch=0, last_epoch=0, epochs={})
            return False
        if self._uuid and self.manifest.root_uuid != self._uuid:
            self.manifest = None
            raise DiskError(f"{self.name} is not the same root as before: restart the daemon to use it")
        self._uuid = self.manifest.root_uuid
        return True

    def unconfirm(self) -> None:
        """Forgets the time of the last confirmation, as the contents are about to be removed."""
        if self.manifest is not None:
            self.manifest = replace(self.manifest, confirmed_s=0)

    async def create_manifest(self) -> None:
        """Makes the manifest of a new root durable; OSError passes through."""
        async with self._writing:  # a clear may be recorded meanwhile: before this, or after it
            if self.manifest is None:
                raise DiskError(f"{self.name} is off")
            await write_manifest(self._here, self.manifest, self._executor, self.files)
            self._uuid = self.manifest.root_uuid

    @property
    def uuid(self) -> bytes:
        """The root's uuid in its manifest; empty while it is off."""
        return self.manifest.root_uuid if self.manifest is not None else b""

    @property
    def _here(self) -> Path:
        """The directory that was opened, wherever it is by now: another one may be at `path`."""
        return Path(f"/proc/self/fd/{self._directory_fd}")

    def has_epoch(self, keyspace: KeyspaceId) -> bool:
        """Returns whether the durable manifest has the epoch of this keyspace, so that its records may be written here.
        On another root, a later start would find them without knowing of the clear before them.
        """
        return self.manifest is not None and self.manifest.epoch_of(keyspace.fingerprint) == keyspace.epoch

    def may_get_epoch(self, keyspace: KeyspaceId) -> bool:
        """Returns whether `has_epoch`, or the manifest that is being written may have it."""
        return self.has_epoch(keyspace) or bool(self._writes)

    async def write_epochs(
        self,
        base: int,
        last: int,
        epochs: dict[bytes, int],
        confirmed_s: int = 0,
        tombstones: tuple[Tombstone, ...] = (),
    ) -> None:
        """Makes clears and deletions durable. The write continues if this call is cancelled, since there is one
        temporary name for a half-written manifest. `epochs` are copied, and cover those of earlier calls.
        `confirmed_s`: see `Manifest`.

        One manifest is written at a time, and the next one serves all calls made meanwhile: no call waits for more than
        two, however many clears there are.

        Raises OSError or DiskError if that can't be done now.
        """
        if self.manifest is None or not self._uuid:
            raise DiskError(f"{self.name} is off")
        # Only one write waits: later calls know all epochs of earlier ones, and while a disk hangs any number of calls
        # may come.
        confirmed_s = confirmed_s or self.manifest.confirmed_s
        self._next = Manifest(self.manifest.root_uuid, base, last, dict(epochs), confirmed_s, tombstones)
        if self._waiting is None:
            self._waiting = asyncio.get_running_loop().create_task(self._write_next())
            self._writes.add(self._waiting)
            self._waiting.add_done_callback(self._wrote)
        await asyncio.shield(self._waiting)

    def _wrote(self, task: asyncio.Task[None]) -> None:
        self._writes.discard(task)
        if not task.cancelled():
            task.exception()  # the callers of `write_epochs` have received it

    async def wait_written(self) -> None:
        """Waits until no clears are being made durable."""
        while self._writes:
            await asyncio.wait(set(self._writes))

    async def _write_next(self) -> None:
        # Clears of several sessions and health checks of the root: one at a time, in order.
        async with self._writing:
            manifest, self._next, self._waiting = self._next, None, None
            if self.manifest is None or manifest is None or manifest.root_uuid != self.uuid:
                raise DiskError(f"{self.name} is off")
            same = replace(manifest, confirmed_s=self.manifest.confirmed_s) == self.manifest
            # Either way: a clock that was ahead may have been corrected.
            if same and abs(manifest.confirmed_s - self.manifest.confirmed_s) < CONFIRM_S:
                return
            if not manifest.covers(self.manifest):  # the root is new, and its clears are not merged yet
                raise DiskError(f"{self.name} has a record of later clears")
            await write_manifest(self._here, manifest, self._executor, self.files)
            self.manifest = manifest

    async def recorded_claims(self) -> bytes:
        """Returns the packed claims that are recorded here, see `claimsfile`; empty if none can be read."""
        try:
            return await self.perform(self.lane, lambda: read_claims(self.files, self._directory_fd, self.name))
        except (OSError, MemoryError) as error:
            log.warning("disk %s: its claims are not taken over: %s", self.name, describe_error(error))
            return b""

    def remove_claims(self) -> None:
        """Removes the recorded claims, durably; blocks. Raises OSError."""
        remove(self.files, self._directory_fd, CLAIMS_NAME)

    async def record_claims(self, packed: Sequence[bytes], ended: Callable[[], None]) -> None:
        """Records packed claims, given in pieces, in place of earlier ones. `ended`: see `perform`. Raises OSError."""
        await self.perform(self.lane, lambda: write_claims(self.files, self._directory_fd, packed), ended)

    def segment_names(self) -> list[str]:
        """Returns files with names of segments; blocks."""
        return sorted(filter(self._may_be_segment, self.files.names(self.segments_fd)))

    def _may_be_segment(self, name: str) -> bool:
        self.on_progress()
        if not is_segment_name(name):
            return False
        try:
            return stat.S_ISREG(self.files.stat(name, self.segments_fd).st_mode)
        except FileNotFoundError:
            return False

    def remove(self, names: list[str]) -> None:
        """Removes segment files, durably; blocks. Raises OSError."""
        for name in names:
            self.files.unlink(self.segments_fd, name)
            self.on_progress()
        self.files.sync_directory(self.segments_fd)

    def make_segment(self, name: str, header: SegmentHeader, *, reuse: bool) -> SegmentMaker:
        """Returns work for a lane that makes a segment file, new or used before, ready for appending."""
        return SegmentMaker(
            self.files,
            self.segments_fd,
            name,
            header,
            direct=self.is_direct,
            reuse=reuse,
            copy_on_write=self.file_system == COPY_ON_WRITE,
            min_free_bytes=self._min_free_bytes,
        )

    def left_bytes(self, name: str, unless_known: int) -> int:
        """Returns the space that a segment file takes, 0 if there is none; blocks."""
        try:
            return self.files.stat(name, self.segments_fd).st_size
        except FileNotFoundError:
            return 0
        except (OSError, MemoryError):
            return unless_known

    def missing(self, names: list[str]) -> list[str]:
        """Returns which of these segment files were removed; blocks. Raises OSError."""
        there = set(self.files.names(self.segments_fd))
        # The second check is for files that are made while the directory is listed.
        return [name for name in names if name not in there and not self._exists(name)]

    def _exists(self, name: str) -> bool:
        try:
            self.files.stat(name, self.segments_fd)
        except FileNotFoundError:
            return False
        return True

    def trouble(self) -> str:
        """Returns why the directory is not the one that was opened; empty: it is. Blocks."""
        try:
            # A removed directory has no links; an unmounted or moved one still has.
            self._lost_segments = not self.files.fstat(self.segments_fd).st_nlink
            self._lost_lock = not self.files.fstat(self._lock_fd).st_nlink
            return what_changed(self.files, self.path, (self._directory_fd, self.segments_fd, self._lock_fd))
        except OSError as error:
            return "" if lacks_resources(error) else describe_error(error)

    def try_directory(self) -> None:
        """Makes, writes and removes a file; blocks. Raises OSError, but not for lack of space."""
        probe(self.files, self._directory_fd, self.is_direct)

    def try_segment(self, name: str) -> None:
        """See `segment.try_segment`."""
        try_segment(self.files, self.segments_fd, name, direct=self.is_direct)

    def try_pages(self, name: str, start: int, stop: int) -> None:
        """See `segment.try_pages`."""
        try_pages(self.files, self.segments_fd, name, start, stop, direct=self.is_direct)

    async def reject(self) -> None:
        """Closes a root that can't be used. Another root may come here next."""
        await self.close()
        self._uuid = b""

    async def close(self) -> None:
        """Closes the directory, in the lane: that may wait for the disk. The caller guarantees that no other thread
        uses its descriptors any more; a write of the manifest that is under way ends first.
        """
        async with self._writing:
            fds = [fd for fd in (self.segments_fd, self._directory_fd, self._lock_fd) if fd != -1]
            self.segments_fd = self._directory_fd = self._lock_fd = -1
            self.manifest = None
            self.accepted = False
            if fds:
                await self.lane.perform(partial(self._close, *fds), urgent=FIRST)

    def _close(self, *fds: int) -> None:
        for fd in fds:
            with suppress(OSError):  # these descriptors were not written to
                self.files.close(fd)
