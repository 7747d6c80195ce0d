"""Holes that this process may not fill: touching one fails, and no page is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import pytest

from kvoffloadd.device.copyruns import CopyRuns, ReadWords, implementations
from kvoffloadd.device.userfaultguard import UserfaultGuard
from kvoffloadd.errors import DeviceError, LimitError
from kvoffloadd.linux.sharedmem import Mapping
from tests.device.memory import address, noise, u64
from tests.server import vanishing
from tests.server.vanishing import HALF, SIZE, Vanish

KINDS = (vanishing.holes, vanishing.huge_pages)
each = pytest.mark.parametrize(("copy", "read"), implementations().values(), ids=implementations())


@pytest.fixture
def holes() -> Iterator[UserfaultGuard]:
    try:
        made = UserfaultGuard()
    except OSError as error:
        pytest.skip(f"no userfaultfd here: {error}")
    yield made
    made.close()


@each
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_holes(
    holes: UserfaultGuard,
    copy: CopyRuns,
    read: ReadWords,
    kind: Callable[[], AbstractContextManager[tuple[int, Vanish]]],
) -> None:
    with kind() as (fd, vanish):
        mapping = Mapping.map_fd(fd, SIZE)
        holes.forbid(mapping)
        own, there, gone = noise(4096, 1), mapping.address, mapping.address + HALF
        copy(u64([address(own)]), u64([gone]), u64([4096]))
        vanish()
        for src, dst in ((gone, address(own)), (address(own), gone), (there, gone)):
            with pytest.raises(DeviceError, match="was never there"):
                copy(u64([src]), u64([dst]), u64([4096]))
        assert read(u64([there, gone]))[1].tolist() == [False, True]
        copy(u64([address(own)]), u64([there]), u64([4096]))
        assert np.array_equal(mapping.array()[:4096], own)
        assert os.fstat(fd).st_blocks * 512 == HALF
        mapping.close()


@each
def test_what_its_owner_fills_is_no_hole(holes: UserfaultGuard, copy: CopyRuns, read: ReadWords) -> None:
    with vanishing.holes() as (fd, vanish):
        vanish()
        mapping = Mapping.map_fd(fd, SIZE)
        holes.forbid(mapping)
        own = np.zeros(4, np.uint8)
        with pytest.raises(DeviceError):
            copy(u64([mapping.address + HALF]), u64([address(own)]), u64([4]))
        os.pwrite(fd, b"abcd", HALF)
        copy(u64([mapping.address + HALF]), u64([address(own)]), u64([4]))
        assert own.tobytes() == b"abcd"
        mapping.close()


def test_sizes_that_are_no_whole_pages(holes: UserfaultGuard) -> None:
    with vanishing.cut_off() as (fd, _):
        mapping = Mapping.map_fd(fd, 5000)
        holes.forbid(mapping)
        mapping.close()


def test_what_the_kernel_refuses_is_told(holes: UserfaultGuard) -> None:
    with vanishing.cut_off() as (fd, _):
        mapping = Mapping.map_fd(fd, SIZE)
    holes.forbid(mapping)
    others = UserfaultGuard()
    with pytest.raises(LimitError, match="can't forbid holes"):
        others.forbid(mapping)
    others.close()
    mapping.close()
