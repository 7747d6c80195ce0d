"""Roots that can't be written, close slowly or lose what is in them keep what they have, and say what is wrong."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.cache.disk import reclaim
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.errors import NotDurableError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import segment as segment_module
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.health import Health, RootState
from kvoffloadd.storage.disk.opening import open_root
from kvoffloadd.storage.disk.recovery import Kind, recover_segment
from kvoffloadd.storage.disk.root import Root
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.testing.wait import HANG_S

from .conftest import Open
from .disktier import MISS, Shape, Tier

SHAPE = Shape(pages=512, segment_pages=64)
"""30 records of two pages in a segment, and eight segments."""

HASTY = Shape(pages=512, segment_pages=64, stuck_s=0.3)


async def fill(tier: Tier, keyspace: Keyspace, count: int, *, first: int = 0) -> list[int]:
    """Store keys, some at a time, each time until they are written and out of memory. Returns their numbers."""
    for at in range(first, first + count, 10):
        await tier.store_away(keyspace, *range(at, at + 10))
    return list(range(first, first + count))


async def offered_again(tier: Tier) -> None:
    """Wait until what could not be written is: that takes the place of what is oldest, and of what is stored before."""
    await tier.until(lambda: not tier.disk.demotion._again and tier.is_quiet)


def states_of(tier: Tier) -> list[str]:
    """Those that its root gets from now on."""
    states = [tier.root.state]
    become = tier.root.health.become

    def note(state: str, reason: str = "") -> None:
        if state != states[-1]:
            states.append(state)
        become(state, reason)

    tier.root.health.become = note  # type: ignore[method-assign]
    return states


# --- writes that fail ---


@pytest.mark.parametrize("fault", ["write=ENOSPC", "write=EDQUOT", "sync=ENOSPC write=ENOSPC"])
async def test_a_root_that_can_not_be_written_is_full_and_keeps_what_it_has(open_tier: Open, fault: str) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    old = await fill(tier, keyspace, 300)  # at its capacity: what comes next takes the place of the oldest
    await tier.quiet()
    there, recycled = tier.on_disk(keyspace, *old), tier.root.pool.recycled
    tier.files.plant(fault.replace(" ", "\n"))
    for at in range(1000, 1200, 20):
        tier.store(keyspace, *range(at, at + 20))
        await asyncio.sleep(0.02)
    await tier.until(lambda: tier.root.state == RootState.FULL)
    assert "planted" in tier.root.health.reason
    await asyncio.sleep(0.3)  # some more tries
    assert tier.root.state == RootState.FULL
    assert tier.root.pool.recycled == recycled
    assert tier.on_disk(keyspace, *old) == there
    assert await tier.fetch(keyspace, *there[:10]) == there[:10]
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    await offered_again(tier)
    await fill(tier, keyspace, 60, first=2000)


@pytest.mark.parametrize("follows", [True, False])
async def test_a_segment_without_room_says_nothing_of_the_disk(open_tier: Open, follows: bool) -> None:
    """A root that is full stays so while nothing can be written: to the segment that follows, or to a new one."""
    has_space = follows
    made: list[int] = []

    def limit(tier: Tier) -> None:
        allocate = tier.files.allocate

        def allocate_one(fd: int, size_bytes: int) -> None:
            if size_bytes == 65 * PAGE_BYTES:
                if made and not has_space:
                    raise OSError(errno.ENOSPC, "the file system is full")
                made.append(fd)
            allocate(fd, size_bytes)

        tier.files.allocate = allocate_one  # type: ignore[method-assign]

    tier = await open_tier(Shape(pages=512, segment_pages=65), before=limit)
    keyspace, pool = tier.keyspace(), tier.root.pool
    tier.store(keyspace, *range(31))
    await tier.until(lambda: pool.open_segment is not None and pool.open_segment.next_page == 63)
    await tier.until(lambda: tier.root.writer.writing == 0 and (pool._clean is not None) == follows)
    has_space = False
    tier.files.plant("write=ENOSPC" if follows else "")
    tier.root.health.stop_writing(OSError(errno.ENOSPC, "planted"))
    states = states_of(tier)
    await asyncio.sleep(0.5)  # some tries
    assert states == [RootState.FULL]
    has_space = True
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    await fill(tier, keyspace, 60, first=1000)


async def test_other_errors_make_it_read_only(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    old = await fill(tier, keyspace, 300)
    await tier.quiet()
    there = tier.on_disk(keyspace, *old)
    tier.files.plant("write=EIO")
    tier.store(keyspace, *range(1000, 1060))
    await tier.until(lambda: tier.root.state == RootState.READ_ONLY)
    assert tier.on_disk(keyspace, *old) == there
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)


async def test_space_that_is_missing_though_it_was_allocated(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thin volume that is full does this: only what was written before can be written. New keys take the place of old
    ones in files that can be, and files that can't be take nothing.
    """
    tier = await open_tier(SHAPE, rewrite_hot=False)
    keyspace = tier.keyspace()
    await fill(tier, keyspace, 150)
    await tier.quiet()
    good = {path.name for path in (tier.root.path / "segments").iterdir()}
    write = tier.files.write

    def thin(fd: int, offset: int, buffers: Sequence[Any]) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if name not in good and len(name) == 16 and offset:  # its first page can be
            raise OSError(errno.ENOSPC, "the volume is full")
        write(fd, offset, buffers)

    monkeypatch.setattr(tier.files, "write", thin)
    states = states_of(tier)
    newest = await fill(tier, keyspace, 300, first=1000)
    assert tier.on_disk(keyspace, *newest[-60:]) == newest[-60:]
    assert states == [RootState.OK]
    assert tier.root.pool.recycled > 4


