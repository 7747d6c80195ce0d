"""What a start finds in a segment file: everything that is whole, nothing that is not."""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.errors import UsageError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import recovery
from kvoffloadd.storage.disk.files import DiskError, aligned_pages
from kvoffloadd.storage.disk.format import (
    Records,
    SegmentHeader,
    encode_records,
    encode_segment_header,
    encode_spaces,
    footer_pages,
    record_pages,
)
from kvoffloadd.storage.disk.recovery import Kind
from kvoffloadd.storage.disk.segment import create_segment, recycle_segment, seal_segment
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.signedpages import sign_page
from tests.storage.disk.builders import NAME, SEGMENT_BYTES, SPACE_A, SPACE_B, Folder, entries_of, header_of

SIZES = [1, 4095, 4096, 4097, 9000, 12288, 70]


def patch(folder: Folder, offset: int, raw: bytes) -> None:
    fd = os.open(folder.path / NAME, os.O_RDWR)
    os.pwrite(fd, raw, offset)
    os.close(fd)


def end_of(entries: Records) -> list[int]:
    return [int(end) for end in entries["page"] + record_pages(entries["payload_bytes"])]


def test_a_sealed_segment_is_known_from_its_footer(folder: Folder) -> None:
    entries = entries_of(SIZES)
    entries["space"][3:] = 1
    header = folder.build(entries, keyspaces=[SPACE_A, SPACE_B])
    found = folder.recover()
    assert found.kind is Kind.SEALED
    assert found.header == header
    assert (found.entries == entries).all()
    assert found.keyspaces == [SPACE_A, SPACE_B]
    assert (found.end_page, found.damaged, found.size_bytes) == (end_of(entries)[-1], 0, SEGMENT_BYTES)


@pytest.mark.parametrize("window_pages", [1, 2, 3, 5, 2048])
def test_any_other_is_walked(folder: Folder, monkeypatch: pytest.MonkeyPatch, window_pages: int) -> None:
    monkeypatch.setattr(recovery, "WALK_BYTES", window_pages * PAGE_BYTES)
    entries = entries_of(SIZES)
    entries["space"][3:] = 1
    header = folder.build(entries, keyspaces=[SPACE_A, SPACE_B], sealed=False)
    found = folder.recover()
    assert found.kind is Kind.WALKED
    assert found.header == header
    for name in ("key", "sequence", "payload_bytes", "page", "part"):
        assert (found.entries[name] == entries[name]).all()
    assert [found.keyspaces[at] for at in found.entries["space"].tolist()] == [SPACE_A] * 3 + [SPACE_B] * 4
    assert (found.end_page, found.damaged) == (end_of(entries)[-1], 0)


def test_an_empty_segment(folder: Folder) -> None:
    folder.build(entries_of([]), sealed=False)
    found = folder.recover()
    assert (found.kind, len(found.entries), found.end_page) == (Kind.WALKED, 0, 1)


def test_an_empty_sealed_segment(folder: Folder) -> None:
    folder.build(entries_of([]))
    found = folder.recover()
    assert (found.kind, len(found.entries), found.end_page) == (Kind.SEALED, 0, 1)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_file_cut_at_any_page_serves_what_is_whole(folder: Folder, sealed: bool) -> None:
    entries = entries_of(SIZES)
    folder.build(entries, sealed=sealed)
    last = SEGMENT_BYTES // PAGE_BYTES
    for pages in reversed(range(last)):
        for extra in (77, 0):
            os.truncate(folder.path / NAME, pages * PAGE_BYTES + extra)
            found = folder.recover()
            if pages == 0:
                assert found.kind is (Kind.DAMAGED if extra else Kind.EMPTY)
                continue
            assert found.kind is Kind.WALKED
            whole = [page for page, end in zip(entries["page"].tolist(), end_of(entries), strict=True) if end <= pages]
            assert found.entries["page"].tolist() == whole
            if len(found.entries):
                assert set(folder.read(found.header.uuid, found.entries, SPACE_A)[0]) == {0}  # type: ignore[union-attr]


def test_a_footer_does_not_make_a_payload_good(folder: Folder) -> None:
    entries = entries_of([300, 300])
    header = folder.build(entries)
    patch(folder, 2 * PAGE_BYTES, b"wrong")
    found = folder.recover()
    assert (found.kind, len(found.entries)) == (Kind.SEALED, 2)
    assert folder.read(header.uuid, found.entries, SPACE_A)[0] == [1, 0]


