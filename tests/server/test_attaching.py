"""Memory is mapped off the loop, and anything may happen meanwhile: each descriptor is closed once, each charge is
refunded once, and nothing stays mapped that no session has.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvoffloadd.config import Config
from kvoffloadd.device.base import Allocation
from kvoffloadd.errors import BusyError, KvOffloadError, LimitError, MemoryKindError, StateError, UnknownNameError
from kvoffloadd.server.peers.descriptorcloser import DescriptorCloser
from kvoffloadd.server.session.registry import Registry
from kvoffloadd.testing.wait import HANG_S
from tests.cache.fakes import make_cache
from tests.server.test_clears import context_of

UID, SIZE = os.getuid(), 4096
COUNT = 3


class SlowHost:
    """A host device that makes mappings, and ends them, when the test lets it."""

    kind = "host"

    def __init__(self) -> None:
        self.refused = -1  # which descriptor is not memory
        self.asked: asyncio.Queue[asyncio.Future[None]] = asyncio.Queue()
        self.mapped: set[Allocation] = set()
        self.seen: list[int] = []  # descriptors

    def measure(self, fd: int, peer_uid: int) -> int:
        self.seen.append(fd)
        if len(self.seen) == self.refused:
            raise MemoryKindError("not memory")
        return SIZE

    async def map(self, fd: int, size_bytes: int, peer_uid: int) -> Allocation:
        await self._turn()
        os.fstat(fd)  # it is still open
        self.seen.append(fd)
        made = Allocation("host", size_bytes, 0)
        self.mapped.add(made)
        return made

    async def unmap(self, allocation: Allocation) -> None:
        self.mapped.remove(allocation)
        await self._turn()

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(turn)
        await turn

    async def go_on(self, error: Exception | None = None) -> None:
        """What has waited for longest does what it is to do, or fails."""
        turn = await self.asked.get()
        if error is None:
            turn.set_result(None)
        else:
            turn.set_exception(error)


class AttachScene:
    def __init__(self, fds: list[int]) -> None:
        self.context = context_of(make_cache())
        self.context.closer = DescriptorCloser(self.context.loop, (UID,))
        self.host = SlowHost()
        enough: Any = self.host
        self.context.host = enough
        self.registry = Registry(self.context, self.context.accounts.of(UID), Config().limits)
        self.fds = fds

    def attach(self) -> asyncio.Task[list[int]]:
        return self.registry.attach(self.fds)

    @property
    def charged(self) -> int:
        """Mappings; all that goes with them agrees."""
        used = self.context.accounts.figures().get(str(UID), {})
        count = used.get("mappings", 0)
        each = {"fds": count, "mappings": count, "mapped_bytes": count * SIZE, "page_table_bytes": count * 4096}
        assert used == ({} if not count else each)
        return int(count)

    async def until_idle(self) -> None:
        """All that was begun has ended, and all duplicates are closed."""
        async with asyncio.timeout(HANG_S):
            while self.context.tasks or self.context.closer._of(UID).held:
                if not self.host.asked.empty():
                    await self.host.go_on()
                await asyncio.sleep(0)
        for fd in self.fds:
            os.fstat(fd)  # they are the caller's


@pytest.fixture
def fds(caplog: pytest.LogCaptureFixture) -> Iterator[list[int]]:
    made = [os.memfd_create("attaching") for _ in range(COUNT)]
    yield made
    for fd in made:
        os.close(fd)
    assert "closed twice" not in caplog.text


@pytest.fixture
async def scene(fds: list[int]) -> AttachScene:
    return AttachScene(fds)


async def test_all_of_them(scene: AttachScene) -> None:
    attaching = scene.attach()
    assert scene.charged == COUNT, "before anything is mapped"
    await scene.until_idle()
    numbers = attaching.result()
    assert list(scene.registry.attached) == numbers
    assert scene.registry.sizes_bytes(numbers) == [SIZE] * COUNT
    assert scene.charged == len(scene.host.mapped) == COUNT
    closing = asyncio.ensure_future(scene.registry.close())
    await scene.until_idle()
    for _ in range(COUNT):
        await scene.host.go_on()
    await closing
    assert scene.charged == len(scene.host.mapped) == 0


@pytest.mark.parametrize("which", range(1, COUNT + 1))
async def test_one_that_is_no_memory(scene: AttachScene, which: int) -> None:
    scene.host.refused = which
    with pytest.raises(MemoryKindError):
        scene.attach()
    assert scene.charged == 0
    assert not scene.context.tasks


@pytest.mark.parametrize("cap", range(COUNT))
async def test_too_many_of_them(scene: AttachScene, cap: int) -> None:
    scene.context.accounts.change({"fds": cap})
    with pytest.raises(LimitError):
        scene.attach()
    assert scene.charged == 0
    assert not scene.context.tasks


@pytest.mark.parametrize("which", range(COUNT))
async def test_one_that_the_kernel_does_not_map(scene: AttachScene, which: int) -> None:
    attaching = scene.attach()
    for _ in range(which):
        await scene.host.go_on()
    await scene.host.go_on(LimitError("no address space"))
    with pytest.raises(LimitError, match="address space"):
        await attaching
    assert scene.charged == which, "until they are unmapped"
    await scene.until_idle()
    assert scene.charged == len(scene.host.mapped) == 0
    assert not scene.registry.attached


@pytest.mark.parametrize("done", range(COUNT))
async def test_a_session_that_ends_meanwhile(scene: AttachScene, done: int) -> None:
    attaching = scene.attach()
    for _ in range(done):
        await scene.host.go_on()
    await scene.registry.close()  # waits for none of it
    assert scene.charged == COUNT
    await scene.until_idle()
    assert isinstance(attaching.exception(), StateError)
    assert scene.charged == len(scene.host.mapped) == 0
    assert not scene.registry.attached


async def test_what_is_not_attached_yet_can_not_be_detached(scene: AttachScene) -> None:
    attaching = scene.attach()
    with pytest.raises(UnknownNameError):
        scene.registry.detach([1])
    await scene.until_idle()
    assert len(attaching.result()) == COUNT


async def test_what_is_detached_before_its_reply(scene: AttachScene) -> None:
    attaching = scene.attach()
    for _ in range(COUNT):
        await scene.host.go_on()
    numbers = await attaching
    letting_go = scene.registry.detach(numbers)
    with pytest.raises(StateError):
        scene.registry.sizes_bytes(numbers)
    await scene.until_idle()
    assert letting_go.done()
    assert scene.charged == len(scene.host.mapped) == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO])
@pytest.mark.parametrize("which", range(COUNT))
async def test_a_daemon_without_descriptors(
    scene: AttachScene, monkeypatch: pytest.MonkeyPatch, which: int, number: int
) -> None:
    """It lacks something, and has no bug: its error names that, and it keeps nothing."""
    duplicate, made = os.dup, list[int]()

    def short(fd: int) -> int:
        if len(made) == which:
            raise OSError(number, os.strerror(number))
        made.append(duplicate(fd))
        return made[-1]

    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", short)
        with pytest.raises(OSError if number == errno.EIO else BusyError, match=os.strerror(number)) as caught:
            scene.attach()
    assert isinstance(caught.value, KvOffloadError) is (number != errno.EIO)
    assert scene.charged == 0
    await scene.until_idle()
