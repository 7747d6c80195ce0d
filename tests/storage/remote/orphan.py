"""What matters here of a daemon, in a separate process: `orphan.py POOL_FILE FOLDER`.

It has a pool file and an agent, begins a get that does not end, prints the agent's pid, and waits to be killed.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np

from kvoffloadd.config import RemoteConfig
from kvoffloadd.scheduling.lanes import Lane
from kvoffloadd.storage.arenafile import open_pool
from kvoffloadd.storage.remote.store import RemoteStore
from tests.storage.remote.host import FaultyEngine, names_of, soon, until

CAPACITY_BYTES = 1 << 20


async def main(pool_file: Path, folder: Path) -> None:
    engine = FaultyEngine(folder)
    engine.plant("get=hang")
    loop = asyncio.get_running_loop()
    pool = open_pool(pool_file, CAPACITY_BYTES, CAPACITY_BYTES, lambda size_bytes: None)
    config = RemoteConfig("memory", stuck_s=3600)
    store = RemoteStore(pool, config, engine.settings(), loop, Lane("hash", 1, loop), os.urandom(16))
    store.start()
    await until(store.can_read)
    store.get(names_of(1), np.array([[pool.address]], np.uint64), [100], soon(), lambda result: None)
    print(store.figures()["agent"]["pid"], flush=True)
    await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
