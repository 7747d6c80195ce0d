"""A worker of the demo, in a separate process. It answers turns that come as lines of JSON on standard input.

The demo runs it, with its options as one JSON argument. It "computes" blocks by filling them with the oracle's
contents.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass

import numpy as np

from kvoffloadd.client import Client, Found, KeyState, Outcome
from kvoffloadd.demo.chat import ROOT_TOKENS, ROOTS, ChatTurn
from kvoffloadd.demo.kvcache import GROUPS, TOKENS_PER_KEY, WorkerCache, first_needed, namespace
from kvoffloadd.model import U8Array
from kvoffloadd.testing.oracle import Oracle

CALL_S = 60.0
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The result of a turn. `restored_tokens` need not be computed again; `hits`: keys that were there, `from_disk`:
    how many of them came from disk for this turn. `wrong_bytes`: wrong ones among the loaded bytes; `stray_bytes`:
    bytes written elsewhere.
    """

    restored_tokens: int
    hits: int
    from_disk: int
    loads: int
    wrong_bytes: int
    stray_bytes: int


class Worker:
    """Pins, loads, computes and stores, in this order for every turn."""

    def __init__(self, socket: str, seed: int, memory_name: str) -> None:
        self._oracle = Oracle(seed, 0, KEY_BYTES, roots=ROOTS, root_tokens=ROOT_TOKENS)
        self._client = Client(socket, namespace=namespace(seed), role="worker", deadline_s=CALL_S)
        self._client.connect()
        self._cache = WorkerCache(self._client, self._oracle, memory_name)

    def answer(self, turn: ChatTurn, *, store: bool) -> TurnAnswer:
        """Restores what is held of the prompt, from memory or disk; `store`: computes and stores the rest and the
        answer.

        Reconnects to a daemon that has replaced a killed one.
        """
        self._client.ping()
        keys = self._oracle.keys(turn.conversation, TOKENS_PER_KEY, turn.total_tokens // TOKENS_PER_KEY)
        prompt = keys[: turn.prompt_tokens // TOKENS_PER_KEY]
        pinned = self._client.pin(dict.fromkeys(GROUPS, prompt))
        found = self._client.wait_ready(pinned, CALL_S)
        # The last token is always computed: the engine needs its logits.
        restorable = found.boundaries[found.boundaries < turn.prompt_tokens]
        count = int(restorable[0]) // TOKENS_PER_KEY if len(restorable) else 0
        wrong = stray = loads = 0
        if count:
            loads = 1
            restored, wrong, stray = self._load(keys, count, found)
            count = count if restored else 0
        self._client.release(found.lease)
        if store:
            self._store(keys, count)
        hits = _hits(found)
        from_disk = hits - _hits(pinned) if pinned.promoting else 0
        return TurnAnswer(count * TOKENS_PER_KEY, hits, from_disk, loads, wrong, stray)

    def _load(self, keys: U8Array, count: int, found: Found) -> tuple[bool, int, int]:
        """Loads the first `count` keys. Returns whether all of them came, the wrong bytes among those that came, and
        the stray bytes.
        """
        wanted = {}
        for group in GROUPS:
            first = first_needed(group, count)
            self._cache.forget(group)
            wanted[group] = keys[first:count], np.arange(first, count)
        job = self._client.load(self._cache.registration, wanted, lease=found.lease, deadline_s=CALL_S)
        result = self._client.wait(job, CALL_S)
        wrong = stray = 0
        whole = result.outcome is Outcome.DONE
        for group, (group_keys, blocks) in wanted.items():
            valid = result.valid(group)
            whole = whole and bool(valid.all())
            wrong += self._cache.wrong_bytes(group, group_keys[valid], blocks[valid])
            stray += self._cache.stray_bytes(group, blocks)
        return whole, wrong, stray

    def _store(self, keys: U8Array, first: int) -> None:
        """Stores the blocks after the first keys."""
        blocks = np.arange(first, len(keys))
        if not len(blocks):
            return
        for group in GROUPS:
            self._cache.compute(group, keys[first:], blocks)
        wanted = dict.fromkeys(GROUPS, (keys[first:], blocks))
        self._client.wait(self._client.store(self._cache.registration, wanted, deadline_s=CALL_S), CALL_S)

    def close(self) -> None:
        """Closes the session in order."""
        self._client.close()


def _hits(found: Found) -> int:
    return sum(int((states == KeyState.HIT).sum()) for states in found.states)


def main() -> int:
    """Answers until standard input ends."""
    worker = Worker(**json.loads(sys.argv[1]))
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        answer = worker.answer(ChatTurn(**request["turn"]), store=request["store"])
        sys.stdout.write(json.dumps(asdict(answer)) + "\n")
        sys.stdout.flush()
    worker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
