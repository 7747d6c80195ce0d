"""Going on in a segment: what was there stays, what is new is found, and nothing else comes back."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.scheduling.lanes import AGAIN
from kvoffloadd.storage.disk import resuming
from kvoffloadd.storage.disk.files import DiskError, Files
from kvoffloadd.storage.disk.format import Records, SegmentHeader, record_pages
from kvoffloadd.storage.disk.recovery import Kind, Recovered
from kvoffloadd.storage.disk.resuming import SegmentResumer
from kvoffloadd.storage.disk.segment import seal_segment
from tests.storage.disk.builders import NAME, SEGMENT_BYTES, SPACE_A, Folder, entries_of

sizes_of = st.lists(st.integers(1, 3 * PAGE_BYTES), max_size=6)


def resume(folder: Folder, found: Recovered) -> int:
    """The descriptor; the caller closes it."""
    assert found.header is not None
    work = SegmentResumer(folder.files, folder.fd, found.header, found, direct=False)
    while (made := work()) is AGAIN:
        pass
    assert isinstance(made, int)
    return made


def go_on(folder: Folder, header: SegmentHeader, found: Recovered, sizes: list[int]) -> Records:
    """Write some more. What they are, as a walk is to find them."""
    fd = resume(folder, found)
    more = entries_of(sizes, first_page=found.end_page, first_key=1000)
    if len(more):
        folder.write(fd, header, more, [SPACE_A])
    os.close(fd)
    return more


def keys(entries: Records) -> list[int]:
    found: list[int] = entries["key"][:, 0].tolist()
    return found


def tear(folder: Folder, entries: Records) -> None:
    """The last record has not come whole: its header has, its payload has not."""
    last = entries[-1]
    fd = os.open(folder.path / NAME, os.O_RDWR)
    os.pwrite(fd, b"\xa5" * 16, (int(last["page"]) + 1) * PAGE_BYTES)
    os.close(fd)


def hide(folder: Folder, header: SegmentHeader, entries: Records) -> None:
    """The footer does not name the last record."""
    fd = os.open(folder.path / NAME, os.O_RDWR)
    seal_segment(folder.files, fd, header, entries[:-1], [SPACE_A])
    os.close(fd)


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("window_pages", [1, 3, 2048])
def test_it_holds_what_it_held_and_what_is_new(
    folder: Folder, sealed: bool, window_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "WALK_BYTES", window_pages * PAGE_BYTES)
    entries = entries_of([1, 5000, 4096])
    header = folder.build(entries, sealed=sealed)
    more = go_on(folder, header, folder.recover(), [300, 9000])
    found = folder.recover()
    assert found.kind is Kind.WALKED, "a crash now: no footer tells of less"
    assert keys(found.entries) == keys(entries) + keys(more)
    assert found.damaged == 0
    fd = os.open(folder.path / NAME, os.O_RDWR)
    seal_segment(folder.files, fd, header, found.entries, found.keyspaces)
    os.close(fd)
    again = folder.recover()
    assert (again.kind, again.end_page) == (Kind.SEALED, found.end_page)
    assert keys(again.entries) == keys(found.entries)
    more = go_on(folder, header, again, [7])
    assert keys(folder.recover().entries) == keys(found.entries) + keys(more)


@pytest.mark.parametrize("sizes", [[1], [4096, 4096], [3 * PAGE_BYTES + 1], []])
def test_a_torn_record_does_not_come_back(folder: Folder, sizes: list[int]) -> None:
    """Nor is it reported as damage for ever. What is new may end before it, within it or behind it."""
    entries = entries_of([100, 200, 2 * PAGE_BYTES])
    header = folder.build(entries, sealed=False)
    tear(folder, entries)
    found = folder.recover()
    assert (keys(found.entries), found.damaged) == ([1, 2], 1)
    more = go_on(folder, header, found, sizes)
    again = folder.recover()
    assert keys(again.entries) == [1, 2, *keys(more)]
    assert again.damaged == 0


def test_a_whole_record_that_the_footer_does_not_name_is_not_written_over(folder: Folder) -> None:
    """It is unknown, and it would come back once there is no footer."""
    entries = entries_of([100, 200, 2 * PAGE_BYTES])
    header = folder.build(entries)
    hide(folder, header, entries)
    found = folder.recover()
    assert (found.kind, keys(found.entries)) == (Kind.SEALED, [1, 2])
    before = (folder.path / NAME).read_bytes()
    with pytest.raises(DiskError, match="footer"):
        resume(folder, found)
    assert (folder.path / NAME).read_bytes() == before


@pytest.mark.parametrize("change", [-PAGE_BYTES, PAGE_BYTES])
def test_a_file_of_another_length_stays_as_it_is(folder: Folder, change: int) -> None:
    folder.build(entries_of([100]), sealed=False)
    found = folder.recover()
    os.truncate(folder.path / NAME, SEGMENT_BYTES + change)
    before = (folder.path / NAME).read_bytes()
    with pytest.raises(DiskError, match="bytes"):
        resume(folder, found)
    assert (folder.path / NAME).read_bytes() == before


class FailingFiles(Files):
    """The disk fails from its `after`th write or sync on."""

    after = 0

    def _fail(self) -> None:
        self.after -= 1
        if self.after < 0:
            raise OSError(errno.EIO, "the disk fails")

    def write(self, fd: int, offset: int, pages: Sequence[Any]) -> None:
        self._fail()
        super().write(fd, offset, pages)

    def sync(self, fd: int) -> None:
        self._fail()
        super().sync(fd)


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_disk_that_fails_keeps_what_is_there(folder: Folder, sealed: bool, after: int) -> None:
    entries = entries_of([100, 5000])
    folder.build(entries, sealed=sealed)
    found = folder.recover()
    folder.files = FailingFiles()
    folder.files.after = after
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="the disk fails"):
        resume(folder, found)
    assert len(os.listdir("/proc/self/fd")) == opened
    folder.files = Files()
    assert keys(folder.recover().entries) == keys(entries)


@settings(max_examples=60, deadline=None)
@given(sizes_of, st.booleans(), st.booleans(), sizes_of, st.integers(0, 40))
def test_whatever_was_there_and_wherever_it_ends(
    sizes: list[int], sealed: bool, spoiled: bool, new_sizes: list[int], kept_pages: int
) -> None:
    """The end has as many new pages as may be: the rest has what was there before."""
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path) / "segments")
        entries = entries_of(sizes)
        header = folder.build(entries, sealed=sealed)
        if spoiled and len(entries):
            hide(folder, header, entries) if sealed else tear(folder, entries)
        found = folder.recover()
        before = np.frombuffer((folder.path / NAME).read_bytes(), np.uint8)
        try:
            fd = resume(folder, found)
        except DiskError:
            assert sealed, "a walk knows all"
            assert spoiled
            folder.close()
            return
        begun = np.frombuffer((folder.path / NAME).read_bytes(), np.uint8)
        assert (begun != before).reshape(-1, PAGE_BYTES).any(axis=1).sum() <= 2, "the footer, a torn record"
        more = entries_of(new_sizes, first_page=found.end_page, first_key=1000)
        try:
            if len(more):
                folder.write(fd, header, more, [SPACE_A])
        except UsageError:
            more = more[:0]
        cut = (found.end_page + kept_pages) * PAGE_BYTES
        os.pwrite(fd, begun[cut:].tobytes(), cut)
        os.close(fd)
        ends = more["page"] + record_pages(more["payload_bytes"])
        whole = more[ends * PAGE_BYTES <= cut]
        again = keys(folder.recover().entries)
        assert again == keys(found.entries) + keys(whole)
        folder.close()
