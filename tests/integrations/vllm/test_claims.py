"""What requests want retained becomes claims of the right keys."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.client import Group, GroupKind
from kvoffloadd.integrations.common.claims import Directive, RequestPart, WantedClaim
from kvoffloadd.integrations.vllm.claims import RequestKeys, claims_of
from kvoffloadd.integrations.vllm.keys import PLAIN, KeyNames, key_of

FULL, FINE, WINDOW = (
    Group(0, GroupKind.FULL, 32),
    Group(1, GroupKind.FULL, 16),
    Group(2, GroupKind.SLIDING, 16, window_keys=2),
)
GROUPS = {group.group: group for group in (FULL, FINE, WINDOW)}
TOKENS = st.integers(0, 400)


def offload_key(group: int, end: int) -> bytes:
    return end.to_bytes(16, "big") + group.to_bytes(4, "big")


def request(
    prompt: int, output: int, *directives: Directive, groups: tuple[Group, ...] = (FULL,), names: KeyNames = PLAIN
) -> RequestKeys:
    """All keys of a request of so many tokens, as vLLM names them: those of its prompt first, group by group."""
    ends = [
        (group.group, end)
        for begin, until in ((0, prompt), (prompt, prompt + output))
        for group in groups
        for end in range(group.tokens_per_key, until + 1, group.tokens_per_key)
        if end > begin
    ]
    in_prompt = sum(prompt // group.tokens_per_key for group in groups)
    keys = [offload_key(group, end) for group, end in ends]
    return RequestKeys(directives, keys, [end for _, end in ends], in_prompt, names)


def ends_of(claim: WantedClaim) -> dict[int, list[int]]:
    """Returns where the keys of a claim end, by group."""
    return {
        group: [int.from_bytes(bytes(key[:16]), "big") for key in keys.tolist()] for group, keys in claim.groups.items()
    }


def claimed(asked: RequestKeys) -> list[dict[int, list[int]]]:
    return [ends_of(claim) for claim in claims_of(asked, GROUPS)]


def test_without_a_range_the_whole_prompt_is_claimed_and_nothing_that_was_generated() -> None:
    asked = request(101, 100, Directive(600.0), groups=(FULL, FINE))
    assert claimed(asked) == [{0: [32, 64, 96], 1: [16, 32, 48, 64, 80, 96]}]


def test_a_key_that_a_range_only_touches_belongs_to_it() -> None:
    asked = request(200, 0, Directive(600.0, start=33, end=65), Directive(600.0, start=64, end=96))
    assert claimed(asked) == [{0: [64, 96]}, {0: [96]}]


def test_what_was_generated_is_a_part_of_its_own() -> None:
    """A key that begins in the prompt and ends behind it is the output's."""
    asked = request(
        80,
        60,
        Directive(600.0, part=RequestPart.OUTPUT),
        Directive(600.0, start=32, part=RequestPart.WHOLE),
        Directive(600.0, start=32, end=500),
    )
    assert claimed(asked) == [{0: [64, 96, 128]}, {0: [64]}, {0: [96, 128]}]


def test_nothing_is_claimed_where_there_is_nothing() -> None:
    for nothing in (Directive(600.0, start=96), Directive(600.0, part=RequestPart.OUTPUT)):
        assert claimed(request(100, 20, nothing)) == []
    assert claimed(RequestKeys([Directive(600.0)], [], [], 0, PLAIN)) == []


def test_of_windows_the_end_is_claimed() -> None:
    """Keys before it serve no prefix as long as this one."""
    asked = request(640, 0, Directive(600.0), groups=(FULL, WINDOW))
    (found,) = claimed(asked)
    assert found[0] == list(range(32, 641, 32))
    assert found[2] == list(range(544, 641, 16))


def test_claims_say_where_their_keys_stand() -> None:
    (claim,) = claims_of(request(640, 0, Directive(600.0, start=64), groups=(FULL, WINDOW)), GROUPS)
    assert claim.first == {0: 2, 2: 33}
    assert claim.counts == {0: 18, 2: 7}


def test_keys_come_in_the_order_of_the_prompt() -> None:
    """vLLM may name a shorter key later."""
    keys = [offload_key(0, end) for end in (32, 96, 64)]
    (claim,) = claims_of(RequestKeys([Directive(600.0)], keys, [32, 96, 64], 3, PLAIN), GROUPS)
    assert ends_of(claim) == {0: [32, 64, 96]}


def test_keys_have_the_names_of_their_generation() -> None:
    names = KeyNames(7)
    asked = request(64, 0, Directive(600.0), names=names)
    (claim,) = claims_of(asked, GROUPS)
    assert [bytes(key) for key in claim.groups[0].tolist()] == [key_of(key, names) for key in asked.offload_keys]


@given(
    prompt=TOKENS,
    output=TOKENS,
    start=TOKENS,
    length=st.none() | st.integers(1, 400),
    part=st.sampled_from(RequestPart),
)
def test_a_key_is_claimed_if_one_of_its_tokens_is(
    prompt: int, output: int, start: int, length: int | None, part: RequestPart
) -> None:
    end = None if length is None else start + length
    asked = request(prompt, output, Directive(600.0, start=start, end=end, part=part), groups=(FULL, FINE))

    def wanted(last: int, tokens_per_key: int) -> bool:
        tokens = range(last - tokens_per_key, last)
        inside = {
            RequestPart.PROMPT: last <= prompt,
            RequestPart.WHOLE: True,
            RequestPart.OUTPUT: last > prompt,
        }[part]
        touched = any(token >= start and (end is None or token < end) for token in tokens)
        return inside and (part is RequestPart.OUTPUT or touched)

    expected = {
        group.group: ends
        for group in (FULL, FINE)
        if (ends := [at for at in _ends(prompt + output, group) if wanted(at, group.tokens_per_key)])
    }
    assert claimed(asked) == ([expected] if expected else [])
    for claim in claims_of(asked, GROUPS):
        for group, keys in claim.groups.items():
            tokens_per_key = GROUPS[group].tokens_per_key
            places = np.arange(claim.first[group] + 1, claim.first[group] + len(keys) + 1) * tokens_per_key
            assert places.tolist() == ends_of(claim)[group]


def _ends(tokens: int, group: Group) -> list[int]:
    return list(range(group.tokens_per_key, tokens + 1, group.tokens_per_key))
