"""One demo worker process: an engine without a model. It answers turns that come as lines of JSON on standard input.

Run by the demo, with its options as one JSON argument. Blocks are "computed" by filling them with the oracle's bytes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from kvoffloadd.client import Found, KeyState
from kvoffloadd.demo.chat import ROOT_TOKENS, ROOTS, ChatTurn
from kvoffloadd.model import U8Array
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.counters import Counters
from scripts.harness.engine import Engine
from scripts.harness.jobs import OpenJob, Share
from scripts.harness.models import named, small
from scripts.harness.planned import PlannedGeometry, planned_geometries
from scripts.harness.promises import count

WHOLE = "gpt-oss-20b"
"""The model that keeps all its layers: 12 with full and 12 with sliding attention. Others are scaled down."""
CACHE_TOKENS = 4608
"""Enough for the longest conversation, in all groups."""
READY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a turn. `restored_tokens` need not be computed again; `hits`: keys that were there, `from_disk` of
    them brought from there for this turn.
    """

    restored_tokens: int
    hits: int
    from_disk: int


def geometry_of(name: str, layout: str, kv_heads: int) -> PlannedGeometry:
    """A model's KV cache with fewer heads, since the machine is small. Raises NoSuchLayoutError."""
    model = replace(named(name), kv_heads=kv_heads) if name == WHOLE else small(named(name), kv_heads)
    return planned_geometries(name, model, 0, layouts=(layout,))[0]


class DemoWorker:
    """Pins, loads, computes, stores; in this order for every turn."""

    def __init__(
        self,
        socket: str,
        counters: str,
        rows: int,
        row: int,
        seed: int,
        kv_cache: tuple[str, str, int],
        memory_name: str,
    ) -> None:
        geometry = geometry_of(*kv_cache)
        self._oracle = Oracle(seed, 0, geometry.key_bytes, roots=ROOTS, root_tokens=ROOT_TOKENS)
        self._engine = Engine(
            socket,
            geometry,
            self._oracle,
            Counters(Path(counters), rows, row),
            np.random.default_rng([seed, row]),
            memory_name,
            geometry.blocks_of(CACHE_TOKENS) * geometry.row_bytes(geometry.layouts[0]),
        )
        self._engine.disk = True

    def answer(self, turn: ChatTurn, *, store: bool) -> Answer:
        """Restore what is held of the prompt, from memory or disk; `store`: compute and store the rest and the answer.

        A daemon that has come after one that was killed is found again.
        """
        engine, rank = self._engine, self._engine.ranks[0]
        rank.client.ping()
        keys = self._keys(turn.conversation, turn.total_tokens)
        pinned = rank.client.pin(self._keys(turn.conversation, turn.prompt_tokens))
        found = rank.client.wait_ready(pinned, READY_S)
        # The last token is always computed: its logits are what the engine is after.
        restorable = found.boundaries[found.boundaries < turn.prompt_tokens]
        tokens = int(restorable[0]) if len(restorable) else 0
        if tokens:
            shares = []
            for group in engine.geometry.groups:
                length = tokens // group.tokens_per_key
                first = group.first_needed(length)
                shares.append(engine.share(rank, group, 0, keys[group.number][first:length], first))
            engine.wait([engine.load(rank, shares, lease=found.lease, pending=_pending(pinned, shares))])
        rank.client.release(found.lease)
        if store:
            engine.wait([self._store(keys, tokens)])
        hits = count(found.states, KeyState.HIT)
        return Answer(tokens, hits, hits - count(pinned.states, KeyState.HIT) if pinned.promoting else 0)

    def _keys(self, conversation: int, tokens: int) -> dict[int, U8Array]:
        """Returns the keys of the whole blocks of this many tokens, by group."""
        return {
            group.number: self._oracle.keys(conversation, group.tokens_per_key, tokens // group.tokens_per_key)
            for group in self._engine.geometry.groups
        }

    def _store(self, keys: dict[int, U8Array], tokens: int) -> OpenJob:
        """Stores what is behind the first `tokens` tokens."""
        rank, shares = self._engine.ranks[0], []
        for group in self._engine.geometry.groups:
            first = tokens // group.tokens_per_key
            shares.append(self._engine.share(rank, group, 0, keys[group.number][first:], first))
        return self._engine.store(rank, [share for share in shares if len(share.keys)])

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
    worker = DemoWorker(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps(asdict(worker.answer(ChatTurn(**question["turn"]), store=question["store"]))), flush=True)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
