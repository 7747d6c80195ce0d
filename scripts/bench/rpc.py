"""Round trips to the daemon against those of a bare msgpack echo server in asyncio, in one run on one machine.

Each round measures, one after the other, the echo, `ping` and `lookup` of 1, 64 and 512 keys, first with a blocking
socket and `Client`, then with asyncio and `AsyncClient`. `ratio_to_limit` is the median over the rounds of
(p50 of ping) / (p50 of the echo with the same kind of client); the budget is 2.

Then requests of an engine's scheduler, one after the other on one connection: `ping`, `lookup`, `pin` and `release` of
1 to 512 keys. `price` is the median over the rounds of each one's p50 by that of the pings between them.

Where the scheduler puts the processes decides more than their code: left alone, it runs some pairs on one CPU and
some on two, and changes its mind. So they are placed: `apart`, servers on another CPU than the client, as an engine
and the daemon are; `together`, all on one CPU, which counts nothing but the work; `free`, as the scheduler likes.

With `--beside TREE` no echo, but a daemon of another checkout (built there: its kvoffloadd/ has the C extensions), in
turn with this one's: how much longer this one takes, and how much more of a processor's time its daemon uses, which
depends less on what else the machine does. With this checkout itself: what the measurement is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.bench.echo import echo_process
from kvoffloadd.bench.requests import PLACEMENTS, placed, timed
from kvoffloadd.bench.rounds import Samples, in_rounds
from kvoffloadd.client import AsyncClient, Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.testing.figures import KEY_BYTES, keys_of, median_ratio, p50, p99, print_grid
from kvoffloadd.testing.output import ProgressBar
from kvoffloadd.testing.process import private_folder
from scripts.bench.echo import AsyncEchoClient, EchoClient
from scripts.harness.daemon import Daemon
from scripts.harness.program import benchmark_line, show_result

RATIO_MAX = 2.0
FEW_KEYS, PRICE_MAX, MANY_PRICE_MAX = 32, 1.6, 3.0
"""What a request of up to FEW_KEYS keys may cost, in pings, and one of more keys."""
PRICED, REQUESTS = (1, 8, 32, 512), ("lookup", "pin", "release")
BESIDE_RATIO_MAX = 1.02
SIDES = ("this", "other")
TURN_CALLS = 10
KEY_COUNTS = (1, 64, 512)
KEYS = keys_of(np.arange(max(KEY_COUNTS)))
PAGE_BYTES = 4096
NAMESPACE = NamespaceSpec(model="bench_rpc", key_bytes=KEY_BYTES)

RoundTrips = Samples[list[float]]
"""What was measured -> seconds of each round trip, by round."""


async def timed_async(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - begun)
    return seconds


def fill(client: Client) -> None:
    """Store all keys, so that lookups find them."""
    tensor = SharedTensor.allocate(len(KEYS), PAGE_BYTES)
    group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAGE_BYTES)])
    registration = client.register(KvCache([tensor], [group]))
    client.wait(client.store(registration, {0: (KEYS, np.arange(len(KEYS)))}), 30.0)
    client.drain(30.0)
    hits = int(client.lookup({0: KEYS}).states[0].astype(bool).sum())
    if hits != len(KEYS):
        raise SystemExit(f"the daemon holds {hits} of {len(KEYS)} keys: is its memory too small?")


def measure(paths: tuple[str, str], given: argparse.Namespace, live: ProgressBar) -> RoundTrips:
    """`paths`: of the daemon and of the echo server."""
    with (
        Client(paths[0], namespace=NAMESPACE) as client,
        contextlib.closing(EchoClient(paths[1])) as echo,
        asyncio.Runner() as runner,
    ):
        fill(client)
        blocking: dict[str, Callable[[], object]] = {"echo": echo.ping, "ping": client.ping}
        blocking |= {f"lookup {n}": partial(client.lookup, {0: KEYS[:n]}) for n in KEY_COUNTS}

        def measure_round() -> dict[str, list[float]]:
            gc.collect()
            found = {f"blocking {name}": timed(call, given.calls) for name, call in blocking.items()}
            found |= runner.run(measure_async(paths, given.calls))
            return found | measure_requests(client, given.calls)

        return in_rounds(given.rounds, measure_round, live.show)


async def measure_async(paths: tuple[str, str], calls: int) -> dict[str, list[float]]:
    loop = asyncio.get_running_loop()
    _transport, echo = await loop.create_unix_connection(AsyncEchoClient, paths[1])
    async with AsyncClient(paths[0], namespace=NAMESPACE) as client:
        called: dict[str, Callable[[], Awaitable[object]]] = {"echo": echo.ping, "ping": client.ping}
        called |= {f"lookup {n}": partial(client.lookup, {0: KEYS[:n]}) for n in KEY_COUNTS}
        found = {f"asyncio {name}": await timed_async(call, calls) for name, call in called.items()}
    echo.close()
    return found


def measure_requests(client: Client, calls: int) -> dict[str, list[float]]:
    """A scheduler's requests of each number of keys, and the pings between them."""
    found: dict[str, list[float]] = {}

    def note(what: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        answer = call()
        found.setdefault(what, []).append(time.perf_counter() - begun)
        return answer

    for number in PRICED:
        groups = {0: KEYS[:number]}
        for _ in range(calls):
            note(f"priced {number} ping", client.ping)
            note(f"priced {number} lookup", partial(client.lookup, groups))
            lease = note(f"priced {number} pin", partial(client.pin, groups)).lease
            note(f"priced {number} release", partial(client.release, lease))
    return found


def measure_beside(paths: tuple[str, str], given: argparse.Namespace, live: ProgressBar) -> RoundTrips:
    """`paths`: of this checkout's daemon and of the other one's. Few calls at a time, in turn, so that what else the
    machine does hits both.
    """
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(path, namespace=NAMESPACE)) for path in paths]
        for client in clients:
            fill(client)
        pids = [client.status()["pid"] for client in clients]

        def measure_round() -> dict[str, list[float]]:
            gc.collect()
            found: dict[str, list[float]] = {}
            for name in ("ping", *(f"{verb} {n}" for verb in ("lookup", "pin") for n in KEY_COUNTS)):
                used_s = [0.0, 0.0]
                for turn in range(given.calls // TURN_CALLS):
                    for which in (0, 1) if turn % 2 else (1, 0):
                        begun_s = cpu_s(pids[which])
                        seconds = timed(call_of(clients[which], name), TURN_CALLS)
                        used_s[which] += cpu_s(pids[which]) - begun_s
                        found.setdefault(f"{SIDES[which]} {name}", []).extend(seconds)
                for side, used in zip(SIDES, used_s, strict=True):
                    found[f"{side} cpu {name}"] = [used / given.calls]
            return found

        return in_rounds(given.rounds, measure_round, live.show)


def cpu_s(pid: int) -> float:
    """Returns the processor time that all threads of a process have used, also those that have ended: the clock of
    `clock_getcpuclockid`, see https://github.com/torvalds/linux/blob/master/include/linux/posix-timers.h.
    """
    return time.clock_gettime((~pid << 3) | 2)


def call_of(client: Client, name: str) -> Callable[[], object]:
    """A pin is released again."""
    verb, _, count = name.partition(" ")
    if verb == "ping":
        return client.ping
    keys = {0: KEYS[: int(count)]}
    return partial(client.lookup, keys) if verb == "lookup" else lambda: client.release(client.pin(keys).lease)


def medians_of(samples: RoundTrips) -> Samples[float]:
    """The p50 of each round."""
    return {name: [p50(one) for one in rounds] for name, rounds in samples.items()}


def beside_summary(samples: RoundTrips) -> dict[str, Any]:
    """Medians over the rounds of the ratio of this checkout's p50 to the other one's, and of their processor times."""
    medians = medians_of(samples)
    rows = {}
    for name in [name.removeprefix("this ") for name in samples if name.startswith("this ")]:
        if name.startswith("cpu "):
            continue
        (p50s, ratio), (cpu, cpu_ratio) = (compared(medians, what) for what in (name, f"cpu {name}"))
        rows[name] = {"p50_us": p50s, "ratio": ratio, "cpu_us": cpu, "cpu_ratio": cpu_ratio}
    worst, worst_cpu = (max(row[ratio] for row in rows.values()) for ratio in ("ratio", "cpu_ratio"))
    within_budget = worst_cpu <= BESIDE_RATIO_MAX
    return {"round_trips": rows, "worst_ratio": worst, "worst_cpu_ratio": worst_cpu, "within_budget": within_budget}


def compared(medians: Samples[float], name: str) -> tuple[float, float]:
    """Returns the microseconds of this checkout, and their ratio to the other one's."""
    this, other = (medians[f"{side} {name}"] for side in SIDES)
    return round(p50(this) * 1e6, 1), round(median_ratio(this, other), 4)


def show_beside(result: dict[str, Any]) -> None:
    heads = ("call", "p50 us", "ratio", "daemon's cpu us", "ratio")
    rows = [
        (name, f"{row['p50_us']:.1f}", f"{row['ratio']:.3f}", f"{row['cpu_us']:.1f}", f"{row['cpu_ratio']:.3f}")
        for name, row in result["round_trips"].items()
    ]
    print_grid(f"beside {result['beside']}, processes {result['placement']}", heads, rows)


def summary(samples: RoundTrips) -> dict[str, Any]:
    """Microseconds and ratios."""
    medians = medians_of(samples)
    rows = {
        name: {
            "p50_us": round(p50(medians[name]) * 1e6, 1),
            "p99_us": round(p99([seconds for one in rounds for seconds in one]) * 1e6, 1),
        }
        for name, rounds in samples.items()
        if not name.startswith("priced ")
    }
    ratios = {
        kind: round(median_ratio(medians[f"{kind} ping"], medians[f"{kind} echo"]), 2)
        for kind in ("blocking", "asyncio")
    }
    prices = {
        str(number): {
            what: round(median_ratio(medians[f"priced {number} {what}"], medians[f"priced {number} ping"]), 2)
            for what in REQUESTS
        }
        for number in PRICED
    }
    prices_max = {str(number): PRICE_MAX if number <= FEW_KEYS else MANY_PRICE_MAX for number in PRICED}
    are_cheap = all(max(by_request.values()) <= prices_max[number] for number, by_request in prices.items())
    return {
        "round_trips": rows,
        "ratio_to_limit": ratios,
        "ratio_max": RATIO_MAX,
        "price": prices,
        "price_max": prices_max,
        "within_budget": max(ratios.values()) <= RATIO_MAX and are_cheap,
    }


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, row in result["round_trips"].items():
        kind, call = name.split(" ", 1)
        unit = " keys" if call.startswith("lookup") else ""
        rows.append((kind, call + unit, f"{row['p50_us']:.1f}", f"{row['p99_us']:.1f}"))
    print_grid(f"round trips, processes {result['placement']}", ("client", "call", "p50 us", "p99 us"), rows, texts=2)
    print_grid(
        "\nprice of a request, in pings",
        ("keys", *REQUESTS, "budget"),
        (
            (number, *(f"{by_request[what]:.2f}" for what in REQUESTS), str(result["price_max"][number]))
            for number, by_request in result["price"].items()
        ),
    )
    for kind, ratio in result["ratio_to_limit"].items():
        print(f"ratio_to_limit, {kind}: {ratio:.2f} (budget {RATIO_MAX})")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.placement == "apart" and len(os.sched_getaffinity(0)) == 1:
        raise SystemExit("there is one CPU only: use --placement together")
    socket_path, beside = arguments.socket, arguments.beside
    with contextlib.ExitStack() as stack:
        place_client = stack.enter_context(placed(arguments.placement))
        folder = Path(stack.enter_context(private_folder()))
        if beside is None:
            other = stack.enter_context(echo_process("scripts.bench.echo", folder))
        else:
            (folder / "other").mkdir()
            tree = {"PYTHONPATH": str(beside.resolve())}
            program = ("-P", "-m", "kvoffloadd")
            rival = Daemon(folder / "other", arguments.memory, environment=tree, program=program)
            other = stack.enter_context(rival).socket
        if socket_path is None:
            socket_path = str(stack.enter_context(Daemon(folder, arguments.memory)).socket)
        place_client()
        live = stack.enter_context(ProgressBar("bench_rpc", 1))
        paths = socket_path, str(other)
        if beside is not None:
            found = {"beside": str(beside), **beside_summary(measure_beside(paths, arguments, live))}
        else:
            found = summary(measure(paths, arguments, live))
        return {"placement": arguments.placement, **found}


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--socket", help="measure the daemon that listens there, instead of starting one")
    parser.add_argument("--memory", default="64MiB", help="memory of the daemon that it starts (default: %(default)s)")
    parser.add_argument("--placement", choices=PLACEMENTS, default="apart", help="see above (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="calls of each kind in a round (default: %(default)s)")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another checkout, whose daemon runs in turn")
    arguments = parser.parse_args()
    return show_result(run(arguments), arguments, show if arguments.beside is None else show_beside)
