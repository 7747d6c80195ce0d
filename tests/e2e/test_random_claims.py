"""Claims at random against a model of them, with kills, restarts and clears of a real daemon with a disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import ClaimFigures, KeyState
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.disk import MIB, disk_settings, idle
from tests.e2e.rank import Keys, Rank, new_keys

Start = Callable[..., Daemon]

SECONDS_VARIABLE = "KVOFFLOADD_CLAIMS_S"
"""How long the long test takes; without it ten minutes."""

MEMORY_BYTES, DISK_BYTES = MIB, 8 * MIB
PAGE_BYTES, SLOTS = 4096, 256
MEMORY_SHARE, DISK_SHARE = 0.25, 0.5
NAMES = [f"agent {number}" for number in range(24)]
KEYS_MAX = 12
"""Of a claim: all claims at once are more than memory may keep (64 keys), and less than the disk may (512)."""

SHORT_S, LONG_S = 3.0, 3600.0
LATE_S = 1.0
"""A claim ends within a second of its time."""


@dataclass(eq=False)
class ModelClaim:
    """A claim as it was asked for. `earliest` and `latest`: when it ends, in time.monotonic seconds. `whole`: no key
    was missing when all were looked for last.
    """

    keys: Keys
    priority: int
    earliest: float
    latest: float
    whole: bool = False

    def is_as(self, found: ClaimFigures) -> bool:
        return (found.keys, found.priority) == (len(self.keys), self.priority)


Versions = dict[str, list[ModelClaim | None]]
"""What a name has stood for since it was last known to be saved, the present one last. None: nothing."""


@dataclass
class Model:
    """What must be claimed, what may be, and what must never be found again."""

    claims: dict[str, ModelClaim] = field(default_factory=dict)
    unsaved: Versions = field(default_factory=dict)
    cleared: list[Keys] = field(default_factory=list)

    def put(self, name: str, claim: ModelClaim | None) -> None:
        self.unsaved.setdefault(name, [self.claims.get(name)]).append(claim)
        if claim is None:
            self.claims.pop(name, None)
        else:
            self.claims[name] = claim


class RandomClaims:
    """One run: an engine's rank, the daemon, and the model of its claims."""

    def __init__(self, start_daemon: Start, folder: Path, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.daemon = start_daemon(
            *disk_settings((folder / "disk", DISK_BYTES)),
            "disk.segment_bytes=1MiB",
            "disk.flush_s=0.02",
            memory=str(MEMORY_BYTES),
        )
        self.model = Model()
        self.counts: dict[str, int] = {}
        self.rank = self._come()

    def run(self, seconds: float) -> None:
        steps: dict[Callable[[], None], int] = {
            self.claim: 30, self.extend: 10, self.forget: 8, self.flood: 20, self.rest: 6, self.check: 20,
            self.clear: 2, self.stop: 1, self.kill: 2,
        }  # fmt: skip
        chances = np.array(list(steps.values())) / sum(steps.values())
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            step = list(steps)[self.rng.choice(len(chances), p=chances)]
            self.counts[step.__name__] = self.counts.get(step.__name__, 0) + 1
            step()
        self.check()
        assert not self.daemon.observer.verify().findings

    # --- what happens ------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Claims a new prompt, before or after it is stored, in place of what its name stood for."""
        keys, first = new_keys(self.rng, int(self.rng.integers(1, KEYS_MAX + 1))), self.rng.random() < 0.2
        if not first:
            self.rank.store_keys(keys)
        name, seconds, priority = str(self.rng.choice(NAMES)), self._seconds(), int(self.rng.integers(0, 101))
        before = time.monotonic()
        made = self.rank.client.retain({0: keys}, seconds, name=name, priority=priority)
        assert (made.claims, made.keys) == (1, len(keys))
        after = time.monotonic()
        self.model.put(name, ModelClaim(keys, priority, before + seconds, after + seconds))
        if first:
            self.rank.store_keys(keys)

    def extend(self) -> None:
        for name, claim in self._some():
            seconds = self._seconds()
            before = time.monotonic()
            if claim.earliest - before < LATE_S:
                return
            self.rank.client.retain({}, seconds, name=name)
            after = time.monotonic()
            changed = ModelClaim(claim.keys, claim.priority, before + seconds, after + seconds, claim.whole)
            self.model.put(name, changed)

    def forget(self) -> None:
        for name, claim in self._some():
            if claim.earliest - time.monotonic() > LATE_S:
                self.rank.client.forget(name)
                self.model.put(name, None)

    def flood(self) -> None:
        for _ in range(int(self.rng.integers(1, 4))):
            self.rank.store_keys(new_keys(self.rng, 60))

    def rest(self) -> None:
        time.sleep(float(self.rng.random()))

    def clear(self) -> None:
        self.rank.client.clear()
        self.model.cleared += [claim.keys for claim in self.model.claims.values()]
        self.model.claims.clear()
        self.model.unsaved.clear()  # a clear is recorded before it is answered
        assert not self.rank.client.claims()

    def stop(self) -> None:
        """Ends the daemon in order: all of its claims are saved."""
        self._again(self.daemon.stop)
        self.model.unsaved.clear()
        self.check()

    def kill(self) -> None:
        """Kills the daemon, often between a claim and its record."""
        if self.rng.random() < 0.3:
            until(lambda: self._retention()["saved"], "the claims are saved")
            self.model.unsaved.clear()
        self._again(self.daemon.kill)
        found = {claim.name: claim for claim in self.rank.client.claims()}
        for name, versions in self.model.unsaved.items():
            now = time.monotonic()
            one = found.get(name)
            fits = [version for version in versions if version is not None and one is not None and version.is_as(one)]
            if one is None:
                assert (
                    any(version is None or version.earliest < now + LATE_S for version in versions) or len(versions) > 1
                )
                self.model.claims.pop(name, None)
            else:
                assert fits, f"{name} is none of the claims that were made"
                ends = now + one.left_s
                assert ends <= max(version.latest for version in fits) + LATE_S, "no kill makes a claim longer"
                self.model.claims[name] = ModelClaim(fits[-1].keys, one.priority, ends - LATE_S, ends, fits[-1].whole)
        self.model.unsaved.clear()
        self.check()

    # --- what must hold ----------------------------------------------------------------------------------

    def check(self) -> None:
        before = time.monotonic()
        found = {claim.name: claim for claim in self.rank.client.claims()}
        after = time.monotonic()
        for name, one in found.items():
            assert name in self.model.claims, f"{name} was forgotten, has ended, or was cleared"
            assert self.model.claims[name].is_as(one), name
            assert before <= self.model.claims[name].latest + LATE_S, f"{name} has outlived its time"
        for name, claim in list(self.model.claims.items()):
            if name not in found:
                assert claim.earliest <= after + LATE_S, f"{name} has ended before its time"
                self.model.put(name, None)
        status = self._retention()
        assert status["memory_bytes"] <= MEMORY_SHARE * MEMORY_BYTES
        assert status["disk_bytes"] <= DISK_SHARE * DISK_BYTES
        assert (status["disk_keys_unkept"], status["disk_claims_lapsed"]) == (0, 0)
        if status["saved"]:
            self.model.unsaved.clear()
        self._look_for_keys()
        for keys in self.model.cleared[-20:]:
            assert set(self.rank.states(keys)) == {KeyState.MISS}, "what was cleared is served"

    def _look_for_keys(self) -> None:
        """Claimed keys that were on disk once are there until their claim ends, and have the right bytes."""
        idle(self.daemon)
        for name, claim in self.model.claims.items():
            missed = KeyState.MISS in self.rank.states(claim.keys)
            holds = time.monotonic() < claim.earliest - LATE_S
            assert not (claim.whole and missed and holds), f"keys of {name} were lost"
            claim.whole = not missed
        for name, claim in self._some():
            if claim.whole and self.rng.random() < 0.3:
                came = self.rank.loads_right(claim.keys)
                assert came or time.monotonic() >= claim.earliest - LATE_S, f"keys of {name} did not come"

    # --- helpers -----------------------------------------------------------------------------------------

    def _come(self) -> Rank:
        found: Rank = self.daemon.welcome(Rank(self.daemon.socket, num_blocks=SLOTS))
        return found

    def _again(self, ends: Callable[[], object]) -> None:
        self.daemon.leave_guests()
        ends()
        self.daemon.start()
        self.rank = self._come()

    def _some(self) -> list[tuple[str, ModelClaim]]:
        """Returns one claim that is in force, if there is any."""
        names = sorted(self.model.claims)
        if not names:
            return []
        name = names[int(self.rng.integers(len(names)))]
        return [(name, self.model.claims[name])]

    def _seconds(self) -> float:
        return float(self.rng.uniform(0.2, SHORT_S)) if self.rng.random() < 0.3 else LONG_S

    def _retention(self) -> dict[str, int]:
        found: dict[str, int] = self.daemon.status()["retention"]
        return found


@pytest.mark.slow
def test_random_claims(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    RandomClaims(start_daemon, tmp_path, seed).run(15.0)


@pytest.mark.soak
@pytest.mark.timeout(24 * 3600)
def test_random_claims_for_long(start_daemon: Start, tmp_path: Path, seed: int) -> None:
    run = RandomClaims(start_daemon, tmp_path, seed)
    run.run(float(os.environ.get(SECONDS_VARIABLE, 600.0)))
    print(f"steps: {run.counts}, retention: {run.daemon.status()['retention']}")
