"""The manifest of a root: its identity, the epochs of cleared namespaces, and deleted keys. A small readable text.

A record is served only if its epoch matches its namespace's, and if it was written after its key was deleted: without
the manifest, no record is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import aiofiles.os
import msgspec
import xxhash

from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.storage.disk.files import DiskManifestError, DiskVersionError, Files
from kvoffloadd.storage.disk.replacedfile import read_whole, replace, write_new
from kvoffloadd.storage.tombstone import Tombstone

MANIFEST_NAME = "manifest"
MANIFEST_VERSION = 1
CONFIRMED_VERSION = 2
"""The version of manifests with the time at which a shared store last confirmed their epochs."""

DELETED_VERSION = 3
"""The version of manifests with deleted keys, so that daemons that do not know of these do not use the root."""

_CHECKSUM = b"xxh3_128 "
_BYTES_MAX = 256 << 20

FILES: Final = Files()
"""The real file system."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest."""

    root_uuid: bytes
    base_epoch: int  # of namespaces that `epochs` does not list
    last_epoch: int  # the highest known epoch when this was written
    epochs: dict[bytes, int] = field(default_factory=dict)  # of namespaces, by fingerprint
    confirmed_s: int = 0  # when a shared store last confirmed the epochs, in seconds since 1970; 0: never
    tombstones: tuple[Tombstone, ...] = ()  # of deleted keys

    def epoch_of(self, fingerprint: bytes) -> int:
        """Returns the epoch of a namespace: records of other epochs are dead."""
        return self.epochs.get(fingerprint, self.base_epoch)

    def has_clear(self, names: Collection[bytes] | None, epoch: int) -> bool:
        """Returns whether the manifest has the clear of these namespaces (None: of all) that began this epoch, or later
        ones.
        """
        if names is None:
            return self.base_epoch >= epoch
        return all(self.epoch_of(name) >= epoch for name in names)

    def covers(self, other: Manifest) -> bool:
        """Returns whether all records that are dead by the other manifest are dead by this one, too."""
        names = self.epochs.keys() | other.epochs.keys()
        later = all(self.epoch_of(name) >= other.epoch_of(name) for name in names)
        return later and self.base_epoch >= other.base_epoch


_Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Keys = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]
_Time = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
_Epoch = Annotated[int, msgspec.Meta(ge=0, le=EPOCH_MAX)]


class _Version(msgspec.Struct):
    version: int


class _StoredTombstone(msgspec.Struct, forbid_unknown_fields=True):
    fingerprint: _Hex
    uid: int
    epoch: int
    group: int
    number: int
    key_bytes: int
    keys: _Keys
    in_store: bool

    def decode(self) -> Tombstone:
        """Returns the tombstone. Raises MsgspecError or ValueError if there can be none like it."""
        tombstone = msgspec.convert(
            [
                *(bytes.fromhex(self.fingerprint), self.uid, self.epoch, self.group, self.number, self.key_bytes),
                *(bytes.fromhex(self.keys), self.in_store),
            ],
            Tombstone,
        )
        if not tombstone.is_sound:
            raise ValueError(f"{len(tombstone.keys)} bytes of deleted keys are no whole number of keys")
        return tombstone


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    root_uuid: _Hex
    base_epoch: _Epoch
    last_epoch: _Epoch
    epochs: dict[_Hex, _Epoch]
    confirmed_s: _Time | None = None
    deleted: list[_StoredTombstone] = []


async def read_manifest(path: Path, executor: Executor | None = None, files: Files = FILES) -> Manifest | None:
    """Returns the manifest of the root directory `path`; None if there is none. `executor`: its threads wait for the
    disk.

    Raises:
        DiskVersionError: it is of another version.
        DiskManifestError: it is damaged.
        OSError: it can't be read.
    """
    found: Manifest | None = await _READ(path, files, executor=executor)
    return found


async def write_manifest(
    path: Path, manifest: Manifest, executor: Executor | None = None, files: Files = FILES
) -> None:
    """Replaces the manifest of the root directory `path`, durably and in one step. One at a time. `executor`: as above.

    Raises:
        OSError: the old one holds, or the new one does and may not be durable.
    """
    await _WRITE(path, manifest, files, executor=executor)
    await _REPLACE(path, files, executor=executor)


