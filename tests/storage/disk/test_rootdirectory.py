"""The directory of a root: its manifest is written by one writer at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.manifest import read_manifest
from kvoffloadd.storage.disk.opening import probe
from kvoffloadd.storage.disk.rootdirectory import RootDirectory

NAME = b"n" * 16


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("first", ["the root", "the clear"])
async def test_a_clear_while_a_root_is_taken_in_is_recorded(tmp_path: Path, first: str, turns: int) -> None:
    """A root whose contents are not trusted gets a new manifest, and a clear is recorded there at the same time. What
    is counted as recorded is on the disk, whichever comes first, and whatever lies between.
    """
    lane = Lane("manifest", 1, asyncio.get_running_loop())
    directory = RootDirectory(tmp_path / "root", Files(), None, 0, lane)
    directory.open()
    await directory.load_manifest()
    await directory.create_manifest()
    directory.unconfirm()
    works = [directory.create_manifest(), directory.write_epochs(0, 7, {NAME: 7})]
    tasks = []
    for work in works if first == "the root" else works[::-1]:
        tasks.append(asyncio.ensure_future(work))
        for _ in range(turns):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    on_disk = await read_manifest(tmp_path / "root")
    assert on_disk is not None
    assert on_disk == directory.manifest
    assert on_disk.epoch_of(NAME) == 7
    assert directory.uuid == on_disk.root_uuid
    await directory.close()
    await lane.close(20)


class LyingFiles(Files):
    """Reads other bytes than were written, or too few."""

    def __init__(self, *, short: bool) -> None:
        self._short = short

    def read(self, fd: int, offset: int, buffers: Sequence[Any]) -> int:
        came = super().read(fd, offset, buffers)
        if self._short:
            return came - 1
        buffers[0][0, 0] ^= 1
        return came


@pytest.mark.parametrize("short", [False, True])
def test_a_directory_that_does_not_return_what_was_written_is_refused(tmp_path: Path, short: bool) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="what was written is not what is read"):
            probe(LyingFiles(short=short), fd, None)
    finally:
        os.close(fd)
    assert list(tmp_path.iterdir()) == []
