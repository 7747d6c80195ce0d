"""Packs and reads claims that are saved for the next run, on disk and next to the arena. Pure.

A saved claim has its end by the wall clock and the seconds that were left when it was saved: the smaller counts, so
that no clock that is wrong or was set makes a claim longer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Annotated

import msgpack
import msgspec

from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.claimedkeys import KEYS_MAX
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.savedstate import SavedKeyspace, are_consistent, pack_keyspace
from kvoffloadd.cache.memory.tierclaims import Prompt

log = logging.getLogger(__name__)

PRIORITY_MAX = 100
NAME_CHARS_MAX = 128
POSITION_END = 1 << 48
RUN_BYTES = 16
_HEAD_BYTES = 48
"""The maximum size of what precedes the lists, and of their headers."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class SavedKeys(msgspec.Struct, frozen=True, array_like=True):
    """Describes the keys of one group. `keyspace`: its number in the list of keyspaces. `keys`: packed, at least one;
    `first`: the position of the first of them in the prompt.
    """

    keyspace: int
    first: Annotated[int, msgspec.Meta(ge=0, lt=POSITION_END)]
    keys: Annotated[bytes, msgspec.Meta(min_length=1)]


class SavedClaim(msgspec.Struct, frozen=True, array_like=True):
    """Describes one claim. `left_s`: seconds to its end when it was saved; `ends_s`: its end, in seconds since 1970."""

    number: Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
    priority: Annotated[int, msgspec.Meta(ge=0, le=PRIORITY_MAX)]
    left_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    ends_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)]
    hits: _Count
    groups: Annotated[list[SavedKeys], msgspec.Meta(min_length=1)]

    def left_at(self, now_s: float) -> float:
        """Returns the seconds to its end. `now_s`: the time, in seconds since 1970."""
        return min(self.left_s, self.ends_s - now_s)


class SavedClaims(msgspec.Struct, frozen=True, array_like=True):
    """Holds claims as they were saved at one time. `version` rises: of two, the higher one is the later. `run`: names
    the run that saved them.
    """

    version: _Count
    run: Annotated[bytes, msgspec.Meta(min_length=RUN_BYTES, max_length=RUN_BYTES)]
    keyspaces: list[SavedKeyspace]
    claims: list[SavedClaim]

    @property
    def fault(self) -> str:
        """Returns why `PackedClaims` does not pack such claims; empty: it does."""
        if not are_consistent(self.keyspaces):
            return "its groups can't be together"
        widths = {keyspace.number: keyspace.key_bytes for keyspace in self.keyspaces}
        namespaces = {keyspace.number: keyspace.fingerprint for keyspace in self.keyspaces}
        keys = 0
        for claim in self.claims:
            numbers = [group.keyspace for group in claim.groups]
            if len(set(numbers)) < len(numbers) or not widths.keys() >= set(numbers):
                return "a claim names groups that are not there"
            if len({namespaces[number] for number in numbers}) > 1:
                return "a claim names keys of several namespaces"
            if any(len(group.keys) % widths[group.keyspace] for group in claim.groups):
                return "a claim names keys of another width"
            keys += sum(len(group.keys) // widths[group.keyspace] for group in claim.groups)
        numbers = [claim.number for claim in self.claims]
        if sorted(set(numbers)) != numbers:
            return "its claims are not in order"
        return f"it has {keys} keys" if keys > KEYS_MAX else ""


@dataclass(slots=True)
class PackedClaims:
    """Collects claims, the oldest first, each packed when it is added."""

    _keyspaces: dict[int, bytes] = field(default_factory=dict)  # packed, by number
    _claims: list[tuple[tuple[int, int], list[int], bytes]] = field(default_factory=list)

    def add(self, claim: Claim, prompt: Prompt, hits: int, left_s: float, now_s: float) -> None:
        """Adds a claim of these keys, as far as the sizes of their groups are known. `now_s`: the time, in seconds
        since 1970.
        """
        groups = list[tuple[int, int, bytes]]()
        for keyspace, first, keys in prompt:
            if packed := pack_keyspace(keyspace):
                self._keyspaces[keyspace.id] = packed
                groups.append((keyspace.id, first, pack(keys, keyspace.namespace.key_bytes)))
        if groups:
            facts = (claim.number, claim.name, claim.priority, left_s, now_s + left_s, hits, groups)
            self._claims.append((claim.order, [number for number, _, _ in groups], msgpack.packb(facts)))

    def pieces(self, version: int, run: bytes, bytes_max: int) -> list[bytes]:
        """Returns the packed claims in pieces, of no more than this many bytes: those that would lapse last."""
        size, kept, numbers = _HEAD_BYTES, set[tuple[int, int]](), set[int]()
        for order, named, packed in sorted(self._claims, key=lambda claim: claim[0], reverse=True):
            more = len(packed) + sum(len(self._keyspaces[number]) for number in set(named) - numbers)
            if size + more <= bytes_max:
                size += more
                kept.add(order)
                numbers |= set(named)
        packer = msgpack.Packer()
        return [
            packer.pack_array_header(4) + packer.pack(version) + packer.pack(run),
            packer.pack_array_header(len(numbers)),
            *(self._keyspaces[number] for number in sorted(numbers)),
            packer.pack_array_header(len(kept)),
            *(packed for order, _, packed in self._claims if order in kept),
        ]


def read_saved_claims(packed: bytes, place: str) -> SavedClaims | None:
    """Unpacks the result of `PackedClaims.pieces`. Returns None if there is none, or, with a warning that names the
    `place`, if it is damaged.
    """
    if not packed:
        return None
    try:
        saved = msgspec.msgpack.decode(packed, type=SavedClaims)
        why = saved.fault
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = str(error)
    if not why:
        return saved
    log.warning("%s: the claims of the previous run are damaged, and are not taken over: %.200s", place, why)
    return None
