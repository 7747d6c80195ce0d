"""An engine's worker around the decoder: it computes a prompt, stores, restores to other blocks, and goes on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvoffloadd.client import Client, GroupKind, Outcome
from kvoffloadd.layout import Reach
from kvoffloadd.model import U8Array
from scripts.harness.layers import LayerMemory
from tests.layout.decoder import VOCABULARY, Decoder
from tests.layout.oracle import gather, rows_of, scatter, torch

BLOCK, WINDOW = 8, 20
FULL_BLOCKS, TAIL, NEW = 5, 3, 24
TOKENS = FULL_BLOCKS * BLOCK + TAIL
TABLE = -(-(TOKENS + NEW) // BLOCK)
NOWHERE = 0
"""A block that nobody may read: what tables name where a window has passed."""

NAN, PLAUSIBLE = (0xFF, 0x100), (0x38, 0x40)
"""Ranges of bytes that memory is filled with: each item is not a number, or one as small as those models compute."""

Moves = dict[int, tuple[range, list[int]]]
"""Group -> keys, by their place in the prompt, and the block of each."""

Generated = tuple[list[int], Any]
"""Tokens, and the logits (tokens, vocabulary) of each."""


def wipe(memory: LayerMemory, garbage: tuple[int, int], rng: np.random.Generator) -> None:
    """See NAN."""
    for one in memory.flat:
        one.copy_(torch.from_numpy(rng.integers(*garbage, one.shape, dtype=np.uint8).view(np.int8)))


def prompt_of(seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, TOKENS).tolist()
    return tokens


class Worker:
    """A prompt, a model over memory, and a session with the daemon.

    Block tables in which the prompt is computed and those to which it is restored have no block in common.
    """

    def __init__(self, client: Client, memory: LayerMemory, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._client, self._memory = client, memory
        self._model = Decoder(memory.specs, memory.groups, memory.layers, seed)
        self._registration = client.register(memory.cache.kv_cache())
        self._prompt = prompt_of(seed)
        self._per = {group.group: BLOCK // memory.specs[group.layers[0]].block_size for group in memory.groups}
        self._keys = {group.group: self._rolling_hash(group.group) for group in memory.groups}
        firsts = {group.group: memory.specs[group.layers[0]] for group in memory.groups}
        self.reaches = {
            group: Reach(spec.group_kind, spec.block_size, getattr(spec, "window", 0)) for group, spec in firsts.items()
        }
        num_blocks = memory.cache.tensors[0].shape[0]
        blocks = iter((1 + self._rng.permutation(num_blocks - 1)).tolist())
        self._source, self._target = (
            {group: list(itertools.islice(blocks, TABLE * per)) for group, per in self._per.items()} for _ in range(2)
        )
        self._tables: dict[int, list[int]] = {}

    def _rolling_hash(self, group: int) -> U8Array:
        """u8 (keys, 32): of each full block, what it and all before it hold."""
        digest = hashlib.blake2b(bytes([group]), digest_size=32)
        found = []
        per = self._per[group]
        size = BLOCK // per
        for block in range(FULL_BLOCKS * per):
            digest.update(bytes(self._prompt[block * size : (block + 1) * size]))
            found.append(np.frombuffer(digest.digest(), np.uint8))
        return np.stack(found)

    def wipe(self, garbage: tuple[int, int]) -> None:
        wipe(self._memory, garbage, self._rng)

    def offload(self, kind: GroupKind | None = None, missing: int = FULL_BLOCKS) -> None:
        """Compute the prompt and store its full blocks; of groups of `kind` all but the `missing` one."""
        self.wipe(NAN)
        self._model.prefill(self._prompt, self._source)
        for group, reach in self.reaches.items():
            full = FULL_BLOCKS * self._per[group]
            gap = missing * self._per[group] if reach.kind == kind else full
            for keys in (range(gap), range(gap + 1, full)):
                self._move(self._client.store, {group: (keys, self._source[group][keys.start : keys.stop])})

    def restorable(self) -> int:
        """Blocks of the longest prefix that the daemon has for all groups."""
        boundaries: list[int] = self._client.lookup(self._keys).boundaries.tolist()
        return max(boundaries, default=0) // BLOCK

    def admit(self, remote: int, local: int = 0) -> Moves:
        """Block tables for the request, whose first `local` blocks are computed here, and what to load for
        `remote` ones. Blocks that a group does not need are nowhere. A group's own blocks may be parts of these.
        """
        moves: Moves = {}
        for group, reach in self.reaches.items():
            per, ids = self._per[group], self._target[group]
            keys = reach.blocks(remote * BLOCK, local * per)
            self._tables[group] = [*ids[: local * per], *[NOWHERE] * (keys.start - local * per), *ids[keys.start :]]
            moves[group] = keys, ids[keys.start : keys.stop]
        self._model.prefill(self._prompt[: local * BLOCK], self._tables)
        return moves

    def load(self, moves: Moves) -> None:
        self._move(self._client.load, moves)

    def _move(self, submit: Callable[..., Any], moves: Moves) -> None:
        groups = {group: (self._keys[group][keys.start : keys.stop], ids) for group, (keys, ids) in moves.items()}
        first = {group: keys.start for group, (keys, _) in moves.items()}
        job = submit(self._registration, groups, first=first)
        assert self._client.wait(job, 15).outcome == Outcome.DONE

    def resume(self, blocks: int, count: int = NEW) -> Generated:
        """The rest of the prompt behind `blocks` blocks, and what follows."""
        return self._model.generate(self._prompt, self._tables, count, blocks * BLOCK)

    def turn_a_sign(self, group: int, block: int) -> None:
        """Turns the sign of one item of the block's payload."""
        rows = rows_of(self._memory.cache)
        refs = next(known.refs for known in self._memory.cache.groups if known.group == group)
        payload = bytearray(gather(rows, refs, block))
        payload[int(self._rng.integers(len(payload))) | 3] ^= 0x80  # the last byte of an item, whatever its size
        scatter(rows, refs, block, bytes(payload))


def check_same(one: Generated, other: Generated) -> None:
    assert one[0] == other[0]
    assert bool(one[1].isfinite().all())
    assert torch.equal(one[1], other[1])
