"""A worker that replays a trace's requests: its KV cache, the requests' turns, the check of every loaded byte."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client, Job, KeyState, KvCache, Outcome, Ref, SharedTensor
from kvoffloadd.model import I64Array, U8Array
from kvoffloadd.testing.figures import KEY_BYTES
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.arrangement import group_of
from scripts.harness.otheruser import connect_as
from scripts.replay.tenants import BLOCK_TOKENS, Tenant, keys_of_blocks

WAIT_S = 120.0
LOOK_S = 1.0


@dataclass(slots=True)
class ReplayTally:
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

    def add(self, other: ReplayTally) -> None:
        """Sum up."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Task:
    """What every worker knows: the tenant of each worker, and the worker of each request. `overlaps`: a turn ends when
    the store is admitted, not with the request.
    """

    socket: Path
    requests: list[I64Array]
    tenants: list[Tenant]
    workers: list[int]
    overlaps: bool
    seed: int


class Turn:
    """The one right to be next: the worker that has it is at the next request of the trace. `workers`: whose each
    request is.
    """

    def __init__(self, gates: list[Semaphore], workers: list[int], number: int) -> None:
        self._gates = gates
        self._workers = workers
        self._number = number

    def take(self) -> None:
        """Wait for it. Ends this process if the one that began it is gone."""
        script = parent_process()
        while not self._gates[self._number].acquire(timeout=LOOK_S):
            if script is None or not script.is_alive():
                sys.exit("the script is gone")

    def give(self, at: int) -> None:
        """Pass it on to the worker of this request, if there is one."""
        if at < len(self._workers):
            self._gates[self._workers[at]].release()


class ReplayWorker:
    """One engine: its KV cache, and what must be in it."""

    def __init__(self, task: Task, number: int) -> None:
        self.tally = ReplayTally()
        self._task = task
        self._tenant = tenant = task.tenants[number]
        self._geometry = geometry = tenant.geometry
        self._oracle = Oracle(task.seed, tenant.number, KEY_BYTES, roots=1, root_tokens=0)
        self._rng = np.random.default_rng([task.seed, number])
        self.own = [at for at, worker in enumerate(task.workers) if worker == number]
        # Of each request and group: blocks to be stored, and as many to load into.
        blocks = 2 * len(geometry.groups) * max(len(task.requests[at]) for at in self.own)
        memory = SharedTensor.allocate(1, blocks * tenant.payload_bytes)
        self._pages = memory.array.reshape(geometry.tensors, blocks, -1)
        client = Client(task.socket, namespace=tenant.namespace, deadline_s=WAIT_S)
        self._client = connect_as(client, tenant.uid)
        tensors = [SharedTensor.adopt(pages) for pages in self._pages]
        refs = [Ref(number, 0, tensor.page_bytes) for number, tensor in enumerate(tensors)]
        groups = [group_of(shape, refs, 0) for shape in geometry.groups]
        self._registration = self._client.register(KvCache(tensors, groups))

    def close(self) -> None:
        self._client.close()

    def replay(self, at: int, turn: Turn) -> None:
        """One request of the trace. Raises KvOffloadError where the daemon does not do what it must."""
        request = self._task.requests[at]
        count, groups = len(request), range(len(self._geometry.groups))
        keys = keys_of_blocks(request, self._task.seed)
        contents = [self._oracle.contents(group, 0, keys, self._tenant.payload_bytes) for group in groups]
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
        if self._task.overlaps:
            turn.give(at + 1)
        self.tally.block_references += count
        self.tally.block_hits += prefix
        if prefix:
            wanted = {group.number: slice(group.first_needed(prefix), prefix) for group in self._geometry.groups}
            self._load(keys, contents, {group: blocks[1, group] for group in groups}, wanted, found.lease)
        if found.lease:
            self._client.release(found.lease)
        if store is not None:
            self._finish_store(store)
        if not self._task.overlaps:
            # The daemon counts uses of a key within some milliseconds as one, unless asked for the order before. In the
            # trace they lie further apart.
            self._client.keep({}, "soon")
            turn.give(at + 1)

    def _prefix(self, states: list[U8Array], boundaries: np.ndarray) -> int:
        """Blocks that hit; counts those that would if what is pending were held."""
        prefix = self._tenant.prefix([state == KeyState.HIT for state in states])
        longest = int(boundaries[0]) // BLOCK_TOKENS if len(boundaries) else 0
        if longest != prefix:
            self.tally.findings.append(
                f"{prefix} blocks can be served, the longest boundary reported is {longest} blocks"
            )
        soon = self._tenant.prefix([(state == KeyState.HIT) | (state == KeyState.PENDING) for state in states])
        self.tally.pending_misses += soon - prefix
        return min(prefix, longest)

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
        shares = {group: (keys[at], blocks[group][at]) for group, at in wanted.items()}
        job = self._client.load(self._registration, shares, lease=lease, deadline_s=WAIT_S)
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
    """Runs a worker: registers when it is asked to and reports so, replays its requests, sends its `ReplayTally`."""
    turn.take()
    worker = ReplayWorker(task, number)
    report.send(None)
    for at in worker.own:
        worker.replay(at, turn)
        done[number] += 1
    worker.close()
    report.send(worker.tally)
