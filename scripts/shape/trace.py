"""How many hands one store and one load pass through: a daemon and a client in this process, which counts its calls.

`python -m scripts.shape.trace TREE` prints one JSON object. TREE is the checkout whose package is traced: nothing of
this one is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

KEYS, PAYLOAD_BYTES = 64, 65_536
ROUNDS = 40
SETTLE_S, REST_S = 0.05, 0.1
"""After a job, for its checksums; before the next, for everything else."""

Calls = list[tuple[int, str]]
"""Of each Python call of the package: its thread and its file."""

BESIDE = ("scheduling/lag.py",)
"""What a timer calls all the time."""


class Recorder:
    """Takes down calls of the package's functions in all threads, while it is on."""

    def __init__(self, package: Path) -> None:
        self._package = f"{package}{os.sep}"
        self._calls: Calls | None = None

    def begin(self) -> None:
        self._calls = []

    def end(self) -> Calls:
        calls, self._calls = self._calls, None
        return calls or []

    def hook(self, frame: FrameType, event: str, _argument: object) -> None:
        """Is the hook for sys.setprofile."""
        calls = self._calls
        if event == "call" and calls is not None and frame.f_code.co_filename.startswith(self._package):
            calls.append((threading.get_ident(), frame.f_code.co_filename.removeprefix(self._package)))


def counts(calls: Calls, client: int) -> tuple[int, int, int]:
    """Calls, files, and changes of file within a thread, all threads but the client's together."""
    by_thread: dict[int, list[str]] = defaultdict(list)
    for thread, file in calls:
        if thread != client and file not in BESIDE:
            by_thread[thread].append(file)
    lists = list(by_thread.values())
    changes = sum(one != other for files in lists for one, other in pairwise(files))
    return sum(map(len, lists)), len({file for files in lists for file in files}), changes


def least(trials: Sequence[tuple[int, int, int]]) -> dict[str, int]:
    """Returns the trial with the fewest changes: what else happens in a process only adds."""
    calls, files, changes = min(trials, key=lambda one: one[2])
    return {"calls": calls, "files": files, "changes": changes}


def exercise(socket: Path, recorder: Recorder) -> dict[str, Any]:
    """Store and load, again and again. Runs in its own thread."""
    import numpy as np

    from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor

    while not socket.exists():
        time.sleep(0.01)
    time.sleep(REST_S)
    trials: dict[str, list[tuple[int, int, int]]] = {"store": [], "load": []}
    tensor = SharedTensor.allocate(KEYS, PAYLOAD_BYTES)
    group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAYLOAD_BYTES)])
    with Client(socket, namespace=NamespaceSpec(model="shape"), role="worker") as client:
        registration = client.register(KvCache([tensor], [group]))
        for _ in range(ROUNDS):
            keys = os.urandom(32 * KEYS)
            for what, submit in (("store", client.store), ("load", client.load)):
                time.sleep(REST_S)
                recorder.begin()
                client.wait(submit(registration, {0: (keys, np.arange(KEYS))}), 20.0)
                time.sleep(SETTLE_S)
                trials[what].append(counts(recorder.end(), threading.get_ident()))
    return {what: least(each) for what, each in trials.items()}


def main(tree: Path) -> int:
    """Prints the counts; returns the exit status."""
    sys.path[0] = str(tree)
    import kvoffloadd
    from kvoffloadd import cli

    recorder = Recorder(Path(kvoffloadd.__file__).parent)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvo-") as folder:
        socket = Path(folder) / "kvo.sock"

        def work() -> None:
            try:
                results.update(exercise(socket, recorder))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.setprofile(recorder.hook)
        threading.Thread(target=work, daemon=True).start()
        sys.setprofile(recorder.hook)
        cli.main(["serve", "--socket", str(socket), "--memory", "64MiB"])
        sys.setprofile(None)
    print(json.dumps(results))
    return 0 if results else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
