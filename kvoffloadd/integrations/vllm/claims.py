"""Turns what a request wants retained into claims: which of its keys, and where in the request these stand."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import Group, GroupKind
from kvoffloadd.integrations.vllm.keys import KeyNames, groups_of, pack_by_group
from kvoffloadd.model import BoolArray, I64Array, U8Array


class RequestPart(enum.Enum):
    """The part of a request that a directive is about."""

    PROMPT = "prompt"
    WHOLE = "whole"
    OUTPUT = "output"  # what was generated


@dataclass(frozen=True, slots=True)
class Directive:
    """Tokens of a request that are to be claimed, and for how long. `end` None: up to the end of the part. `name` may
    be that of several directives.
    """

    seconds: float
    priority: int | None = None
    name: str = ""
    start: int = 0
    end: int | None = None
    part: RequestPart = RequestPart.PROMPT

    def covers(self, ends: I64Array, in_prompt: BoolArray, tokens_per_key: int) -> BoolArray:
        """Returns which keys of a group hold tokens that this is about. `ends`: where they end, in tokens; `in_prompt`:
        whether that is in the prompt.
        """
        if self.part is RequestPart.OUTPUT:
            return ~in_prompt
        begins = (ends - 1) // tokens_per_key * tokens_per_key
        covered: BoolArray = ends > self.start
        if self.end is not None:
            covered &= begins < self.end
        return covered & in_prompt if self.part is RequestPart.PROMPT else covered


@dataclass(frozen=True, slots=True, eq=False)
class RequestKeys:
    """All keys of a request that has ended, as vLLM names them, and what is to become of them. `ends`: where in the
    request each of them ends, in tokens. `in_prompt`: how many of them, the first ones, are the prompt's.
    """

    directives: Sequence[Directive]
    offload_keys: Sequence[bytes]
    ends: Sequence[int]
    in_prompt: int
    names: KeyNames


@dataclass(frozen=True, slots=True, eq=False)
class WantedClaim:
    """Keys to claim. `groups`: u8 (keys, KEY_BYTES), in the order of the request. `first`: the position of each group's
    first key.
    """

    directive: Directive
    groups: dict[int, U8Array]
    first: dict[int, int]

    @property
    def counts(self) -> dict[int, int]:
        """Returns the number of keys of each group."""
        return {group: len(keys) for group, keys in self.groups.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _GroupKeys:
    group: Group
    keys: U8Array
    ends: I64Array
    in_prompt: BoolArray


def claims_of(request: RequestKeys, groups: Mapping[int, Group]) -> Iterator[WantedClaim]:
    """Yields a claim for each directive that covers keys, in the order of their beginnings. `groups`: those that the
    engine's scheduler has registered.
    """
    found = list(_by_group(request, groups))
    longest = max((each.group.tokens_per_key for each in found), default=0)
    for directive in sorted(request.directives, key=lambda each: (each.part is RequestPart.OUTPUT, each.start)):
        covered = [directive.covers(each.ends, each.in_prompt, each.group.tokens_per_key) for each in found]
        end = max((int(each.ends[of].max()) for each, of in zip(found, covered, strict=True) if of.any()), default=0)
        claim = WantedClaim(directive, {}, {})
        for each, of in zip(found, covered, strict=True):
            chosen = of & _needed(each, end, longest)
            if chosen.any():
                number, tokens_per_key = each.group.group, each.group.tokens_per_key
                claim.groups[number] = each.keys[chosen]
                claim.first[number] = -(-int(each.ends[chosen][0]) // tokens_per_key) - 1
        if claim.groups:
            yield claim


def _by_group(request: RequestKeys, groups: Mapping[int, Group]) -> Iterator[_GroupKeys]:
    keys, ends = request.offload_keys, np.asarray(request.ends, np.int64)
    number_of = groups_of(keys)
    for number, (_, named) in pack_by_group(keys, request.names).items():
        places = np.flatnonzero(number_of == number)
        order = np.argsort(ends[places], kind="stable")
        places = places[order]
        yield _GroupKeys(groups[number], named[order], ends[places], places < request.in_prompt)


def _needed(each: _GroupKeys, end: int, longest: int) -> BoolArray:
    """Returns which keys a prefix needs that ends at `end`. vLLM keeps of windows and states what such a prefix needs;
    it may hit up to the key before the last, and has a key more of a window that begins within one.
    """
    if each.group.kind is GroupKind.FULL:
        return np.ones(len(each.ends), bool)
    needed: BoolArray = each.ends > end - 2 * longest - (each.group.window_keys + 1) * each.group.tokens_per_key
    return needed


def numbered(names: Sequence[str]) -> list[str]:
    """Returns the names of claims, those that are given several times with a number behind: a claim replaces the one
    that had its name.
    """
    times, seen = Counter(names), Counter[str]()
    found = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} #{seen[name]}" if name and times[name] > 1 else name)
    return found
