"""Packs and reads claims that are saved for the next run, on disk and next to the arena. Pure.

A saved claim has its end by the wall clock and the seconds that were left when it was saved: the smaller counts, so
that no clock that is wrong or was set makes a claim longer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgpack
import msgspec

from kvoffloadd.cache.memory.claim import Claim
from kvoffloadd.cache.memory.keys import pack
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.savedstate import SavedKeyspace, are_consistent, pack_keyspace
from kvoffloadd.cache.memory.tierclaims import Prompt

log = logging.getLogger(__name__)

PRIORITY_MAX = 100
NAME_CHARS_MAX = 128
POSITION_END = 1 << 48
RUN_BYTES = 16
_HEAD_BYTES = 48
"""The maximum size of what precedes the lists, and of their headers."""

VERSION_MAX = (1 << 53) - 1
_Count = Annotated[int, msgspec.Meta(ge=0, le=VERSION_MAX)]


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
    def sound_claims(self) -> list[SavedClaim]:
        """Returns the claims that `PackedClaims` may have packed: of groups that are there, each named once, and of one
        namespace.
        """
        keyspaces = {keyspace.number: keyspace for keyspace in self.keyspaces}
        return [claim for claim in self.claims if _is_sound(claim, keyspaces)]


def _is_sound(claim: SavedClaim, keyspaces: Mapping[int, SavedKeyspace]) -> bool:
    named = [keyspaces.get(group.keyspace) for group in claim.groups]
    found = [keyspace for keyspace in named if keyspace is not None]
    return (
        len({keyspace.number for keyspace in found}) == len(named)
        and len({keyspace.fingerprint for keyspace in found}) == 1
        and all(len(group.keys) % found[0].key_bytes == 0 for group in claim.groups)
    )


@dataclass(slots=True)
class PackedClaims:
    """Collects claims, the oldest first."""

    _claims: list[tuple[Claim, list[Keyspace], bytes]] = field(default_factory=list)
    _keyspaces: dict[int, bytes] = field(default_factory=dict)  # packed, by number
    _is_whole: bool = True  # nothing was left out

    def add(self, claim: Claim, prompt: Prompt, hits: int, left_s: float, now_s: float) -> None:
        """Adds a claim of these keys, as far as the sizes of their groups are known. `now_s`: the time, in seconds
        since 1970.
        """
        known = [part for part in prompt if all(part[0].part_bytes)]
        self._is_whole &= len(known) == len(prompt)
        groups = [(keyspace.id, first, pack(keys, keyspace.namespace.key_bytes)) for keyspace, first, keys in known]
        facts = (claim.number, claim.name, claim.priority, left_s, now_s + left_s, hits, groups)
        if groups:
            self._claims.append((claim, [keyspace for keyspace, _, _ in known], msgpack.packb(facts)))

    def settle(self, current: Iterable[Claim]) -> None:
        """Leaves out all but these claims, and what names keyspaces that are gone. Packs the keyspaces as they are
        now.
        """
        still = set(current)
        self._claims = [
            (claim, keyspaces, packed)
            for claim, keyspaces, packed in self._claims
            if claim in still and not any(keyspace.retired for keyspace in keyspaces)
        ]
        named = {keyspace.id: keyspace for _, keyspaces, _ in self._claims for keyspace in keyspaces}
        self._keyspaces = {number: pack_keyspace(keyspace) for number, keyspace in named.items()}

    def pieces(self, version: int, run: bytes, bytes_max: int) -> tuple[list[bytes], bool]:
        """Returns the settled claims packed, in pieces, of no more than this many bytes: those that would lapse last.
        Also returns whether these are all that were added.
        """
        size, kept, numbers = _HEAD_BYTES, set[Claim](), set[int]()
        for claim, keyspaces, packed in sorted(self._claims, key=lambda item: item[0].order, reverse=True):
            new = {keyspace.id for keyspace in keyspaces} - numbers
            more = len(packed) + sum(len(self._keyspaces[number]) for number in new)
            if size + more <= bytes_max:
                size += more
                kept.add(claim)
                numbers |= new
        packer = msgpack.Packer()
        pieces = [
            packer.pack_array_header(4) + packer.pack(version) + packer.pack(run),
            packer.pack_array_header(len(numbers)),
            *(self._keyspaces[number] for number in sorted(numbers)),
            packer.pack_array_header(len(kept)),
            *(packed for claim, _, packed in self._claims if claim in kept),
        ]
        return pieces, self._is_whole and len(kept) == len(self._claims)


def read_saved_claims(packed: bytes, place: str) -> SavedClaims | None:
    """Unpacks the result of `PackedClaims.pieces`. Returns None if there is none, or, with a warning that names the
    `place`, if it is damaged.
    """
    if not packed:
        return None
    try:
        saved = msgspec.msgpack.decode(packed, type=SavedClaims)
        why = "" if are_consistent(saved.keyspaces) else "its groups can't be together"
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        why = str(error)
    if not why:
        return saved
    log.warning("%s: the claims of the previous run are damaged, and are not taken over: %.200s", place, why)
    return None
