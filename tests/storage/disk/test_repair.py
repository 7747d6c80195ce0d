"""Offline: every bad record of a root is found and named, and nothing else is; repairing takes out just these."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk.files import DiskError
from kvoffloadd.storage.disk.format import encode_footer, encode_segment_header
from kvoffloadd.storage.disk.manifest import DELETED_VERSION, Manifest, encode_manifest
from kvoffloadd.storage.disk.recovery import Kind
from kvoffloadd.storage.disk.repair import RootReport, check_root
from kvoffloadd.storage.signedpages import sign_page
from tests.storage.disk.builders import NAME, SEGMENT_BYTES, SPACE_A, SPACE_B, Folder, entries_of, header_of

SIZES = [300, 9000, 300, 4096]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir(0o700)
    (tmp_path / "root" / "manifest").write_bytes(encode_manifest(Manifest(b"r" * 16, 0, 0, {})))
    return tmp_path / "root"


@pytest.fixture
def folder(root: Path) -> Iterator[Folder]:
    made = Folder(root / "segments")
    yield made
    made.close()


def patch(folder: Folder, offset: int, raw: bytes, name: str = NAME) -> None:
    fd = os.open(folder.path / name, os.O_RDWR)
    os.pwrite(fd, raw, offset)
    os.close(fd)


def contents(folder: Folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.path.iterdir()}


def test_a_sound_root(root: Path, folder: Folder) -> None:
    entries = entries_of(SIZES)
    entries["space"][2:] = 1
    folder.build(entries, keyspaces=[SPACE_A, SPACE_B])
    folder.build(entries, keyspaces=[SPACE_A, SPACE_B], sealed=False, name="1" * 16)
    before = contents(folder)
    seen: list[tuple[int, int]] = []
    for repair in (False, True):
        report = check_root(root, repair=repair, progress=lambda done, total: seen.append((done, total)))
        assert report == RootReport(2, 8, 2 * SEGMENT_BYTES, [], 0)
    assert seen[:3] == [(0, 2 * SEGMENT_BYTES), (SEGMENT_BYTES, 2 * SEGMENT_BYTES), (2 * SEGMENT_BYTES,) * 2]
    assert contents(folder) == before


@pytest.mark.parametrize("sealed", [True, False])
def test_bad_payloads_are_named_and_taken_out(root: Path, folder: Folder, sealed: bool) -> None:
    entries = entries_of(SIZES)
    header = folder.build(entries, sealed=sealed)
    bad = [1, 3]
    for at in bad:
        patch(folder, (int(entries["page"][at]) + 1) * PAGE_BYTES, b"\xff\xfe")
    before = contents(folder)
    expected = [f"segment {NAME}: the record at page {page} is damaged or torn" for page in entries["page"][bad]]
    report = check_root(root, repair=False)
    assert (report.findings, report.repaired, report.records) == (expected, 0, 4)
    assert contents(folder) == before
    report = check_root(root, repair=True)
    assert (report.findings, report.repaired) == (expected, 2)
    assert check_root(root, repair=False).findings == []
    found = folder.recover()
    assert found.kind is (Kind.SEALED if sealed else Kind.WALKED)
    assert found.entries["page"].tolist() == entries["page"][[0, 2]].tolist()
    assert folder.read(header.uuid, entries, SPACE_A)[0] == [0, 1, 0, 1]


def test_bad_headers_in_a_sealed_segment(root: Path, folder: Folder) -> None:
    entries = entries_of(SIZES)
    folder.build(entries)
    patch(folder, int(entries["page"][2]) * PAGE_BYTES + 3000, b"\xff")
    assert len(check_root(root, repair=True).findings) == 1
    assert check_root(root, repair=True).findings == []
    assert len(folder.recover().entries) == 3


@pytest.mark.parametrize("name", ["key", "sequence", "part", "space"])
def test_a_footer_that_says_something_else_than_its_record(root: Path, folder: Folder, name: str) -> None:
    entries = entries_of(SIZES)
    header = folder.build(entries)
    lying = entries.copy()
    lying[name][1] = 1 if name != "key" else 999
    raw = encode_footer(header.uuid, header.number, lying, [SPACE_A, SPACE_B], SEGMENT_BYTES)
    patch(folder, SEGMENT_BYTES - len(raw), raw.tobytes())
    assert len(check_root(root, repair=True).findings) == 1
    assert folder.recover().entries["page"].tolist() == entries["page"][[0, 2, 3]].tolist()


def test_a_lost_segment_header_is_written_again_or_the_file_removed(root: Path, folder: Folder) -> None:
    folder.build(entries_of(SIZES))
    folder.build(entries_of(SIZES), sealed=False, name="1" * 16)
    for name in (NAME, "1" * 16):
        patch(folder, 30, b"\xee", name)
    report = check_root(root, repair=False)
    assert len(report.findings) == 2
    assert report.repaired == 0
    assert check_root(root, repair=True).repaired == 2
    assert check_root(root, repair=False).findings == []
    assert list(contents(folder)) == [NAME]
    found = folder.recover()
    assert (found.kind, found.header_lost, len(found.entries)) == (Kind.SEALED, False, 4)


def test_what_is_not_ours_is_never_touched(root: Path, folder: Folder) -> None:
    newer = encode_segment_header(header_of())
    newer[8] = 2
    sign_page(newer)
    (folder.path / ("1" * 16)).write_bytes(newer.tobytes() * 4)
    (folder.path / ("2" * 16)).write_bytes(b"\x7fELF" * 4096)
    (folder.path / "notes.txt").write_bytes(b"mine")
    before = contents(folder)
    report = check_root(root, repair=True)
    assert [finding.split(" is ")[1].split(";")[0] for finding in report.findings] == [
        "nothing of ours",
        "of another format version",
        "nothing of ours",
    ]
    assert report.repaired == 0
    assert contents(folder) == before


def test_what_can_not_be_read_is_no_reason_to_stop(root: Path, folder: Folder, tmp_path: Path) -> None:
    folder.build(entries_of(SIZES))
    (folder.path / ("0" * 16)).symlink_to(tmp_path)
    (folder.path / ("1" * 16)).mkdir()
    report = check_root(root, repair=True)
    assert len(report.findings) == 2
    assert all("can't be read" in finding for finding in report.findings)
    assert report.records == 4


def test_a_short_file_is_named(root: Path, folder: Folder) -> None:
    folder.build(entries_of(SIZES))
    os.truncate(folder.path / NAME, 5 * PAGE_BYTES)
    report = check_root(root, repair=False)
    assert any(f"should have {SEGMENT_BYTES}" in finding for finding in report.findings)


def test_the_manifest(root: Path, folder: Folder) -> None:
    folder.build(entries_of(SIZES))
    patch(folder, 2 * PAGE_BYTES, b"\xff")
    manifest = root / "manifest"
    manifest.write_bytes(b"torn")
    assert "manifest is damaged" in check_root(root, repair=False).findings[0]
    manifest.unlink()
    assert "no manifest" in check_root(root, repair=False).findings[0]
    assert not manifest.exists()
    before = contents(folder)
    text = b'{"version": %d}\n' % (DELETED_VERSION + 1)
    manifest.write_bytes(text + f"xxh3_128 {xxhash.xxh3_128_hexdigest(text)}\n".encode())
    report = check_root(root, repair=True)
    assert f"version {DELETED_VERSION + 1}" in report.findings[0]
    assert report.repaired == 0
    assert contents(folder) == before


def test_a_root_in_use_and_no_root_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="is not a root"):
        check_root(root)
    with pytest.raises(DiskError, match="is not a root"):
        check_root(tmp_path / "nothing")
    assert sorted(os.listdir(root)) == ["manifest"]
    folder = Folder(root / "segments")
    folder.close()
    with open(root / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DiskError, match="kvoffloadd verify --disk"):
            check_root(root)
    before = set(os.listdir("/proc/self/fd"))
    assert check_root(root) == RootReport()
    assert set(os.listdir("/proc/self/fd")) == before


def test_many_bad_records_are_all_found(root: Path, folder: Folder, seed: int) -> None:
    rng = np.random.default_rng(seed)
    entries = entries_of(rng.integers(1, 5000, 20).tolist())
    header = folder.build(entries)
    bad = np.flatnonzero(rng.random(20) < 0.5)
    for at in bad.tolist():
        start = int(entries["page"][at]) * PAGE_BYTES
        offset = int(rng.integers(PAGE_BYTES + int(entries["payload_bytes"][at])))
        patch(folder, start + offset, bytes([(folder.path / NAME).read_bytes()[start + offset] ^ 4]))
    report = check_root(root, repair=True)
    assert len(report.findings) == report.repaired == len(bad)
    assert folder.recover().entries["page"].tolist() == np.delete(entries["page"], bad).tolist()
    left = np.delete(entries, bad)
    assert set(folder.read(header.uuid, left, SPACE_A)[0]) <= {0}