def test_a_damaged_footer_costs_nothing(folder: Folder) -> None:
    entries = entries_of(SIZES)
    folder.build(entries)
    for offset in (SEGMENT_BYTES - 2 * PAGE_BYTES, SEGMENT_BYTES - 10):
        patch(folder, offset, b"\xee")
        found = folder.recover()
        assert found.kind is Kind.WALKED
        assert (found.entries["page"] == entries["page"]).all()


@pytest.mark.parametrize("junk", [b"\xff", b"\0" * PAGE_BYTES, b"elf" * 1000], ids=["flip", "zeros", "junk"])
def test_a_damaged_header_is_told_by_the_trailer(folder: Folder, junk: bytes) -> None:
    entries = entries_of(SIZES)
    header = folder.build(entries)
    patch(folder, 0, junk)
    found = folder.recover()
    assert (found.kind, found.header_lost) == (Kind.SEALED, True)
    assert found.header == SegmentHeader(header.uuid, header.number, header.segment_bytes, 0)
    assert (found.entries == entries).all()


@pytest.mark.parametrize("junk", [b"\xff", b"\0" * PAGE_BYTES], ids=["flip", "zeros"])
def test_a_damaged_header_without_a_trailer_is_the_end(folder: Folder, junk: bytes) -> None:
    folder.build(entries_of(SIZES), sealed=False)
    patch(folder, 0, junk)
    found = folder.recover()
    assert (found.kind, found.header, len(found.entries)) == (Kind.DAMAGED, None, 0)


def test_files_that_are_not_ours(folder: Folder) -> None:
    (folder.path / NAME).write_bytes(b"\x7fELF" * 5000)
    assert folder.recover().kind is Kind.FOREIGN
    (folder.path / NAME).write_bytes(b"short")
    assert folder.recover().kind is Kind.FOREIGN


