"""Sentinels: namespaces whose bytes show which clear they are older than, so that one that is served shows.

Now and then all that is wrong ends for a **trial**, except for the vandal. Each host has the bytes of a version in
memory, and one of them on its disk. One host clears; the other one hears of it while it runs, or was down meanwhile and
is asked as soon as it is back; the disk may not be able to record any of it. Some trials do not clear: what the host
that was down then has shows that the others would have found something.

Between trials everything goes wrong at once. What a host has obeyed once it obeys for ever: it is asked all the time.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.errors import ClientError
from kvoffloadd.model import U8Array
from kvoffloadd.server.session.session import fingerprint
from kvoffloadd.testing.wait import HANG_S, slowness, within
from scripts.harness.disk import ManifestTrap
from scripts.soak.host import SoakHost
from scripts.soak.sentinel import KEYS, Sentinel

SPARED, VANDALISED = 2, 2
"""Namespaces that the vandal leaves alone, and that it does not."""
TRIAL_S, LOOK_S = 25.0, 1.0
"""How long between two trials, and between two looks."""
HEARD_S: Final = 10.0
"""Within this time a host hears of a clear if it runs, and so does the store: the poll, and a look that takes as long
as one may. On a machine that is busy, it is multiplied by how slow that is.
"""
VANDALISED_S: Final = 30.0
"""The same where a vandal is at work: what no look has confirmed for 15 s does not hit."""
AT_ONCE_S: Final = 2.0
"""How long a host is asked all the time when it is back."""
CLEARED_SHARE, DOWN_SHARE, CLOSED_SHARE, SPOILT_SHARE = 0.75, 0.6, 0.5, 0.4
FORGETFUL_SHARE, KILLED_SHARE = 0.6, 0.5
SETTLES_S: Final = 2.0
"""About how long it takes until what was stored is on disk and in the store."""
KEEPS = 0
"""The host that has a disk, and whose memory outlives its daemon."""


@dataclass(slots=True)
class Watched:
    """A namespace. `version`: that of its next keys; `floors`: of each host, the first version it may serve."""

    spec: NamespaceSpec
    is_spared: bool
    keys: U8Array
    version: int = 1
    floors: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def name(self) -> str:
        """Returns the name for people to read."""
        return self.spec.model


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """A trial. `clearing` and `other`: hosts. `down`: the other one is, during the clear; `closed`: it was before, and
    no engine has come back yet; `forgets`: it comes back without its memory; `spoilt`: the disk can't record anything.
    """

    clearing: int
    clears: bool
    down: bool
    closed: bool
    killed: bool
    forgets: bool
    spoilt: bool

    @property
    def other(self) -> int:
        return 1 - self.clearing

    @property
    def name(self) -> str:
        """What is counted."""
        words = ["down" if self.down else "closed" if self.closed else "up"]
        words += ["without record"] if self.spoilt else []
        words += [] if self.clears else ["without clear"]
        return " ".join(words)


@dataclass(slots=True)
class SentinelReport:
    """`served`: keys from before a clear, after it; `fresh`: keys of the last version, which may be served; `kept`:
    those that a host had that was down while nothing was cleared; `heard_s`: how long it took hosts to hear of clears.
    """

    trials: Counter[str] = field(default_factory=Counter)
    clears: int = 0
    served: int = 0
    wrong: int = 0
    fresh: int = 0
    kept: int = 0
    looks: int = 0
    heard_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Returns all but the errors, which are among those of the run."""
        figures = ("clears", "served", "wrong", "fresh", "kept", "looks", "heard_s")
        return {"trials": dict(self.trials), **{name: getattr(self, name) for name in figures}}


