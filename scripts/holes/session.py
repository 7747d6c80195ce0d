"""A client in one namespace, and the check of all that its jobs report and move."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffloadd.client import (
    Client,
    Found,
    Job,
    JobConnectionLostError,
    JobDeadlineError,
    JobResult,
    KeyState,
    KvCache,
    Outcome,
)
from kvoffloadd.model import BoolArray, Direction, I64Array, U8Array
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.counters import Counters
from scripts.harness.jobs import Share
from scripts.harness.kvmemory import Wrong
from scripts.harness.promises import Findings, broken_in_result, count
from scripts.holes.evidence import Journal
from scripts.holes.memory import WatchedMemory
from scripts.holes.texts import GROUP, SHAPE, Text, Texts

GONE = "is gone"
"""The message of a job that met a hole."""


@dataclass(frozen=True, slots=True, eq=False)
class HolesJob:
    """A job whose blocks are the daemon's. `boot_id`: of the daemon that was asked."""

    job: Job
    prompt: Text
    shares: list[Share]
    leased: bool
    boot_id: bytes
    began: float
    hurried: bool = False
    cancelled: bool = False

    @property
    def is_load(self) -> bool:
        return self.job.direction is Direction.LOAD

    @property
    def share(self) -> Share:
        """The only one."""
        return self.shares[0]

    @property
    def blocks(self) -> I64Array:
        return self.share.wanted


