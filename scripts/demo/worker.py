"""One demo worker process: an engine without a model. It answers turns that come as lines of JSON on standard input.

Run by the demo, with its options as one JSON argument. Blocks are "computed" by filling them with what the oracle says.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.client import GroupKind, KeyState
from scripts.demo.chat import ROOT_TOKENS, ROOTS, Turn
from scripts.harness.counters import Counters
from scripts.harness.engine import Engine
from scripts.harness.geometry import BLOCK_TOKENS, Geometry, GroupShape, RefShape
from scripts.harness.oracle import Oracle
from scripts.harness.promises import count

if TYPE_CHECKING:
    from kvoffloadd.client import Found
    from scripts.harness.jobs import OpenJob, Share

SLOTS, KV_HEADS, HEAD_SIZE, WINDOW_TOKENS = 12, 8, 64, 128
"""gpt-oss-20b: 12 layers with full and 12 with sliding attention, on 12 slots of one tensor."""
CACHE_BLOCKS = 576
"""Enough for the longest conversation in both groups."""
READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a turn. `restored_tokens` need not be computed again; `hits`: keys that were there, `from_disk` of
    them brought from there for this turn.
    """

    restored_tokens: int
    hits: int
    from_disk: int


def gpt_oss_20b(kv_heads: int) -> Geometry:
    """Its KV cache in bf16, with fewer heads if the machine is small: one row holds a block's pages of all 12 slots."""
    page_bytes = 2 * BLOCK_TOKENS * kv_heads * HEAD_SIZE * 2
    refs = ((RefShape(0, SLOTS * page_bytes),),)
    window_keys = -(-(WINDOW_TOKENS - 1) // BLOCK_TOKENS)
    groups = (
        GroupShape(0, GroupKind.FULL, BLOCK_TOKENS, 0, 1, refs, (0,)),
        GroupShape(1, GroupKind.SLIDING, BLOCK_TOKENS, window_keys, 1, refs, (0,)),
    )
    return Geometry("gpt-oss-20b", kv_heads, 32, 1, 1, True, groups)


class Worker:
    """Pins, loads, computes, stores; in this order for every turn."""

    def __init__(
        self, socket: str, counters: str, rows: int, row: int, seed: int, kv_heads: int, memory_name: str
    ) -> None:
        geometry = gpt_oss_20b(kv_heads)
        self._oracle = Oracle(seed, 0, geometry.key_bytes, roots=ROOTS, root_tokens=ROOT_TOKENS)
        self._engine = Engine(
            socket,
            geometry,
            self._oracle,
            Counters(Path(counters), rows, row),
            np.random.default_rng([seed, row]),
            memory_name,
            CACHE_BLOCKS * geometry.groups[0].payload_bytes(0),
            padded=False,
        )
        self._engine.disk = True

    def answer(self, turn: Turn, *, store: bool) -> Answer:
        """Restore what is held of the prompt, from memory or disk; `store`: compute and store the rest and the answer.

        A daemon that has come after one that was killed is found again.
        """
        engine, rank = self._engine, self._engine.ranks[0]
        rank.client.ping()
        keys = self._oracle.keys(turn.conversation, BLOCK_TOKENS, turn.total_tokens // BLOCK_TOKENS)
        asked = keys[: turn.prompt_tokens // BLOCK_TOKENS]
        pinned = rank.client.pin({group.number: asked for group in engine.geometry.groups})
        found = rank.client.wait_ready(pinned, READY_S)
        # The last token is always computed: its logits are what the engine is after.
        restorable = found.boundaries[found.boundaries < turn.prompt_tokens]
        tokens = int(restorable[0]) if len(restorable) else 0
        length = tokens // BLOCK_TOKENS
        if length:
            shares = [
                engine.share(rank, group, 0, keys[group.first_needed(length) : length], group.first_needed(length))
                for group in engine.geometry.groups
            ]
            engine.wait([engine.load(rank, shares, lease=found.lease, pending=_pending(pinned, shares))])
        rank.client.release(found.lease)
        if store:
            engine.wait([self._store(keys, length)])
        hits = count(found.states, KeyState.HIT)
        return Answer(tokens, hits, hits - count(pinned.states, KeyState.HIT) if pinned.promoting else 0)

    def _store(self, keys: np.ndarray, first: int) -> OpenJob:
        rank = self._engine.ranks[0]
        shares = [self._engine.share(rank, group, 0, keys[first:], first) for group in self._engine.geometry.groups]
        return self._engine.store(rank, shares)

    def close(self) -> None:
        """Orderly end: everything is compared once more."""
        self._engine.close()


def _pending(pinned: Found, shares: list[Share]) -> tuple[list[np.ndarray], int]:
    """Which of the shares' keys were on disk when they were pinned."""
    states = dict(enumerate(pinned.states))
    masks = [states[one.group.number][one.first : one.first + len(one.keys)] == KeyState.PENDING for one in shares]
    others = count(pinned.states, KeyState.PENDING) - pinned.promoting
    return masks, others


def main() -> int:
    """Answers until standard input ends."""
    worker = Worker(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(asdict(worker.answer(Turn(**asked["turn"]), store=asked["store"]))), flush=True)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
