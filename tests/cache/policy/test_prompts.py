"""Several prompts in one call are what a call for each of them is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.cache.policy import POLICIES, create_policy
from kvoffloadd.cache.policy.prompts import backwards, changes, highest_from_here
from kvoffloadd.model import BoolArray, I64Array, U32Array

ROWS = 512
PROMPTS = st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=6), min_size=1, max_size=6)


def begins_of(prompts: list[list[int]]) -> I64Array:
    counts = np.array([len(prompt) for prompt in prompts], np.int64)
    begins: I64Array = np.cumsum(counts) - counts
    return begins


@given(PROMPTS)
def test_as_one_prompt_after_the_other(prompts: list[list[int]]) -> None:
    values = np.array([value for prompt in prompts for value in prompt], np.uint8)
    begins = begins_of(prompts)
    assert values[backwards(begins, len(values))].tolist() == [v for prompt in prompts for v in prompt[::-1]]
    highest = [max(prompt[at:]) for prompt in prompts for at in range(len(prompt))]
    assert highest_from_here(values, begins).tolist() == highest
    differs = [at > 0 and prompt[at] != prompt[at - 1] for prompt in prompts for at in range(len(prompt))]
    assert changes(values, begins).tolist() == differs


def test_nothing_at_all() -> None:
    nothing = np.zeros(0, np.int64)
    assert len(backwards(nothing, 0)) == 0
    assert len(highest_from_here(nothing.astype(np.uint8), nothing)) == 0
    assert len(changes(nothing.astype(np.uint8), nothing)) == 0


def everybody(rows: U32Array) -> BoolArray:
    return np.ones(len(rows), bool)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[bool, list[tuple[int, list[int]]]]]:
    """Draws, for each request, whether its keys are new, and its prompts: the first one's position, and keys that are
    new, or were named before.
    """
    made: list[tuple[bool, list[tuple[int, list[int]]]]] = []
    held: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        new = not held or draw(st.booleans())
        prompts = []
        taken: set[int] = set()
        for _ in range(draw(st.integers(1, 5))):
            if new:
                rows = list(range(len(held), len(held) + draw(st.integers(1, 5))))
                held += rows
            else:
                rows = draw(st.lists(st.sampled_from(held), min_size=1, max_size=6, unique=True))
                rows = [row for row in rows if row not in taken]
                taken |= set(rows)
            if rows:
                prompts.append((draw(st.sampled_from([0, 0, 3, 5])), rows))
        if prompts:
            made.append((new, prompts))
    return made


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(made=requests())
@settings(max_examples=60, deadline=None)
def test_policies_take_several_prompts(name: str, made: list[tuple[bool, list[tuple[int, list[int]]]]]) -> None:
    one, other = create_policy(name, ROWS, ROWS), create_policy(name, ROWS, ROWS)
    hashes = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x100001)  # each remembered in a separate place
    for new, prompts in made:
        rows = [np.array(numbers, np.uint32) for _, numbers in prompts]
        places = [np.arange(first, first + len(numbers), dtype=np.uint32) for first, numbers in prompts]
        every, begins = np.concatenate(rows), begins_of([numbers for _, numbers in prompts])
        if new:
            for prompt_rows, at in zip(rows, places, strict=True):
                one.insert(prompt_rows, hashes[prompt_rows], at)
            other.insert(every, hashes[every], np.concatenate(places), begins)
        else:
            for prompt_rows, at in zip(rows, places, strict=True):
                one.touch(prompt_rows, at)
            other.touch(every, np.concatenate(places), begins)
    assert len(one) == len(other)
    assert one.victims(ROWS, everybody).tolist() == other.victims(ROWS, everybody).tolist()