class Sentinels:
    """Call `look` often. `calm()` ends all that is wrong for now. `last_end_s`: no daemon is ended after that."""

    def __init__(
        self,
        hosts: Sequence[SoakHost],
        trap: ManifestTrap,
        pool: Path,
        rng: np.random.Generator,
        seconds: float,
        calm: Callable[[], None],
        last_end_s: float,
    ) -> None:
        self.report = SentinelReport()
        self._hosts = hosts
        self._trap = trap
        self._pool = pool
        self._rng = rng
        self._calm = calm
        self._gap_s = min(TRIAL_S, seconds / 6)
        self._last_end_s = last_end_s
        self._trial_s, self._look_s = self._gap_s / 2, 0.0
        self._engines: dict[tuple[int, int], Sentinel] = {}
        self.watched = [
            Watched(
                NamespaceSpec(model=f"sentinel-{'spared' if number < SPARED else 'vandalised'}-{number}"),
                number < SPARED,
                rng.integers(0, 256, (KEYS, 32), np.uint8),
            )
            for number in range(SPARED + VANDALISED)
        ]

    def vandalised(self) -> list[bytes]:
        """Fingerprints of what is not spared."""
        return [fingerprint_of(one.spec) for one in self.watched if not one.is_spared]

    def close(self) -> None:
        """Leave the daemons."""
        for host in range(len(self._hosts)):
            self._leave(host)

    # --- between trials ---

    def look(self, now_s: float) -> None:
        """`now_s`: since the begin of the run."""
        if now_s >= self._trial_s:
            began_s = time.monotonic()
            self._trial(self._plan(now_s))
            self._trial_s = now_s + (time.monotonic() - began_s) + self._gap_s
        elif now_s >= self._look_s:
            self._look_s = now_s + LOOK_S
            self._look_at(int(self._rng.integers(0, 2)), int(self._rng.integers(0, len(self.watched))))

    def _look_at(self, host: int, number: int) -> None:
        """Whatever is wrong: what was cleared does not come. Now and then clear, where that is durable."""
        watched = self.watched[number]
        with suppress(ClientError):
            self._load(host, number, wait=False)
            if host == KEEPS and self._rng.random() < 1 / 16:
                self._engine(host, number).client.clear(wait_s=0.0)
                self.report.clears += 1
                watched.version += 1
                watched.floors[host] = watched.version
                self._load(host, number, wait=False)
            self._engine(host, number).store(watched.keys, watched.version)
            return
        self._leave(host)

    def _engine(self, host: int, number: int) -> Sentinel:
        if (host, number) not in self._engines:
            name = f"kvo-sentinel{os.getpid()}-{host}-{number}"
            self._engines[host, number] = Sentinel(self._hosts[host].daemon.socket, self.watched[number].spec, name)
        return self._engines[host, number]

    def _leave(self, host: int) -> None:
        """Its daemon ends, or has ended."""
        for at in [at for at in self._engines if at[0] == host]:
            with suppress(ClientError):
                self._engines.pop(at).close()

    def _load(self, host: int, number: int, *, wait: bool) -> int:
        """How many keys came that are older than the last version. None may that this host is known to have cleared."""
        watched, report = self.watched[number], self.report
        loaded = self._engine(host, number).load(watched.keys, wait=wait)
        report.looks += 1
        report.fresh += int((loaded.versions == watched.version).sum())
        report.wrong += loaded.wrong
        if served := int((loaded.versions < watched.floors[host]).sum()):
            report.served += served
            self._wrong(
                f"host {host} served {served} keys of {watched.name} of version {int(loaded.versions.min())}, "
                f"which ended with a clear: {watched.floors[host]} is the first it may serve"
            )
        return int((loaded.versions < watched.version).sum())

    def _wrong(self, text: str) -> None:
        self.report.errors.append(f"sentinel: {text}")

    # --- trials ---

    def _plan(self, now_s: float) -> TrialPlan:
        def chance(share: float) -> bool:
            return bool(self._rng.random() < share)

        clearing = int(self._rng.integers(0, 2))
        may_end = now_s < self._last_end_s
        down = chance(DOWN_SHARE) and may_end
        closed = chance(CLOSED_SHARE) and may_end and not down
        spoilt = chance(SPOILT_SHARE) and may_end
        clears = chance(CLEARED_SHARE) or not down
        return TrialPlan(clearing, clears, down, closed, chance(KILLED_SHARE), chance(FORGETFUL_SHARE), spoilt)

    def _trial(self, plan: TrialPlan) -> None:
        """Raises DaemonError: a daemon does not start or stop."""
        self._calm()
        self.report.trials[plan.name] += 1
        try:
            self._fill()
            if plan.down or plan.closed:
                self._go_down(plan.other, killed=plan.killed, forgets=plan.forgets)
            if plan.closed:
                self._hosts[plan.other].daemon.start()
            if plan.spoilt:
                self._trap.set()
            recorded = [plan.clears and self._clear(plan, number) for number in range(len(self.watched))]
            if plan.down:
                self._hosts[plan.other].daemon.start()
                self._ask_at_once(plan, recorded)
            self._await_heard(plan, recorded)
            if plan.spoilt:
                self._forget_and_ask(recorded)
        except ClientError as error:
            self._wrong(f"in a trial ({plan.name}): {error!r}")
            self.close()
        finally:
            self._trap.remove()

    def _fill(self) -> None:
        """Both hosts store, and fetch what the other one has."""
        for host in range(len(self._hosts)):
            self._leave(host)
            for number in range(len(self.watched)):
                self._engine(host, number)
            self._await_eras(host)
            for number, watched in enumerate(self.watched):
                half = watched.keys[:: 2 if host else 1]
                self._engine(host, number).store(half, watched.version)
        time.sleep(SETTLES_S)
        for host in range(len(self._hosts)):
            self._load_all(host)

    def _await_eras(self, host: int) -> None:
        """Waits until the daemon knows the eras of what the vandal leaves alone: nothing is put
        into the store before.
        """
        spared = {f"{watched.name}#" for watched in self.watched if watched.is_spared}

        def known() -> bool:
            eras: dict[str, str] = self._hosts[host].daemon.status()["remote"]["eras"]
            return spared <= {label[: label.find("#") + 1] for label, era in eras.items() if era}

        if within(known, HEARD_S * slowness(), every_s=0.05) is None:
            self._wrong(f"host {host} does not agree with the store on an era within {HEARD_S * slowness():.0f} s")

    def _go_down(self, number: int, *, killed: bool, forgets: bool) -> None:
        self._leave(number)
        self._hosts[number].go_down(killed=killed)
        if forgets and number == KEEPS:
            self._pool.unlink(missing_ok=True)

    def _clear(self, plan: TrialPlan, number: int) -> bool:
        """Whether the store has recorded it."""
        watched, token = self.watched[number], secrets.token_bytes(16)
        client = self._engine(plan.clearing, number).client
        limit_s = HANG_S if watched.is_spared else HEARD_S
        took_s = within(lambda: "remote" not in client.clear(wait_s=1.0, token=token).unrecorded, limit_s, every_s=0.1)
        self.report.clears += 1
        watched.version += 1
        if took_s is not None or plan.clearing == KEEPS:
            watched.floors[plan.clearing] = watched.version
            self._load(plan.clearing, number, wait=True)
        if took_s is None and watched.is_spared:
            self._wrong(f"a clear of {watched.name} is not recorded in the store after {limit_s:.0f} s")
        return took_s is not None

    def _ask_at_once(self, plan: TrialPlan, recorded: list[bool]) -> None:
        """The host that was down, as soon as it answers."""
        for number in self._spared(recorded):
            self.watched[number].floors[plan.other] = self.watched[number].version
        came, until_s = 0, time.monotonic() + AT_ONCE_S * slowness()
        while time.monotonic() < until_s:
            came = self._load_all(plan.other)
        if not plan.clears:
            self.report.kept += came

    def _load_all(self, host: int) -> int:
        """How many keys of the last version came."""
        before = self.report.fresh
        for number in range(len(self.watched)):
            self._load(host, number, wait=True)
        return self.report.fresh - before

    def _spared(self, recorded: list[bool]) -> Iterator[int]:
        return (number for number, is_so in enumerate(recorded) if is_so and self.watched[number].is_spared)

    def _await_heard(self, plan: TrialPlan, recorded: list[bool]) -> None:
        """The other host serves nothing any more of what was cleared, and nothing again."""
        for number, is_recorded in enumerate(recorded):
            if not is_recorded:
                continue
            watched = self.watched[number]
            limit_s = (HEARD_S if watched.is_spared else VANDALISED_S) * slowness()
            began_s = time.monotonic()
            took_s = within(lambda n=number: not self._load(plan.other, n, wait=True), limit_s, every_s=0.05)  # type: ignore[misc]
            if watched.is_spared or self._epoch(plan.other, number) >= self._epoch(plan.clearing, number):
                watched.floors[plan.other] = watched.version
            if took_s is None:
                self._load(plan.other, number, wait=True)
                self._wrong(
                    f"host {plan.other} still served {watched.name} {time.monotonic() - began_s:.0f} s after a clear"
                )
            else:
                self.report.heard_s.append(took_s)

    def _epoch(self, host: int, number: int) -> int:
        """Returns the epoch of the last clear that the host has obeyed. What does not hit may be merely in doubt."""
        label = f"{self.watched[number].name}#"
        namespaces = self._hosts[host].daemon.status()["namespaces"]
        return max((int(one["epoch"]) for one in namespaces if one["label"].startswith(label)), default=0)

    def _forget_and_ask(self, recorded: list[bool]) -> None:
        """The host whose disk could not record it comes back with that disk alone. Where the vandal is at work, the
        store may have lost the clear, too: then no host knows of it.
        """
        self._go_down(KEEPS, killed=True, forgets=True)
        for watched in self.watched:
            if not watched.is_spared:
                watched.floors[KEEPS] = 0
        if self._rng.random() < KILLED_SHARE:
            self._trap.remove()
        self._hosts[KEEPS].daemon.start()
        for _ in range(3):
            for number in self._spared(recorded):
                self._load(KEEPS, number, wait=True)


def fingerprint_of(spec: NamespaceSpec) -> bytes:
    """Returns the fingerprint that daemons of this user give the namespace."""
    return fingerprint(spec, os.getuid())
