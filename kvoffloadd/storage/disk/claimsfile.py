"""The file of a root that has the claims, see docs/DISK_FORMAT.md. Blocks.

No record depends on it: without it, or if it is damaged, nothing is claimed after a start.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence

import xxhash

from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.replacedfile import read_whole, replace, write_new

log = logging.getLogger(__name__)

CLAIMS_NAME = "claims"
CLAIMS_VERSION = 1

_MAGIC = b"KVOCLMS\n"
_HEAD = struct.Struct("<8sII16s")  # magic, version, zeros, xxh3_128 of what follows
_BYTES_MAX = 64 << 20


def write_claims(files: Files, directory_fd: int, packed: Sequence[bytes]) -> None:
    """Replaces the claims that a root has recorded by the packed ones, given in pieces. Raises OSError."""
    digest = xxhash.xxh3_128()
    for piece in packed:
        digest.update(piece)
    head = _HEAD.pack(_MAGIC, CLAIMS_VERSION, 0, digest.digest())
    write_new(files, directory_fd, CLAIMS_NAME, b"".join([head, *packed]))
    replace(files, directory_fd, CLAIMS_NAME)


def read_claims(files: Files, directory_fd: int, place: str) -> bytes:
    """Returns the packed claims that a root has recorded; empty if there are none, or, with a warning that names the
    `place`, if they can't be used. Raises OSError.
    """
    raw = read_whole(files, directory_fd, CLAIMS_NAME, _BYTES_MAX)
    if raw is None:
        return b""
    why = _fault(raw)
    if why:
        log.warning("disk %s: its claims are not taken over: %s", place, why)
        return b""
    return raw[_HEAD.size :]


def _fault(raw: bytes) -> str:
    """Returns why this is no file of claims that can be used; empty: it is one."""
    if len(raw) < _HEAD.size:
        return "the file is cut off"
    magic, version, _, digest = _HEAD.unpack_from(raw)
    if magic != _MAGIC:
        return "the file is damaged"
    if version != CLAIMS_VERSION:
        return f"the file has version {version}, this program knows {CLAIMS_VERSION}"
    return "" if xxhash.xxh3_128_digest(raw[_HEAD.size :]) == digest else "the file is damaged"
