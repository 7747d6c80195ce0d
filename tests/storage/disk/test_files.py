"""System calls that do less than they were asked for, directories that are not ours, faults on demand."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.errors import ConfigError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.storage.disk import files as disk_files
from kvoffloadd.storage.disk.faults import FaultyFiles
from kvoffloadd.storage.disk.files import DiskError, Files, aligned_pages, is_segment_name
from kvoffloadd.storage.disk.opening import probe
from kvoffloadd.storage.disk.segment import create_segment, recycle_segment, seal_segment
from kvoffloadd.testing.wait import HANG_S
from tests.conftest import OTHER_UID
from tests.storage.disk.builders import NAME, SPACE_A, Folder, entries_of, header_of


def test_names_of_segments() -> None:
    assert is_segment_name("00000000000000af")
    for name in ("", "af", "00000000000000AF", "00000000000000ag", "00000000000000af\n", "0" * 17, "\u0660" * 16):
        assert not is_segment_name(name)


# --- directories ---


def test_a_directory_is_private(tmp_path: Path) -> None:
    files = Files()
    files.make_directory(tmp_path / "made")
    files.make_directory(tmp_path / "made")
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    os.close(files.open_directory(tmp_path / "made"))


@pytest.mark.parametrize("mode", [0o710, 0o704, 0o701, 0o777])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(DiskError, match=f"has mode {mode:o}"):
        Files().open_directory(tmp_path / "open")


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    (tmp_path / "theirs").mkdir(0o700)
    os.chown(tmp_path / "theirs", OTHER_UID, -1)
    with pytest.raises(DiskError, match=f"belongs to uid {OTHER_UID}"):
        Files().open_directory(tmp_path / "theirs")


def test_links_are_not_followed(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder.path)
    with pytest.raises(DiskError, match=f"is a symbolic link: name the directory itself, {folder.path}"):
        folder.files.open_directory(tmp_path / "link")
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        folder.files.open_directory(tmp_path / "plain")
    (tmp_path / "file").write_bytes(b"precious")
    (folder.path / NAME).symlink_to(tmp_path / "file")
    for create in (False, True):
        with pytest.raises(OSError, match=r"symbolic|exists"):
            folder.files.open(folder.fd, NAME, create=create, direct=False, write=True)
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_fifo_under_the_name_of_a_segment_is_not_waited_for(folder: Folder) -> None:
    os.mkfifo(folder.path / NAME)
    with pytest.raises(OSError, match="seek"):
        folder.recover()


def test_files_are_private(folder: Folder) -> None:
    os.close(folder.create(header_of()))
    assert (folder.path / NAME).stat().st_mode & 0o777 == 0o600


# --- reads and writes that do less ---


def buffers_of(count: int, size: int) -> list[bytes]:
    return [bytes([at % 251]) * size for at in range(count)]


@pytest.mark.parametrize("most", [1, 100, 4096, 10_000])
def test_short_writes_and_reads_go_on(folder: Folder, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    pwritev, preadv = os.pwritev, os.preadv

    def short(call: Any) -> Any:
        def call_short(fd: int, buffers: Sequence[Any], offset: int) -> int:
            return int(call(fd, [memoryview(buffers[0])[:most]], offset))

        return call_short

    monkeypatch.setattr(os, "pwritev", short(pwritev))
    monkeypatch.setattr(os, "preadv", short(preadv))
    wanted = buffers_of(7, 999)
    fd = folder.files.open(folder.fd, NAME, create=True, direct=False, write=True)
    folder.files.write(fd, 5, wanted)
    room = bytearray(7 * 999 + 100)
    views = [memoryview(room)[:1000], memoryview(room)[1000:]]
    assert folder.files.read(fd, 5, views) == 7 * 999
    assert bytes(room[: 7 * 999]) == b"".join(wanted)
    os.close(fd)


def test_records_survive_short_writes_and_reads(folder: Folder, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The real buffers: pages of an array, and memory behind addresses."""
    rng = np.random.default_rng(seed)
    pwritev, preadv = os.pwritev, os.preadv

    def short(call: Any) -> Any:
        def call_short(fd: int, buffers: Sequence[Any], offset: int) -> int:
            raw = np.concatenate([np.frombuffer(one, np.uint8) for one in buffers])
            count = int(rng.integers(1, len(raw) + 1))
            if call is pwritev:
                return int(call(fd, [raw[:count].data], offset))
            kept, left = [], count
            for one in buffers:
                kept.append(np.frombuffer(one, np.uint8)[:left])
                left -= len(kept[-1])
            return int(call(fd, [one for one in kept if len(one)], offset))

        return call_short

    monkeypatch.setattr(os, "pwritev", short(pwritev))
    monkeypatch.setattr(os, "preadv", short(preadv))
    entries = entries_of([300, 5000, 4096, 9000])
    header = folder.build(entries)
    assert (folder.recover().entries == entries).all()
    assert folder.read(header.uuid, entries, SPACE_A)[0] == [0] * 4


