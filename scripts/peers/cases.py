"""The work of a round, and what is found out once.

The latter: what each system does when memory is full, after a restart without a disk, and with a flipped bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffloadd.testing.process import DaemonError
from scripts.peers.figures import Samples
from scripts.peers.peers import Peer, PeerError, PeerSession, Sizes
from scripts.peers.system import ModelGeometry, NotOfferedError

FULL_PROMPTS = 8
HIT_S = 10.0
"""How long a store that has ended may take to be found."""
SAID_MAX = 200
"""Characters of an error: a line, and no log."""
CACHED_MAX = 0.05
"""The share of all bytes that small files other than the payloads' may have."""
REST_S = 3.0
"""After a start, before bytes move: some systems still provide their memory then, and others did so before."""
AGAIN_S = 20.0
"""How long a system that has started again may take to find what it had."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Describes a run. `tokens`: of a prompt that is stored and loaded; `jobs`: the number of each in a round; `asks`:
    pings and lookups. `disk`: where folders are made.
    """

    tokens: int
    jobs: int
    asks: int
    lookups: tuple[int, ...]
    chunk_tokens: int
    threads: int
    disk: Path | None

    @property
    def model(self) -> ModelGeometry:
        """Llama-3.2-1B's: 16 layers, 8 KV heads of 64."""
        return ModelGeometry(16, 8, 64, 16, self.chunk_tokens, max(2, self.jobs) * self.tokens // 16)

    @property
    def thin(self) -> ModelGeometry:
        """A few bytes for each token: lookups of many tokens without as many bytes."""
        return ModelGeometry(2, 2, 16, 16, self.chunk_tokens, max(self.lookups) // 16)

    @property
    def prompt_bytes(self) -> int:
        return self.tokens * self.model.token_bytes

    def sizes(self, prompts: int, *, verified: bool = False) -> Sizes:
        """Returns memory for `prompts` prompts, and more disk than anything needs."""
        return Sizes(prompts * self.prompt_bytes, 32 * self.prompt_bytes + (1 << 30), self.threads, verified)


@dataclass
class Notes:
    """What has no figure: case -> what happened, or why it was not had."""

    said: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def guarded(self, case: str) -> Iterator[None]:
        """What the system does not have, and its own errors, are noted and cost nothing else."""
        try:
            yield
        except NotOfferedError as error:
            self.said.setdefault(case, f"not compared: {error}")
        except PeerError as error:
            self.said[case] = f"error: {in_short(error)}"
        except DaemonError as error:
            self.said[case] = f"it has ended, or does not answer: {in_short(error)}"

    def page_cache(self, written: float, read: float) -> None:
        """Whether the system goes past the kernel's cache, by what it has of the files then."""
        if max(written, read) > CACHED_MAX:
            self.said["page cache"] = (
                f"it does not go past it: of its files {written:.0%} were in it once they were written, {read:.0%} "
                "once they were read; nothing was in it before"
            )


def run_round(peer: Peer, plan: RunPlan, samples: Samples, notes: Notes) -> None:
    """All figures once: three sessions, each with a system that has just started."""
    with notes.guarded("lookups"):
        _lookups(peer, plan, samples, notes)
    with notes.guarded("memory"):
        _memory(peer, plan, samples)
    with notes.guarded("disk"):
        _disk(peer, plan, samples, notes)


def _add(samples: Samples, name: str, value: float) -> None:
    samples.setdefault(name, []).append(value)


def _lookups(peer: Peer, plan: RunPlan, samples: Samples, notes: Notes) -> None:
    sizes = Sizes(256 * _MIB, 0, plan.threads)
    with PeerSession(peer, plan.thin, sizes, disk=None, on_disk=False) as session:
        _add(samples, "start", session.ask("start"))

        with notes.guarded("ping"):
            _add(samples, "ping", statistics.median(session.ask("ping", count=10 * plan.asks)))
        for tokens in plan.lookups:
            _store(session, 1, tokens)
            _add(samples, f"lookup_{tokens >> 10}k", _median_lookup(session, plan, 1, tokens, tokens))
        _add(samples, f"miss_{plan.lookups[-1] >> 10}k", _median_lookup(session, plan, 2, plan.lookups[-1], 0))


def _start(session: PeerSession) -> None:
    session.ask("start")
    time.sleep(REST_S)


def _store(session: PeerSession, number: int, tokens: int) -> float:
    """Seconds. Returns once it is found."""
    seconds, stored = session.ask("store", number=number, tokens=tokens)
    if not stored:
        raise PeerError(f"a prompt of {tokens} tokens was not stored")
    found = session.ask("await_hit", number=number, tokens=tokens, deadline_s=HIT_S)
    if found != tokens:
        raise PeerError(f"of {tokens} tokens that were stored {found} are found after {HIT_S:.0f} s")
    return float(seconds)


def _median_lookup(session: PeerSession, plan: RunPlan, number: int, tokens: int, expected: int) -> float:
    lookups: list[tuple[float, int]] = session.ask("lookup", number=number, tokens=tokens, count=plan.asks)
    for _, found in lookups:
        if found != expected:
            raise PeerError(f"a lookup of {tokens} tokens found {found}, not {expected}")
    return statistics.median(seconds for seconds, _ in lookups)


def _memory(peer: Peer, plan: RunPlan, samples: Samples) -> None:
    """One prompt after the other, each loaded once it is stored; the first warms up."""
    with PeerSession(peer, plan.model, plan.sizes(4 * plan.jobs), disk=None, on_disk=False) as session:
        _start(session)
        stores, loads = [], []
        for number in range(plan.jobs + 1):
            stores.append(_store(session, number, plan.tokens))
            loads.append(_whole(session.ask("load", number=number, tokens=plan.tokens), plan)["load_s"])
        _add(samples, "store", plan.prompt_bytes / statistics.median(stores[1:]))
        _add(samples, "load", plan.prompt_bytes / statistics.median(loads[1:]))


def _whole(loaded: dict[str, Any], plan: RunPlan) -> dict[str, Any]:
    """Raises PeerError unless all of the prompt came back, right."""
    if loaded["wrong"]:
        raise PeerError(
            f"WRONG BYTES among {loaded['told']} tokens that it reported as loaded; wrong blocks: {loaded['wrong']}"
        )
    if loaded["told"] != plan.tokens:
        raise PeerError(f"of {plan.tokens} tokens {loaded['found']} were found and {loaded['told']} loaded")
    return loaded


def _disk(peer: Peer, plan: RunPlan, samples: Samples, notes: Notes) -> None:
    """Prompts to disk, back from it, and back once more after each kind of restart."""
    with PeerSession(peer, plan.model, plan.sizes(4 * plan.jobs), disk=plan.disk, on_disk=True) as session:
        _start(session)
        seconds, stored = session.ask("write", numbers=list(range(plan.jobs)), tokens=plan.tokens)
        if not stored:
            raise PeerError("a prompt was not stored")
        _add(samples, "write", plan.jobs * plan.prompt_bytes / seconds)
        cached = session.ask("cached_share")

        with notes.guarded("read"):
            session.ask("forget")
            time.sleep(REST_S)
            seconds = sum(_load(session, number, plan) for number in range(plan.jobs))
            _add(samples, "read", plan.jobs * plan.prompt_bytes / seconds)
            notes.page_cache(cached, session.ask("cached_share"))
        for name, kill in (("restart", False), ("restart_killed", True)):
            with notes.guarded(name):
                _add(samples, name, _restart(session, plan, kill=kill))


def _load(session: PeerSession, number: int, plan: RunPlan) -> float:
    """Seconds of lookup and load. Raises PeerError unless all of the prompt came back, right."""
    loaded = _whole(session.ask("load", number=number, tokens=plan.tokens), plan)
    return float(loaded["lookup_s"] + loaded["load_s"])


def _restart(session: PeerSession, plan: RunPlan, *, kill: bool) -> float:
    """Seconds until the first prompt is loaded; asked again while nothing of it is."""
    seconds: float = session.ask("restart", kill=kill)
    begun = time.perf_counter()
    while True:
        waited = time.perf_counter() - begun
        loaded = session.ask("load", number=0, tokens=plan.tokens)
        if loaded["told"] or waited > AGAIN_S:
            _whole(loaded, plan)
            return float(seconds + waited + loaded["lookup_s"] + loaded["load_s"])


def in_short(error: Exception) -> str:
    """The first line, and the last one of the log that may follow: the reason, of a traceback."""
    lines = str(error).strip().splitlines() or [""]
    return " ".join(dict.fromkeys((lines[0], lines[-1])))[:SAID_MAX]


# --- what is found out once ---


def find_out(peer: Peer, plan: RunPlan) -> dict[str, str]:
    """Case -> what happened."""
    notes = Notes()
    with notes.guarded("full memory"):
        notes.said["full memory"] = _full(peer, plan)
    with notes.guarded("restart, memory alone"):
        notes.said["restart, memory alone"] = _restarted(peer, plan)
    for verified in (False, True) if peer.verifiable else (False,):
        for where, place in (("memory", "in memory"), ("disk", "on disk")):
            case = f"flipped bit {place}{', checksums on' if verified else ''}"
            with notes.guarded(case):
                notes.said[case] = _flipped(peer, plan, where, verified=verified)
    return notes.said


def _full(peer: Peer, plan: RunPlan) -> str:
    """Three times as many prompts as memory has room for, and which of them are there, the newest asked for first."""
    count = 3 * FULL_PROMPTS
    with PeerSession(peer, plan.model, plan.sizes(FULL_PROMPTS), disk=None, on_disk=False) as session:
        session.ask("start")
        stored = [session.ask("store", number=number, tokens=plan.tokens)[1] for number in range(count)]
        found = {number: session.ask("load", number=number, tokens=plan.tokens) for number in reversed(range(count))}
    whole = [number for number, loaded in found.items() if loaded["told"] == plan.tokens]
    wrong = sum(loaded["wrong"] for loaded in found.values())
    part = sum(0 < loaded["told"] < plan.tokens for loaded in found.values())
    newest = list(range(count - 1, count - 1 - len(whole), -1))
    which = "" if not whole else " (the newest)" if whole == newest else " (not the newest alone)"
    return (
        f"{sum(stored)} of {count} prompts accepted as a whole; room for {FULL_PROMPTS}; "
        f"{len(whole)} are there whole{which}, {part} in part; {_verdict(wrong)}"
    )


def _verdict(wrong: int) -> str:
    return f"WRONG BYTES; wrong blocks: {wrong}" if wrong else "all bytes right"


def _restarted(peer: Peer, plan: RunPlan) -> str:
    """Restarts without a disk: what memory keeps."""
    parts = []
    with PeerSession(peer, plan.model, plan.sizes(4), disk=None, on_disk=False) as session:
        session.ask("start")
        for number, (kill, how) in enumerate(((False, "in order"), (True, "SIGKILL"))):
            _store(session, number, plan.tokens)
            try:
                session.ask("restart", kill=kill)
            except NotOfferedError as error:
                parts.append(f"{how}: {error}")
                continue
            loaded = session.ask("load", number=number, tokens=plan.tokens)
            right = _verdict(loaded["wrong"]) if loaded["told"] else "a miss"
            parts.append(f"{how}: {loaded['told']} of {plan.tokens} tokens, {right}")
    return "; ".join(parts)


def _flipped(peer: Peer, plan: RunPlan, where: str, *, verified: bool) -> str:
    """One prompt, a bit of it, and a load."""
    on_disk = where == "disk"
    sizes = plan.sizes(4, verified=verified)
    with PeerSession(peer, plan.model, sizes, disk=plan.disk if on_disk else None, on_disk=on_disk) as session:
        session.ask("start")
        _store(session, 0, plan.tokens)
        if on_disk:
            session.ask("settle")
            session.ask("forget")
        places = session.ask("damage", where=where, number=0, tokens=plan.tokens)
        if not places:
            raise NotOfferedError("the bytes were not found where they should be")
        loaded = session.ask("load", number=0, tokens=plan.tokens)
    return flipped_verdict(loaded, plan.tokens)


def flipped_verdict(loaded: dict[str, Any], tokens: int) -> str:
    """What a load made of a prompt in which one chunk is damaged."""
    if loaded["wrong"]:
        return f"WRONG BYTES: {loaded['told']} of {tokens} tokens said to be loaded; wrong blocks: {loaded['wrong']}"
    if loaded["told"] == tokens:
        return "all tokens loaded, all bytes right"
    if loaded["found"] > loaded["told"]:
        return f"{loaded['found']} tokens found, {loaded['told']} loaded, the rest said to have failed; all bytes right"
    return f"a miss from there on: {loaded['told']} of {tokens} tokens, all bytes right"
