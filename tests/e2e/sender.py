"""Runs a worker that obeys commands, one a line, until it is killed: its session ends while the daemon is at its
request.

python -m tests.e2e.sender SOCKET SALT INSTANCE KEYS; then a line each of `ask KIND`, which prints the lease, and `begin
KIND [LEASE]`, which does not wait for the reply. Kinds: store, load, reserve, pin, release.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvoffloadd.model import NO_BLOCK
from scripts.harness.peer import RawPeer
from tests.server.scene import Scene, ids
from tests.server.scene import keys as packed

FIRST = 1000


def asked_of(number: int) -> list[dict[str, object]]:
    """Returns `number` keys of group 0, as requests name them."""
    return [{"group": 0, "keys": packed(*range(FIRST, FIRST + number))}]


def blocks_of_one(number: int) -> list[dict[str, object]]:
    """A job of the same keys, all of them in block 0."""
    return [{**asked_of(number)[0], "blocks": ids(*[0] * number)}]


def fields(scene: Scene, kind: str, number: int, lease: str = "") -> dict[str, Any]:
    """Returns the fields of a request of this kind."""
    if kind == "release":
        return {"lease": int(lease)}
    if kind == "store":
        return scene.job(groups=blocks_of_one(number))
    if kind == "load":  # all of them, but only the first is copied
        blocks = ids(0, *[NO_BLOCK] * (number - 1))
        return scene.job(groups=[{**asked_of(number)[0], "blocks": blocks}])
    return {"groups": asked_of(number)}


def main() -> None:
    path, salt, instance, number = sys.argv[1:]
    daemon: Any = SimpleNamespace(peer=lambda: RawPeer(Path(path)))
    scene = Scene(daemon, salt, bytes.fromhex(instance))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        how, kind, *words = line.split()
        request = fields(scene, kind, int(number), *words)
        lease = 0
        if how == "ask":
            lease = scene.peer.ok(kind, **request)["lease"]
        else:
            scene.peer.begin(kind, **request)
        sys.stdout.write(f"{lease}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
