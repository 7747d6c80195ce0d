"""The manifest is replaced whole or not at all, and never believed when it is not what was written."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.storage.disk.faults import FaultyFiles
from kvoffloadd.storage.disk.files import DiskManifestError, DiskVersionError
from kvoffloadd.storage.disk.manifest import (
    Manifest,
    decode_manifest,
    encode_manifest,
    read_manifest,
    write_manifest,
)
from kvoffloadd.storage.tombstone import Tombstone
from kvoffloadd.testing.wait import until

FULL = Manifest(b"r" * 16, 3, 9, {b"a" * 16: 9, b"b" * 16: 2})


async def test_what_was_written_is_read(tmp_path: Path) -> None:
    await write_manifest(tmp_path, FULL)
    assert await read_manifest(tmp_path) == FULL
    other = Manifest(b"r" * 16, 10, 10, {})
    await write_manifest(tmp_path, other)
    assert await read_manifest(tmp_path) == other
    assert os.listdir(tmp_path) == ["manifest"]
    assert (tmp_path / "manifest").stat().st_mode & 0o777 == 0o600


async def test_who_stops_waiting_for_a_disk_leaves_no_open_file(tmp_path: Path) -> None:
    """A disk that does not answer."""
    await write_manifest(tmp_path, FULL)
    (tmp_path / "switch").write_text("read_delay_s=3600", encoding="utf-8")
    executor = ThreadPoolExecutor(1)
    before = set(os.listdir("/proc/self/fd"))
    reading = asyncio.ensure_future(read_manifest(tmp_path, executor, FaultyFiles(tmp_path / "switch")))
    await asyncio.to_thread(until, lambda: set(os.listdir("/proc/self/fd")) > before, "it is open")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    (tmp_path / "switch").unlink()
    await asyncio.to_thread(executor.shutdown)
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_pipe_in_place_of_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "manifest")
    with pytest.raises(OSError, match="seek"):
        await read_manifest(tmp_path)


async def test_the_loop_s_own_threads_never_wait_for_the_disk(tmp_path: Path) -> None:
    """They serve all roots, and more; here they take no work at all."""
    ended = ThreadPoolExecutor(1)
    ended.shutdown()
    asyncio.get_running_loop().set_default_executor(ended)
    with ThreadPoolExecutor(1) as executor:
        await write_manifest(tmp_path, FULL, executor)
        assert await read_manifest(tmp_path, executor) == FULL


async def test_a_manifest_takes_few_calls_of_a_thread(tmp_path: Path) -> None:
    """One for each wait for the disk: the health of the root is judged by how long one call takes."""
    calls = 0

    class Counting(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().submit(*args, **kwargs)

    with Counting(1) as executor:
        await write_manifest(tmp_path, FULL, executor)
        assert calls == 2
        assert await read_manifest(tmp_path, executor) == FULL
        assert calls == 3


async def test_no_manifest_is_none(tmp_path: Path) -> None:
    assert await read_manifest(tmp_path) is None


@pytest.mark.parametrize("torn", [0, 1, 40])
async def test_a_write_that_was_cut_short_leaves_the_old_one(tmp_path: Path, torn: int) -> None:
    await write_manifest(tmp_path, FULL)
    (tmp_path / "manifest.new").write_bytes(encode_manifest(FULL)[:torn])
    assert await read_manifest(tmp_path) == FULL
    await write_manifest(tmp_path, FULL)
    assert await read_manifest(tmp_path) == FULL


async def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious", encoding="utf-8")
    (tmp_path / "manifest.new").symlink_to(victim)
    await write_manifest(tmp_path, FULL)
    assert victim.read_text(encoding="utf-8") == "precious"
    (tmp_path / "manifest").unlink()
    (tmp_path / "manifest").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        await read_manifest(tmp_path)


def test_every_cut_and_every_flip_is_noticed() -> None:
    raw = encode_manifest(FULL)
    for end in range(len(raw)):
        with pytest.raises(DiskManifestError):
            decode_manifest(raw[:end])
    for at in range(len(raw)):
        with pytest.raises(DiskManifestError):
            decode_manifest(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


def signed(text: str) -> bytes:
    raw = text.encode()
    return raw + f"xxh3_128 {xxhash.xxh3_128_hexdigest(raw)}\n".encode()


@pytest.mark.parametrize("version", [0, 4, 99])
def test_other_versions_are_told_from_damage(version: int) -> None:
    with pytest.raises(DiskVersionError, match=f"version {version}"):
        decode_manifest(signed(f'{{"version": {version}, "new": []}}\n'))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        pytest.param('{"x": %s' % ("[" * 100_000), id="deep"),
        "{}",
        '{"version": 1}',
        '{"version": 1, "root_uuid": "zz", "base_epoch": 0, "last_epoch": 0, "epochs": {}}',
        '{"version": 1, "root_uuid": "00", "base_epoch": 0, "last_epoch": 0, "epochs": {}}',
        '{"version": 1, "root_uuid": "%s", "base_epoch": -1, "last_epoch": 0, "epochs": {}}' % ("00" * 16),
        '{"version": 1, "root_uuid": "%s", "base_epoch": 0, "last_epoch": 0, "epochs": {"00": 1}}' % ("00" * 16),
        '{"version": 1, "root_uuid": "%s", "base_epoch": 0, "last_epoch": 0, "epochs": {}, "x": 1}' % ("00" * 16),
        '{"version": 1, "root_uuid": "%s", "base_epoch": 0, "last_epoch": 0, "epochs": {}, "confirmed_s": 5}'
        % ("00" * 16),
        '{"version": 2, "root_uuid": "%s", "base_epoch": 0, "last_epoch": 0, "epochs": {}}' % ("00" * 16),
        '{"version": 2, "root_uuid": "%s", "base_epoch": 0, "last_epoch": 0, "epochs": {}, "confirmed_s": 0}'
        % ("00" * 16),
    ],
)
def test_signed_nonsense_is_damage(text: str) -> None:
    with pytest.raises(DiskManifestError):
        decode_manifest(signed(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"version": 3', '"version": 1'),
        ('"version": 3', '"version": 2'),
        ('"keys": "6b', '"keys": "'),
        ('"number": 5', '"number": 0'),
        ('"group": 1', '"group": -1'),
        ('"key_bytes": 8', '"key_bytes": 7'),
        ('"in_store": false', '"in_store": 0'),
    ],
)
def test_deleted_keys_that_can_not_be_are_damage(old: str, new: str) -> None:
    tombstone = Tombstone(b"f" * 16, 7, 3, 1, 5, 8, b"k" * 16)
    text = encode_manifest(Manifest(b"r" * 16, 3, 9, {}, tombstones=(tombstone,))).rpartition(b"xxh3_128 ")[0].decode()
    assert decode_manifest(signed(text)).tombstones == (tombstone,)
    assert old in text
    with pytest.raises(DiskManifestError):
        decode_manifest(signed(text.replace(old, new)))


epochs = st.integers(0, EPOCH_MAX)
tombstones = st.builds(
    Tombstone,
    st.binary(min_size=16, max_size=16),
    st.integers(0, (1 << 32) - 1),
    epochs,
    st.integers(0, (1 << 31) - 1),
    st.integers(1, EPOCH_MAX),
    st.just(8),
    st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(b"".join),
    st.booleans(),
)


@given(
    uuid=st.binary(min_size=16, max_size=16),
    base=epochs,
    last=epochs,
    by_name=st.dictionaries(st.binary(min_size=16, max_size=16), epochs, max_size=5),
    confirmed_s=st.integers(0, 1 << 53),
    deleted=st.lists(tombstones, max_size=3).map(tuple),
)
def test_any_manifest_comes_back(
    uuid: bytes, base: int, last: int, by_name: dict[bytes, int], confirmed_s: int, deleted: tuple[Tombstone, ...]
) -> None:
    manifest = Manifest(uuid, base, last, by_name, confirmed_s, deleted)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    for name, epoch in by_name.items():
        assert manifest.epoch_of(name) == epoch
    assert manifest.epoch_of(b"") == base
