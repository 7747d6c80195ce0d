"""Turns what a request of vLLM wants retained into claims: which of its keys, and where in the request these stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import Group, GroupKind
from kvoffloadd.integrations.common.claims import Directive, WantedClaim, in_order
from kvoffloadd.integrations.vllm.keys import KeyNames, groups_of, pack_by_group
from kvoffloadd.model import BoolArray, I64Array, U8Array


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
    for directive in in_order(request.directives):
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
