"""A bystander process: stores and loads in its own namespace and in the shared one, every byte and state checked.

It does nothing to its memory. It knows every byte of all keys but those that attackers have stored.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence

import numpy as np

from kvoffloadd.client import KeyState
from scripts.holes.options import HolesWorkerOptions
from scripts.holes.worker import HolesWorker, live

PATIENT = 0.8
"""How often a turn waits for what comes from disk."""


class HolesBystander(HolesWorker):
    """See above."""

    @property
    def operations(self) -> Sequence[tuple[float, Callable[[], None]]]:
        return (
            (50.0, self.turn),
            (25.0, self.load_unpinned),
            (20.0, self.load_holed),
            (4.0, self.compare),
            (0.5, self.reconnect),
        )

    def turn(self) -> None:
        """What an engine does with a prompt: pin it, load what hits, compute and store the rest."""
        session = self.any_session()
        prompt = session.texts.clean(self.rng)
        found = session.pin(prompt, patient=self.rng.random() < PATIENT)
        try:
            hits = np.flatnonzero(found.states[0] == KeyState.HIT)
            if len(hits) and self.room(len(hits)):
                session.load(prompt, hits, lease=found.lease)
        finally:
            session.client.release(found.lease)
        missing = np.flatnonzero(found.states[0] == KeyState.MISS)
        if len(missing) and self.room(len(missing)):
            session.store(prompt, missing)

    def load_unpinned(self) -> None:
        """Keys that may be there or not."""
        session = self.any_session()
        if self.room():
            session.load(session.texts.clean(self.rng), self.draw(0.7))

    def load_holed(self) -> None:
        """Keys that attackers have stored, while holes were punched into them: right bytes, and zeros."""
        if self.room():
            self.shared.load(self.shared.texts.holed(self.rng), self.draw(0.7))


def main() -> int:
    return live(lambda: HolesBystander(HolesWorkerOptions(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
