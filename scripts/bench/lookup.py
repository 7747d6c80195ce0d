"""Lookups while ever more keys are held, through the real socket, and what holding a key costs.

For each number of keys a separate daemon is filled in its own process: its arena is a sparse memfd whose pages are
never touched, so that ten million keys need no 40 GiB. Then rounds of calls go to all the daemons in turn: `lookup` of
512 keys that were stored together (a prompt), that were not (scattered) and that are not held (missing), and `pin`
with `release` of a prompt; and to a bare blocking server that takes and gives as many bytes as a lookup does, which is
what the machine's sockets and scheduler cost alone. Growth is compared within each round.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.bench.echo import bare_echo
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.client import Client, NamespaceSpec
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema
from kvoffloadd.testing.figures import KEY_BYTES, keys_of, median_ratio, p50, p99, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import end, module, private_folder, rss_anon_bytes, spawn, tail
from scripts.harness.figures import at_most, judged, print_bounds
from scripts.harness.program import benchmark_line, show_result

LEVELS = (10_000, 100_000, 1_000_000, 10_000_000)
KEYS = 512
CALLS = ("bare echo", "ping", "lookup prompt", "lookup scattered", "lookup missing", "pin, release")
P50_MS_MAX, GROWTH_MAX, PRIVATE_BYTES_MAX = 0.5, 5.0, 100.0
NAMESPACE = NamespaceSpec(model="bench_lookup", key_bytes=KEY_BYTES)
BLOCK_TOKENS = 16
REQUEST_BYTES, REPLY_BYTES = KEYS * KEY_BYTES + 64, KEYS * 5 + 64
"""Of a lookup: keys; states and boundaries; names of fields."""
SPARE_BYTES = 1 << 20
SLAB_BYTES = 64 << 20
START_S = 30.0

Samples = dict[int, dict[str, list[list[float]]]]
"""Keys held -> call -> seconds of each call, by round."""


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
    from kvoffloadd.server.session.session import fingerprint

    uid, spec = os.getuid(), NAMESPACE
    namespace = cache.open_namespace(fingerprint(spec, uid), uid, spec.model, spec.key_bytes)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, BLOCK_TOKENS))
    cache.set_part_bytes(keyspace, {0: PAGE_BYTES})
    part = np.zeros(1, np.uint16)
    before, seconds = rss_anon_bytes(os.getpid()), []
    for first in range(0, count, KEYS):
        keys = keys_of(np.arange(first, min(first + KEYS, count))).view(np.uint64)
        begun = time.perf_counter()
        parts = reserve(cache, keyspace, keys, part, 0).parts
        cache.commit(parts)
        seconds.append(time.perf_counter() - begun)
    if keyspace.keys != count:
        raise SystemExit(f"{keyspace.keys} of {count} keys are held")
    return Filled(
        seconds=sum(seconds),
        turn_p50_ms=p50(seconds) * 1e3,
        turn_p99_ms=p99(seconds) * 1e3,
        turn_max_ms=max(seconds) * 1e3,
        index_bytes=cache.entries.memory_bytes(),
        rss_anon_bytes=rss_anon_bytes(os.getpid()) - before,
    )


def serve(path: str, count: int, policy: str) -> int:
    """A daemon that holds `count` keys from its start; prints a `Filled` as JSON when it does."""
    from unittest import mock

    from kvoffloadd import config, daemon
    from kvoffloadd.cache.memory.cache import Cache
    from kvoffloadd.storage import pool
    from kvoffloadd.storage.memory import MemoryTier

    class SparseTier(MemoryTier):
        """Its pages are left alone."""

        def prefault(self, threads: int) -> None:
            """Not here."""

    class FilledCache(Cache):
        """Full before it is first asked."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            print(json.dumps(asdict(fill(self, count))), flush=True)

    sizes = {"capacity_bytes": str(count * PAGE_BYTES + SPARE_BYTES), "slab_bytes": str(SLAB_BYTES), "policy": policy}
    chosen = config.load(None, {"server.socket": path} | {f"memory.{name}": value for name, value in sizes.items()})
    with (
        mock.patch.multiple(daemon, MemoryTier=SparseTier, Cache=FilledCache),
        mock.patch.object(pool, "check_pool_fits", lambda _memory: None),
    ):
        return daemon.run(chosen)


# --- the measuring process -----------------------------------------------------------------------------