def test_direct_goes_on_at_a_page(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    if not probe(folder.files, folder.fd, None).direct:
        pytest.skip("no O_DIRECT here")
    pwritev, offsets = os.pwritev, []

    def short(fd: int, buffers: Sequence[Any], offset: int) -> int:
        offsets.append(offset)
        done = pwritev(fd, buffers, offset)
        return done - 512 if len(offsets) == 1 else done

    monkeypatch.setattr(os, "pwritev", short)
    pages = aligned_pages(6)
    pages.reshape(-1)[:] = 7
    fd = folder.files.open(folder.fd, NAME, create=True, direct=True, write=True)
    folder.files.write(fd, 0, [pages[:3], pages[3:]])
    assert offsets == [0, 5 * PAGE_BYTES]
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 512)
    with pytest.raises(OSError, match="nothing more"):
        folder.files.write(fd, 0, [pages])
    # A file that ends inside a page.
    os.truncate(folder.path / NAME, 2 * PAGE_BYTES + 100)
    assert folder.files.read(fd, 0, [pages]) == 2 * PAGE_BYTES + 100
    os.close(fd)


def test_a_disk_that_takes_nothing_is_an_error(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    fd = folder.files.open(folder.fd, NAME, create=True, direct=False, write=True)
    with pytest.raises(OSError, match="nothing more") as caught:
        folder.files.write(fd, 0, [b"abc"])
    assert caught.value.errno == errno.EIO
    os.close(fd)


def test_more_buffers_than_one_call_takes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "_IOV_MAX", 100)
    wanted = buffers_of(1234, 10)
    fd = folder.files.open(folder.fd, NAME, create=True, direct=False, write=True)
    folder.files.write(fd, 0, wanted)
    back = [bytearray(10) for _ in wanted]
    assert folder.files.read(fd, 0, back) == 12340
    assert [bytes(one) for one in back] == wanted
    os.truncate(folder.path / NAME, 5005)
    assert folder.files.read(fd, 0, back) == 5005
    assert folder.files.read(fd, 6000, back) == 0
    os.close(fd)


