"""One stress worker process: random operations on a daemon, every answer and every byte checked.

Run by `stress`, with its options as one JSON argument. It ends when it is asked to, when its parent ends, or killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from kvoffloadd.client import Found, JobDeadlineError, KeyState
from kvoffloadd.errors import ClientError, DeadlineError, RemoteError
from kvoffloadd.model import I64Array, U8Array
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.counters import Counters
from scripts.harness.engine import CALL_S, JOB_S, Engine
from scripts.harness.geometry import Geometry
from scripts.harness.groupshape import GroupShape
from scripts.harness.jobs import Epoch, OpenJob, Rank, Share
from scripts.harness.places import Lines
from scripts.harness.promises import Findings, broken_in_answer, count
from scripts.stress.namespaces import geometries, turns
from scripts.stress.options import WorkerOptions
from scripts.stress.prompts import ROOT_TOKENS, ROOTS, Prompts

PATIENT = 0.8
"""How often a turn waits for what comes from disk."""
AGAIN_KEYS = 8
BETWEEN_RUNS = ("schema_mismatch", "unknown_name", "bad_lease", "draining")
"""What a daemon that was started anew may say to one rank before the other has come back, and one that is to end."""
CLEAR_WAIT_S = 2.0
"""How long a clear waits until the remote store has recorded it."""


class StressWorker:
    """Runs operations until it is asked to stop."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.rng = np.random.default_rng([options.seed, options.row, options.generation])
        self.counters = Counters(Path(options.counters), options.rows, options.row)
        self.findings = Findings(self.counters)
        self.lines = Lines(options.device)
        self.parent = os.getppid()
        found = geometries(options.seed, options.rows, options.layout, options.model, options.plant)
        turn = options.row + options.generation
        self.namespaces = turns(tuple(zip(found, options.conversations, strict=True)), turn)
        self.layouts = {one.number: turns(one.layouts, turn) for one in found}
        self.engine: Engine
        self.prompts: Prompts
        self.latest: dict[int, U8Array] = {}
        self.operations: list[tuple[float, Callable[[], None]]] = [
            (40.0, self.turn),
            (10.0, self.reserve_own_part),
            (6.0, self.reserve_all_parts),
            (4.0, self.reserve_and_release),
            (14.0, self.load_unpinned),
            (30.0, self.load_again),
            (8.0, self.cancel_some),
            (5.0, self.hurry),
            (8.0, self.ask),
            (1.0, self.compare),
            (0.5, self.register_again),
            (0.3, self.reconnect),
            (0.02, self.clear),
        ]

    def run(self) -> None:
        """Runs until asked to stop. Raises what only a bug of this script can cause."""
        if not self.engage():
            return
        weights = np.array([weight for weight, _ in self.operations])
        bounds = np.cumsum(weights / weights.sum())
        while not self.counters.stopping and os.getppid() == self.parent:
            _, operation = self.operations[int(np.searchsorted(bounds, self.rng.random()))]
            self.attempt(operation)
            self.attempt(lambda: self.engine.settle_to(int(self.rng.integers(0, 7))))
            self.counters.add("operations")
        self.attempt(self.engine.close)

    def attempt(self, operation: Callable[[], None]) -> None:
        """One operation; what may go wrong is counted, what may not is a finding."""
        epoch = self.engine.epoch
        try:
            operation()
        except RemoteError as error:
            self._refused(error, operation, epoch)
        except ClientError as error:
            self.counters.add("calls_lost")
            # A daemon that dies ends its jobs: one that does not end is a daemon that neither works nor dies.
            if not self.options.daemon_may_die or isinstance(error, JobDeadlineError):
                self.findings.broken(f"{_name(operation)}: {error!r}")

    def _refused(self, error: RemoteError, operation: Callable[[], None], epoch: Epoch) -> None:
        if error.code == "bad_lease" and self.engine.cleared_since(epoch):
            self.counters.add("leases_void")
        elif self.options.daemon_may_die and error.code in BETWEEN_RUNS:
            self.counters.add("calls_lost")
        else:
            self.findings.broken(f"{_name(operation)}: {error!r}")

    # --- prompts ---------------------------------------------------------------------------------------

    def engage(self) -> bool:
        """Be an engine in one of the namespaces; try until there is a daemon. False: asked to stop before."""
        while not self.counters.stopping:
            geometry, conversations = next(self.namespaces)
            seed, number = self.options.seed, geometry.number
            oracle = Oracle(seed, number, geometry.key_bytes, roots=ROOTS, root_tokens=ROOT_TOKENS)
            self.latest = {}
            self.prompts = Prompts(self.rng, oracle, geometry, conversations)
            try:
                self.engine = self._engine(geometry, oracle)
                return True
            except ClientError as error:
                self.counters.add("calls_lost")
                if not self.options.daemon_may_die:
                    self.findings.broken(f"can't connect: {error!r}")
                    raise
        return False

    def _engine(self, geometry: Geometry, oracle: Oracle) -> Engine:
        engine = Engine(
            self.options.socket,
            geometry,
            oracle,
            self.counters,
            self.rng,
            self.options.memory_name,
            self.options.rank_bytes,
            layouts=self.layouts[geometry.number],
            lines=self.lines,
        )
        engine.disk = self.options.disk
        engine.jobs_may_fail = self.options.jobs_may_fail
        engine.may_be_doubted = self.options.remote
        return engine

    def any_rank(self) -> Rank:
        """One of the engine's ranks."""
        return self.engine.ranks[int(self.rng.integers(0, len(self.engine.ranks)))]

    def shares(
        self, rank: Rank, keys: dict[int, U8Array], chosen: Callable[[GroupShape, int], I64Array]
    ) -> list[Share]:
        """Returns shares of all groups that the rank has a part of: the keys whose indices
        `chosen(group, keys)` names.
        """
        found = []
        for group, part in self.engine.groups_of(rank):
            own = keys[group.number]
            at = chosen(group, len(own))
            if len(at):
                found.append(self.engine.share(rank, group, part, own[at], int(at[0])))
        return [share for share in found if len(share.keys)]

    # --- operations ------------------------------------------------------------------------------------

    def turn(self) -> None:
        """What an engine does with a prompt: pin it, load the longest prefix, compute the rest and store it."""
        keys = self.prompts.all_keys()
        pinned = found = self.pin(keys)
        try:
            if pinned.promoting and self.rng.random() < PATIENT:
                found = self.wait_ready(keys, pinned)
            if len(found.boundaries):
                self._load_prefix(keys, pinned, found)
        finally:
            self.engine.ranks[0].client.release(pinned.lease)
        self._store_new(keys, dict(zip(keys, found.states, strict=True)))
        self.latest = keys

    def pin(self, keys: dict[int, U8Array]) -> Found:
        """Pin in the first rank, as a scheduler does; check and count the answer."""
        began = time.monotonic()
        found = self.engine.ranks[0].client.pin(keys)
        self.counters.took("pin", time.monotonic() - began)
        self.counters.add("block_references", sum(map(len, found.states)))
        self.counters.add("block_hits", count(found.states, KeyState.HIT))
        self.counters.add("block_pending", count(found.states, KeyState.PENDING))
        self.counters.add("block_promoting", found.promoting)
        self._check_found(keys, found)
        return found

    def _check_found(self, keys: dict[int, U8Array], found: Found) -> None:
        for text in broken_in_answer(self.engine.geometry, keys, found):
            self.findings.broken(text)

    def wait_ready(self, keys: dict[int, U8Array], found: Found) -> Found:
        """The answer once the keys on disk have come; check it, too."""
        try:
            ready = self.engine.ranks[0].client.wait_ready(found, CALL_S)
        except DeadlineError as error:
            self.findings.broken(f"keys did not come from disk: {error!r}")
            raise
        self._check_found(keys, ready)
        before, after = (count(one.states, KeyState.HIT) for one in (found, ready))
        is_promised = ready.lease and not self.engine.may_be_doubted
        if is_promised and after < before and not self.engine.cleared_since(self.engine.epoch):
            self.findings.broken(f"of {before} keys that were leased {after} were left when others had come from disk")
        return ready

    def _load_prefix(self, keys: dict[int, U8Array], pinned: Found, found: Found) -> None:
        """`pinned`: the first answer; `found`: the one to go by."""
        pending = dict(zip(keys, (state == KeyState.PENDING for state in pinned.states), strict=True))
        longest = self.rng.random() < 0.9
        tokens = int(found.boundaries[0] if longest else self.rng.choice(found.boundaries))

        def needed(group: GroupShape, _count: int) -> I64Array:
            length = tokens // group.tokens_per_key
            return np.arange(group.first_needed(length), length)

        begun = []
        for rank in self.engine.ranks:
            if shares := self.shares(rank, keys, needed):
                expedited = bool(self.rng.integers(0, 2))
                own = [pending[one.group.number][one.first : one.first + len(one.keys)] for one in shares]
                known = own, count(pinned.states, KeyState.PENDING) - pinned.promoting
                opened = self.engine.load(rank, shares, lease=found.lease, expedited=expedited, pending=known)
                begun.append(opened)
        self.engine.wait(begun)

    def _store_new(self, keys: dict[int, U8Array], states: dict[int, U8Array]) -> None:
        again = 0.1  # of keys that are there already, for that answer

        def missing(group: GroupShape, count: int) -> I64Array:
            wanted = (states[group.number] == KeyState.MISS) | (self.rng.random(count) < again)
            return np.flatnonzero(wanted)

        skipped = int(self.rng.integers(0, 10))  # one rank or the other may fail to store its part
        ranks = [rank for rank in self.engine.ranks if rank.number != skipped]
        begun = [self.engine.store(rank, shares) for rank in ranks if (shares := self.shares(rank, keys, missing))]
        if self.rng.random() < 0.3:
            self.engine.wait(begun)

    def reserve_own_part(self) -> None:
        """Reserve one rank's part of a group's keys, store some of them under the lease, release the rest."""
        rank = self.any_rank()
        held = self.engine.groups_of(rank)
        if not held:  # this geometry gives the rank no part of any group
            return
        group, part = held[int(self.rng.integers(0, len(held)))]
        keys = self.prompts.keys(group)
        reserved = rank.client.reserve({group.number: keys}, parts=[part])
        try:
            own = np.flatnonzero(reserved.states[0] == KeyState.RESERVED)
            own = own[self.rng.random(len(own)) < 0.8]
            share = self.engine.share(rank, group, part, keys[own], 0)
            if len(share.keys):
                begun = self.engine.store(rank, [share], lease=reserved.lease)
                if self.rng.random() < 0.5:
                    self.engine.wait([begun])
        finally:
            rank.client.release(reserved.lease)

    def reserve_all_parts(self) -> None:
        """Reserve keys of all groups in all their parts, as a scheduler does, and let each rank store its own."""
        keys = self.prompts.all_keys()
        reserved = self.engine.ranks[0].client.reserve(keys)
        self.counters.add("reservations")
        states = dict(zip(keys, reserved.states, strict=True))
        try:
            begun = [
                self.engine.store(rank, shares, lease=reserved.lease)
                for rank in self.engine.ranks
                if (shares := self.shares(rank, keys, partial(_reserved_for, rank.number, states)))
            ]
            self.engine.wait(begun)
        finally:
            self.engine.ranks[0].client.release(reserved.lease)

    def reserve_and_release(self) -> None:
        """Reserve, think better of it."""
        rank = self.any_rank()
        reserved = rank.client.reserve(self.prompts.all_keys())
        self.counters.add("reservations")
        rank.client.release(reserved.lease)

    def load_unpinned(self) -> None:
        """Load keys that may be there or not, and not all blocks of each."""
        rank = self.any_rank()
        keys = self.prompts.all_keys()
        fraction = float(self.rng.choice([1.0, 0.5]))
        shares = self.shares(rank, keys, lambda _group, count: np.flatnonzero(self.rng.random(count) < fraction))
        if shares:
            unwanted = float(self.rng.choice([0.0, 0.3]))
            begun = self.engine.load(rank, shares, unwanted=unwanted)
            if self.rng.random() < 0.5:
                self.engine.wait([begun])

    def load_again(self) -> None:
        """Load some of the latest prompt's keys, as a second request for it would; most are in memory."""
        rank = self.any_rank()
        keys = {number: latest[:AGAIN_KEYS] for number, latest in self.latest.items()}
        if keys and (shares := self.shares(rank, keys, lambda _group, count: np.arange(count))):
            self.engine.wait([self.engine.load(rank, shares, expedited=True)])

    def cancel_some(self) -> None:
        """Start jobs both ways, and cancel most of them, the last first: those may not have begun yet."""
        for opened in reversed(self._several_jobs(int(self.rng.integers(2, 9)), JOB_S)):
            if self.rng.random() < 0.8:
                self.engine.cancel(opened)

    def hurry(self) -> None:
        """Start jobs whose deadline passes while they run, or before."""
        self._several_jobs(int(self.rng.integers(1, 4)), float(self.rng.choice([1e-6, 1e-3, 1e-2])))

    def _several_jobs(self, count: int, deadline_s: float) -> list[OpenJob]:
        begun = []
        for _ in range(count):
            rank = self.any_rank()
            shares = self.shares(rank, self.prompts.all_keys(), lambda _group, count: np.arange(count))
            if shares:
                start = self.engine.load if self.rng.random() < 0.5 else self.engine.store
                begun.append(start(rank, shares, deadline_s=deadline_s))
        return begun

    def ask(self) -> None:
        """What moves nothing. Keys that were never stored are strewn in, so that prefixes break in all places."""
        rank = self.any_rank()
        keys = self.prompts.all_keys()
        share = float(self.rng.choice([0.0, 0.05, 0.2]))
        strewn = {number: self._strewn(whole, share) for number, whole in keys.items()}
        self._check_found(strewn, rank.client.lookup(strewn))
        coming = rank.client.prefetch(keys)
        if self.rng.random() < 0.3:
            rank.client.wait_ready(coming, CALL_S)
        rank.client.touch(keys)
        group = self.engine.geometry.groups[0]
        listed = rank.client.snapshot(group.number)
        if len(np.unique(listed, axis=0)) != len(listed):
            self.findings.broken(f"a snapshot of group {group.number} names a key twice")

    def _strewn(self, keys: U8Array, share: float) -> U8Array:
        unknown = self.rng.integers(0, 256, keys.shape, np.uint8)
        return np.where(self.rng.random((len(keys), 1)) < share, unknown, keys)

    def compare(self) -> None:
        """Every byte of the KV caches."""
        self.engine.compare_all()

    def register_again(self) -> None:
        """End a rank's registration, whatever runs, and make a new one of the same memory or of other."""
        rank = self.any_rank()
        self.counters.add("reregistrations")
        try:
            rank.client.unregister(rank.registration)
            if any(opened.rank is rank and not opened.job.blocks_free for opened in self.engine.open):
                self.findings.broken("a registration ended before its jobs")
        finally:
            # Whatever came of it: what could not be settled now keeps its own memory.
            self.engine.settle()
            if any(opened.rank is rank for opened in self.engine.open) or self.rng.random() < 0.5:
                rank.memory = self.engine.new_memory(rank.number)
            rank.registration = rank.client.register(rank.memory.caches)

    def reconnect(self) -> None:
        """Say bye, whatever runs, and come back as another engine, perhaps in another namespace."""
        self.counters.add("reconnects")
        try:
            self.engine.close()
        finally:
            self.engine.abandon()
            self.engage()

    def clear(self) -> None:
        """Drop all that the namespace has."""
        self.counters.add("clears")
        unrecorded = self.any_rank().client.clear(wait_s=CLEAR_WAIT_S).unrecorded
        if unrecorded and not self.options.remote:
            self.findings.broken(f"a clear is not recorded in {', '.join(unrecorded)}")
        elif unrecorded:
            self.counters.add("clears_not_everywhere")


def _reserved_for(rank: int, states: dict[int, U8Array], group: GroupShape, _count: int) -> I64Array:
    """Keys that are reserved; of ranks that hold the same part the first one stores them."""
    if group.part_of_rank.index(group.part_of_rank[rank]) != rank:
        return np.zeros(0, np.int64)
    return np.flatnonzero(states[group.number] == KeyState.RESERVED)


def _name(operation: Callable[[], None]) -> str:
    return getattr(operation, "__name__", "settle")


def main() -> int:
    """The whole life of a worker process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    StressWorker(WorkerOptions(**json.loads(sys.argv[1]))).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