def writes_fail_behind(tier: Tier, monkeypatch: pytest.MonkeyPatch, end: int) -> list[str]:
    """Lets only the first bytes of segments be written from now on. Returns the segments' names, one for each write
    that failed: trials of a root that is full, too, which its counter of errors leaves out.
    """
    write, failed = tier.files.write, list[str]()

    def fail(fd: int, offset: int, buffers: Sequence[Any]) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        if len(name) == 16 and offset + sum(memoryview(buffer).nbytes for buffer in buffers) > end:
            failed.append(name)
            raise OSError(errno.ENOSPC, "the volume is full")
        write(fd, offset, buffers)

    monkeypatch.setattr(tier.files, "write", fail)
    return failed


async def test_contents_stay_unless_all_can_be_written_that_comes_next(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full volume may have room for the first page of each segment. What the root can't use it does not empty."""
    tier = await open_tier(SHAPE, rewrite_hot=False)
    keyspace = tier.keyspace()
    old = await fill(tier, keyspace, 220)
    await tier.quiet()
    there, recycled = tier.on_disk(keyspace, *old), tier.root.pool.recycled
    failed = writes_fail_behind(tier, monkeypatch, PAGE_BYTES)
    number = 1000
    while len(failed) < 8 or tier.root.state != RootState.FULL:
        tier.store(keyspace, number)
        number += 1
        await asyncio.sleep(0.01)
    assert tier.on_disk(keyspace, *old) == there
    assert tier.root.pool.recycled == recycled
    monkeypatch.undo()
    await tier.until(lambda: tier.root.state == RootState.OK)
    await offered_again(tier)
    await fill(tier, keyspace, 60, first=5000)


async def test_one_segment_goes_at_most_for_files_that_can_not_be_used_anew(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here what was tried succeeds, and what comes then fails."""
    tier = await open_tier(SHAPE, rewrite_hot=False)
    keyspace, pool, write = tier.keyspace(), tier.root.pool, tier.files.write
    old = await fill(tier, keyspace, 220)
    await tier.quiet()
    there, recycled = tier.on_disk(keyspace, *old), pool.recycled

    def fail(fd: int, offset: int, buffers: Sequence[Any]) -> None:
        if not any(memoryview(buffer).cast("B").tobytes().strip(b"\0") for buffer in buffers):  # new uses begin so
            raise OSError(errno.ENOSPC, "the volume is full")
        write(fd, offset, buffers)

    monkeypatch.setattr(tier.files, "write", fail)
    number = 1000
    while tier.root.state != RootState.FULL:
        tier.store(keyspace, number)
        number += 1
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)  # some more tries
    assert tier.root.state == RootState.FULL
    assert pool.recycled == recycled + 1
    assert len(tier.on_disk(keyspace, *old)) >= len(there) - 30
    monkeypatch.undo()
    await tier.until(lambda: tier.root.state == RootState.OK)


async def test_restarts_on_a_full_file_system_use_the_files_that_there_are(open_tier: Open) -> None:
    """Each stop leaves one that is empty. If another were made for it, the oldest contents would go for its space."""
    tier = await open_tier(SHAPE)
    old = await fill(tier, tier.keyspace(), 120)
    await tier.close()

    def take_the_rest(tier: Tier) -> None:
        tier.files.free_bytes = lambda dir_fd: 0  # type: ignore[method-assign]

    kept = []
    for _ in range(4):
        tier = await open_tier(SHAPE, before=take_the_rest)
        await tier.quiet()
        kept.append(tier.on_disk(tier.keyspace(), *old))
        files = list((tier.root.path / "segments").iterdir())
        assert len(files) == len(tier.root.pool.segments), "all of them are in use"
        await tier.close()
    assert len(kept[0]) >= len(old) - 30, "one for the segment that is to be ready"
    assert kept[1:] == kept[:1] * 3


async def test_a_segment_stays_if_what_is_used_of_it_could_not_be_written_again(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace, pool = tier.keyspace(), tier.root.pool
    old = await fill(tier, keyspace, 220)
    await tier.quiet()
    oldest = pool.oldest()
    assert oldest is not None
    used = [number for number in tier.on_disk(keyspace, *old) if tier.place(keyspace, number)[1] is oldest]
    assert await tier.fetch(keyspace, *used) == used
    tier.evict(keyspace, *used)
    may_recycle, asked = pool.may_recycle, []

    async def fail_from_now_on(segment: Segment) -> bool:
        can = await may_recycle(segment)
        asked.append(can)
        if can:
            tier.files.plant("write=EIO")
        return can

    pool.may_recycle = fail_from_now_on  # type: ignore[method-assign]
    number = 1000
    while True not in asked:
        tier.store(keyspace, number)
        number += 1
        await asyncio.sleep(0.01)
    await tier.until(lambda: tier.root.state == RootState.READ_ONLY)
    await tier.until(lambda: not tier.root.writer.reserved_pages)
    assert tier.on_disk(keyspace, *used) == used
    assert oldest.ordinal in pool.segments


Lack = Callable[[Tier, pytest.MonkeyPatch], None]


def raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def no_address_space(tier: Tier, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reclaim, "reserve_array", raising(OSError(errno.ENOMEM, "planted")))


def no_descriptors(tier: Tier, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tier.files, "open_to_read", raising(OSError(errno.EMFILE, "planted")))


def no_memory(tier: Tier, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tier.files, "write", raising(MemoryError("planted")))


@pytest.mark.parametrize("times", [1, 8])
@pytest.mark.parametrize("lack", [no_address_space, no_descriptors, no_memory])
async def test_a_segment_stays_while_resources_to_move_its_records_are_lacking(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, lack: Lack, times: int
) -> None:
    """Reclaiming goes on when there are some. No attempt takes room from the next."""
    tier = await open_tier(SHAPE)
    keyspace, pool = tier.keyspace(), tier.root.pool
    old = await fill(tier, keyspace, 220)
    await tier.quiet()
    oldest = pool.oldest()
    assert oldest is not None
    used = [number for number in tier.on_disk(keyspace, *old) if tier.place(keyspace, number)[1] is oldest]
    del used[6:]  # they may all be moved
    assert await tier.fetch(keyspace, *used) == used
    tier.evict(keyspace, *used)
    rewrite, tried = tier.disk.reclaim._rewrite, list[Segment]()

    async def rewrite_without(root: Root, segment: Segment, allowance: reclaim.Allowance) -> list[np.ndarray]:
        tried.append(segment)
        with monkeypatch.context() as patch:
            if len(tried) <= times:
                lack(tier, patch)
            return await rewrite(root, segment, allowance)

    tier.disk.reclaim._rewrite = rewrite_without  # type: ignore[method-assign]
    number = 1000
    while not tried:
        tier.store(keyspace, number)
        number += 1
        await asyncio.sleep(0.01)
    await tier.until(lambda: len(tried) > times and not pool.wants_segment)
    assert tried[: times + 1] == [oldest] * (times + 1)
    assert tier.on_disk(keyspace, *used) == used


@pytest.mark.parametrize("call", ["open_directory", "open_again", "names", "read"])
async def test_a_root_that_can_not_be_opened_for_lack_of_memory_comes_later(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    tier = await open_tier(SHAPE)
    await tier.store_away(tier.keyspace(), 1, 2)
    await tier.close()
    with monkeypatch.context() as patch:
        tier = await open_tier(SHAPE, before=lambda tier: patch.setattr(tier.files, call, raising(MemoryError())))
        assert tier.root.state == RootState.OFF
        assert tier.states(tier.keyspace(), 1) == [MISS]
    await tier.until(lambda: tier.root.state == RootState.OK, 10)
    assert await tier.fetch(tier.keyspace(), 1, 2) == [1, 2]


async def test_a_root_is_watched_on_after_a_lack_of_memory(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await open_tier(SHAPE)
    tier.root.health.become(RootState.READ_ONLY, "planted")
    tried = threading.Event()

    def fail(*_: object, **__: object) -> None:
        tried.set()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(tier.files, "open", fail)
        await tier.until(tried.is_set, 10)
    await tier.until(lambda: tier.root.state == RootState.OK, 10)


async def test_a_clear_that_lacks_memory_is_recorded_later(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(tier.files, "rename", raising(MemoryError()))
        with pytest.raises(NotDurableError):
            await tier.clear()
        assert not tier.disk.catalog.records, "what the clear has closed is given back"
    await tier.until(lambda: not tier.disk.clears.unrecorded(tier.roots, [(None, tier.cache.epochs.base)]), 10)


async def test_a_lack_of_memory_in_a_thread_of_the_disk_breaks_off_no_change(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a segment is sealed, made, or removed because it only takes space."""
    tier = await open_tier(SHAPE)
    keyspace, pool = tier.keyspace(), tier.root.pool
    await tier.store_away(keyspace, 1, 2)
    (tier.root.path / "segments" / ("0" * 16)).touch()
    failed = set[str]()

    def failing(call: str) -> Callable[..., None]:
        def fail(*_: object, **__: object) -> None:
            failed.add(call)
            raise MemoryError

        return fail

    with monkeypatch.context() as patch:
        for call in ("sync", "allocate", "stat", "unlink"):
            patch.setattr(tier.files, call, failing(call))
        tier.root.writer.seal_unsealed()
        await tier.until(lambda: failed >= {"sync", "allocate", "stat"}, 10)
        failed.clear()
        pool._reusable.append(("0" * 16, PAGE_BYTES))
        pool._create_after = pool._reuse_after = math.inf
        await tier.until(lambda: "unlink" in failed, 10)
    pool._create_after = pool._reuse_after = 0.0
    await tier.store_away(keyspace, 3)


async def test_a_file_is_used_anew_only_when_it_is_not_tried_any_more(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trial has read it writes again: the header of a later use would be gone."""
    tier = await open_tier(SHAPE)
    pool = tier.root.pool
    await fill(tier, tier.keyspace(), 220)
    await tier.quiet()
    oldest, has_read, may_write = pool.oldest(), threading.Event(), threading.Event()
    assert oldest is not None
    read, name = tier.files.read, oldest.name

    def wait(fd: int, offset: int, buffers: Sequence[Any]) -> int:
        came = read(fd, offset, buffers)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(name):
            has_read.set()
            may_write.wait(HANG_S)
        return came

    monkeypatch.setattr(tier.files, "read", wait)
    for segment in (pool.open_segment, pool._clean):  # so that the oldest is what the trial tries
        assert segment is not None
        tier.root.writer.withdraw(segment)
    tier.root.health.become(RootState.READ_ONLY, "planted")
    await tier.until(has_read.is_set)
    assert oldest.readers == 1, "what recycles it waits for its readers"
    may_write.set()
    await tier.until(lambda: oldest.readers == 0)
    await tier.until(lambda: tier.root.state == RootState.OK)


async def test_a_close_that_fails_ends_no_task(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await fill(tier, keyspace, 10)
    await tier.quiet()
    allocate, entered, may_go_on = tier.files.allocate, threading.Event(), threading.Event()

    def wait(fd: int, size: int) -> None:
        allocate(fd, size)
        entered.set()
        may_go_on.wait(HANG_S)

    monkeypatch.setattr(tier.files, "allocate", wait)
    number = 1000
    while not entered.is_set():
        tier.store(keyspace, number)
        number += 1
        await asyncio.sleep(0.01)
    tier.files.plant("close=EIO")
    tier.root.health.become(RootState.OFF, "planted")
    may_go_on.set()
    await tier.until(lambda: not tier.root.directory._using)
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK and tier.root.pool.open_segment is not None)
    assert [task.exception() for task in tier.tasks if task.done()] == []
    await fill(tier, keyspace, 60, first=5000)


@pytest.mark.parametrize(
    ("number", "state"),
    [(errno.ENOSPC, RootState.FULL), (errno.EDQUOT, RootState.FULL), (errno.EIO, RootState.READ_ONLY)],
)
def test_two_failed_writes_in_a_row_stop_writing(tmp_path: Path, number: int, state: str) -> None:
    health = Health(tmp_path)
    health.become(RootState.OK)
    error = OSError(number, "planted")
    for _ in range(2):
        health.write_failed(error)
        assert health.state == RootState.OK
        health.write_succeeded()
    health.write_failed(error)
    health.write_failed(error)
    assert (health.state, health.reason) == (state, "planted")


async def test_a_segment_that_broke_gets_no_footer(open_tier: Open) -> None:
    """A footer would need a write, too. A start walks the segment, and finds what was written before."""
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1, 2, 3)
    _, segment, _ = tier.place(keyspace, 1)
    tier.files.failing_writes = 1
    tier.store(keyspace, 4)
    await tier.until(lambda: segment.fd == -1)
    fd = tier.files.open_directory(tier.root.path / "segments")
    found = recover_segment(tier.files, fd, segment.name, direct=False)
    os.close(fd)
    assert (found.kind, len(found.entries)) == (Kind.WALKED, 3)
    assert await tier.fetch(keyspace, 1, 2, 3) == [1, 2, 3]


async def test_a_write_that_ends_after_its_root_was_given_up_is_not_found(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    tier.files.writing.close()
    tier.store(keyspace, 2)
    await tier.until(tier.files.writing.entered.is_set)
    tier.files.plant("open=EIO")  # it does not come back
    tier.root.health.become(RootState.OFF, "planted")
    await tier.until(lambda: tier.on_disk(keyspace, 1) == [])  # given up, and not detached: a thread writes
    tier.files.writing.open()
    await tier.until(lambda: not tier.root.writer.writing)
    assert tier.root.state == RootState.OFF
    assert tier.on_disk(keyspace, 2) == []
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert await tier.fetch(keyspace, 1) == [1]


# --- no fallocate(2) ---


async def test_a_file_system_that_can_not_allocate(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is filled with zeros, in several turns of the lane: none of them takes long."""
    monkeypatch.setattr(segment_module, "FILL_BYTES", 16 * PAGE_BYTES)
    tier = await open_tier(SHAPE, before=lambda tier: tier.files.plant("allocate=EOPNOTSUPP"))
    assert not tier.root.directory.abilities.allocates
    keyspace = tier.keyspace()
    numbers = await fill(tier, keyspace, 90)
    assert tier.root.health.write_errors == 0
    for path in (tier.root.path / "segments").iterdir():
        assert path.stat().st_size == 64 * PAGE_BYTES == path.stat().st_blocks * 512
    assert await tier.fetch(keyspace, *numbers[:10]) == numbers[:10]


@pytest.mark.parametrize("pages", [0, 16, 64])
async def test_a_stop_while_a_file_is_made_is_no_damage(
    open_tier: Open, caplog: pytest.LogCaptureFixture, pages: int
) -> None:
    """It has no header yet: its space is used for another one."""
    tier = await open_tier(SHAPE)
    await tier.close()
    left = tier.root.path / "segments" / f"{7:016x}"
    left.write_bytes(bytes(pages * PAGE_BYTES))
    tier = await open_tier(SHAPE)
    assert tier.root.figures()["damaged_segments"] == 0
    assert "damaged" not in caplog.text
    keyspace = tier.keyspace()
    await fill(tier, keyspace, 300)  # at its capacity
    await tier.quiet()
    assert not left.exists() or left.stat().st_size == 64 * PAGE_BYTES
    assert tier.root.pool.used_bytes <= tier.root.pool.capacity_bytes
    assert len(tier.root.pool.segments) == 8, "as many as without it"


# --- close(2) ---


async def test_a_close_that_hangs_stops_nobody_else(open_tier: Open) -> None:
    """The loop goes on, and the root is off until it ends."""
    tier = await open_tier(HASTY)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    tier.files.plant("close_delay_s=3600")
    tier.store(keyspace, *range(100, 160))
    await tier.until(lambda: tier.root.state == RootState.OFF)
    assert tier.root.health.reason == "the disk does not answer"
    assert tier.states(keyspace, 1) == [MISS]
    assert tier.served(keyspace, 159) == [159]
    tier.files.plant("")
    await tier.until(lambda: tier.root.state == RootState.OK)
    assert await tier.fetch(keyspace, 1) == [1]


async def test_what_was_read_does_not_depend_on_close(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    tier.files.plant("close=EIO")
    assert await tier.fetch(keyspace, 1) == [1]


# --- what is in a root is removed ---


def move(path: Path, to: Path) -> None:
    path.rename(to)


def held_files() -> list[str]:
    """What this process has open."""
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link)]


def empty(path: Path) -> None:
    for one in path.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink(missing_ok=True)  # a probe removes its own file


async def test_a_root_that_is_emptied_begins_anew(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await fill(tier, keyspace, 60)
    states = states_of(tier)
    uuid = tier.root.directory.uuid
    empty(tier.root.path)
    await tier.until(lambda: tier.root.state == RootState.OK and tier.root.directory.uuid not in (uuid, b""))
    assert states == [RootState.OK, RootState.OFF, RootState.OK]
    assert tier.on_disk(keyspace, *range(60)) == []
    await fill(tier, keyspace, 60, first=100)
    await tier.close()
    tier = await open_tier(SHAPE)
    assert len(tier.on_disk(tier.keyspace(), *range(100, 160))) == 60


async def test_a_root_that_is_looked_at_while_it_is_emptied_begins_anew(open_tier: Open) -> None:
    """An operator who does it removes one thing after the other, and the lock before the segments."""
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await fill(tier, keyspace, 60)
    uuid, path = tier.root.directory.uuid, tier.root.path
    (path / "manifest").unlink()
    (path / "lock").unlink()
    await tier.until(lambda: tier.root.state == RootState.OK and tier.root.directory.uuid not in (uuid, b""))
    assert tier.on_disk(keyspace, *range(60)) == []
    empty(path)
    uuid = tier.root.directory.uuid
    await tier.until(lambda: tier.root.state == RootState.OK and tier.root.directory.uuid not in (uuid, b""))
    await fill(tier, keyspace, 60, first=100)


async def test_nobody_else_can_take_a_root_that_has_lost_its_lock(open_tier: Open) -> None:
    tier = await open_tier(SHAPE, retry_s=3600.0)
    empty(tier.root.path)
    with pytest.raises(BlockingIOError):
        open_root(Files(), tier.root.path, make_root=True, make_segments=True, make_lock=True)


async def test_a_root_without_its_lock_locks_itself_again(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    states = states_of(tier)
    (tier.root.path / "lock").unlink()
    await tier.until(lambda: len(states) == 3)
    assert states == [RootState.OK, RootState.OFF, RootState.OK]
    assert (tier.root.path / "lock").exists()
    assert await tier.fetch(keyspace, 1) == [1]


async def test_a_directory_that_was_removed_is_to_be_made_again(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    while tier.root.path.exists():  # a probe makes and removes files in it
        shutil.rmtree(tier.root.path, ignore_errors=True)
    await tier.until(lambda: "is missing: mount its file system, or create it with mode 700" in tier.root.health.reason)
    assert not tier.root.path.exists()
    tier.root.path.mkdir(mode=0o700)
    await tier.until(lambda: tier.root.state == RootState.OK)
    await tier.store_away(keyspace, 2)


async def test_a_directory_that_was_moved_is_not_begun_anew(open_tier: Open) -> None:
    """What it holds is still somewhere: maybe its file system was unmounted."""
    tier = await open_tier(SHAPE)
    await tier.store_away(tier.keyspace(), 1)
    tier.root.path.rename(tier.root.path.with_suffix(".moved"))
    tier.root.path.mkdir(mode=0o700)
    await tier.until(lambda: "restart the daemon to begin anew" in tier.root.health.reason)
    assert list(tier.root.path.iterdir()) == []


@pytest.mark.parametrize("by", ["a look", "a read"])
async def test_a_segment_that_was_removed_is_forgotten(
    open_tier: Open, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await open_tier(SHAPE, retry_s=0.05 if by == "a look" else 3600.0)
    keyspace = tier.keyspace()
    numbers = await fill(tier, keyspace, 90)
    root, segment, _ = tier.place(keyspace, 0)
    lost = [number for number in numbers if tier.place(keyspace, number)[1] is segment]
    used = root.pool.used_bytes
    (root.path / "segments" / segment.name).unlink()
    if by == "a read":
        assert await tier.fetch(keyspace, lost[0]) == []
    await tier.until(lambda: segment.ordinal not in root.pool.segments)
    kept = [number for number in numbers if number not in lost]
    assert tier.on_disk(keyspace, *numbers) == kept
    assert root.pool.used_bytes == used - segment.size_bytes
    assert (root.state, root.health.write_errors) == (RootState.OK, 0)
    assert "failed verification" not in caplog.text
    assert f"segments/{segment.name} was removed" in caplog.text
    assert await tier.fetch(keyspace, *kept[-5:]) == kept[-5:]


async def test_files_being_written_that_were_removed_are_closed(open_tier: Open) -> None:
    """Otherwise, their space stays taken, with no visible cause."""
    tier = await open_tier(SHAPE)
    keyspace = tier.keyspace()
    await tier.store_away(keyspace, 1)
    await tier.quiet()
    for path in (tier.root.path / "segments").iterdir():
        path.unlink()
    before = set(tier.root.pool.segments)
    await tier.until(lambda: before.isdisjoint(tier.root.pool.segments))
    assert not [
        name for name in held_files() if name.startswith(f"{tier.root.path}/segments/") and name.endswith("(deleted)")
    ]
    assert tier.on_disk(keyspace, 1) == []
    await tier.store_away(keyspace, 2)


# --- names ---


async def test_a_path_that_is_no_utf8_is_escaped(open_tier: Open, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/disk-\xff"))
    tier = await open_tier(SHAPE, paths=[path])
    assert tier.root.figures()["path"] == f"{tmp_path}/disk-\\xff"
    move(path, tmp_path / "moved")
    await tier.until(lambda: "is missing" in tier.root.health.reason)
    tier.root.health.reason.encode()
    move(tmp_path / "moved", path)


async def test_what_a_killed_process_has_left_of_a_trial_is_removed(open_tier: Open) -> None:
    tier = await open_tier(SHAPE)
    await tier.close()
    (tier.root.path / "probe-0123456789abcdef").write_bytes(bytes(PAGE_BYTES))
    (tier.root.path / "probe-results.csv").write_text("of somebody else")
    (tier.root.path / "probe-runs").mkdir()
    theirs = {"probe-results.csv", "probe-runs"}
    tier = await open_tier(SHAPE)
    assert {path.name for path in tier.root.path.iterdir()} == {"lock", "manifest", "segments"} | theirs