def test_probing_for_direct_leaves_nothing(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe(folder.files, folder.fd, None).allocates
    assert folder.files.names(folder.fd) == []

    write = os.pwritev

    def refuse(fd: int, buffers: Sequence[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned")
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse)
    assert not probe(folder.files, folder.fd, None).direct
    with pytest.raises(DiskError, match=r"O_DIRECT does not work there .*: set disk.direct = "):
        probe(folder.files, folder.fd, True)
    assert folder.files.names(folder.fd) == []


# --- faults ---


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    return tmp_path / "switch"


def test_faults_come_and_go(folder: Folder, switch: Path) -> None:
    files = FaultyFiles(switch)
    folder.files = files
    fd = folder.create(header_of())
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: files.write(fd, 0, [b"x"]),
        "read": lambda: files.read(fd, 0, [bytearray(1)]),
        "allocate": lambda: files.allocate(fd, 1),
        "sync": lambda: files.sync(fd),
        "open": lambda: files.open(folder.fd, NAME, create=False, direct=False, write=False),
        "unlink": lambda: files.unlink(folder.fd, "nothing"),
        "names": lambda: files.names(folder.fd),
    }
    for name, call in calls.items():
        switch.write_text(f"{name}=EDQUOT\n", encoding="utf-8")
        with pytest.raises(OSError, match="planted") as caught:
            call()
        assert caught.value.errno == errno.EDQUOT
    assert files.planted == 7
    switch.write_text("", encoding="utf-8")
    files.write(fd, 0, [b"x"])
    switch.unlink()
    files.write(fd, 0, [b"x"])
    os.close(fd)


def test_delays(folder: Folder, switch: Path) -> None:
    switch.write_text("read_delay_s=0.05\nwrite=EIO\n", encoding="utf-8")
    files = FaultyFiles(switch)
    fd = Files().open(folder.fd, NAME, create=True, direct=False, write=True)
    began = time.monotonic()
    files.read(fd, 0, [bytearray(1)])
    assert time.monotonic() - began >= 0.05
    os.close(fd)


def test_a_delay_can_be_replaced_while_a_call_waits(folder: Folder, switch: Path) -> None:
    switch.write_text("read_delay_s=3600\n", encoding="utf-8")
    files = FaultyFiles(switch)
    fd = Files().open(folder.fd, NAME, create=True, direct=False, write=True)
    reader = threading.Thread(target=files.read, args=(fd, 0, [bytearray(1)]), daemon=True)
    reader.start()
    time.sleep(0.1)
    assert reader.is_alive()
    new = switch.with_suffix(".new")
    new.write_text("read_delay_s=0.05\n", encoding="utf-8")
    new.replace(switch)
    reader.join(HANG_S)
    assert not reader.is_alive()
    os.close(fd)


@pytest.mark.parametrize("text", ["fly=EIO", "write=EBROKEN", "write=5", "write", "read_delay_s=-1", "read_delay_s=x"])
def test_unknown_faults_are_refused(folder: Folder, switch: Path, text: str) -> None:
    switch.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        FaultyFiles(switch).names(folder.fd)


@pytest.mark.parametrize("operation", ["allocate", "write", "sync"])
def test_a_segment_that_can_not_be_made_leaves_no_file(folder: Folder, switch: Path, operation: str) -> None:
    switch.write_text(f"{operation}=ENOSPC", encoding="utf-8")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="planted"):
        create_segment(FaultyFiles(switch), folder.fd, NAME, header_of(), direct=False)
    assert os.listdir(folder.path) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("operation", ["open", "write", "sync"])
def test_recycling_and_sealing_that_fail_lose_no_descriptor(folder: Folder, switch: Path, operation: str) -> None:
    entries = entries_of([300])
    header = folder.build(entries)
    files = FaultyFiles(switch)
    fd = files.open(folder.fd, NAME, create=False, direct=False, write=True)
    switch.write_text(f"{operation}=EIO", encoding="utf-8")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="planted"):
        recycle_segment(files, folder.fd, NAME, header_of(number=2), direct=False)
    if operation != "open":
        with pytest.raises(OSError, match="planted"):
            seal_segment(files, fd, header, entries, [])
    assert set(os.listdir("/proc/self/fd")) == before
    os.close(fd)


def test_recovery_and_reads_under_faults(folder: Folder, switch: Path) -> None:
    entries = entries_of([300, 300])
    header = folder.build(entries)
    folder.files = FaultyFiles(switch)
    for text in ("open=EACCES", "read=EIO"):
        switch.write_text(text, encoding="utf-8")
        assert folder.read(header.uuid, entries, SPACE_A)[0] == [2, 2]
        with pytest.raises(OSError, match="planted"):
            folder.recover()
    switch.unlink()
    assert folder.read(header.uuid, entries, SPACE_A)[0] == [0, 0]
