"""What the daemon's answers must be, whatever it holds: answers that contradict each other, or the protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from kvoffloadd.client import Found, Job, JobResult, KeyState, Outcome
from kvoffloadd.model import BoolArray, U8Array
from scripts.harness.counters import Counters
from scripts.harness.geometry import Geometry
from scripts.harness.groupshape import GroupShape
from scripts.harness.kvmemory import Wrong


class Moved(Protocol):
    """One group's keys in a job."""

    def bytes_of(self, keys: BoolArray) -> int:
        """What some of them move."""


class Begun(Protocol):
    """A job that was asked for. `leased`: under a lease; `hurried`: its deadline may pass; `cancelled`: an early
    end was asked for.
    """

    @property
    def job(self) -> Job: ...

    @property
    def shares(self) -> Sequence[Moved]: ...

    @property
    def is_load(self) -> bool: ...

    @property
    def leased(self) -> bool: ...

    @property
    def hurried(self) -> bool: ...

    @property
    def cancelled(self) -> bool: ...


_LOADED = (KeyState.HIT, KeyState.MISS, KeyState.PENDING)
_STORED = (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.NO_SPACE)
_FILLED = (KeyState.RESERVED, KeyState.HIT, KeyState.PENDING, KeyState.MISS)


class Findings:
    """Where a worker reports what went wrong: counted, and written to its standard error."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def broken(self, text: str) -> None:
        """A promise that was not kept."""
        self._counters.add("broken_promises")
        print(f"broken promise: {text}", file=sys.stderr, flush=True)

    def wrong(self, wrong: Wrong, what: str) -> None:
        """Bytes that are not what they must be. `wrong.stray_bytes` of them are where nothing was asked to write."""
        self._counters.add("wrong_bytes", wrong.wrong_bytes)
        self._counters.add("stray_bytes", wrong.stray_bytes)
        print(
            f"wrong: {wrong.wrong_bytes} bytes ({wrong.stray_bytes} stray), {wrong.where}; {what}",
            file=sys.stderr,
            flush=True,
        )


def count(states: Iterable[U8Array], wanted: KeyState) -> int:
    """How many keys are in that state."""
    return sum(int((state == wanted).sum()) for state in states)


def broken_in_answer(geometry: Geometry, keys: dict[int, U8Array], found: Found) -> list[str]:
    """What is wrong with an answer about keys: the boundaries follow from the states."""
    broken = []
    hits = {number: state == KeyState.HIT for number, state in zip(keys, found.states, strict=True)}
    step = geometry.step_tokens
    right = [
        tokens
        for tokens in range(geometry.prompt_tokens // step * step, 0, -step)
        if all(_servable(group, hits[group.number], tokens) for group in geometry.groups)
    ]
    if found.boundaries.tolist() != right:
        broken.append(f"boundaries {found.boundaries.tolist()}, but the states allow {right}")
    if any(state.size and state.max() > KeyState.PENDING for state in found.states):
        broken.append(f"a pin answered states {[np.unique(state).tolist() for state in found.states]}")
    pending = count(found.states, KeyState.PENDING)
    if found.promoting > pending:
        broken.append(f"{found.promoting} keys are promoted, but only {pending} are pending")
    return broken


def _servable(group: GroupShape, hits: Any, tokens: int) -> bool:
    """Whether these keys restore a prefix of that many tokens in this group."""
    length, rest = divmod(tokens, group.tokens_per_key)
    return rest == 0 and 0 < length <= len(hits) and bool(hits[group.first_needed(length) : length].all())


def broken_in_result(opened: Begun, result: JobResult, *, may_miss: bool, closing: bool) -> list[str]:
    """What is wrong with the end of a job. `may_miss`: keys of a load may turn out not to be there after all, because
    they were on disk when it was accepted. `closing`: its session may have ended before.
    """
    broken = []
    load, finished = opened.is_load, result.outcome in (Outcome.DONE, Outcome.PARTIAL)
    chosen = [states == (KeyState.HIT if load else KeyState.RESERVED) for states in result.states]
    moved = [result.valid(at) if load else wanted for at, wanted in enumerate(chosen)]
    if finished:
        least = sum(share.bytes_of(wanted) for share, wanted in zip(opened.shares, moved, strict=True))
        most = least
        if load and result.outcome is Outcome.PARTIAL:  # what the copy itself has found wrong was copied
            tried = [wanted | found for wanted, found in zip(moved, chosen, strict=True)]
            most = sum(share.bytes_of(wanted) for share, wanted in zip(opened.shares, tried, strict=True))
        if not least <= result.bytes <= most:
            broken.append(f"{opened.job}: {result.bytes} bytes were copied, its keys have {least} to {most}")
    for states, failed, wanted in zip(result.states, result.failed, chosen, strict=True):
        if not np.isin(states, _LOADED if load else _FILLED if opened.leased else _STORED).all():
            broken.append(f"{opened.job}: states {np.unique(states).tolist()}")
        reported = np.isin(np.arange(len(wanted)), failed)
        if load:
            must_fail = ~wanted if finished else np.ones(len(wanted), bool)
            must_fail |= reported & wanted & may_miss
        else:
            must_fail = wanted & reported if finished else wanted
        if not np.array_equal(np.sort(failed), np.flatnonzero(must_fail)):
            broken.append(f"{opened.job}, {result.outcome}: names {failed.tolist()}, states {states.tolist()}")
    some_failed = any(map(len, result.failed))
    allowed = {
        Outcome.DONE: not some_failed,
        Outcome.PARTIAL: some_failed,
        Outcome.CANCELLED: opened.cancelled or closing,
        Outcome.EXPIRED: opened.hurried,
    }
    if not allowed.get(result.outcome, False):
        named = [indices.tolist() for indices in result.failed]
        broken.append(f"{opened.job} ended as {result.outcome}, failed {named}; {result.reason}")
    return broken
