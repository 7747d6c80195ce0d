"""Runs a worker to kill in the middle of a job: it registers memory named "victim", starts one slow job, prints that.

python -m tests.e2e.victim SOCKET (store | load) KEYS_HEX [fork] [rows]
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from pathlib import Path

import numpy as np

from tests.e2e.rank import ROWS, SIMPLE, Rank

FOREVER_S = 1000.0


def hold_sockets() -> None:
    """Open once more what the client library closes in a forked child: other code that forks does not ask it."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.dup(int(name))


def main() -> None:
    path, what, packed, *options = sys.argv[1:]
    keys = np.frombuffer(bytes.fromhex(packed), np.uint8).reshape(-1, 32)
    groups = ROWS if "rows" in options else SIMPLE
    rank = Rank(Path(path), groups, name="victim", num_blocks=len(keys) + 8)
    if "fork" in options:
        hold_sockets()
        if os.fork() == 0:
            time.sleep(FOREVER_S)  # holds the socket and the memory open
    wanted = {0: (keys, rank.blocks_of(0, 0, len(keys)))}
    others = keys ^ np.uint8(0xFF)
    reserved = rank.client.reserve({0: others}).lease
    pinned = rank.client.pin({0: keys}).lease
    if what == "store":
        rank.begin_store(wanted)
    else:
        rank.client.load(rank.registration, wanted, lease=pinned)
    sys.stdout.write(f"running {int(reserved)} {int(pinned)}\n")
    sys.stdout.flush()
    time.sleep(FOREVER_S)


if __name__ == "__main__":
    main()
