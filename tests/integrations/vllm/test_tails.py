"""Names of tails, and which chunks and blocks a prompt that is handed over has."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.integrations.vllm.blocks import NULL_BLOCK
from kvoffloadd.integrations.vllm.keys import hash_bytes_of, key_of
from kvoffloadd.integrations.vllm.tails import HandedPrompt, filled, tail_name

CHUNKS = st.sampled_from([1, 2, 16, 32, 96])


def block_hash(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def test_a_name_tells_the_prompt_and_its_length() -> None:
    names = {tail_name(block_hash(text), tokens) for text in (b"a", b"b") for tokens in (500, 501)}
    assert len(names) == 4
    assert tail_name(block_hash(b"a"), 500) in names


def test_no_tail_is_named_as_a_whole_chunk() -> None:
    """The prompt's hash may be that of a block: where the tail fills blocks, but no chunk."""
    assert tail_name(block_hash(b"a"), 480) != block_hash(b"a")


@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_a_name_is_as_long_as_a_block_hash(size: int) -> None:
    """So that an engine's keys all have one width before they get the daemon's."""
    name = tail_name(b"h" * size, 501)
    assert len(name) == size
    assert hash_bytes_of(name + b"\0" * 4) == size
    assert key_of(name + b"\0" * 4) != key_of(b"h" * size + b"\0" * 4)


def test_names_of_very_long_hashes() -> None:
    assert tail_name(b"h" * 100 + b"a", 501) != tail_name(b"h" * 100 + b"b", 501)


@given(tokens=st.integers(1, 2000), chunk=CHUNKS)
def test_whole_chunks_and_the_tail_are_all_but_the_last_token(tokens: int, chunk: int) -> None:
    prompt = HandedPrompt(b"", tokens)
    whole = prompt.whole_chunks(chunk) * chunk
    assert 0 <= prompt.loaded_tokens - whole < chunk
    assert prompt.has_tail(chunk) == (whole < prompt.loaded_tokens)
    assert prompt.loaded_tokens == tokens - 1


@pytest.mark.parametrize(
    ("tokens", "whole", "tail"), [(1, 0, False), (2, 0, True), (32, 0, True), (33, 1, False), (34, 1, True)]
)
def test_where_a_tail_begins(tokens: int, whole: int, tail: bool) -> None:
    """A last chunk that is full is a tail, too; the last token by itself is none."""
    prompt = HandedPrompt(b"", tokens)
    assert (prompt.whole_chunks(32), prompt.has_tail(32)) == (whole, tail)


@pytest.mark.parametrize(
    ("local", "window", "needed"),
    [
        (0, None, range(15)),
        (64, None, range(2, 15)),
        (80, None, range(2, 15)),
        (480, None, range(0)),
        (0, 5, range(11, 15)),
        (448, 5, range(14, 15)),
        (0, 1, range(0)),
        (0, 99, range(15)),
    ],
)
def test_needed_chunks(local: int, window: int | None, needed: range) -> None:
    """The 501 tokens make 15 chunks of 32 and a tail; a window counts the tail."""
    assert range(15)[HandedPrompt(b"", 501).needed_chunks(32, local, window)] == needed


@given(tokens=st.integers(1, 2000), chunk=CHUNKS, local=st.integers(0, 2000), window=st.none() | st.integers(1, 99))
def test_what_is_needed_is_there(tokens: int, chunk: int, local: int, window: int | None) -> None:
    prompt = HandedPrompt(b"", tokens)
    chunks = range(prompt.whole_chunks(chunk))
    needed = chunks[prompt.needed_chunks(chunk, min(local, prompt.loaded_tokens), window)]
    assert set(needed) <= set(chunks)
    if window is not None:
        assert len(needed) + prompt.has_tail(chunk) <= max(window, prompt.has_tail(chunk))


def test_a_key_has_all_of_its_blocks() -> None:
    """Those that are not there, and those that have slid out of a window, are the last one once more."""
    assert filled([7], 1) == [7]
    assert filled([7, 8], 4) == [7, 8, 8, 8]
    assert filled([NULL_BLOCK, 8, 9], 4) == [9, 8, 9, 9]
