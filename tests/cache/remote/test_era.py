"""Eras as bytes: they are read as they were written and not otherwise, and what is read leaves room for a next one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cache.remote.era import COUNT_MAX, Era, decode_era, encode_era, new_era
from kvoffloadd.model import EPOCH_MAX

NAME = b"n" * 16

eras = st.builds(
    lambda generation, count, rest: Era(generation, count.to_bytes(4) + rest),
    st.integers(0, EPOCH_MAX),
    st.integers(0, COUNT_MAX),
    st.binary(min_size=4, max_size=4),
)


def test_a_pointer_is_read_as_it_was_written_and_not_otherwise() -> None:
    era = Era(12345, b"12345678")
    value = encode_era(NAME, era)
    assert decode_era(NAME, value) == era
    assert decode_era(b"m" * 16, value) is None
    for at in range(len(value)):
        damaged = bytearray(value)
        damaged[at] ^= 1
        assert decode_era(NAME, bytes(damaged)) is None
    for end in range(len(value)):
        assert decode_era(NAME, value[:end]) is None
    assert decode_era(NAME, value + b"x") is None


@pytest.mark.parametrize(
    "era",
    [
        Era(EPOCH_MAX + 1, bytes(8)),
        Era(1, b"\xff" * 8),
        Era(1, (COUNT_MAX + 1).to_bytes(4) + bytes(4)),
        Era(1, b"short"),
    ],
)
def test_what_no_reader_takes_is_not_written(era: Era) -> None:
    with pytest.raises(ValueError, match="last era"):
        encode_era(NAME, era)


@given(eras, st.integers(0, EPOCH_MAX))
def test_after_each_era_that_can_be_read_comes_one_that_can_be_read(era: Era, epoch: int) -> None:
    if decode_era(NAME, encode_era(NAME, era)) != era or epoch < era.generation:
        return
    if epoch == era.generation and era.is_last:
        return  # a clear comes first: see `EraAgreement`
    after = new_era(era.after(epoch))
    assert after > era
    assert decode_era(NAME, encode_era(NAME, after)) == after
