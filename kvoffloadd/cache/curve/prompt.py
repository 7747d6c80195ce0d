"""Describes the keys of one prompt, as a lookup or a store names them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvoffloadd.model import GroupKind, U64Array


@dataclass(frozen=True, slots=True, eq=False)
class AskedKeys:
    """Has the keys of one group, in prompt order. `hashes`: one well-mixed u64 each, (n,), by a secret of the daemon;
    keys of the same name have the same one in each group. `key_bytes`: what each takes in its tier, with all its parts.
    """

    hashes: U64Array
    tokens_per_key: int
    key_bytes: int
    group: int = 0
    first: int = 0  # position of the first key in its prompt; the engine has the keys before it
    kind: GroupKind = GroupKind.FULL
    window_keys: int = 0


def measuring(groups: Sequence[AskedKeys]) -> int:
    """Returns which group's keys stand for the prompt's tokens: the first with full attention, or with most keys."""
    full = next((at for at, group in enumerate(groups) if group.kind is GroupKind.FULL), None)
    return full if full is not None else max(range(len(groups)), key=lambda at: len(groups[at].hashes))
