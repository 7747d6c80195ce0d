"""All attacks, in a separate process: `-m scripts.fuzz.attackers SOCKET PORT SEED [UID...]`.

It reads a line for each phase, the names of the attacks that are made at once, and an empty line at the phase's end.
Then it prints as JSON what each of them did. It ends with its standard input.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from kvoffloadd.testing.process import DaemonError, module, spawn, tail
from kvoffloadd.testing.wait import HANG_S
from scripts.fuzz.enemy import Attack, Deeds, Enemy, RefusedError, Target
from scripts.fuzz.hoards import HOARDS
from scripts.fuzz.strikes import STRIKES

ATTACKS: dict[str, Attack] = {attack.__name__: attack for attack in (*HOARDS, *STRIKES)}
PROBLEMS_KEPT = 20
READY = "ready"
PATIENCE_S = 3 * HANG_S
"""With a phase's end: the attacks have their own."""


class Attackers:
    """The process, as long as the context lasts. `deeds`: by attack, of all phases. Raises DaemonError: it is stuck."""

    def __init__(self, target: Target, seed: int, log: Path) -> None:
        words = [str(target.socket), str(target.metrics_port), str(seed), *map(str, target.uids)]
        command = module("scripts.fuzz.attackers", *words)
        self._child = spawn(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._log = log
        self.deeds = {name: Deeds() for name in ATTACKS}

    def __enter__(self) -> Self:
        if self._line() != READY:
            raise DaemonError(f"the attackers do not start:\n{tail(self._log)}")
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._child.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    @contextmanager
    def make(self, names: Sequence[str]) -> Iterator[None]:
        """These attacks, all at once, as long as the context lasts."""
        self._tell(" ".join(names))
        yield
        self._tell("")
        line = self._line()
        try:
            found = json.loads(line)
        except ValueError:
            raise DaemonError(f"the attackers printed {line[:200]!r}; their log:\n{tail(self._log)}") from None
        for name, report in found.items():
            self.deeds[name].add(Deeds(report["asked"], Counter(report["refusals"]), report["problems"]))

    def _tell(self, line: str) -> None:
        if self._child.stdin is None:
            raise DaemonError("the attackers have no input")
        self._child.stdin.write(f"{line}\n".encode())
        self._child.stdin.flush()

    def _line(self) -> str:
        return "" if self._child.stdout is None else self._child.stdout.readline().decode().rstrip("\n")


class Phase:
    """Attacks that are made at once, each in its own thread."""

    def __init__(self, target: Target, names: Sequence[str], rng: random.Random) -> None:
        self._over = threading.Event()
        self._target = target
        self._deeds = {name: Deeds() for name in names}
        self._threads = {
            name: threading.Thread(target=self._make, args=(name, rng.getrandbits(64)), daemon=True) for name in names
        }
        for thread in self._threads.values():
            thread.start()

    def end(self) -> dict[str, Deeds]:
        """What each did."""
        self._over.set()
        for name, thread in self._threads.items():
            thread.join(2 * HANG_S)
            if thread.is_alive():
                self._deeds[name].problems.append(f"{name} has not ended after {2 * HANG_S:.0f} s")
        return self._deeds

    def _make(self, name: str, seed: int) -> None:
        """Again and again: one that is refused, or at its end, begins anew."""
        rng = random.Random(seed)
        deeds = self._deeds[name]
        while not self._over.is_set() and len(deeds.problems) < PROBLEMS_KEPT:
            with Enemy(self._target, rng, self._over) as enemy:
                try:
                    ATTACKS[name](enemy)
                except RefusedError:
                    enemy.rest(0.02)
                except (OSError, AssertionError) as error:  # no answer, or a session that ended
                    where = traceback.extract_tb(error.__traceback__)
                    lines = ", ".join(f"{frame.name}:{frame.lineno}" for frame in where[-4:])
                    enemy.problem(f"{name}: {type(error).__name__}: {error} ({lines})")
            deeds.add(enemy.deeds)


def main() -> None:
    path, port, seed, *uids = sys.argv[1:]
    target = Target(Path(path), int(port), tuple(map(int, uids)))
    rng = random.Random(int(seed))
    print(READY, flush=True)
    while names := sys.stdin.readline().split():
        phase = Phase(target, names, rng)
        sys.stdin.readline()
        print(json.dumps({name: deeds.as_json() for name, deeds in phase.end().items()}), flush=True)


if __name__ == "__main__":
    main()
