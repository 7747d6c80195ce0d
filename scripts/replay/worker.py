"""A worker that replays a trace's requests: its KV cache, the requests' turns, the check of every loaded byte."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client, GroupKind, Job, KeyState, KvCache, NamespaceSpec, Outcome, Ref, SharedTensor
from kvoffloadd.model import PAGE_BYTES, BoolArray, I64Array, U8Array, slot_pages
from kvoffloadd.trial.figures import KEY_BYTES, keys_of
from kvoffloadd.trial.oracle import Oracle, digest
from scripts.harness.arrangement import group_of
from scripts.harness.geometry import Geometry
from scripts.harness.groupshape import GroupShape, RefShape

BLOCK_TOKENS = 512
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Model:
    """One rank's KV cache: `tensors` layer slots, in each `token_bytes` of K and V per token. `windows`: of each
    group that shares them, the tokens of its sliding window; 0: full attention.
    """

    tensors: int
    token_bytes: int
    windows: tuple[int, ...]


MODELS = {
    "llama-3.1-8b": Model(tensors=32, token_bytes=2 * 8 * 128 * 2, windows=(0,)),
    "gpt-oss-20b": Model(tensors=12, token_bytes=2 * 8 * 64 * 2, windows=(0, 128)),
}


def geometry_of(model: Model, scale: float | None) -> Geometry:
    """A model scaled down, whose blocks are those of the trace. `scale` 1 is the real size; None: as large as one slot
    of 4 KiB takes.
    """
    real = model.token_bytes * BLOCK_TOKENS
    page_bytes = PAGE_BYTES // model.tensors if scale is None else max(1, round(real * scale))
    refs = (tuple(RefShape(tensor, page_bytes) for tensor in range(model.tensors)),)
    # A window's keys hold its last `window - 1` tokens.
    groups = tuple(
        GroupShape(number, GroupKind.SLIDING, BLOCK_TOKENS, -(-(window - 1) // BLOCK_TOKENS), 1, refs, (0,))
        if window
        else GroupShape(number, GroupKind.FULL, BLOCK_TOKENS, 0, 1, refs, (0,))
        for number, window in enumerate(model.windows)
    )
    return Geometry("replay", 0, KEY_BYTES, 1, model.tensors, True, groups)


def slot_bytes(geometry: Geometry) -> int:
    """What a key takes in the arena."""
    return slot_pages(geometry.groups[0].payload_bytes(0)) * PAGE_BYTES


def prefix_of(geometry: Geometry, usable: Sequence[BoolArray]) -> int:
    """The longest prefix, in blocks, that all groups can serve."""
    for length in range(len(usable[0]), 0, -1):
        if all(usable[group.number][group.first_needed(length) : length].all() for group in geometry.groups):
            return length
    return 0


@dataclass(slots=True)
class Tally:
    """What one worker counted."""

    block_references: int = 0
    block_hits: int = 0
    pending_misses: int = 0
    stores: int = 0
    loads: int = 0
    verified_loads: int = 0
    wrong_bytes: int = 0
    keys_stored: int = 0
    keys_without_space: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    findings: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Task:
    """What every worker knows. Worker w of n replays requests w, w + n, w + 2n..."""

    socket: Path
    requests: list[I64Array]
    workers: int
    geometry: Geometry
    seed: int


class Turn:
    """A token that goes round all workers: whoever has it is at the next request of the trace."""

    def __init__(self, mine: Connection, following: Connection) -> None:
        self._mine = mine
        self._following = following

    def take(self) -> None:
        """Wait for it. Raises EOFError: the worker before this one has ended early."""
        self._mine.recv_bytes()

    def give(self) -> None:
        """Pass it on, unless the next worker has no request left and is gone."""
        with contextlib.suppress(BrokenPipeError):
            self._following.send_bytes(b"turn")


class Worker:
    """One engine: its KV cache, and what must be in it."""

    def __init__(self, task: Task, number: int) -> None:
        self.tally = Tally()
        self._geometry = geometry = task.geometry
        self._oracle = Oracle(task.seed, 0, KEY_BYTES, roots=1, root_tokens=0)
        self._rng = np.random.default_rng([task.seed, number])
        self._key_seed = digest(task.seed, 1)
        # Of each request and group: blocks to be stored, and as many to load into.
        blocks = 2 * len(geometry.groups) * max(map(len, task.requests))
        self._payload_bytes = geometry.groups[0].payload_bytes(0)
        memory = SharedTensor.allocate(1, blocks * self._payload_bytes)
        self._pages = memory.array.reshape(geometry.tensors, blocks, -1)
        self._client = Client(
            task.socket, namespace=NamespaceSpec(model="replay", key_bytes=KEY_BYTES), deadline_s=WAIT_S
        )
        tensors = [SharedTensor.adopt(pages) for pages in self._pages]
        refs = [Ref(number, 0, tensor.page_bytes) for number, tensor in enumerate(tensors)]
        groups = [group_of(shape, refs, 0) for shape in geometry.groups]
        self._registration = self._client.register(KvCache(tensors, groups))

    def close(self) -> None:
        self._client.close()

    def replay(self, request: I64Array, turn: Turn) -> None:
        """One request. Raises KvOffloadError where the daemon does not do what it must."""
        count, groups = len(request), range(len(self._geometry.groups))
        keys = keys_of(request, self._key_seed)
        contents = [self._oracle.contents(group, 0, keys, self._payload_bytes) for group in groups]
        blocks = self._rng.permutation(self._pages.shape[1])[: 2 * len(groups) * count].reshape(2, len(groups), count)
        for group in groups:
            self._write(blocks[0, group], contents[group])
        turn.take()
        found = self._client.pin(dict.fromkeys(groups, keys))
        prefix = self._prefix(found.states, found.boundaries)
        store = None
        if prefix < count:
            rest = {group: (keys[prefix:], blocks[0, group, prefix:]) for group in groups}
            store = self._client.store(self._registration, rest, first=prefix, deadline_s=WAIT_S)
        turn.give()
        self.tally.block_references += count
        self.tally.block_hits += prefix
        if prefix:
            wanted = {group.number: slice(group.first_needed(prefix), prefix) for group in self._geometry.groups}
            self._load(keys, contents, {group: blocks[1, group] for group in groups}, wanted, found.lease)
        if found.lease:
            self._client.release(found.lease)
        if store is not None:
            self._finish_store(store)

    def _prefix(self, states: list[U8Array], boundaries: np.ndarray) -> int:
        """Blocks that hit; counts those that would if what is pending were held."""
        prefix = prefix_of(self._geometry, [state == KeyState.HIT for state in states])
        told = int(boundaries[0]) // BLOCK_TOKENS if len(boundaries) else 0
        if told != prefix:
            self.tally.findings.append(f"{prefix} blocks can be served, the longest boundary told is {told} blocks")
        soon = prefix_of(self._geometry, [(state == KeyState.HIT) | (state == KeyState.PENDING) for state in states])
        self.tally.pending_misses += soon - prefix
        return min(prefix, told)

    def _load(
        self,
        keys: U8Array,
        contents: list[U8Array],
        blocks: dict[int, I64Array],
        wanted: dict[int, slice],
        lease: int,
    ) -> None:
        """Load the `wanted` keys of each group into blocks that hold anything else, and compare."""
        for group, at in wanted.items():
            self._write(blocks[group][at], ~contents[group][at])
        asked = {group: (keys[at], blocks[group][at]) for group, at in wanted.items()}
        job = self._client.load(self._registration, asked, lease=lease, deadline_s=WAIT_S)
        result = self._client.wait(job, WAIT_S)
        self.tally.loads += 1
        self.tally.loaded_bytes += result.bytes
        if result.outcome is not Outcome.DONE:
            self.tally.findings.append(f"a load of pinned keys ended as {result.outcome}: {result.reason}")
            return
        wrong = sum(self._count_wrong(blocks[group][at], contents[group][at]) for group, at in wanted.items())
        self.tally.wrong_bytes += wrong
        self.tally.verified_loads += wrong == 0

    def _finish_store(self, job: Job) -> None:
        result = self._client.wait(job, WAIT_S)
        states = np.concatenate(result.states)
        self.tally.stores += 1
        self.tally.stored_bytes += result.bytes
        self.tally.keys_stored += int((states == KeyState.RESERVED).sum())
        self.tally.keys_without_space += int((states == KeyState.NO_SPACE).sum())
        if result.outcome is not Outcome.DONE:
            self.tally.findings.append(f"a store ended as {result.outcome}: {result.reason}")

    def _write(self, blocks: I64Array, payloads: U8Array) -> None:
        self._pages[:, blocks] = payloads.reshape(len(blocks), *self._pages[:, 0].shape).swapaxes(0, 1)

    def _count_wrong(self, blocks: I64Array, payloads: U8Array) -> int:
        real = self._pages[:, blocks].swapaxes(0, 1).reshape(payloads.shape)
        return int(np.count_nonzero(real != payloads))


def work(task: Task, number: int, turn: Turn, report: Connection, done: Any) -> None:
    """A worker's process: says that it is ready, replays its requests, sends its `Tally`."""
    worker = Worker(task, number)
    report.send(None)
    with contextlib.suppress(EOFError):  # the worker before this one has failed, and said so
        for index in range(number, len(task.requests), task.workers):
            worker.replay(task.requests[index], turn)
            done[number] += 1
        worker.close()
        report.send(worker.tally)
