"""The keys of a run of holes and what their payloads are: one namespace for each worker, and one that all share.

Attackers store none of the `clean` prompts, and only attackers store the others. Those were stored while holes were
punched into them: every byte of such a payload is the oracle's, or 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffloadd.client import Group, GroupKind, NamespaceSpec, Ref
from kvoffloadd.model import U8Array
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.groupshape import GroupShape, RefShape

KEY_BYTES = 32
KEYS = 8
"""Of a prompt."""
TOKENS_PER_KEY = 16
PAYLOAD_BYTES = 40_000
STRIDE_BYTES = 40_192
"""Neither is a multiple of a page: holes cross blocks, and what lies between two of them is compared, too."""
SHAPE = GroupShape(
    number=0,
    kind=GroupKind.FULL,
    tokens_per_key=TOKENS_PER_KEY,
    window_keys=0,
    blocks_per_key=1,
    parts=((RefShape(0, PAYLOAD_BYTES),),),
    part_of_rank=(0,),
)
GROUP = Group(0, GroupKind.FULL, TOKENS_PER_KEY, refs=[Ref(0, 0, PAYLOAD_BYTES)])
SHARED = 0
"""The number of the shared namespace; a worker's own one has the number behind its row's."""


@dataclass(frozen=True, slots=True)
class Text:
    """`keys`: u8 (KEYS, KEY_BYTES). `holed`: it is stored while holes are punched into it."""

    number: int
    keys: U8Array
    holed: bool


class Texts:
    """All prompts of one namespace, `count` of each kind."""

    def __init__(self, seed: int, number: int, count: int) -> None:
        self.spec = NamespaceSpec(model=f"holes-{number}", key_bytes=KEY_BYTES)
        self._oracle = Oracle(seed, number, KEY_BYTES, roots=1, root_tokens=0)
        self._count = count

    def clean(self, rng: np.random.Generator) -> Text:
        """One that no attacker stores."""
        return self._prompt(int(rng.integers(0, self._count)), holed=False)

    def holed(self, rng: np.random.Generator) -> Text:
        """One that only attackers store."""
        return self._prompt(self._count + int(rng.integers(0, self._count)), holed=True)

    def _prompt(self, number: int, *, holed: bool) -> Text:
        return Text(number, self._oracle.keys(number, TOKENS_PER_KEY, KEYS), holed)

    def contents(self, keys: U8Array) -> U8Array:
        """u8 (keys, PAYLOAD_BYTES): what was written before it was stored."""
        return self._oracle.contents(SHAPE.number, 0, keys, PAYLOAD_BYTES)