@pytest.mark.parametrize("pages", [0, 1, 5, SEGMENT_BYTES // PAGE_BYTES])
def test_a_file_that_was_never_used_is_no_loss(folder: Folder, pages: int) -> None:
    """Its maker was stopped, or the power was cut, before the header came, or when only its end had come."""
    file = folder.path / NAME
    file.write_bytes(bytes(pages * PAGE_BYTES))
    assert (found := folder.recover()).kind is Kind.EMPTY
    assert (found.header, found.size_bytes) == (None, pages * PAGE_BYTES)
    if pages:
        patch(folder, 512, encode_segment_header(header_of())[512:].tobytes())
        assert folder.recover().kind is Kind.EMPTY


@pytest.mark.parametrize("version", [0, 2, 77])
def test_other_versions_are_not_read(folder: Folder, version: int) -> None:
    folder.build(entries_of(SIZES))
    page = encode_segment_header(header_of())
    page[8:12].view("<u4")[:] = version
    sign_page(page)
    patch(folder, 0, page.tobytes())
    found = folder.recover()
    assert (found.kind, found.header, len(found.entries)) == (Kind.UNREADABLE, None, 0)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_recycled_segment_shows_nothing_old(folder: Folder, sealed: bool) -> None:
    entries = entries_of([300] * 8)
    old = folder.build(entries, sealed=sealed)
    new = header_of(b"\x02" * 16, 2)
    fd = recycle_segment(folder.files, folder.fd, NAME, new, direct=False)
    found = folder.recover()
    assert (found.kind, found.header, len(found.entries), found.damaged) == (Kind.WALKED, new, 0, 0)
    assert set(folder.read(new.uuid, entries, SPACE_A)[0]) == {1}
    fresh = entries_of([5000], first_key=50)
    folder.write(fd, new, fresh, [SPACE_A])
    found = folder.recover()
    assert found.entries["key"][:, 0].tolist() == [50]
    seal_segment(folder.files, fd, new, fresh, [SPACE_A])
    assert (folder.recover().entries == fresh).all()
    os.close(fd)
    # Even if the new header is lost one day, the old footer does not come back.
    fd = recycle_segment(folder.files, folder.fd, NAME, header_of(b"\x03" * 16, 3), direct=False)
    os.close(fd)
    patch(folder, 20, b"\xff\xff")
    assert folder.recover().kind is Kind.DAMAGED
    assert old.uuid != new.uuid


def test_recycling_mends_a_short_file_and_refuses_a_long_one(folder: Folder) -> None:
    folder.build(entries_of([300]))
    os.truncate(folder.path / NAME, 3 * PAGE_BYTES)
    os.close(recycle_segment(folder.files, folder.fd, NAME, header_of(number=2), direct=False))
    assert folder.recover().size_bytes == SEGMENT_BYTES
    with pytest.raises(DiskError, match="more than the 32768 of a segment"):
        recycle_segment(folder.files, folder.fd, NAME, header_of(segment_bytes=8 * PAGE_BYTES), direct=False)


def test_segments_are_checked_when_they_are_made(folder: Folder) -> None:
    with pytest.raises(UsageError):
        create_segment(folder.files, folder.fd, NAME, header_of(segment_bytes=PAGE_BYTES + 1), direct=False)
    folder.build(entries_of([300]))
    with pytest.raises(FileExistsError):
        folder.create(header_of())
    assert folder.recover().kind is Kind.SEALED


def test_a_footer_never_overwrites_a_record(folder: Folder) -> None:
    room = SEGMENT_BYTES // PAGE_BYTES - 1 - footer_pages(1, 1)
    fits = entries_of([(room - 1) * PAGE_BYTES])
    folder.build(fits, name="0" * 16)
    assert folder.recover("0" * 16).kind is Kind.SEALED
    with pytest.raises(UsageError):
        folder.build(entries_of([room * PAGE_BYTES]), name="1" * 16)


@pytest.fixture(scope="module", params=[2 * PAGE_BYTES, recovery.WALK_BYTES], ids=["small", "large"])
def walk_bytes(request: pytest.FixtureRequest) -> int:
    size: int = request.param
    return size


_numbers = itertools.count()
items = st.tuples(st.sampled_from(["good", "good", "bad", "old", "junk", "torn"]), st.integers(1, 5 * PAGE_BYTES))


@pytest.mark.slow
@given(layout=st.lists(items, max_size=7), number=st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_a_walk_finds_exactly_the_good_ones(walk_bytes: int, layout: list[tuple[str, int]], number: int) -> None:
    """good: as written; bad: payload changed; old: of an earlier use; junk: random pages; torn: header changed."""
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patched:
        patched.setattr(recovery, "WALK_BYTES", walk_bytes)
        folder = Folder(Path(path) / "segments")
        header = folder.build(entries_of([]), sealed=False)
        fd = os.open(folder.path / NAME, os.O_RDWR)
        rng = np.random.default_rng(number)
        page, good, damaged = 1, [], 0
        for key, (kind, size) in enumerate(layout, 1):
            entry = entries_of([size], first_page=page, first_key=key)
            writer = header_of(b"\x09" * 16) if kind == "old" else header
            folder.write(fd, writer, entry, [SPACE_A])
            start = page * PAGE_BYTES
            if kind == "bad":
                at = start + PAGE_BYTES + int(rng.integers(size))
                os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
            elif kind == "torn":
                at = start + int(rng.integers(PAGE_BYTES))
                os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
            elif kind == "junk":
                os.pwrite(fd, rng.bytes(size), start)
            if kind == "good":
                good.append(page)
            damaged += kind == "bad"
            page += int(record_pages(entry["payload_bytes"])[0])
        os.close(fd)
        found = folder.recover()
        assert found.kind is Kind.WALKED
        assert found.entries["page"].tolist() == good
        assert found.damaged == damaged
        if good:
            assert set(folder.read(header.uuid, found.entries, SPACE_A)[0]) == {0}
        folder.close()


def test_a_record_inside_a_payload_is_not_one(folder: Folder) -> None:
    """A payload that holds records of this very use, headers and all, and whole ones."""
    header = header_of()
    fd = folder.create(header)
    folder.write(fd, header, entries_of([300, 5000], first_page=4), [SPACE_A])
    assert len(folder.recover().entries) == 2
    outer = entries_of([5 * PAGE_BYTES], first_page=3, first_key=77)
    payload = np.frombuffer(os.pread(fd, 5 * PAGE_BYTES, 4 * PAGE_BYTES), np.uint8)
    digest = hash_payloads(np.array([payload.ctypes.data], np.uint64), np.array([len(payload)]))
    page = aligned_pages(1)
    encode_records(page, header.uuid, outer, encode_spaces([SPACE_A]), digest, 0)
    os.pwrite(fd, page.tobytes(), 3 * PAGE_BYTES)
    os.close(fd)
    assert folder.recover().entries["key"][:, 0].tolist() == [77]
    patch(folder, 8 * PAGE_BYTES + 4095, b"\x11")  # padding of the inner one, payload of the outer one
    found = folder.recover()
    assert (found.entries["key"][:, 0].tolist(), found.damaged) == ([1, 2], 1)
