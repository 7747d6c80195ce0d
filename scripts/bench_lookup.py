#!/usr/bin/env python3
"""Lookups while ever more keys are held, through the real socket, and what holding a key costs.

For each number of keys a daemon of its own is filled in its own process: its arena is a sparse memfd whose pages are
never touched, so that ten million keys need no 40 GiB. Then rounds of calls go to all the daemons in turn: `lookup` of
512 keys that were stored together (a prompt), that were not (scattered) and that are not held (missing), and `pin`
with `release` of a prompt. Growth is compared within each round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _bench import at_most, judged, median_ratio, p50, p99, print_bounds, print_grid
from _daemon import end, private_folder, rss_anon_bytes, spawn, tail
from _oracle import mixed
from _output import Live, print_json

from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvoffloadd.cache.cache import Cache
    from kvoffloadd.model import I64Array, U8Array

LEVELS = (10_000, 100_000, 1_000_000, 10_000_000)
KEYS = 512
CALLS = ("ping", "lookup prompt", "lookup scattered", "lookup missing", "pin, release")
P50_MS_MAX, GROWTH_MAX, KEY_BYTES_MAX = 0.5, 5.0, 100.0
NAMESPACE = NamespaceSpec(model="bench_lookup", key_bytes=32)
BLOCK_TOKENS = 16
SPARE_BYTES = 1 << 20
SLAB_BYTES = 64 << 20
FILL_S = 1800.0

Samples = dict[int, dict[str, list[list[float]]]]
"""Keys held -> call -> seconds of each call, by round."""


def keys_of(numbers: I64Array) -> U8Array:
    """u8 (n, 32): the keys of these numbers, as unlike each other as hashes."""
    words = numbers.astype(np.uint64)[:, None] * np.uint64(4) + np.arange(4, dtype=np.uint64)
    return np.ascontiguousarray(mixed(words)).view(np.uint8)


# --- the daemon's process ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Filled:
    """What filling took. A turn reserves and commits 512 keys: what one store request costs the event loop."""

    seconds: float
    turn_p50_ms: float
    turn_p99_ms: float
    turn_max_ms: float
    index_bytes: int
    rss_anon_bytes: int


def fill(cache: Cache, count: int) -> Filled:
    """Hold `count` keys without their bytes."""
    from kvoffloadd.server.session import fingerprint

    uid, spec = os.getuid(), NAMESPACE
    namespace = cache.open_namespace(fingerprint(spec, uid), uid, spec.model, spec.key_bytes)
    space = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, BLOCK_TOKENS))
    cache.learn_part(space, 0, PAGE_BYTES)
    part = np.zeros(1, np.uint16)
    before, seconds = rss_anon_bytes(os.getpid()), []
    for first in range(0, count, KEYS):
        keys = keys_of(np.arange(first, min(first + KEYS, count))).view(np.uint64)
        begun = time.perf_counter()
        parts = cache.reserve(space, keys, part, 0).parts
        cache.begin(parts)
        cache.commit(parts)
        seconds.append(time.perf_counter() - begun)
    if space.keys != count:
        raise SystemExit(f"{space.keys} of {count} keys are held")
    return Filled(
        seconds=sum(seconds),
        turn_p50_ms=p50(seconds) * 1e3,
        turn_p99_ms=p99(seconds) * 1e3,
        turn_max_ms=max(seconds) * 1e3,
        index_bytes=cache.entries.memory_bytes(),
        rss_anon_bytes=rss_anon_bytes(os.getpid()) - before,
    )


def serve(socket: str, count: int, policy: str) -> int:
    """A daemon that holds `count` keys from its start; prints a `Filled` as JSON when it does."""
    from kvoffloadd import config, daemon
    from kvoffloadd.device.faults import Faults
    from kvoffloadd.server.listener import bind
    from kvoffloadd.tiers.memory import MemoryTier

    class SparseTier(MemoryTier):
        """Its pages are left alone."""

        def prefault(self, threads: int) -> None:
            """Not here."""

    class FilledDaemon(daemon.Daemon):
        """Full before it serves."""

        def _start(self, loop: Any) -> Any:
            context = super()._start(loop)
            filled = fill(context.cache, count)
            sys.stdout.write(json.dumps(asdict(filled)) + "\n")
            sys.stdout.flush()
            return context

    vars(daemon)["MemoryTier"] = SparseTier
    sizes = {"capacity_bytes": str(count * PAGE_BYTES + SPARE_BYTES), "slab_bytes": str(SLAB_BYTES), "policy": policy}
    chosen = config.load(None, {"server.socket": socket} | {f"memory.{name}": value for name, value in sizes.items()})
    listener, lock = bind(chosen.server.socket, chosen.server.socket_mode)
    with contextlib.closing(os.fdopen(lock)):
        return daemon._runner(chosen.server.use_uvloop)(daemon.Daemon.serve(FilledDaemon(chosen, listener, Faults())))