def read_manifest_in(files: Files, directory_fd: int) -> Manifest | None:
    """Returns the manifest of a root whose directory is open; blocks. Raises as `read_manifest`."""
    raw = read_whole(files, directory_fd, MANIFEST_NAME, _BYTES_MAX)
    return None if raw is None else decode_manifest(raw)


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest as text: JSON, then a line with the checksum of all before it."""
    stored: dict[str, object] = {
        "version": _version_of(manifest),
        "root_uuid": manifest.root_uuid.hex(),
        "base_epoch": manifest.base_epoch,
        "last_epoch": manifest.last_epoch,
        "epochs": {name.hex(): epoch for name, epoch in sorted(manifest.epochs.items())},
    }
    if manifest.confirmed_s:
        stored["confirmed_s"] = manifest.confirmed_s
    if manifest.tombstones:
        stored["deleted"] = [_stored(tombstone) for tombstone in manifest.tombstones]
    text = json.dumps(stored, indent=1).encode() + b"\n"
    return text + _CHECKSUM + xxhash.xxh3_128_hexdigest(text).encode() + b"\n"


def _version_of(manifest: Manifest) -> int:
    if manifest.tombstones:
        return DELETED_VERSION
    return CONFIRMED_VERSION if manifest.confirmed_s else MANIFEST_VERSION


def _stored(tombstone: Tombstone) -> dict[str, object]:
    stored = msgspec.structs.asdict(tombstone)
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in stored.items()}


def decode_manifest(raw: bytes) -> Manifest:
    """Decodes the text of a manifest.

    Raises:
        DiskVersionError: it is of another version.
        DiskManifestError: it is damaged.
    """
    text, found, checksum = raw.rpartition(_CHECKSUM)
    if not found or checksum != xxhash.xxh3_128_hexdigest(text).encode() + b"\n":
        raise DiskManifestError("the manifest is damaged: its checksum is wrong")
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version not in (MANIFEST_VERSION, CONFIRMED_VERSION, DELETED_VERSION):
            raise DiskVersionError(f"the manifest has version {version}, this program knows {DELETED_VERSION}")
        stored = msgspec.json.decode(text, type=_Stored)
        if version != DELETED_VERSION and (stored.confirmed_s is not None) != (version == CONFIRMED_VERSION):
            raise DiskManifestError(f"the manifest is damaged: confirmed_s does not go with version {version}")
        if bool(stored.deleted) != (version == DELETED_VERSION):
            raise DiskManifestError(f"the manifest is damaged: deleted keys do not go with version {version}")
        epochs = {bytes.fromhex(name): epoch for name, epoch in stored.epochs.items()}
        uuid, confirmed_s = bytes.fromhex(stored.root_uuid), stored.confirmed_s or 0
        tombstones = tuple(tombstone.decode() for tombstone in stored.deleted)
        return Manifest(uuid, stored.base_epoch, stored.last_epoch, epochs, confirmed_s, tombstones)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DiskManifestError(f"the manifest is damaged: {error}") from None


def _read(path: Path, files: Files) -> Manifest | None:
    with _directory(path, files) as directory_fd:
        return read_manifest_in(files, directory_fd)


def _write(path: Path, manifest: Manifest, files: Files) -> None:
    encoded = encode_manifest(manifest)
    with _directory(path, files) as directory_fd:
        write_new(files, directory_fd, MANIFEST_NAME, encoded)


def _replace(path: Path, files: Files) -> None:
    with _directory(path, files) as directory_fd:
        replace(files, directory_fd, MANIFEST_NAME)


@contextmanager
def _directory(path: Path, files: Files) -> Iterator[int]:
    fd = files.open_again(path)
    try:
        yield fd
    finally:
        files.close(fd)


# Each is one call of a thread, with one wait for the disk: a disk may not answer for long, and a caller that is
# cancelled meanwhile leaves no open file behind. Thousands of clears take milliseconds to encode, too.
_READ, _WRITE, _REPLACE = map(aiofiles.os.wrap, (_read, _write, _replace))
