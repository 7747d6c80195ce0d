"""Checks what is made of a disk's data. Each function takes one thing that is almost right."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random

import numpy as np
import xxhash

from kvoffloadd.model import EPOCH_MAX, PAGE_BYTES, PARTS_PER_KEY_MAX
from kvoffloadd.storage.disk.files import DiskManifestError
from kvoffloadd.storage.disk.format import ENTRY, RECORD, SEGMENT, SPACE, TRAILER, record_pages
from kvoffloadd.storage.disk.manifest import Manifest, decode_manifest, encode_manifest
from kvoffloadd.storage.disk.records import DAMAGED, FAILED, OK
from kvoffloadd.storage.disk.recovery import Kind
from kvoffloadd.storage.signedpages import digest_of, sign_page
from kvoffloadd.storage.tombstone import Tombstone
from tests.cache.conftest import Open, open_tier  # noqa: F401  a fixture
from tests.outside.changes import Take, changed_bytes, changed_numbers, changed_tree, signed, spots_of
from tests.storage.disk.builders import NAME, SPACE_A, SPACE_B, Folder, entries_of


def manifests(rng: Random) -> None:
    deleted = (Tombstone(b"a" * 16, 0, 3, 1, 9, 8, b"k" * 16, in_store=True),) if rng.random() < 0.5 else ()
    epochs = {b"a" * 16: 3, b"b" * 16: EPOCH_MAX}
    manifest = Manifest(b"u" * 16, 1, EPOCH_MAX, epochs, rng.choice([0, 1, 1 << 53]), deleted)
    text = encode_manifest(manifest).rpartition(b"xxh3_128 ")[0]
    if rng.random() < 0.3:
        text = changed_bytes(rng, text)
    else:
        with suppress(TypeError):  # what is no JSON can't come
            text = json.dumps(changed_tree(rng, json.loads(text))).encode()
    try:
        found = decode_manifest(text + b"xxh3_128 " + xxhash.xxh3_128_hexdigest(text).encode() + b"\n")
    except DiskManifestError:
        return
    assert all(0 <= number <= EPOCH_MAX for number in (found.base_epoch, found.last_epoch, *found.epochs.values()))
    assert decode_manifest(encode_manifest(found)) == found


SIZES = [1, 4096, 9000, 70]


def changed_segment(rng: Random, raw: bytes) -> bytes:
    """Returns a segment file with changed pages, all signed, and a footer whose digest is right."""
    pages = [bytearray(raw[at : at + PAGE_BYTES]) for at in range(0, len(raw), PAGE_BYTES)]
    entries = entries_of(SIZES)
    footer, listed = len(pages) - 2, len(entries) * ENTRY.itemsize
    for _ in range(rng.randint(1, 3)):
        page, spots = rng.choice([
            (0, spots_of(SEGMENT)), (len(pages) - 1, spots_of(TRAILER)),
            (int(rng.choice(entries["page"].tolist())), spots_of(RECORD)),
            (footer, [spot for at in range(len(entries)) for spot in spots_of(ENTRY, at * ENTRY.itemsize)]),
            (footer, [spot for at in range(2) for spot in spots_of(SPACE, listed + at * SPACE.itemsize)]),
        ])  # fmt: skip
        pages[page][:] = changed_numbers(rng, bytes(pages[page]), spots)
        if page != footer:
            pages[page][:] = signed(bytes(pages[page]))
    if rng.random() < 0.8:
        trailer = np.frombuffer(bytes(pages[-1]), np.uint8).copy()
        trailer.view(TRAILER)[0]["footer_digest"] = digest_of(np.frombuffer(bytes(pages[footer]), np.uint8))
        sign_page(trailer)
        pages[-1][:] = trailer.tobytes()
    whole = b"".join(pages)
    return whole if rng.random() < 0.9 else changed_bytes(rng, whole)


def segments(folder: Folder, sealed: bool) -> Take:
    """What a start finds in them, and what is read of them."""
    entries = entries_of(SIZES)
    entries["space"][2:] = 1
    header = folder.build(entries, keyspaces=[SPACE_A, SPACE_B], sealed=sealed)
    raw = (folder.path / NAME).read_bytes()

    def take(rng: Random) -> None:
        (folder.path / NAME).write_bytes(changed_segment(rng, raw))
        found = folder.recover()
        if found.kind in (Kind.SEALED, Kind.WALKED):
            pages, sizes = found.entries["page"].astype(np.int64), found.entries["payload_bytes"]
            assert (pages >= 1).all()
            assert (pages + record_pages(sizes) <= found.size_bytes // PAGE_BYTES).all()
            parts = np.array([keyspace.parts for keyspace in found.keyspaces], np.int64)[found.entries["space"]]
            assert ((found.entries["part"] < parts) & (parts <= PARTS_PER_KEY_MAX)).all()
        statuses, _ = folder.read(header.uuid, entries[:2], SPACE_A)  # compares the bytes of what is OK
        assert set(statuses) <= {OK, DAMAGED, FAILED}

    return take


def changed_root_segment(rng: Random, raw: bytes) -> bytes:
    """Does what `changed_segment` does, with no knowledge of the segment but the dtypes of its pages."""
    pages = [bytearray(raw[at : at + PAGE_BYTES]) for at in range(0, len(raw), PAGE_BYTES)]
    kinds = {b"KVOSEGM\n": SEGMENT, b"KVORECD\n": RECORD, b"KVOTRLR\n": TRAILER}
    ours = [page for page in pages if bytes(page[:8]) in kinds]
    for page in rng.sample(ours, min(len(ours), rng.randint(1, 3))):
        page[:] = signed(changed_numbers(rng, bytes(page), spots_of(kinds[bytes(page[:8])])))
    return b"".join(pages)
