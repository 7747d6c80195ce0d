"""Whether records on disk are whole, whoever they belong to. Blocks; for the threads of a read lane."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.sharedmem import reserve_array
from kvoffloadd.tiers.disk.format import decode_records

if TYPE_CHECKING:
    from kvoffloadd.model import BoolArray, U8Array, U32Array
    from kvoffloadd.tiers.disk.files import Files

_LOW = (1 << 64) - 1


def inspect_records(
    files: Files, segments_fd: int, name: str, uuid: bytes, pages: U32Array, *, direct: bool
) -> BoolArray:
    """For each page: whether a record begins there whose header and payload match their checksums.

    Raises:
        OSError: the file can't be opened or read.
    """
    good = np.zeros(len(pages), bool)
    fd = files.open(segments_fd, name, create=False, direct=direct, write=False)
    try:
        header = reserve_array((1, PAGE_BYTES), np.uint8)
        payload = reserve_array((PAGE_BYTES,), np.uint8)
        for at, page in enumerate(pages.tolist()):
            if files.read(fd, page * PAGE_BYTES, [header[0].data]) < PAGE_BYTES:
                continue
            records, valid = decode_records(header, uuid)
            if not valid[0]:
                continue
            size = int(records["payload_bytes"][0])
            padded = -(-size // PAGE_BYTES) * PAGE_BYTES
            if (page + 1) * PAGE_BYTES + padded > os.fstat(fd).st_size:
                continue
            if padded > len(payload):
                payload = reserve_array((padded,), np.uint8)
            if files.read(fd, (page + 1) * PAGE_BYTES, [payload[:padded].data]) < size:
                continue
            good[at] = _matches(payload[:size], records["digest"][0])
    finally:
        files.close(fd)
    return good


def _matches(payload: U8Array, digest: np.ndarray) -> bool:
    value = xxhash.xxh3_128_intdigest(payload.data)
    return (value >> 64, value & _LOW) == (int(digest[0]), int(digest[1]))
