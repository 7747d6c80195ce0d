"""A cache with a real disk tier in a directory, and files whose calls wait or fail on request."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.cache.claimsaver import ClaimSaver
from kvoffloadd.cache.deleting import Deletion, Deletions
from kvoffloadd.cache.disk.disktier import DiskTier
from kvoffloadd.cache.lower.fetches import Fetch, Urgency, keys_below
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.namespace import Keyspace, Namespace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.memory.savedstate import read_saved_state
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.config import DiskConfig, DiskRoot
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, I64Array, KeyState, U16Array, U64Array
from kvoffloadd.storage.arenafile import ArenaFile
from kvoffloadd.storage.disk.claimsfile import CLAIMS_NAME
from kvoffloadd.storage.disk.faults import FaultyFiles
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.storage.disk.segmentpool import OVERHEAD_BYTES
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.memory import MemoryTier
from kvoffloadd.testing.wait import HANG_S

from .clears import clear
from .fakes import FirstInFirstOut, keys_of


@dataclass(frozen=True)
class Shape:
    """Describes memory and each root. A record of one page takes two, a segment's header and footer three."""

    pages: int = 256
    slab_pages: int = 16
    segment_pages: int = 16
    num_segments: int = 8
    roots: int = 1
    threads: int = 1
    stuck_s: float = 60.0

    @property
    def capacity_bytes(self) -> int:
        return OVERHEAD_BYTES + self.num_segments * self.segment_pages * PAGE_BYTES


@dataclass(frozen=True)
class Sums:
    """Checksums of parts that may be other keys' by now."""

    parts: I64Array
    generations: U16Array
    digests: U64Array


class DiskGate:
    """Open at first. `entered` is set when a thread arrives."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._passes = threading.Event()
        self.entered = threading.Event()
        self._open.set()

    def close(self) -> None:
        self.entered.clear()
        self._passes.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def let_others_pass(self) -> None:
        """Threads that come from now on pass; those that wait there stay."""
        self._passes.set()

    def __call__(self) -> None:
        self.entered.set()
        if not self._passes.is_set():
            self._open.wait(HANG_S)


class SteeredFiles(FaultyFiles):
    """Reads and writes of records stop at their gates, and are remembered by how many records they take; the next
    `failing_writes` of them fail. Files that are `unreadable`, by name, can't be opened.
    """

    def __init__(self, switch: Path) -> None:
        super().__init__(switch)
        self.switch = switch
        self.reading, self.writing = DiskGate(), DiskGate()
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.failing_writes = 0
        self.unreadable: set[str] = set()
        self._hanging: dict[tuple[str, Path], DiskGate] = {}

    def plant(self, text: str) -> None:
        """Faults from now on, as in FaultyFiles; none: no text."""
        fresh = self.switch.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.switch)

    def hang(self, operation: str, path: Path) -> DiskGate:
        """Keeps this root from answering from now on: "enter" when it is taken, "manifest" when that is opened, "names"
        when its segments are listed.
        """
        gate = self._hanging[operation, path] = DiskGate()
        gate.close()
        return gate

    def let_all_go(self) -> None:
        """Open every gate."""
        for gate in (self.reading, self.writing, *self._hanging.values()):
            gate.open()

    def open_directory(self, path: str | Path) -> int:
        if (gate := self._hanging.get(("enter", Path(path)))) is not None:
            gate()
        return super().open_directory(path)

    def open_again(self, path: Path) -> int:
        if (gate := self._hanging.get(("manifest", Path(os.path.realpath(path))))) is not None:
            gate()
        return super().open_again(path)

    def names(self, dir_fd: int) -> list[str]:
        path = Path(os.readlink(f"/proc/self/fd/{dir_fd}")).parent
        if (gate := self._hanging.get(("names", path))) is not None:
            gate()
        return super().names(dir_fd)

    def open(self, directory_fd: int, name: str, *, create: bool, direct: bool, write: bool) -> int:
        if name in self.unreadable:
            raise OSError(errno.EIO, "planted")
        return super().open(directory_fd, name, create=create, direct=direct, write=write)

    def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
        if len(buffers) > 1:  # a header page and a payload at least
            self.reading()
            self.reads.append(len(buffers) // 2)
        return super().read(fd, offset, buffers)

    def write(self, fd: int, offset: int, buffers: Sequence[Any]) -> None:
        if len(buffers) > 1:
            self.writing()
            if self.failing_writes:
                self.failing_writes -= 1
                raise OSError(errno.EIO, "planted")
            self.writes.append(len(buffers) // 2)
        super().write(fd, offset, buffers)


def payload_of(keyspace: Keyspace, number: int, part: int) -> bytes:
    """What a key's part holds in this epoch: anything else is wrong."""
    size = keyspace.part_bytes[part]
    names = [number, part, keyspace.schema.group, keyspace.namespace.epoch, keyspace.namespace.fingerprint[0]]
    return np.random.default_rng(names).bytes(size)


