"""`python -m tests.remote.stranger` does what a stranger can do who only reaches Mooncake's ports. Prints JSON."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from typing import Any

from kvoffloadd.testing.process import ROOT, module, search_path
from kvoffloadd.testing.wait import HANG_S
from scripts.harness.lab import Host

PAGE_BYTES = 4096


def stranger(host: Host, *words: str) -> Any:
    """Run one of `main`'s, from this host."""
    command = [*host.enter, *module("tests.remote.stranger", host.address, *words)]
    environment = {**os.environ, "PYTHONPATH": search_path(), "MC_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """`scribble MASTER NAME OFFSET`: into an object in a store. `reach ADDRESS ENDPOINT...`: a page of a process, read
    and then overwritten, through any of these endpoints: how many succeeded.
    """
    address, verb, *words = sys.argv[1:]
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    page = mmap.mmap(-1, PAGE_BYTES)
    here = ctypes.addressof(ctypes.c_char.from_buffer(page))
    if engine.initialize(f"{address}:17777", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(here, PAGE_BYTES):
        raise SystemExit("no transfer engine")
    page[:] = b"\x55" * PAGE_BYTES
    if verb == "scribble":
        from mooncake.store import MooncakeDistributedStore

        master, name, offset = words
        store = MooncakeDistributedStore()
        if store.setup(address, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
            raise SystemExit("no store")
        place = store.get_replica_desc(name)[0].get_memory_descriptor().buffer_descriptor
        there = place.buffer_address + int(offset)
        found: Any = engine.transfer_sync_write(place.transport_endpoint, here, there, 16)
    else:
        at, *endpoints = words
        found = {
            "read": sum(not engine.transfer_sync_read(each, here, int(at), PAGE_BYTES) for each in endpoints),
            "written": sum(not engine.transfer_sync_write(each, here, int(at), PAGE_BYTES) for each in endpoints),
        }
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
