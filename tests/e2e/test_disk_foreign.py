"""What lies in a root and is not this daemon's: never touched, never served, never a reason not to serve."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvoffloadd.client import KeyState, Outcome
from kvoffloadd.storage.disk.manifest import DELETED_VERSION, decode_manifest
from kvoffloadd.testing.disk import used_bytes
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, demoted, disk, disk_settings, root_state, segments, served, store_on_disk
from tests.e2e.rank import Keys, Rank, new_keys

pytestmark = pytest.mark.slow

Start = Callable[..., Daemon]
MISS, HIT = KeyState.MISS, KeyState.HIT


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def keys(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed), 120)


@pytest.fixture
def more(seed: int) -> Keys:
    return new_keys(np.random.default_rng(seed + 1), 60)


def worker(daemon: Daemon) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket, num_blocks=128))
    return found


def end(daemon: Daemon) -> None:
    daemon.leave_guests()
    assert daemon.stop() == 0


def test_foreign_files_are_left_alone(start_daemon: Start, root: Path, seed: int) -> None:
    """Their names do not matter, nor that they leave the daemon too little space."""
    daemon = start_daemon(*disk_settings((root, 8 * MIB)), memory="2MiB")
    store_on_disk(daemon, worker(daemon), new_keys(np.random.default_rng(seed), 100))
    end(daemon)
    rng = np.random.default_rng(seed)
    folder = root / "segments"
    theirs = {
        "notes.txt": b"mine",
        "0123456789ABCDEF": rng.bytes(5000),  # not a name that the daemon gives
        "0123456789abcdef": rng.bytes(MIB),  # a name as the daemon gives
        "1123456789abcdef": rng.bytes(10),
        "2123456789abcdef": b"\x7fELF" + bytes(100_000),
    }
    for name, data in theirs.items():
        (folder / name).write_bytes(data)
    (folder / "3123456789abcdef").mkdir()
    os.symlink("/etc/passwd", folder / "4123456789abcdef")
    os.mkfifo(folder / "5123456789abcdef")
    before = {name: (folder / name).stat() for name in theirs}
    daemon.start()
    rank = worker(daemon)
    many = new_keys(rng, 1500)
    store_on_disk(daemon, rank, many)
    assert disk(daemon)["roots"][0]["segments_recycled"] > 0
    assert served(rank, many[-60:]).all()
    end(daemon)
    assert {name: (folder / name).read_bytes() for name in theirs} == theirs
    assert [(folder / name).stat().st_mtime_ns for name in theirs] == [one.st_mtime_ns for one in before.values()]
    assert (folder / "3123456789abcdef").is_dir()
    assert (folder / "4123456789abcdef").is_symlink()
    assert (folder / "5123456789abcdef").is_fifo()


def test_files_without_contents_are_used_again(start_daemon: Start, root: Path, keys: Keys) -> None:
    """A daemon that died before it wrote anything leaves such files: they cost no capacity and no errors."""
    daemon = start_daemon(*disk_settings((root, 4 * MIB)))
    store_on_disk(daemon, worker(daemon), keys)
    end(daemon)
    for number in range(6):
        (root / "segments" / f"{number:016x}").touch(mode=0o600)
    (root / "segments" / f"{7:016x}").write_bytes(bytes(MIB // 2))
    daemon.start()
    rank = worker(daemon)
    many = new_keys(np.random.default_rng(1), 800)
    store_on_disk(daemon, rank, many)
    status = disk(daemon)["roots"][0]
    assert (status["state"], status["write_errors"]) == ("ok", 0)
    assert used_bytes(root) <= 4 * MIB
    assert served(rank, many[-60:]).all()


@pytest.mark.parametrize("part", ["segment", "record"])
def test_other_versions_are_not_served(start_daemon: Start, root: Path, keys: Keys, part: str) -> None:
    """`part`: the magic that has another version."""
    daemon = start_daemon(*disk_settings((root, 4 * MIB)))
    store_on_disk(daemon, worker(daemon), keys)
    end(daemon)
    for path in segments(root):
        pages = np.fromfile(path, np.uint8).reshape(-1, 4096)
        for page in pages:
            if page[:8].tobytes() == (b"KVOSEGM\n" if part == "segment" else b"KVORECD\n"):
                page[8] = 2
                whole = xxhash.xxh3_128_intdigest(page[:-16].tobytes())
                page[-16:].view("<u8")[:] = whole >> 64, whole & (1 << 64) - 1
        path.write_bytes(pages.tobytes())
    daemon.start()
    rank = worker(daemon)
    assert not served(rank, keys).any()
    many = new_keys(np.random.default_rng(1), 800)
    store_on_disk(daemon, rank, many)
    assert root_state(daemon) == "ok"
    assert used_bytes(root) <= 4 * MIB
    assert served(rank, many[-60:]).all()


# --- the manifest ---


def damage(root: Path, how: str) -> None:
    path = root / "manifest"
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "finish"),
    [
        ("missing", Daemon.kill),
        ("flipped", Daemon.stop),
        pytest.param("missing", Daemon.stop, marks=pytest.mark.soak),
        pytest.param("flipped", Daemon.kill, marks=pytest.mark.soak),
        pytest.param("empty", Daemon.kill, marks=pytest.mark.soak),
    ],
)
def test_without_a_manifest_nothing_is_served(
    start_daemon: Start, root: Path, keys: Keys, more: Keys, how: str, finish: Callable[[Daemon], object]
) -> None:
    """What was cleared is not known any more; nor is it at the start after that, when there is a manifest again."""
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    store_on_disk(daemon, rank, keys)
    rank.client.clear()
    end(daemon)
    damage(root, how)
    daemon.start()
    rank = worker(daemon)
    assert rank.states(keys) == [MISS] * len(keys)
    daemon.leave_guests()
    finish(daemon)
    daemon.start()
    rank = worker(daemon)
    assert rank.states(keys) == [MISS] * len(keys)
    assert not served(rank, keys).any()
    store_on_disk(daemon, rank, more)
    end(daemon)
    daemon.start()
    assert served(worker(daemon), more).all()


def test_a_newer_manifest_is_not_touched(start_daemon: Start, root: Path, keys: Keys, more: Keys) -> None:
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    store_on_disk(daemon, worker(daemon), keys)
    end(daemon)
    path = root / "manifest"
    old = path.read_bytes()
    decode_manifest(old)
    new = newer(old)
    path.write_bytes(new)
    daemon.start()
    rank = worker(daemon)
    assert root_state(daemon) == "off"
    assert "version" in disk(daemon)["roots"][0]["reason"]
    assert not served(rank, keys).any()
    assert rank.store_keys(more).outcome is Outcome.DONE
    assert rank.loads_right(more)
    assert path.read_bytes() == new
    aside = path.with_suffix(".aside")
    aside.write_bytes(old)
    aside.replace(path)  # in one step: the daemon looks again and again, and half a manifest is no manifest
    until(lambda: root_state(daemon) == "ok", "the root is used when its manifest can be read")
    until(lambda: disk(daemon)["keys"] >= len(keys), "and what it holds is known")  # some time after its state
    assert served(rank, keys).all()


def newer(raw: bytes) -> bytes:
    """The same manifest, of a later version."""
    later = b'"version": %d' % (DELETED_VERSION + 1)
    text = raw.rpartition(b"xxh3_128 ")[0].replace(b'"version": 1', later)
    return text + b"xxh3_128 " + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


# --- other users of the directory ---


def test_two_daemons_can_not_share_a_root(start_daemon: Start, root: Path, keys: Keys, more: Keys) -> None:
    """The second one serves from memory, and takes the root over when it is free: what the first one has cleared is
    cleared, what it has stored is found.
    """
    first = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(first)
    second = start_daemon(*disk_settings((root, 64 * MIB)))
    other = worker(second)
    assert root_state(second) == "off"
    assert "in use" in disk(second)["roots"][0]["reason"]
    assert other.store_keys(more).outcome is Outcome.DONE
    assert other.loads_right(more)
    store_on_disk(first, rank, keys[:60])
    rank.client.clear()
    store_on_disk(first, rank, keys[60:])
    end(first)
    until(lambda: root_state(second) == "ok", "the root is taken over")
    assert other.states(keys[:60]) == [MISS] * 60
    assert served(other, keys[60:]).all()
    assert other.states(more) == [MISS] * 60, "they may be older than the clear"
    assert other.store_keys(more).outcome is Outcome.DONE
    assert other.loads_right(more)
    newest = new_keys(np.random.default_rng(1), 60)
    store_on_disk(second, other, newest)
    end(second)
    second.start()
    other = worker(second)
    assert other.states(keys[:60]) == [MISS] * 60
    assert served(other, keys[60:]).all()
    assert served(other, newest).all()


@pytest.mark.parametrize("what", ["root", "segments"])
def test_a_symlink_is_no_root(start_daemon: Start, tmp_path: Path, keys: Keys, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    root = tmp_path / "disk"
    if what == "root":
        root.symlink_to(elsewhere)
    else:
        root.mkdir(mode=0o700)
        (root / "segments").symlink_to(elsewhere)
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    assert root_state(daemon) == "off"
    assert rank.store_keys(keys).outcome is Outcome.DONE
    assert rank.loads_right(keys)
    assert list(elsewhere.iterdir()) == []


def test_a_root_that_others_may_enter_is_none(start_daemon: Start, root: Path, keys: Keys) -> None:
    """This holds until that is mended."""
    root.mkdir(mode=0o755)
    daemon = start_daemon(*disk_settings((root, 64 * MIB)))
    rank = worker(daemon)
    assert "mode 755" in disk(daemon)["roots"][0]["reason"]
    root.chmod(0o700)
    until(lambda: root_state(daemon) == "ok", "it is used")
    assert rank.store_keys(keys).outcome is Outcome.DONE
    demoted(daemon, len(keys))