class Tier:
    """Cache, roots and disk in `folder`, or with roots in `paths`. `holds`, `reserved`: what the test itself holds, for
    the audit.
    """

    def __init__(
        self,
        folder: Path,
        shape: Shape | None = None,
        *,
        paths: Sequence[Path] | None = None,
        pool: ArenaFile | None = None,
        **settings: Any,
    ) -> None:
        self.shape = shape or Shape()
        self.folder = folder
        self.loop = asyncio.get_running_loop()
        self.files = SteeredFiles(folder / "faults")
        self.holds = self.reserved = 0
        memory = MemoryTier(self.shape.pages * PAGE_BYTES, self.shape.slab_pages * PAGE_BYTES, pool)
        self.cache = Cache(memory, lambda capacity_rows, max_rows: FirstInFirstOut(), seed=7)
        paths = paths or [folder / f"root{n}" for n in range(self.shape.roots)]
        config = DiskConfig(
            tuple(DiskRoot(path, self.shape.capacity_bytes) for path in paths),
            segment_bytes=self.shape.segment_pages * PAGE_BYTES,
            read_threads=self.shape.threads,
            write_threads=self.shape.threads,
            min_free_bytes=0,
            stuck_s=self.shape.stuck_s,
            **{"retry_s": 0.05} | settings,
        )
        self.disk = DiskTier(self.cache, config, self.files, self.loop, seed=9)
        self.roots = self.disk.roots
        self.clock_error_s = 0.0
        self.claims = ClaimSaver(
            self.cache, self.disk, self.shape.stuck_s, now=lambda: time.time() + self.clock_error_s
        )
        self.tasks: list[asyncio.Task[None]] = []
        self.recording: list[asyncio.Task[Any]] = []
        self.arena = self.cache.tier.pool.arena
        self.is_closed = False
        self.troubles: list[str] = []
        self.loop.set_exception_handler(self._hear)

    def _hear(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Hears of a callback that failed, or of a task whose end was never looked at."""
        self.troubles.append(f"{context['message']}: {context.get('exception')!r}")

    @property
    def root(self) -> Root:
        return self.roots[0]

    @property
    def not_demoted(self) -> dict[str, int]:
        return {why: count for why, count in self.disk.demotion.counters.not_demoted.items() if count}

    # --- life ---

    async def start(self) -> Tier:
        """Starts the tier with what the pool has, if it is old."""
        pool = self.cache.tier.pool
        saved = read_saved_state(pool.names()) if pool.is_old else None
        if saved is not None:
            self.cache.epochs.merge(saved.base, saved.last, saved.epochs)
            self.cache.tombstones.add(saved.tombstones)
            await self.claims.inherit(saved.claims)
        await self.disk.start(self._spawn)
        if pool.is_old:
            self.disk.demotion.adopted(adopt(self.cache, saved))
        else:
            self.cache.save_state()
        await self.claims.restore()
        self.claims.start(self._spawn)
        return self

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(self.loop.create_task(coroutine))
        return self.tasks[-1]

    async def close(self, flush_s: float = 10.0) -> None:
        """Closes the tier in order."""
        await self.claims.close(20.0)
        assert await self.disk.close(flush_s, 20.0)
        await self._end()

    async def drop(self, *, amid_a_note: bool = False) -> None:
        """Ends like a process that is killed: nothing is flushed, nothing sealed. What a thread works on ends first,
        and so does the note of a clear, unless `amid_a_note`.
        """
        for task in (*self.tasks, *self.recording):
            task.cancel()
        for root in self.roots:
            if not amid_a_note:
                await root.directory.wait_written()
            for sealing in list(root.writer._sealing):
                sealing.cancel()
            for lane in root.lanes:
                assert await lane.close(20)
            for segment in root.pool.segments.values():
                if segment.fd != -1:
                    os.close(segment.fd)
                    segment.fd = -1
            for fd in (root.directory.segments_fd, root.directory._directory_fd, root.directory._lock_fd):
                if fd != -1:
                    os.close(fd)
        await self._end()

    async def _end(self) -> None:
        self.is_closed = True
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what the lanes have still reported
        self.cache.tier.close()

    # --- keys ---

    def keyspace(self, name: bytes = b"n" * 16, *, sizes: tuple[int, ...] = (PAGE_BYTES,)) -> Keyspace:
        """Group 0 of a namespace, with parts of these sizes; of its current epoch."""
        namespace = self.cache.namespaces.get(name) or self.cache.open_namespace(name, 0, "test", 32)
        keyspace = self.cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=len(sizes)))
        for part, size in enumerate(sizes):
            self.cache.set_part_bytes(keyspace, {part: size})
        return keyspace

    def write(self, keyspace: Keyspace, numbers: Sequence[int], parts: Sequence[int] | None = None) -> I64Array:
        """Store these keys as far as there is room, without checksums. Returns the parts to be sealed."""
        wanted = np.arange(keyspace.schema.parts, dtype=np.uint16) if parts is None else np.array(parts, np.uint16)
        reserved = reserve(self.cache, keyspace, keys_of(*numbers), wanted, 0).parts
        columns = self.cache.entries.parts
        rows = columns.row[reserved]
        of_key = self.cache.entries.index.keys[rows, 1].tolist()
        part_of = (reserved - self.cache.entries.first[rows]).tolist()
        for record, number, part in zip(reserved.tolist(), of_key, part_of, strict=True):
            self.slot(record, keyspace.part_bytes[part])[:] = np.frombuffer(
                self.payload(keyspace, number, part), np.uint8
            )
        return self.cache.commit(reserved)

    def payload(self, keyspace: Keyspace, number: int, part: int) -> bytes:
        return payload_of(keyspace, number, part)

    def check_payload(self, keyspace: Keyspace, number: int, part: int, payload: bytes) -> None:
        assert payload == payload_of(keyspace, number, part), f"key {number} is wrong"

    def hash(self, parts: I64Array) -> Sums:
        """Hashes as the hash lane does; `take` comes some time later."""
        digests = hash_payloads(self.cache.entries.payload_addresses(parts), self.cache.entries.payload_bytes(parts))
        return Sums(parts, self.cache.entries.parts.generation[parts], digests)

    def take(self, sums: Sums) -> None:
        self.cache.seal(sums.parts, sums.generations, sums.digests)
        self.disk.demotion.backlog.sealed(sums.parts)

    def seal(self, parts: I64Array) -> None:
        self.take(self.hash(parts))

    def store(self, keyspace: Keyspace, *numbers: int) -> None:
        self.seal(self.write(keyspace, numbers))

    async def store_away(self, keyspace: Keyspace, *numbers: int) -> None:
        """Stores keys on disk, and not in memory."""
        self.store(keyspace, *numbers)
        await self.quiet()
        self.evict(keyspace, *numbers)
        assert self.on_disk(keyspace, *numbers) == list(numbers)

    def slot(self, record: int, size: int) -> np.ndarray:
        start = int(self.cache.entries.parts.page[record]) * PAGE_BYTES
        return self.arena[start : start + size]

    def evict(self, keyspace: Keyspace, *numbers: int) -> None:
        """Evicts as the memory tier does."""
        rows = self.cache.find(keyspace, keys_of(*numbers)).hit_rows
        assert self.cache.entries.evictable(rows).all()
        self.cache.eviction.drop(rows)

    def states(self, keyspace: Keyspace, *numbers: int) -> list[int]:
        """Returns states as `lookup` answers them."""
        found = self.cache.find(keyspace, keys_of(*numbers))
        self.disk.on_disk(keyspace, keys_of(*numbers), found)
        answer: list[int] = found.states.tolist()
        return answer

    def on_disk(self, keyspace: Keyspace, *numbers: int) -> list[int]:
        """Those of the keys that the catalog finds."""
        disk_keyspace = self.disk.of(keyspace)
        assert disk_keyspace is not None
        rows = self.disk.catalog.find(disk_keyspace, keys_of(*numbers)).tolist()
        return [number for number, row in zip(numbers, rows, strict=True) if row >= 0]

    def served(self, keyspace: Keyspace, *numbers: int) -> list[int]:
        """Those that memory would serve now; each byte of them is right."""
        found = self.cache.find(keyspace, keys_of(*numbers))
        hits = [number for number, hit in zip(numbers, found.hits.tolist(), strict=True) if hit]
        for number, row in zip(hits, found.hit_rows.tolist(), strict=True):
            for part, size in enumerate(keyspace.part_bytes):
                record = int(self.cache.entries.first[row]) + part
                self.check_payload(keyspace, number, part, self.slot(record, size).tobytes())
        return hits

    # --- from disk ---

    def begin_fetch(
        self, keyspace: Keyspace, *numbers: int, urgent: int = Urgency.PIN, done: Callable[[], None]
    ) -> Fetch:
        keys = keys_of(*numbers)
        on_disk = self.disk.on_disk(keyspace, keys, self.cache.find(keyspace, keys))
        return self.disk.promotion.fetch([keys_below(keyspace, keys, 0, on_disk)], urgent, done)

    async def fetch(self, keyspace: Keyspace, *numbers: int, urgent: int = Urgency.PIN) -> list[int]:
        """Bring them to memory; those that are served when that is over."""
        ended, served = asyncio.Event(), list[int]()

        def done() -> None:
            served.extend(self.served(keyspace, *numbers))
            ended.set()

        self.begin_fetch(keyspace, *numbers, urgent=urgent, done=done)
        await ended.wait()
        return served

    # --- clears ---

    async def clear(self, *namespaces: Namespace) -> None:
        """Clears these namespaces, or all if there are none."""
        await clear(self.cache, self.disk, [namespace.fingerprint for namespace in namespaces] or None)

    def begin_delete(self, keyspace: Keyspace, *numbers: int) -> tuple[Deletions, Deletion]:
        """Deletes keys; what goes on behind it is cancelled when the tier is dropped."""
        deletions = Deletions(self.cache, self.disk, None, self._record)
        return deletions, deletions.begin(keyspace.namespace, [(keyspace.schema.group, keys_of(*numbers))])

    def _record(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.recording.append(self.loop.create_task(coroutine))
        return self.recording[-1]

    async def delete(self, keyspace: Keyspace, *numbers: int) -> Deletion:
        """Deletes keys, durably on all roots."""
        deletions, deletion = self.begin_delete(keyspace, *numbers)
        await deletion.tried
        assert deletions.unrecorded(deletion) == []
        return deletion

    # --- waiting ---

    async def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110  threads change it, which set no event
                await asyncio.sleep(0.001)

    @property
    def is_quiet(self) -> bool:
        """Nothing is on its way, and every root that works has its next segment."""
        demotion, promotion = self.disk.demotion, self.disk.promotion
        ready = not any(root.state == RootState.OK and root.pool.wants_segment for root in self.roots)
        sealed = not any(root.writer._sealing for root in self.roots)
        moving = demotion.backlog_bytes or demotion.holds or promotion._fetches or promotion.reserved
        return ready and sealed and not moving

    async def quiet(self) -> None:
        await self.until(lambda: self.is_quiet)

    # --- files ---

    def place(self, keyspace: Keyspace, number: int, part: int = 0) -> tuple[Root, Segment, int]:
        """Where a key on disk lies: root, segment, page of its header."""
        found = self.place_if_there(keyspace, number, part)
        assert found is not None
        return found

    def place_if_there(self, keyspace: Keyspace, number: int, part: int = 0) -> tuple[Root, Segment, int] | None:
        """None: its root is coming in or going right now, so it is not read."""
        catalog = self.disk.catalog
        disk_keyspace = self.disk.of(keyspace)
        assert disk_keyspace is not None
        row = catalog.find(disk_keyspace, keys_of(number))
        record = int(catalog.places(disk_keyspace, row.astype(np.uint32))[0, part])
        where = self.disk.segment(int(catalog.segment[record]))
        return None if where is None else (*where, int(catalog.page[record]))

    def flip(self, keyspace: Keyspace, number: int, offset: int, part: int = 0) -> None:
        """Damage a record: a byte at this offset from its header on."""
        root, segment, page = self.place(keyspace, number, part)
        flip_byte(root.path / "segments" / segment.name, page * PAGE_BYTES + offset)

    def segments_by_age(self) -> list[Segment]:
        return sorted(self.root.pool.segments.values(), key=lambda segment: segment.header.number)

    # --- audit ---

    def audit(self) -> list[str]:
        """The laws of memory and disk, the files' real sizes, no callback that failed, and no task that died."""
        demotion, promotion = self.disk.demotion, self.disk.promotion
        if self.is_closed:
            return self.troubles + self._dead_tasks()
        holds = self.holds + demotion.holds + promotion.holds
        findings = check(self.cache, holds, self.reserved + promotion.reserved) + self.disk.check()
        for root in self.roots:
            on_disk = bytes_under(root.path)
            if on_disk > root.capacity_bytes:
                findings.append(f"{root.path} has {on_disk} bytes on disk, may have {root.capacity_bytes}")
        if demotion.backlog_bytes < 0:
            findings.append(f"the backlog has {demotion.backlog_bytes} bytes")
        return findings + self.troubles + self._dead_tasks()

    def _dead_tasks(self) -> list[str]:
        ended = [task for task in self.tasks if task.done() and not task.cancelled()]
        return [f"a task of the disk tier ended: {task.exception()!r}" for task in ended]


def flip_byte(path: Path, offset: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte[0] ^ 0x40]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def bytes_under(folder: Path) -> int:
    """Bytes of all files, as their lengths and as the blocks behind them, whichever is more. Saved claims come on
    top, and are left out.
    """
    total = 0
    for path in [folder, *folder.rglob("*")]:
        if path.stem == CLAIMS_NAME:
            continue
        try:
            found = path.stat()
        except FileNotFoundError:
            continue  # it went while we looked
        total += max(found.st_size, found.st_blocks * 512)
    return total


HIT, MISS, PENDING = int(KeyState.HIT), int(KeyState.MISS), int(KeyState.PENDING)
