"""One demo worker process: an engine without a model. It answers turns that come as lines of JSON on standard input.

Run by demo.py, with its options as one JSON argument. Blocks are "computed" by filling them with what the oracle says.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.client import GroupKind, KeyState
from scripts.demo.chat import ROOT_TOKENS, ROOTS, Turn
from scripts.harness.counters import Counters
from scripts.harness.disk import is_idle
from scripts.harness.engine import Engine
from scripts.harness.geometry import BLOCK_TOKENS, Geometry, GroupShape, RefShape
from scripts.harness.oracle import Oracle

if TYPE_CHECKING:
    from kvoffloadd.client import Found
    from scripts.harness.jobs import Share

if TYPE_CHECKING:
    from scripts.harness.jobs import OpenJob

LAYERS, SLOTS, KV_HEADS, HEAD_SIZE, WINDOW_TOKENS = 24, 12, 8, 64, 128
"""gpt-oss-20b: 12 layers with full and 12 with sliding attention, on 12 slots of one tensor."""
PROBE_CONVERSATION = 1 << 30
READY_S, REST_S = 30.0, 0.005


@dataclass(frozen=True, slots=True)
class Options:
    """What demo.py tells a worker."""

    socket: str
    counters: str
    rows: int
    row: int
    seed: int
    kv_heads: int
    cache_blocks: int
    memory_name: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a turn. `restored_tokens` need not be computed again; `references`: keys that were asked for;
    `hits`: those that were there, `from_disk` of them brought from there for this turn.
    """

    restored_tokens: int
    references: int
    hits: int
    from_disk: int
    loaded_bytes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """GB/s of one thread's memcpy, and of stores and loads of the same bytes with nothing else going on."""

    memcpy: float
    store: float
    load: float


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

    def __init__(self, options: Options) -> None:
        counters = Counters(Path(options.counters), options.rows, options.row)
        geometry = gpt_oss_20b(options.kv_heads)
        rng = np.random.default_rng([options.seed, options.row])
        self._counters = counters
        self._oracle = Oracle(options.seed, 0, geometry.key_bytes, roots=ROOTS, root_tokens=ROOT_TOKENS)
        self._engine = Engine(
            options.socket,
            geometry,
            self._oracle,
            counters,
            rng,
            options.memory_name,
            options.cache_blocks * geometry.groups[0].payload_bytes(0),
            padded=False,
        )
        self._engine.disk = True

    def answer(self, turn: Turn, *, restore_alone: bool) -> Answer:
        """Restore what is held of the prompt, from memory or disk; compute and store the rest and the answer, unless
        `restore_alone`.
        """
        engine, rank = self._engine, self._engine.ranks[0]
        keys = self._oracle.keys(turn.conversation, BLOCK_TOKENS, turn.total_tokens // BLOCK_TOKENS)
        asked = keys[: turn.prompt_tokens // BLOCK_TOKENS]
        began = time.monotonic()
        pinned = rank.client.pin({group.number: asked for group in engine.geometry.groups})
        self._counters.took("pin", time.monotonic() - began)
        found = rank.client.wait_ready(pinned, READY_S)
        loaded_bytes = 0
        # The last token is always computed: its logits are what the engine is after.
        restorable = found.boundaries[found.boundaries < turn.prompt_tokens]
        tokens = int(restorable[0]) if len(restorable) else 0
        length = tokens // BLOCK_TOKENS
        if length:
            shares = [
                engine.share(rank, group, 0, keys[group.first_needed(length) : length], group.first_needed(length))
                for group in engine.geometry.groups
            ]
            opened = engine.load(rank, shares, lease=found.lease, pending=_pending(pinned, shares))
            engine.wait([opened])
            loaded_bytes = opened.job.result.bytes if opened.job.result else 0
        rank.client.release(found.lease)
        if not restore_alone:
            engine.wait([self._store(keys, length)])
        hits = sum(int((state == KeyState.HIT).sum()) for state in found.states)
        from_disk = hits - sum(int((state == KeyState.HIT).sum()) for state in pinned.states) if pinned.promoting else 0
        return Answer(tokens, 2 * len(asked), hits, from_disk, loaded_bytes)

    def _store(self, keys: np.ndarray, first: int) -> OpenJob:
        rank = self._engine.ranks[0]
        shares = [self._engine.share(rank, group, 0, keys[first:], first) for group in self._engine.geometry.groups]
        return self._engine.store(rank, shares)

    def _rest(self) -> None:
        """Until the daemon has hashed and written what was stored."""
        client = self._engine.ranks[0].client
        until = time.monotonic() + READY_S
        while not is_idle(client.status()) and time.monotonic() < until:
            time.sleep(REST_S)

    def probe(self, rounds: int) -> Speed:
        """How fast it is, beside a memcpy of as many bytes, alternately; medians."""
        engine, rank = self._engine, self._engine.ranks[0]
        full = engine.geometry.groups[0]
        count = rank.memory.num_free
        source = np.ones(count * full.payload_bytes(0), np.uint8)
        target = np.zeros_like(source)
        taken: dict[str, list[float]] = {"memcpy": [], "store": [], "load": []}
        for number in range(rounds + 1):
            began = time.perf_counter()
            np.copyto(target, source)
            taken["memcpy"].append(time.perf_counter() - began)
            keys = self._oracle.keys(PROBE_CONVERSATION + number, BLOCK_TOKENS, count + ROOT_TOKENS // BLOCK_TOKENS)
            for what, start in (("store", engine.store), ("load", engine.load)):
                self._rest()
                opened = start(rank, [engine.share(rank, full, 0, keys[-count:], 0)])
                engine.wait([opened])
                taken[what].append(opened.took_s)
        # The first round pays for pages that are touched for the first time.
        return Speed(**{what: source.size / statistics.median(times[1:]) / 1e9 for what, times in taken.items()})

    def reconnect(self) -> None:
        """To the daemon that has come after the one that was killed."""
        self._engine.ranks[0].client.ping()

    def close(self) -> None:
        """Orderly end: everything is compared once more."""
        self._engine.close()


def _pending(pinned: Found, shares: list[Share]) -> tuple[list[np.ndarray], int]:
    """Which of the shares' keys were on disk when they were pinned."""
    states = dict(enumerate(pinned.states))
    masks = [states[one.group.number][one.first : one.first + len(one.keys)] == KeyState.PENDING for one in shares]
    others = sum(int((state == KeyState.PENDING).sum()) for state in pinned.states) - pinned.promoting
    return masks, others


def main() -> int:
    """Answers until standard input ends."""
    worker = Worker(Options(**json.loads(sys.argv[1])))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "probe" in asked:
            answer: Answer | Speed = worker.probe(asked["probe"])
        elif "restore" in asked:
            worker.reconnect()
            answer = worker.answer(Turn(**asked["restore"]), restore_alone=True)
        else:
            answer = worker.answer(Turn(**asked), restore_alone=False)
        print(json.dumps(asdict(answer)), flush=True)
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
