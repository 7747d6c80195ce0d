"""The file behind the memory tier: who may go on with it, and what it remembers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.errors import ConfigError, TryAgainError
from kvoffloadd.model import HUGE_PAGE_BYTES, PAGE_BYTES
from kvoffloadd.storage import arenafile as module
from kvoffloadd.storage import arenaowner as owner_module
from kvoffloadd.storage.arenafile import ATTEMPTS_MAX, NAMES_BYTES, ArenaFile, file_bytes, inherit, open_pool, unfit
from tests.kernelsettings import reserved_pages
from tests.server.vanishing import punch

CAPACITY, SLAB = 40 * PAGE_BYTES, 8 * PAGE_BYTES
RESERVED_PAGES = file_bytes(CAPACITY, SLAB, HUGE_PAGE_BYTES) // HUGE_PAGE_BYTES


def fits(_: int) -> None:
    """There is room for everything."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool"


@pytest.fixture
def pool() -> Iterator[ArenaFile]:
    made = ArenaFile.make(CAPACITY, SLAB)
    yield made
    made.close()


def heir(pool: ArenaFile, capacity_bytes: int = CAPACITY, slab_bytes: int = SLAB) -> ArenaFile | None:
    return inherit(os.dup(pool.fd), capacity_bytes, slab_bytes, fits)


def test_an_heir_has_all_of_it(pool: ArenaFile) -> None:
    pool.arena[5], pool.slabs[2], pool.records[7, 3] = 11, 12, 13
    pool.save_names(b"names")
    other = heir(pool)
    assert other is not None
    assert other.is_old
    assert (other.arena[5], other.slabs[2], other.records[7, 3], other.names()) == (11, 12, 13, b"names")
    assert other.seed == pool.seed
    other.close()


