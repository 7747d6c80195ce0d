"""Moves records between a segment file and memory: many in one system call, straight from and to their slots.

A record is reported good only after a check of all of it: the header page is whole and belongs to this use of the
segment, the record is the wanted one, and the payload matches the header's checksum.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

import numpy as np

from kvoffloadd.model import PAGE_BYTES, BoolArray, I64Array, U8Array, U64Array
from kvoffloadd.storage.disk.files import Files, aligned_pages, lacks_resources
from kvoffloadd.storage.disk.format import KeyspaceId, Records, decode_records, encode_spaces, record_pages
from kvoffloadd.storage.hashing import hash_payloads, in_turns

READ = np.dtype([("page", "<u4"), ("part", "<u4"), ("payload_bytes", "<u8"), ("address", "<u8"), ("key", "<u8", (4,))])
"""A wanted record. `page`: of its header; `address`: of a page-aligned slot with the payload's number of whole pages.
"""

OK: Final = 0
DAMAGED: Final = 1
"""The place does not have the wanted record, or not all of it."""
FAILED: Final = 2
"""The disk returned an error for it."""
NOT_READ: Final = 3
"""It was cancelled before its turn came. Nothing is known about it."""
NO_RESOURCES: Final = 4
"""The system had no descriptor or no memory to read it with. Nothing is known about it."""

GONE: Final = 5
"""The segment's file was removed."""

RUN_BYTES = 8 << 20
"""Neighbours are read together up to about this size."""


def write_records(
    files: Files, fd: int, page: int, headers: U8Array, addresses: U64Array, payload_bytes: I64Array
) -> None:
    """Writes records one after another from `page` on: header page, payload, header page, ...

    `headers`: (n, 4096), page-aligned. The memory at each address is page-aligned, and readable to the end of the
    payload's last page. Not durable before the segment is synced.

    Raises:
        OSError: part of the data may be there, which its next reader will detect.
    """
    if not len(headers):
        return
    sizes = (record_pages(payload_bytes) - 1) * PAGE_BYTES
    buffers: list[Any] = []
    for header, address, size in zip(headers, addresses.tolist(), sizes.tolist(), strict=True):
        buffers.append(header)
        buffers.append((ctypes.c_char * size).from_address(address))
    files.write(fd, page * PAGE_BYTES, buffers)
    files.drop_cached(fd, page * PAGE_BYTES, int(sizes.sum()) + len(headers) * PAGE_BYTES)


def read_records(
    files: Files,
    segments_fd: int,
    name: str,
    uuid: bytes,
    keyspace: KeyspaceId,
    wanted: Records,
    *,
    direct: bool,
) -> tuple[U8Array, U64Array]:
    """Reads the wanted records (READ) of one segment, each to its address, and checks them.

    Returns OK, DAMAGED, FAILED, NO_RESOURCES or GONE for each, and the checksums (n, 2) of records that are OK. The
    slots of the others have arbitrary contents. Never raises OSError.
    """
    status = np.full(len(wanted), FAILED, np.uint8)
    digests = np.zeros((len(wanted), 2), np.uint64)
    if not len(wanted):
        return status, digests
    headers = aligned_pages(len(wanted))
    order = np.argsort(wanted["page"], kind="stable")
    try:
        with files.open_to_read(segments_fd, name, direct=direct) as fd:
            for run in _runs(wanted, order):
                _read_run(files, fd, wanted, run, headers, status)
                if not direct:
                    size = int(record_pages(wanted["payload_bytes"][run]).sum()) * PAGE_BYTES
                    files.drop_cached(fd, int(wanted["page"][run[0]]) * PAGE_BYTES, size)
    except OSError as error:
        status[:] = _reason(error)
        return status, digests
    _check(wanted, headers, uuid, keyspace, status, digests)
    return status, digests


def _runs(wanted: Records, order: I64Array) -> list[I64Array]:
    """Returns indices of adjacent records on disk, in pieces of about RUN_BYTES."""
    first = wanted["page"][order].astype(np.int64)
    pages = record_pages(wanted["payload_bytes"][order])
    breaks = np.flatnonzero(first[1:] != first[:-1] + pages[:-1]) + 1
    runs = []
    for start, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(order)], strict=True):
        runs += in_turns(order[start:end], pages[start:end] * PAGE_BYTES, RUN_BYTES)
    return runs


def _reason(error: OSError) -> int:
    if isinstance(error, FileNotFoundError):
        return GONE
    return NO_RESOURCES if lacks_resources(error) else FAILED


def _read_run(files: Files, fd: int, wanted: Records, run: I64Array, headers: U8Array, status: U8Array) -> None:
    """Sets each status: OK for whole reads, DAMAGED for records beyond the file's end, or the reason of a failure."""
    sizes = (record_pages(wanted["payload_bytes"][run]) - 1) * PAGE_BYTES
    buffers: list[Any] = []
    for index, address, size in zip(run.tolist(), wanted["address"][run].tolist(), sizes.tolist(), strict=True):
        buffers.append(headers[index])
        buffers.append((ctypes.c_char * size).from_address(address))
    try:
        came = files.read(fd, int(wanted["page"][run[0]]) * PAGE_BYTES, buffers)
    except OSError as error:
        if len(run) == 1 or lacks_resources(error):
            status[run] = _reason(error)
            return
        # One bad place on the disk must not lose its neighbours.
        for index in range(len(run)):
            _read_run(files, fd, wanted, run[index : index + 1], headers, status)
        return
    ends = np.cumsum(sizes + PAGE_BYTES)
    status[run] = np.where(ends <= came, OK, DAMAGED)


def _check(
    wanted: Records, headers: U8Array, uuid: bytes, keyspace: KeyspaceId, status: U8Array, digests: U64Array
) -> None:
    """Sets the status of all but the wanted records to DAMAGED, and stores the checksums of the others."""
    came = np.flatnonzero(status == OK)
    records, valid = decode_records(headers[came], uuid)
    valid &= _matches(records, wanted[came], keyspace)
    status[came[~valid]] = DAMAGED
    whole = came[valid]
    named = records["digest"][valid]
    found = hash_payloads(wanted["address"][whole], wanted["payload_bytes"][whole].astype(np.int64))
    good = (named == found).all(axis=1)
    status[whole[~good]] = DAMAGED
    digests[whole[good]] = found[good]


def _matches(records: Records, wanted: Records, keyspace: KeyspaceId) -> BoolArray:
    same: BoolArray = (records["part"] == wanted["part"]) & (records["payload_bytes"] == wanted["payload_bytes"])
    same &= (records["key"] == wanted["key"]).all(axis=1)
    expected = encode_spaces([keyspace])[0]
    for name in ("fingerprint", "shape"):
        same &= (records[name] == expected[name]).all(axis=1)
    for name in ("epoch", "group", "parts", "key_bytes"):
        same &= records[name] == expected[name]
    return same
