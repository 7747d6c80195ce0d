"""Pings a daemon all the time, in a separate process: a `WorkerProcess` with the option `socket`.

Each question is answered with the round trips since the one before, {"seconds": [...]}.
"""

from __future__ import annotations

import json
import select
import sys
import time

from kvoffloadd.client import Client

PING_EVERY_S = 0.002


def main() -> None:
    """Ends with its input."""
    seconds: list[float] = []
    with Client(json.loads(sys.argv[1])["socket"], namespace=None, role="observer") as client:
        while True:
            begun = time.perf_counter()
            client.ping()
            seconds.append(time.perf_counter() - begun)
            if select.select([sys.stdin], [], [], PING_EVERY_S)[0]:
                if not sys.stdin.readline():
                    return
                print(json.dumps({"seconds": seconds}), flush=True)
                seconds = []


if __name__ == "__main__":
    main()
