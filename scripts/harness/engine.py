"""An engine of one worker: an instance with a session per rank, its jobs, and the check of every byte that they move.

Used from one thread. Every wait is bounded.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvoffloadd.client import Client, JobConnectionLostError, JobDeadlineError, JobResult, KeyState, Outcome, Ready
from kvoffloadd.errors import ClientError, ConnectionLostError
from kvoffloadd.model import NO_BLOCK, BoolArray, Direction, I64Array, U8Array
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.counters import Counters, verified_in
from scripts.harness.geometry import Geometry
from scripts.harness.groupshape import GroupShape
from scripts.harness.jobs import Epoch, OpenJob, Rank, Share
from scripts.harness.kvmemory import KvMemory
from scripts.harness.places import Lines
from scripts.harness.promises import Findings, broken_in_result, count

CALL_S = 30.0
JOB_S = 60.0
LATE = {"host": 0.15, "cuda": 0.7}
"""How often a job is asked for before its blocks are final."""
HELD_UP_S = (0.0, 0.0005, 0.001, 0.003)
"""How much later they are."""


class Engine:
    """Sessions of one instance, one per rank. Connects at once; raises ClientError, UsageError, DeviceError or OSError.

    `layouts`: of the geometry's, for one KV cache after the other; None: always the first. `lines`: where KV caches
    lie, and what writes into them late; None: in shared memory, and nothing does. `disk`: the daemon has a disk tier;
    `jobs_may_fail`: faults are planted that say so; `may_be_doubted`: there is a shared store that may lose all, so
    that keys come into doubt while they are leased; all False until set.
    """

    def __init__(  # noqa: PLR0913  the settings of a worker
        self,
        socket: str,
        geometry: Geometry,
        oracle: Oracle,
        counters: Counters,
        rng: np.random.Generator,
        memory_name: str,
        rank_bytes: int,
        *,
        padded: bool = True,
        layouts: Iterator[str] | None = None,
        lines: Lines | None = None,
    ) -> None:
        self.geometry = geometry
        self.closing = False
        self.open: list[OpenJob] = []
        self.ranks: list[Rank] = []
        self._socket = socket
        self._oracle = oracle
        self._counters = counters
        self._findings = Findings(counters)
        self._rng = rng
        self._memory_name = memory_name
        self._rank_bytes = rank_bytes
        self._padded = padded
        self._layouts = layouts or itertools.repeat(geometry.layouts[0])
        self._lines = lines
        self.disk = False
        self.jobs_may_fail = False
        self.may_be_doubted = False
        self._instance = os.urandom(16)
        try:
            for number in range(geometry.ranks):
                self.ranks.append(self._connected(number))
            self.epoch = self._epoch()
        except BaseException:
            self.abandon()
            raise

    def _epoch(self) -> Epoch:
        status = self.ranks[0].client.status()
        epochs = [keyspace["epoch"] for keyspace in status["namespaces"] if keyspace["label"] == self.geometry.name]
        return status["boot_id"], max(epochs, default=0)

    def cleared_since(self, epoch: Epoch) -> bool:
        """Whether the namespace was cleared since `self.epoch` was that; yes, if that is unknown."""
        if self.closing:
            return True
        try:
            self.epoch = self._epoch()
        except ClientError:
            return True
        return self.epoch != epoch

    def _connected(self, number: int) -> Rank:
        client = Client(
            self._socket,
            namespace=self.geometry.namespace(),
            instance=self._instance,
            deadline_s=CALL_S,
            connect_deadline_s=CALL_S,
        )
        memory = self.new_memory(number)
        return Rank(number, client, memory, client.register(memory.caches))

    def new_memory(self, rank: int) -> KvMemory:
        """A KV cache of about `rank_bytes`, its rows laid out anew."""
        line = None if self._lines is None else self._lines.of(rank, self._rng)
        arrangement = self.geometry.arrange(
            rank, self._rank_bytes, self._rng, padded=self._padded, layout=next(self._layouts)
        )
        return KvMemory(self.geometry, arrangement, self._rng, self._memory_name, line=line)

    def groups_of(self, rank: Rank) -> list[tuple[GroupShape, int]]:
        """The groups that a rank has a part of, and which part."""
        parts = [(group, group.part_of_rank[rank.number]) for group in self.geometry.groups]
        return [(group, part) for group, part in parts if part is not None]

    def share(self, rank: Rank, group: GroupShape, part: int, keys: U8Array, first: int) -> Share:
        """Blocks for as many of the keys as there are blocks for."""
        count = min(len(keys), len(rank.memory.free) // group.blocks_per_key)
        blocks = rank.memory.free.take(count * group.blocks_per_key).reshape(count, group.blocks_per_key)
        return Share(group, part, keys[:count], blocks, first)

    # --- jobs ----------------------------------------------------------------------------------------

    def store(self, rank: Rank, shares: list[Share], *, lease: int = 0, deadline_s: float = JOB_S) -> OpenJob:
        """Compute the shares' blocks and start to store them. Raises ClientError; then the shares are given back."""
        late = self._holds_up(rank.memory)
        for share in shares:
            contents = self._oracle.contents(
                share.group.number, share.part, share.keys, share.group.payload_bytes(share.part)
            )
            rank.memory.fill(share.group.number, share.blocks, contents, late=late)
        ready = rank.memory.ready() if late else None
        return self._submit(Direction.STORE, rank, shares, lease, deadline_s, ready=ready)

    def _holds_up(self, memory: KvMemory) -> bool:
        """Whether to ask for the next job before its blocks are final; if so, they will not be for a while."""
        if self._lines is None or memory.line is None or self._rng.random() >= LATE[self._lines.device]:
            return False
        memory.line.hold_up(float(self._rng.choice(HELD_UP_S)))
        return True

    def load(
        self,
        rank: Rank,
        shares: list[Share],
        *,
        lease: int = 0,
        deadline_s: float = JOB_S,
        expedited: bool = False,
        unwanted: float = 0.0,
        pending: tuple[list[BoolArray], int] | None = None,
    ) -> OpenJob:
        """Start to load the shares' blocks, but for a fraction `unwanted` of them. Raises as `store`.

        `pending`: which keys of each share were pending when they were asked for, and how many of all keys asked for
        were pending because others stored them. None: a lookup finds out, right before.
        """
        taken = [share.blocks for share in shares]
        if unwanted:
            shares = [self._without_some(share, unwanted) for share in shares]
        if pending is None and self.disk:
            try:
                pending = self._looked_up(rank, shares), 0
            except ClientError:
                self._give_back(rank.memory, [], taken, "")
                raise
        ready = self._used_late(rank.memory, shares)
        opened = self._submit(
            Direction.LOAD, rank, shares, lease, deadline_s, expedited=expedited, taken=taken, ready=ready
        )
        if pending is not None:
            opened.on_disk, opened.others = pending
        return opened

    def _used_late(self, memory: KvMemory, shares: list[Share]) -> Ready | None:
        """Now and then the blocks are still in use: they are written into until the point that is returned."""
        if not self._holds_up(memory):
            return None
        for share in shares:
            memory.spoil(share.group.number, share.blocks, int(self._rng.integers(0, 256)))
        return memory.ready()

    def _looked_up(self, rank: Rank, shares: list[Share]) -> list[BoolArray]:
        found = rank.client.lookup({share.group.number: share.keys for share in shares})
        return [state == KeyState.PENDING for state in found.states]

    def _without_some(self, share: Share, fraction: float) -> Share:
        left_out = self._rng.random(share.blocks.shape) < fraction
        return Share(share.group, share.part, share.keys, np.where(left_out, NO_BLOCK, share.blocks), share.first)

    def _submit(
        self,
        direction: Direction,
        rank: Rank,
        shares: list[Share],
        lease: int,
        deadline_s: float,
        *,
        expedited: bool = False,
        taken: list[I64Array] | None = None,
        ready: Ready | None = None,
    ) -> OpenJob:
        taken = [share.blocks for share in shares] if taken is None else taken
        transfers = {share.group.number: (share.keys, share.blocks) for share in shares}
        terms: dict[str, Any] = {
            "lease": lease,
            "first": {share.group.number: share.first for share in shares},
            "deadline_s": deadline_s,
            "ready": ready,
        }
        began = time.monotonic()
        lost: ClientError | None = None
        try:
            if direction is Direction.STORE:
                job = rank.client.store(rank.registration, transfers, **terms)
            else:
                for share in shares:
                    rank.memory.lend(share.wanted)
                job = rank.client.load(rank.registration, transfers, **terms, expedited=expedited)
        except (JobDeadlineError, JobConnectionLostError) as error:
            job, lost = error.job, error
        except ClientError as error:
            self._refused(rank, shares, taken, forgiven=isinstance(error, ConnectionLostError))
            raise
        hurried, leased = deadline_s < JOB_S, lease != 0
        self.open.append(OpenJob(job, rank, rank.memory, shares, taken, began, hurried, leased, self.epoch))
        self._counters.set("jobs_open", len(self.open))
        if lost is not None:
            raise lost
        return self.open[-1]

    def _refused(self, rank: Rank, shares: list[Share], taken: list[I64Array], *, forgiven: bool) -> None:
        """The daemon never took the job, so that nothing may have changed; or it has lost it (`forgiven`)."""
        for share in shares:
            rank.memory.lend(share.wanted, lent=False)
            if forgiven:
                rank.memory.forgive(share.group.number, share.blocks.reshape(-1))
        self._give_back(rank.memory, shares, taken, "after a refused job")

    def cancel(self, opened: OpenJob) -> None:
        """Ask for an early end."""
        opened.cancelled = True
        opened.rank.client.cancel(opened.job)

    # --- ends of jobs ----------------------------------------------------------------------------------

    def wait(self, opened: Sequence[OpenJob]) -> None:
        """Waits until these have ended. Raises JobDeadlineError."""
        until = time.monotonic() + JOB_S
        for one in opened:
            one.rank.client.wait(one.job, max(until - time.monotonic(), 1.0))
            one.took_s = time.monotonic() - one.began
            self._counters.took("load" if one.is_load else "store", one.took_s)
        self.settle()

    def settle(self) -> None:
        """Check what has ended, and take its blocks back."""
        ended = [one for one in self.open if one.job.blocks_free]
        for one in ended:
            self.open.remove(one)
            if one.job.result is None:
                self._findings.broken(f"{one.job} has ended without a result")
            else:
                self._settle(one, one.job.result)
        self._counters.set("jobs_open", len(self.open))

    def settle_to(self, most: int) -> None:
        """Wait until no more than `most` jobs are open. Raises JobDeadlineError."""
        self.settle()
        while len(self.open) > most:
            oldest = self.open[0]
            oldest.rank.client.wait(oldest.job, JOB_S)
            self.settle()

    def _settle(self, opened: OpenJob, result: JobResult) -> None:
        self._check_result(opened, result)
        finished = result.outcome in (Outcome.DONE, Outcome.PARTIAL)
        loaded = on_disk = 0
        for at, share in enumerate(opened.shares):
            valid = result.valid(at)
            loaded += int(valid.sum())
            on_disk += int((valid & opened.on_disk[at]).sum()) if opened.on_disk else 0
            if opened.is_load:
                opened.memory.lend(share.wanted, lent=False)
                self._expect(opened, share, valid, self._unsure(result, at, valid))
        groups = [share.group.number for share in opened.shares]
        what = f"{opened.job} of {self.geometry.name}, {result.outcome}, groups {groups}"
        right = self._give_back(opened.memory, opened.shares, opened.taken, what)
        self._count(opened, result, loaded, right)
        if opened.is_load and finished:
            self._count_from_disk(result, max(on_disk - opened.others, 0), right)

    def _unsure(self, result: JobResult, at: int, valid: BoolArray) -> BoolArray:
        """Keys whose blocks may hold anything: their copies had begun, or may have begun."""
        if result.outcome is Outcome.LOST:
            return ~valid
        unsure: BoolArray = (result.states[at] == KeyState.HIT) & ~valid
        return unsure

    def _expect(self, opened: OpenJob, share: Share, valid: BoolArray, unsure: BoolArray) -> None:
        group, memory = share.group, opened.memory
        if valid.any():
            payload_bytes = group.payload_bytes(share.part)
            contents = self._oracle.contents(group.number, share.part, share.keys[valid], payload_bytes)
            memory.expect(group.number, share.blocks[valid], contents)
        if unsure.any():
            memory.forgive(group.number, share.blocks[unsure].reshape(-1))

    def _give_back(self, memory: KvMemory, shares: list[Share], taken: list[I64Array], what: str) -> bool:
        """Compare, then free; True if every byte is right."""
        used = [share.wanted for share in shares]
        wrong = memory.compare(np.concatenate(used)) if used else None
        if wrong is not None:
            self._findings.wrong(wrong, what)
        for blocks in taken:
            memory.free.give(blocks.reshape(-1))
        return wrong is None

    def _count(self, opened: OpenJob, result: JobResult, keys: int, right: bool) -> None:
        counters = self._counters
        what = "load" if opened.is_load else "store"
        counters.add(f"{what}s")
        counters.add("moved_out_bytes" if opened.is_load else "moved_in_bytes", result.bytes)
        if result.outcome in (Outcome.CANCELLED, Outcome.EXPIRED, Outcome.LOST):
            counters.add(result.outcome.value)
            return
        counters.add(f"{'loaded' if opened.is_load else 'stored'}_keys", keys)
        counters.add(f"{'loaded' if opened.is_load else 'stored'}_bytes", result.bytes)
        if result.bytes:
            counters.add(f"{what}_busy_us", int(result.seconds * 1e6))
        if opened.is_load and right and keys:
            counters.add("verified_loads")
            counters.add(verified_in(opened.memory.layout))

    def _count_from_disk(self, result: JobResult, keys: int, right: bool) -> None:
        promised = count(result.states, KeyState.HIT)
        self._counters.add(
            "missed_keys", promised - sum(int(result.valid(at).sum()) for at in range(len(result.states)))
        )
        if right and keys:
            self._counters.add("verified_loads_from_disk")
            self._counters.add("loaded_keys_from_disk", keys)

    def _check_result(self, opened: OpenJob, result: JobResult) -> None:
        if result.outcome is Outcome.LOST or (
            self.jobs_may_fail and result.outcome is Outcome.FAILED and result.reason
        ):
            return
        is_promised = opened.is_load and opened.leased and not self.may_be_doubted
        may_miss = self.disk and not is_promised
        for text in broken_in_result(opened, result, may_miss=may_miss, closing=self.closing):
            self._findings.broken(text)
        # What was promised, but for a clear: asked of the daemon only if it matters.
        finished = result.outcome in (Outcome.DONE, Outcome.PARTIAL)
        excused = finished and not opened.is_load and any(map(len, result.failed))
        absent = is_promised and not all((states == KeyState.HIT).all() for states in result.states)
        if (excused or absent or _has_lost_slots(opened, result)) and not self.cleared_since(opened.epoch):
            what = "leased keys were not there" if absent else "reserved keys were not stored"
            self._findings.broken(f"{opened.job}, {result.outcome}: {what}")

    # --- the end ---------------------------------------------------------------------------------------

    def compare_all(self) -> None:
        """Compare every byte of every KV cache that no load is writing."""
        for rank in self.ranks:
            wrong = rank.memory.compare_all()
            self._counters.add("comparisons")
            if wrong is not None:
                self._findings.wrong(wrong, f"rank {rank.number} of {self.geometry.name}, comparing all of it")

    def close(self) -> None:
        """Orderly: bye, whatever runs. Raises JobDeadlineError if blocks did not come free."""
        self.closing = True
        for rank in self.ranks:
            rank.client.close(JOB_S)
        self.settle()
        self.compare_all()

    def abandon(self) -> None:
        """Drop the connections as a program would that ends in a hurry."""
        for rank in self.ranks:
            rank.client.close(0.0, force=True)


def _has_lost_slots(opened: OpenJob, result: JobResult) -> bool:
    """Whether a store has not found a slot that was reserved for it. A key of several parts can be gone as soon as
    others have filled what was reserved of it.
    """
    return (
        not opened.is_load
        and opened.leased
        and any(
            (states != KeyState.RESERVED).any()
            for share, states in zip(opened.shares, result.states, strict=True)
            if len(share.group.parts) == 1
        )
    )