@pytest.mark.parametrize(("capacity", "slab"), [(CAPACITY + PAGE_BYTES, SLAB), (CAPACITY, SLAB // 2)])
def test_other_sizes_are_a_cold_start(pool: ArenaFile, capacity: int, slab: int) -> None:
    assert "it was made for" in unfit(pool.fd, capacity, slab)
    assert heir(pool, capacity, slab) is None


def test_what_is_unfit_says_why(pool: ArenaFile, tmp_path: Path) -> None:
    def reason(change: bytes, at: int) -> str:
        before = os.pread(pool.fd, len(change), at)
        os.pwrite(pool.fd, change, at)
        found = unfit(pool.fd, CAPACITY, SLAB)
        os.pwrite(pool.fd, before, at)
        return found

    assert unfit(pool.fd, CAPACITY, SLAB) == ""
    assert reason(b"\xff", 9) == "its header is damaged"
    assert reason(bytes(80), 0) == "it has no header"
    short = os.open(tmp_path / "short", os.O_RDWR | os.O_CREAT)
    os.write(short, os.pread(pool.fd, PAGE_BYTES, 0))
    assert unfit(short, CAPACITY, SLAB) == f"it has {PAGE_BYTES} bytes"
    os.close(short)
    ends = os.pipe()
    assert unfit(ends[0], CAPACITY, SLAB) == "it is no file"
    assert inherit(ends[0], CAPACITY, SLAB, fits) is None, "and is closed"
    os.close(ends[1])


def test_starts_that_fail_make_it_unfit(pool: ArenaFile) -> None:
    """Or the same crash would come with every start, for ever."""

    def attempt() -> None:
        successor = heir(pool)
        assert successor is not None
        successor.record_attempt()
        successor.close()

    for _ in range(ATTEMPTS_MAX - 1):
        attempt()
    pool.record_success()
    for _ in range(ATTEMPTS_MAX):
        attempt()
    assert heir(pool) is None


def test_what_is_unfit_is_freed_at_once(pool: ArenaFile) -> None:
    """Systemd has it, too, and lets it go when it gets to it: until then there may be no room for the next one."""
    pool.arena[:] = 1
    before = os.fstat(pool.fd).st_blocks
    assert heir(pool, CAPACITY + PAGE_BYTES) is None
    assert os.fstat(pool.fd).st_blocks < before - CAPACITY // 1024
    assert not pool.arena.any()
    assert unfit(pool.fd, CAPACITY, SLAB) == "it has no header"


def test_a_pool_of_another_boot_is_unfit(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of what was written last to a disk may be there, and some not."""
    open_pool(path, CAPACITY, SLAB, fits).close()
    monkeypatch.setattr(owner_module, "BOOT_ID", tmp_path / "boot")
    owner_module.BOOT_ID.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    fd = os.open(path, os.O_RDWR)
    assert "started anew" in unfit(fd, CAPACITY, SLAB)
    os.close(fd)


def test_a_newer_format_is_a_cold_start(pool: ArenaFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffloadd.storage.arenafile.VERSION", 2)
    assert unfit(pool.fd, CAPACITY, SLAB) == "it has format 1, this is 2"


# --- names ---


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=6), st.integers(0, 15), st.integers(0, 250))
def test_names_survive_a_torn_write(saved: list[bytes], kind: int, at: int) -> None:
    """What is being overwritten is not where the names are: whatever happens to it, they are there."""
    pool = ArenaFile.make(CAPACITY, SLAB)
    for names in saved:
        assert pool.save_names(names)
        assert pool.names() == names
    older = PAGE_BYTES + ((len(saved) + 1) % 2) * NAMES_BYTES
    os.pwrite(pool.fd, bytes([kind]) * 8, older + at)
    assert pool.names() == saved[-1]
    successor = heir(pool)
    assert successor is not None
    assert successor.names() == saved[-1]
    successor.save_names(b"later")
    assert pool.names() == b"later"
    successor.close()
    pool.close()


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 8, 15, 16, 31, 32, 36])
def test_damaged_names_are_none(pool: ArenaFile, saved: int, at: int) -> None:
    """And the ones before do not come back, which would take one user's keys for another's."""
    for number in range(saved):
        pool.save_names(f"name{number}".encode())
    place = PAGE_BYTES + (saved % 2) * NAMES_BYTES + at
    byte = os.pread(pool.fd, 1, place)
    os.pwrite(pool.fd, bytes([byte[0] ^ 1]), place)
    assert pool.names() == b""
    successor = heir(pool)
    assert successor is not None
    assert successor.names() == b""
    successor.close()


def test_no_names_at_all(pool: ArenaFile) -> None:
    assert pool.names() == b""


def test_too_many_names_are_none(pool: ArenaFile) -> None:
    """Old ones would be wrong."""
    pool.save_names(b"old")
    assert not pool.save_names(bytes(NAMES_BYTES))
    assert pool.names() == b""


# --- files ---


def test_a_file_is_gone_on_with(path: Path) -> None:
    first = open_pool(path, CAPACITY, SLAB, fits)
    assert not first.is_old
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_blocks * 512 >= file_bytes(CAPACITY, SLAB), "a write to it can't lack room"
    first.arena[1] = 7
    first.close()
    second = open_pool(path, CAPACITY, SLAB, fits)
    assert (second.is_old, second.arena[1]) == (True, 7)
    second.close()
    third = open_pool(path, 2 * CAPACITY, SLAB, fits)
    assert (third.is_old, third.arena[1]) == (False, 0)
    third.close()


def test_a_file_is_one_daemon_s(path: Path) -> None:
    first = open_pool(path, CAPACITY, SLAB, fits)
    with pytest.raises(ConfigError, match="another daemon has it"):
        open_pool(path, CAPACITY, SLAB, fits)
    first.close()


@pytest.fixture
def owner(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that has the file as its own, and no lock on it any more: so is one that is being killed."""
    code = (
        "import sys, time; from pathlib import Path; from kvoffloadd.storage.arenafile import open_pool;"
        f"p = open_pool(Path({str(path)!r}), {CAPACITY}, {SLAB}, lambda _: None); p.arena[3] = 5;"
        "p.close(); print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_an_owner_that_does_not_end_keeps_it(
    path: Path, owner: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GPUs may still write there."""
    monkeypatch.setattr(module, "END_S", 0.1)
    with pytest.raises(TryAgainError, match=f"process {owner.pid}, which used it before, does not end"):
        open_pool(path, CAPACITY, SLAB, fits)
    assert inherit(os.open(path, os.O_RDWR), CAPACITY, SLAB, fits) is None


def test_an_owner_that_ends_is_waited_for(path: Path, owner: subprocess.Popen[bytes]) -> None:
    """A zombie has ended."""
    begun = time.monotonic()
    killer = threading.Timer(0.3, owner.send_signal, (signal.SIGKILL,))
    killer.start()
    heir = open_pool(path, CAPACITY, SLAB, fits)
    assert time.monotonic() - begun >= 0.3
    assert heir.arena[3] == 5
    heir.close()
    killer.join()


def test_a_number_that_was_given_anew_is_no_owner(path: Path, owner: subprocess.Popen[bytes]) -> None:
    with path.open("r+b") as file:
        file.seek(528)  # when it started
        file.write((12345).to_bytes(8, "little"))
    open_pool(path, CAPACITY, SLAB, fits).close()


def test_files_of_others_are_refused(path: Path, tmp_path: Path) -> None:
    path.touch(0o644)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="nobody else may open"):
        open_pool(path, CAPACITY, SLAB, fits)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="pool_file"):
        open_pool(link, CAPACITY, SLAB, fits)


def test_files_of_whole_huge_pages(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is on hugetlbfs, whose pages are no part of the available memory."""
    monkeypatch.setattr(module, "block_bytes", lambda _: 2 << 20)

    def full(_: int) -> None:
        raise ConfigError("only 3 bytes")

    first = open_pool(path, CAPACITY, SLAB, full)
    assert path.stat().st_size == first.size_bytes
    assert path.stat().st_size % (2 << 20) == 0 != file_bytes(CAPACITY, SLAB) % (2 << 20)
    first.arena[-1], first.slabs[-1] = 7, 3
    first.close()
    second = open_pool(path, CAPACITY, SLAB, full)
    assert (second.is_old, len(second.arena), second.arena[-1], second.slabs[-1]) == (True, CAPACITY, 7, 3)
    second.close()


def test_a_kept_pool_of_reserved_pages_needs_no_available_memory() -> None:
    """Not even for those that are not populated yet: they are promised to it."""

    def full(_: int) -> None:
        raise ConfigError("only 3 bytes")

    with reserved_pages(RESERVED_PAGES):
        pool = ArenaFile.make(CAPACITY, SLAB, reserved=True)
        assert (pool.reserved, pool.size_bytes) == (True, RESERVED_PAGES * HUGE_PAGE_BYTES)
        pool.arena[-1] = 7
        other = inherit(os.dup(pool.fd), CAPACITY, SLAB, full)
        assert other is not None
        assert (other.reserved, other.arena[-1]) == (True, 7)
        other.close()
        pool.close()


def test_reserved_pages_that_run_out_are_no_signal_later() -> None:
    with reserved_pages(RESERVED_PAGES - 1), pytest.raises(ConfigError, match=r"huge pages are not available"):
        ArenaFile.make(CAPACITY, SLAB, reserved=True)


@pytest.mark.parametrize(("kind", "is_logged"), [("ext4", True), ("tmpfs", False)])
def test_files_on_disks_are_told_of(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    is_logged: bool,
) -> None:
    monkeypatch.setattr(module, "file_system", lambda _: kind)
    open_pool(path, CAPACITY, SLAB, fits).close()
    assert (f"is on {kind}" in caplog.text) == is_logged


def test_no_room(path: Path) -> None:
    def full(_: int) -> None:
        raise ConfigError("only 3 bytes")

    with pytest.raises(ConfigError, match="only 3 bytes"):
        open_pool(path, CAPACITY, SLAB, full)
    with pytest.raises(ConfigError, match="no room for"):
        open_pool(path, 1 << 60, 1 << 30, fits)
    assert path.stat().st_size == 0


def test_what_an_old_pool_lacks_has_to_be_there(pool: ArenaFile) -> None:
    """A start that was killed while the kernel still provided its pages."""
    asked: list[int] = []

    def none_left(lacking: int) -> None:
        asked.append(lacking)
        raise ConfigError("none left")

    with pytest.raises(ConfigError, match="none left"):
        inherit(os.dup(pool.fd), CAPACITY, SLAB, none_left)
    assert 0 < asked[0] < pool.size_bytes
    pool.populate(1, threading.Event())
    other = inherit(os.dup(pool.fd), CAPACITY, SLAB, lambda lacking: asked.append(lacking))
    assert other is not None
    assert asked[1] == 0
    other.close()


def test_holes_of_an_old_file_are_filled_at_the_start(path: Path) -> None:
    first = open_pool(path, CAPACITY, SLAB, fits)
    first.arena[0] = 7
    place = first.address - first._mapping.address + PAGE_BYTES
    punch(first.fd, place, CAPACITY - PAGE_BYTES)
    first.close()
    fd = os.open(path, os.O_RDONLY)
    assert module.lacking_bytes(fd) > 0
    second = open_pool(path, CAPACITY, SLAB, fits)
    assert second.is_old
    assert second.arena[0] == 7
    assert module.lacking_bytes(fd) == 0
    os.close(fd)
    second.close()
