"""A worker of benchmarks: stores new keys, and loads those that it stored last, in jobs of equal size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, Job, JobResult, KvCache, Outcome, Ready, Ref, Timeline
from kvoffloadd.client.memory.tensor import CanonicalTensor
from kvoffloadd.model import I64Array, U8Array
from kvoffloadd.testing.figures import keys_of

Wanted = dict[int, tuple[U8Array, I64Array]]
"""Maps a group to keys and block ids."""

WAIT_S = 60.0


class Workload:
    """A worker and its jobs. `keys`: keys of a job in each group. `groups`: none: one that has keys with
    `blocks_per_key` rows in each tensor. `scattered`: block ids at random, else consecutive. `load_to`: the first of
    the blocks that loads go to; stores use blocks from 0 on, and each group's blocks follow those of the one before.
    """

    def __init__(
        self,
        client: Client,
        tensors: Sequence[CanonicalTensor],
        keys: int,
        *,
        scattered: bool,
        blocks_per_key: int = 1,
        load_to: int = 0,
        groups: Sequence[Group] = (),
        timelines: Sequence[Timeline] = (),
    ) -> None:
        self.client = client
        self.keys = keys
        refs = [Ref(number, 0, tensor.page_bytes) for number, tensor in enumerate(tensors)]
        self._groups = groups or [Group(0, GroupKind.FULL, 16, refs=refs, blocks_per_key=blocks_per_key)]
        self.bytes = keys * sum(group.blocks_per_key * group.payload_bytes for group in self._groups)
        self.scattered = scattered
        self._load_to = load_to
        self._stored = 0
        self._rng = np.random.default_rng(1)
        self.registration = client.register(KvCache(tensors, self._groups, timelines))

    def store(self) -> tuple[float, float]:
        """Stores new keys. Returns the seconds that the client measures, to the end of `wait`, and those that the
        daemon reports.
        """
        return self._timed(self.client.store, self._new_wanted())

    def load(self) -> tuple[float, float]:
        """Loads the keys that were stored last."""
        return self._timed(self.client.load, self._wanted(self._load_to))

    def _timed(self, submit: Callable[..., Job], wanted: Wanted) -> tuple[float, float]:
        begun = time.perf_counter()
        result = self.finish(submit(self.registration, wanted, deadline_s=WAIT_S))
        return time.perf_counter() - begun, result.seconds

    def begin_store(self, ready: Ready | None = None) -> Job:
        """Begins a store of new keys."""
        return self.client.store(self.registration, self._new_wanted(), deadline_s=WAIT_S, ready=ready)

    def begin_load(self) -> Job:
        """Begins a load of the keys that were stored last."""
        return self.client.load(self.registration, self._wanted(self._load_to), deadline_s=WAIT_S)

    def finish(self, job: Job) -> JobResult:
        """Waits. Raises SystemExit if the job has not moved every byte."""
        result = self.client.wait(job, WAIT_S)
        if result.outcome is not Outcome.DONE or result.bytes != self.bytes:
            raise SystemExit(f"{job} moved {result.bytes} of {self.bytes} bytes: {result.outcome} {result.reason}")
        return result

    def last_keys(self, jobs: int = 1) -> U8Array:
        """Returns the keys that the last `jobs` stores stored."""
        return keys_of(np.arange(self._stored - jobs * self.keys, self._stored))

    def drain(self) -> None:
        """Waits until nothing is copied and nothing waits to be hashed."""
        self.client.drain(WAIT_S)

    def _new_wanted(self) -> Wanted:
        self._stored += self.keys
        return self._wanted(0)

    def _wanted(self, first: int) -> Wanted:
        """Returns the keys that were stored last, and block ids from `first` on."""
        keys = self.last_keys()
        wanted = {}
        for group in self._groups:
            count = self.keys * group.blocks_per_key
            ids = self._rng.permutation(count) if self.scattered else np.arange(count)
            wanted[group.group] = keys, (ids + first).reshape(self.keys, group.blocks_per_key)
            first += count
        return wanted
