"""Header pages: what is asked for is found, and nothing else is taken for it."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.agentwire.frames import PARTS_MAX
from kvoffloadd.agentwire.names import Space
from kvoffloadd.model import PAGE_BYTES, U8Array, U64Array
from kvoffloadd.storage.remote import header as module
from kvoffloadd.storage.remote.header import HEADER, PART, encode_headers, match_headers
from kvoffloadd.storage.signedpages import sign_page

u64 = st.integers(0, (1 << 64) - 1)
spaces = st.builds(
    Space,
    fingerprint=st.binary(min_size=16, max_size=16),
    shape=st.binary(min_size=16, max_size=16),
    generation=u64,
    era=st.binary(min_size=8, max_size=8),
    group=st.integers(0, (1 << 32) - 1),
    key_bytes=st.integers(8, 32),
)


def made(space: Space, seed: int, count: int, parts: int) -> tuple[U8Array, U64Array, U64Array, U64Array]:
    """Pages, and the keys, sizes and digests that are in them."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 64, (count, 4), np.uint64)
    sizes = rng.integers(1, 1 << 30, parts, np.uint64)
    digests = rng.integers(0, 1 << 64, (count, parts, 2), np.uint64)
    return encode_headers(space, keys, sizes, digests, os.urandom(16), 1_800_000_000), keys, sizes, digests


@given(space=spaces, seed=st.integers(0, 99), count=st.integers(0, 4), parts=st.integers(1, PARTS_MAX))
@settings(max_examples=50)
def test_what_is_written_is_found(space: Space, seed: int, count: int, parts: int) -> None:
    pages, keys, sizes, digests = made(space, seed, count, parts)
    valid, found = match_headers(pages, space, keys, sizes)
    assert valid.all()
    assert (found == digests).all()
    assert pages.shape == (count, PAGE_BYTES)


@given(seed=st.integers(0, 99), parts=st.integers(1, PARTS_MAX), bit=st.integers(0, 8 * PAGE_BYTES - 1))
def test_no_bit_may_differ(seed: int, parts: int, bit: int) -> None:
    space = Space(bytes(16), bytes(16), 1, bytes(8), 0, 32)
    pages, keys, sizes, _ = made(space, seed, 2, parts)
    pages[1, bit // 8] ^= 1 << bit % 8
    assert match_headers(pages, space, keys, sizes)[0].tolist() == [True, False]


FIELDS = st.sampled_from(Space.__struct_fields__)


@given(space=spaces, other=spaces, name=FIELDS, seed=st.integers(0, 99), parts=st.integers(1, 9))
def test_what_was_written_for_another_place_is_not_taken(
    space: Space, other: Space, name: str, seed: int, parts: int
) -> None:
    """Each field differs by itself: names could be mixed up by a store, or by us."""
    pages, keys, sizes, _ = made(space, seed, 1, parts)
    mixed = msgspec.structs.replace(space, **{name: getattr(other, name)})
    assert match_headers(pages, mixed, keys, sizes)[0][0] == (mixed == space)
    for at in range(4):
        changed = keys.copy()
        changed[0, at] ^= np.uint64(1)
        assert not match_headers(pages, space, changed, sizes)[0].any()
    for at in range(parts):
        changed = sizes.copy()
        changed[at] += np.uint64(1)
        assert not match_headers(pages, space, keys, changed)[0].any()
    assert not match_headers(pages, space, keys, np.append(sizes, np.uint64(1)))[0].any()
    assert not match_headers(pages, space, keys, sizes[:-1])[0].any()


@pytest.mark.parametrize("at", [64, 71, 144 + 8, 144 + 32 * 5, 4079])
def test_what_is_to_be_zeros_is(at: int) -> None:
    space = Space(bytes(16), bytes(16), 1, bytes(8), 0, 32)
    pages, keys, sizes, _ = made(space, 1, 1, 4)
    pages[0, at] = 1
    sign_page(pages[0])
    assert not match_headers(pages, space, keys, sizes)[0].any()


@given(number=st.integers(0, 1 << 32), signed=st.booleans(), magic=st.booleans())
def test_no_page_makes_the_decoder_fail(number: int, signed: bool, magic: bool) -> None:
    page = np.random.default_rng(number).integers(0, 256, (1, PAGE_BYTES), np.uint8)
    if magic:
        page[:, :8].view("<u8")[:] = module.HEADER_MAGIC
    if signed:
        sign_page(page[0])
    keys = np.zeros((1, 4), np.uint64)
    assert not match_headers(page, Space(bytes(16), bytes(16), 1, bytes(8), 0, 32), keys, np.ones(3, np.uint64))[
        0
    ].any()


def test_the_layout_is_what_the_module_says() -> None:
    """Other releases read it."""
    assert HEADER.fields is not None
    text = module.__doc__ or ""
    lines = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    stated = [int(words[0]) for words in lines if words[0] != "64"]  # 64: zeros, which have no field
    assert stated == [field[1] for field in HEADER.fields.values()]
    assert HEADER.itemsize == PAGE_BYTES
    assert 144 + PARTS_MAX * PART.itemsize <= 4080 < 144 + (PARTS_MAX + 1) * PART.itemsize


def packed(size: int, *numbers: int) -> bytes:
    return b"".join(number.to_bytes(size, "little") for number in numbers)


def test_a_page_of_this_release() -> None:
    """Byte by byte, so that no change of the format goes unnoticed."""
    keys, sizes = np.array([[1, 2, 3, 4]], np.uint64), np.array([5, 6], np.uint64)
    digests = np.arange(4, dtype=np.uint64).reshape(1, 2, 2)
    space = Space(b"F" * 16, b"S" * 16, 7, b"E" * 8, 9, 24)
    page = encode_headers(space, keys, sizes, digests, b"B" * 16, 10)[0].tobytes()
    expected = (
        b"KVORMTE\n" + packed(4, 1, 2) + b"F" * 16 + b"S" * 16 + packed(8, 7) + b"E" * 8 + bytes(8) + packed(4, 9, 24)
    )
    expected += (
        packed(8, 1, 2, 3, 4)
        + packed(8, 11)
        + b"B" * 16
        + packed(8, 10)
        + packed(8, 5, 0, 0, 1)
        + packed(8, 6, 0, 2, 3)
    )
    assert page[:-16] == expected.ljust(4080, b"\0")
