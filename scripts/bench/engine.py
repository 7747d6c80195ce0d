"""One engine that does nothing but offload: a `WorkerProcess` with the options `socket`, `keys` and `page_bytes`.

Its scheduler pins and releases prompts; its rank stores new prompts of as many keys, and loads each once. Two threads
and two sessions of one instance. The question {"seconds": s} is answered after `s` seconds with what was done in
them: {"pins": [seconds of each], "stores": [...], "loads": [...]}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.model import U8Array
from kvoffloadd.testing.workload import WAIT_S

NAMESPACE = NamespaceSpec(model="bench_engines")


class PinningEngine:
    """Two sessions, and one prompt that is held."""

    def __init__(self, socket: str, keys: int, page_bytes: int) -> None:
        instance = os.urandom(16)
        self.scheduler = Client(socket, namespace=NAMESPACE, role="scheduler", instance=instance, deadline_s=WAIT_S)
        self.rank = Client(socket, namespace=NAMESPACE, instance=instance, deadline_s=WAIT_S)
        tensor = SharedTensor.allocate(keys, page_bytes)
        tensor.array[:] = 1
        group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, page_bytes)])
        self.registration = self.rank.register(KvCache([tensor], [group]))
        self._rng = np.random.default_rng()
        self._ids = self._rng.permutation(keys)
        self._prompt = self._new()
        self.store()

    def _new(self) -> U8Array:
        found: U8Array = self._rng.integers(0, 256, (len(self._ids), NAMESPACE.key_bytes), dtype=np.uint8)
        return found

    def pin(self) -> None:
        """One prompt, which the scheduler lets go of at once."""
        found = self.scheduler.pin({0: self._prompt})
        if found.lease:
            self.scheduler.release(found.lease)

    def store(self) -> None:
        prompt = self._new()
        self.rank.wait(self.rank.store(self.registration, {0: (prompt, self._ids)}), WAIT_S)
        self._prompt = prompt

    def load(self) -> None:
        self.rank.wait(self.rank.load(self.registration, {0: (self._prompt, self._ids)}), WAIT_S)

    def run(self, seconds: float) -> dict[str, list[float]]:
        """What was done, and how long each took: of pins with their release."""
        until = time.perf_counter() + seconds
        done: dict[str, list[float]] = {"pins": [], "stores": [], "loads": []}
        pins = threading.Thread(target=repeat, args=(until, [(self.pin, done["pins"])]))
        pins.start()
        repeat(until, [(self.store, done["stores"]), (self.load, done["loads"])])
        pins.join()
        return done

    def close(self) -> None:
        self.scheduler.close()
        self.rank.close()


def repeat(until: float, calls: list[tuple[Callable[[], None], list[float]]]) -> None:
    """Make these calls in turn until this time.perf_counter, and note how long each took."""
    while True:
        for call, seconds in calls:
            begun = time.perf_counter()
            if begun >= until:
                return
            call()
            seconds.append(time.perf_counter() - begun)


def main() -> None:
    """Ends with its input."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    engine = PinningEngine(options["socket"], options["keys"], options["page_bytes"])
    try:
        for line in sys.stdin:
            print(json.dumps(engine.run(json.loads(line)["seconds"])), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