class Level:
    """A daemon that holds a number of keys, and a session with it."""

    def __init__(self, folder: Path, count: int, policy: str, echo: Callable[[], object]) -> None:
        self.count = count
        self._echo = echo
        self._socket = folder / f"{count}.sock"
        self._log = folder / f"{count}.log"
        options = ("--serve", str(self._socket), "--keys", str(count), "--policy", policy)
        self._child = spawn(module("scripts.bench.lookup", *options), self._log, stdout=subprocess.PIPE)
        self._client = Client(self._socket, namespace=NAMESPACE, deadline_s=30.0)
        self.filled: dict[str, Any] = {}

    def wait(self) -> None:
        """Waits until it is full and serves."""
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"the daemon with {self.count:,} keys did not start:\n{tail(self._log)}")
        self.filled = json.loads(line)
        self._client.connect()
        if not self._client.lookup({0: keys_of(np.arange(min(KEYS, self.count)))}).states[0].all():
            raise SystemExit(f"the daemon with {self.count:,} keys does not hold them")

    def close(self) -> None:
        self._client.close(force=True)
        end(self._child, signal.SIGTERM, START_S)

    def calls(self, rng: np.random.Generator) -> dict[str, Callable[[], object]]:
        """Returns the calls that are measured, each with its own keys."""
        client, count = self._client, self.count
        first = int(rng.integers(0, max(count // KEYS, 1))) * KEYS
        prompt = {0: keys_of(np.arange(first, min(first + KEYS, count)))}
        scattered = {0: keys_of(np.unique(rng.integers(0, count, KEYS)))}
        missing = {0: keys_of(rng.integers(count, 1 << 60, KEYS))}
        found = (
            self._echo,
            client.ping,
            lambda: client.lookup(prompt),
            lambda: client.lookup(scattered),
            lambda: client.lookup(missing),
            lambda: client.release(client.pin(prompt).lease),
        )
        return dict(zip(CALLS, found, strict=True))


def measure(levels: list[Level], rounds: int, calls: int, live: ProgressBar, done: int) -> Samples:
    """Rounds of calls to all levels in turn; the first round warms up."""
    samples: Samples = {level.count: {name: [] for name in CALLS} for level in levels}
    rng = np.random.default_rng(1)
    for number in range(-1, rounds):
        for level in levels:
            seconds: dict[str, list[float]] = {name: [] for name in CALLS}
            for _ in range(calls):
                for name, call in level.calls(rng).items():
                    begun = time.perf_counter()
                    call()
                    seconds[name].append(time.perf_counter() - begun)
            if number >= 0:
                for name in CALLS:
                    samples[level.count][name].append(seconds[name])
        live.show(done + (number + 1) / rounds, f"round {number + 1} of {rounds}")
    return samples


def summary(samples: Samples, filled: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Figures by level, and the bounds. `ratio_to_limit` is the growth from the fewest keys to the most."""
    fewest, most = min(samples), max(samples)
    levels: list[dict[str, Any]] = []
    for count, by_call in samples.items():
        figures = {}
        for name, rounds in by_call.items():
            growth = median_ratio([p50(one) for one in rounds], [p50(one) for one in samples[fewest][name]])
            every = [seconds for one in rounds for seconds in one]
            figures[name] = {
                "p50_us": round(p50(every) * 1e6, 1),
                "p99_us": round(p99(every) * 1e6, 1),
                "growth": round(growth, 2),
            }
        costs = {f"{name}_per_key": round(filled[count][f"{name}_bytes"] / count, 1) for name in ("index", "rss_anon")}
        levels.append({"keys": count, "calls": figures, "filling": filled[count], "bytes": costs})
    top = levels[-1]["calls"]
    lookups = ("lookup prompt", "lookup scattered")
    worst = {name: max(top[call][name] for call in lookups) for name in ("p50_us", "growth")}
    label = f"{KEYS} keys, {most:,} held"
    private = levels[-1]["bytes"]["rss_anon_per_key"]
    bounds = [
        at_most(f"lookup of {label}, p50 ms", worst["p50_us"] / 1e3, P50_MS_MAX),
        at_most(f"lookup of {label}, times {fewest:,} held", worst["growth"], GROWTH_MAX),
        at_most(f"private memory per key, {most:,} held, bytes", private, PRIVATE_BYTES_MAX),
    ]
    return judged({"levels": levels, "ratio_to_limit": worst["growth"], "ratio_max": GROWTH_MAX}, bounds)


def show(result: dict[str, Any]) -> None:
    print_grid(
        f"round trips with {KEYS} keys, through the socket",
        ("keys held", "call", "p50 us", "p99 us", "times fewest"),
        (
            (f"{level['keys']:,}", name, f"{call['p50_us']:,.0f}", f"{call['p99_us']:,.0f}", f"{call['growth']:.2f}")
            for level in result["levels"]
            for name, call in level["calls"].items()
        ),
        texts=2,
    )
    print_grid(
        f"\nfilling: one turn of the event loop takes in {KEYS} keys",
        ("keys held", "p50 ms", "p99 ms", "longest ms", "total s", "index B/key", "RssAnon B/key"),
        (
            (
                f"{level['keys']:,}",
                *(f"{level['filling'][name]:.2f}" for name in ("turn_p50_ms", "turn_p99_ms", "turn_max_ms")),
                f"{level['filling']['seconds']:.1f}",
                f"{level['bytes']['index_per_key']:.1f}",
                f"{level['bytes']['rss_anon_per_key']:.1f}",
            )
            for level in result["levels"]
        ),
    )
    print_bounds(result)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fill, then measure."""
    counts = [count for count in LEVELS if count < arguments.max_keys] + [arguments.max_keys]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(private_folder()))
        live = stack.enter_context(ProgressBar("bench_lookup", len(counts) + 1))
        echo = stack.enter_context(bare_echo(folder, REQUEST_BYTES, REPLY_BYTES))
        levels = []
        for number, count in enumerate(counts):
            live.show(number, f"filling {count:,} keys")
            level = Level(folder, count, arguments.policy, echo)
            stack.callback(level.close)
            level.wait()
            levels.append(level)
        samples = measure(levels, arguments.rounds, arguments.calls, live, len(counts))
        return summary(samples, {level.count: level.filled for level in levels})


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--max-keys", type=int, default=LEVELS[-1], help="keys held at most (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=50, help="calls of each kind in a round (default: %(default)s)")
    parser.add_argument("--policy", default="", help="eviction policy (default: the daemon's)")
    parser.add_argument("--serve", metavar="SOCKET", help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve, arguments.keys, arguments.policy)
    if min(arguments.max_keys, arguments.rounds, arguments.calls) < 1:
        parser.error("--max-keys, --rounds and --calls are at least 1")
    result = run(arguments)
    return show_result(result, arguments, show)


if __name__ == "__main__":
    sys.exit(main())