class TextSession:
    """`punched`: holes are made in the memory, by its owner, so that jobs may fail. Used from one thread."""

    def __init__(
        self,
        socket: str,
        texts: Texts,
        memory: WatchedMemory,
        counters: Counters,
        findings: Findings,
        journal: Journal,
        *,
        punched: bool,
    ) -> None:
        """Connects and registers. Raises ClientError."""
        self.texts = texts
        self.memory = memory
        self.closing = False
        self.open: list[HolesJob] = []
        self._counters = counters
        self._findings = findings
        self._journal = journal
        self._punched = punched
        self.client = Client(socket, namespace=texts.spec, deadline_s=HANG_S, connect_deadline_s=HANG_S)
        try:
            self.registration = self.client.register(KvCache([memory.tensor], [GROUP]))
        except BaseException:
            self.client.close(0.0, force=True)
            raise

    # --- keys ---

    def pin(self, prompt: Text, *, patient: bool) -> Found:
        """`patient`: wait for what comes from disk."""
        began = time.monotonic()
        found = self.client.pin({0: prompt.keys})
        self._counters.took("pin", time.monotonic() - began)
        if patient and found.promoting:
            found = self.client.wait_ready(found, HANG_S)
        self._counters.add("block_references", len(prompt.keys))
        self._counters.add("block_hits", count(found.states, KeyState.HIT))
        self._note("pin", prompt, states=found.states[0].tolist(), lease=int(found.lease))
        return found

    # --- jobs ---

    def store(self, prompt: Text, which: I64Array) -> None:
        """Compute some of the prompt's keys, and start to store them. Raises ClientError."""
        keys, blocks = self._taken(prompt, which)
        self.memory.write(blocks, self.texts.contents(keys))
        self._submit(Direction.STORE, prompt, keys, blocks, 0)

    def load(self, prompt: Text, which: I64Array, *, lease: int = 0) -> None:
        """Start to load some of the prompt's keys. Raises ClientError."""
        keys, blocks = self._taken(prompt, which)
        self.memory.spoil(blocks)
        self.memory.lend(blocks)
        self._submit(Direction.LOAD, prompt, keys, blocks, lease)

    def _taken(self, prompt: Text, which: I64Array) -> tuple[U8Array, I64Array]:
        blocks = self.memory.free.take(min(len(which), len(self.memory.free)))
        return prompt.keys[which[: len(blocks)]], blocks

    def _submit(self, direction: Direction, prompt: Text, keys: U8Array, blocks: I64Array, lease: int) -> None:
        share = Share(SHAPE, 0, keys, blocks[:, None], 0)
        call = self.client.store if direction is Direction.STORE else self.client.load
        boot_id, began = self.client.boot_id, time.monotonic()
        try:
            job = call(self.registration, {0: (keys, share.blocks)}, lease=lease, deadline_s=HANG_S)
        except (JobDeadlineError, JobConnectionLostError) as error:
            self.open.append(HolesJob(error.job, prompt, [share], lease != 0, boot_id, began))
            self._note(f"{direction.value} lost", prompt, job=error.job.id, blocks=blocks.tolist())
            raise
        except BaseException:
            self.memory.lend(blocks, False)  # the daemon never had them
            self.memory.free.give(blocks)
            raise
        self.open.append(HolesJob(job, prompt, [share], lease != 0, boot_id, began))
        self._note(direction.value, prompt, job=job.id, lease=int(lease), blocks=blocks.tolist(), keys=_hex(keys))

    def wait(self) -> None:
        """Waits until all jobs have ended. Raises JobDeadlineError."""
        while self.open:
            self.client.wait(self.open[0].job, HANG_S)
            self.settle()

    def settle(self) -> None:
        """Check what has ended, and take its blocks back."""
        for one in [one for one in self.open if one.job.blocks_free]:
            self.open.remove(one)
            if one.job.result is None:
                self._findings.broken(f"{one.job} has ended without a result")
            else:
                self._settle(one, one.job.result)
        self._counters.set("jobs_open", len(self.open))

    def _settle(self, opened: HolesJob, result: JobResult) -> None:
        valid = result.valid(0)
        self._note(
            "ended", opened.prompt, job=opened.job.id, outcome=result.outcome.value, reason=result.reason,
            states=result.states[0].tolist(), failed=result.failed[0].tolist(), bytes=result.bytes,
        )  # fmt: skip
        for key, block, state, good in zip(opened.share.keys, opened.blocks, result.states[0], valid, strict=True):
            self._journal.used(
                int(block), namespace=self.texts.spec.model, prompt=opened.prompt.number, holed=opened.prompt.holed,
                key=key.tobytes().hex(), job=opened.job.id, direction=opened.job.direction.value,
                outcome=result.outcome.value, state=KeyState(int(state)).name, valid=bool(good),
            )  # fmt: skip
        self._check_result(opened, result)
        if opened.is_load:
            self._take_in(opened, result, valid)
        right = self.compare(f"{opened.job} of {self.texts.spec.model}, {result.outcome}", opened.blocks)
        self.memory.free.give(opened.blocks)
        self._count(opened, result, int(valid.sum()), right)

    def _check_result(self, opened: HolesJob, result: JobResult) -> None:
        if result.outcome is Outcome.LOST:
            return
        if self._punched and result.outcome is Outcome.FAILED and GONE in result.reason:
            self._counters.add("failed_jobs")
            return
        for text in broken_in_result(opened, result, may_miss=not opened.leased, closing=self.closing):
            self._findings.broken(text)
        if result.outcome is Outcome.CANCELLED or self.client.boot_id != opened.boot_id:
            return
        if opened.leased and (result.states[0] != KeyState.HIT).any():
            self._findings.broken(f"{opened.job}: leased keys were not there, states {result.states[0].tolist()}")
        if not opened.is_load and len(result.failed[0]):
            self._findings.broken(f"{opened.job}: reserved keys were not stored: {result.failed[0].tolist()}")

    def _take_in(self, opened: HolesJob, result: JobResult, valid: BoolArray) -> None:
        """What the load's blocks must hold now: the keys' bytes; anything, where a copy may have begun; or what they
        held before, where the daemon reports that it copied nothing.
        """
        memory, blocks, keys = self.memory, opened.blocks, opened.share.keys
        if not valid.all():
            excused = memory.differing(blocks[~valid], self.texts.contents(keys[~valid]))
            self._counters.add("excused_bytes", excused)
            self._counters.add("missed_keys", int((~valid).sum()))
        memory.lend(blocks, False)
        memory.expect(blocks[valid], self.texts.contents(keys[valid]), holed=opened.prompt.holed)
        unsure = ~valid if result.outcome is Outcome.LOST else (result.states[0] == KeyState.HIT) & ~valid
        memory.forgive(blocks[unsure])

    def compare(self, what: str, wanted: I64Array | None = None) -> bool:
        """Every byte of the memory; what is wrong outside the payloads of the blocks `wanted` is stray."""
        wrong = self.memory.compare()
        if not wrong:
            return True
        inside = set() if wanted is None else set(wanted.tolist())
        total = sum(one.wrong_bytes for one in wrong)
        stray = sum(one.gap_bytes if one.block in inside else one.wrong_bytes for one in wrong)
        path = self._journal.write(wrong, what)
        self._findings.wrong(Wrong(f"evidence in {path}", total, stray), what)
        return False

    def _count(self, opened: HolesJob, result: JobResult, keys: int, right: bool) -> None:
        counters, what = self._counters, "load" if opened.is_load else "store"
        counters.add(f"{what}s")
        counters.took(what, time.monotonic() - opened.began)
        if result.outcome in (Outcome.CANCELLED, Outcome.EXPIRED, Outcome.LOST):
            counters.add(result.outcome.value)
        elif keys:
            moved = "loaded" if opened.is_load else "stored"
            counters.add(f"{moved}_keys", keys)
            counters.add(f"{moved}_bytes", result.bytes)
            if opened.is_load and right:
                counters.add("verified_loads")

    def close(self) -> None:
        """Bye, whatever runs. Raises JobDeadlineError."""
        self.closing = True
        self.client.close(HANG_S)
        self.settle()

    def abandon(self) -> None:
        """Drop the connection as a program would that ends in a hurry."""
        self.client.close(0.0, force=True)

    def _note(self, call: str, prompt: Text, **details: Any) -> None:
        self._journal.note(call, namespace=self.texts.spec.model, prompt=prompt.number, **details)


def _hex(keys: U8Array) -> list[str]:
    return [key.tobytes().hex() for key in np.asarray(keys)]
