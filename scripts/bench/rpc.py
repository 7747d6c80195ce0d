"""Round trips to the daemon beside those of a bare msgpack echo server in asyncio, in one run on one machine.

Each round measures, one after the other, the echo, `ping` and `lookup` of 1, 64 and 512 keys, first with a blocking
socket and `Client`, then with asyncio and `AsyncClient`. `ratio_to_limit` is the median over the rounds of
(p50 of ping) / (p50 of the echo with the same kind of client); the budget is 2.

Then requests of an engine's scheduler, one after the other on one connection: `ping`, `lookup`, `pin` and `release` of
so many keys. `price` is the median over the rounds of each one's p50 by that of the pings between them.

Where the scheduler puts the processes decides more than their code: left alone, it runs some pairs on one CPU and
some on two, and changes its mind. So they are placed: `apart`, servers on another CPU than the client, as an engine
and the daemon are; `together`, all on one CPU, which counts nothing but the work; `free`, as the scheduler likes.

With `--beside TREE` no echo, but a daemon of another checkout (built there: its kvoffloadd/ has the C extensions), in
turn with this one's: how much longer this one takes. With this checkout itself: what the measurement is worth.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from kvoffloadd.client import AsyncClient, Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.model import U8Array
from kvoffloadd.trial.figures import median_ratio, p50, p99, print_grid
from kvoffloadd.trial.output import Live
from kvoffloadd.trial.process import end, module, private_folder, spawn, tail
from kvoffloadd.trial.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.program import benchmark_line, show_result

RATIO_MAX = 2.0
FEW_KEYS, PRICE_MAX, MANY_PRICE_MAX = 32, 1.6, 3.0
"""What a request of up to so many keys may cost, in pings, and one of more."""
PRICED = (1, 8, 32, 512)
BESIDE_RATIO_MAX = 1.02
TURN_CALLS = 10
KEY_COUNTS = (1, 64, 512)
PAGE_BYTES = 4096
NAMESPACE = NamespaceSpec(model="bench_rpc")
PREFIX = struct.Struct("<I")
START_S = 30.0

Samples = dict[str, list[list[float]]]
"""What was measured -> seconds of each round trip, by round."""
Prices = dict[str, dict[str, float]]
"""By number of keys, by kind of request: in pings."""


class EchoServer(asyncio.Protocol):
    """Unpacks each frame and packs its answer: the least that a daemon with msgpack must do."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= PREFIX.size:
            (size,) = PREFIX.unpack_from(self._buffer)
            if len(self._buffer) < PREFIX.size + size:
                return
            asked = msgpack.unpackb(self._buffer[PREFIX.size : PREFIX.size + size])
            self._buffer = self._buffer[PREFIX.size + size :]
            body = msgpack.packb({"type": "done", "seq": asked["seq"]})
            self._transport.write(PREFIX.pack(len(body)) + body)


async def serve_echo(path: str) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_unix_server(EchoServer, path)
    await server.serve_forever()


def request(seq: int) -> bytes:
    body: bytes = msgpack.packb({"type": "ping", "seq": seq})
    return PREFIX.pack(len(body)) + body


def answered(frame: bytes, seq: int) -> None:
    if msgpack.unpackb(frame[PREFIX.size :])["seq"] != seq:
        raise RuntimeError("the echo server answered something else")


class EchoClient:
    """A blocking socket."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._seq = 0

    def ping(self) -> None:
        self._seq += 1
        self._socket.sendall(request(self._seq))
        answered(self._socket.recv(65536), self._seq)

    def close(self) -> None:
        self._socket.close()


class AsyncEchoClient(asyncio.Protocol):
    """An asyncio protocol and a future."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[bytes] | None = None
        self._seq = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.set_result(data)

    async def ping(self) -> None:
        self._seq += 1
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request(self._seq))
        answered(await self._answer, self._seq)

    def close(self) -> None:
        self._transport.close()


def timed(call: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return seconds


async def timed_async(call: Callable[[], Awaitable[object]], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        await call()
        seconds.append(time.perf_counter() - begun)
    return seconds


@contextlib.contextmanager
def echo_server(path: Path) -> Iterator[None]:
    """It listens at `path` as long as the context lasts."""
    log = path.with_suffix(".log")
    child = spawn(module("scripts.bench.rpc", "--echo-server", str(path)), log)
    try:
        until(lambda: listens(path), "the echo server listens", START_S, every_s=0.02)
        yield
    except TimeoutError as error:
        raise SystemExit(f"{error}\n{tail(log)}") from None
    finally:
        end(child, signal.SIGTERM, START_S)


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def fill(client: Client, keys: U8Array) -> None:
    """Store all keys, so that lookups find them."""
    tensor = SharedTensor.allocate(len(keys), PAGE_BYTES)
    group = Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAGE_BYTES)])
    registration = client.register(KvCache([tensor], [group]))
    client.wait(client.store(registration, {0: (keys, np.arange(len(keys)))}), 30.0)
    client.drain(30.0)


def measure(paths: tuple[str, str], rounds: int, calls: int, live: Live) -> tuple[Samples, Prices]:
    """`paths`: of the daemon and of the echo server."""
    samples: Samples = {}
    requests: list[dict[str, dict[str, float]]] = []
    keys = np.random.default_rng(1).integers(0, 256, (max(KEY_COUNTS), NAMESPACE.key_bytes), dtype=np.uint8)
    with Client(paths[0], namespace=NAMESPACE) as client, contextlib.closing(EchoClient(paths[1])) as echo:
        fill(client, keys)
        hits = int(client.lookup({0: keys}).states[0].astype(bool).sum())
        if hits != len(keys):
            raise SystemExit(f"the daemon holds {hits} of {len(keys)} keys: is its memory too small?")
        with asyncio.Runner() as runner:
            for number in range(-1, rounds):
                kept: Samples = samples if number >= 0 else {}  # the first round warms up
                gc.collect()
                blocking: dict[str, Callable[[], object]] = {"echo": echo.ping, "ping": client.ping}
                blocking |= {f"lookup {n}": partial(client.lookup, {0: keys[:n]}) for n in KEY_COUNTS}
                for name, call in blocking.items():
                    kept.setdefault(f"blocking {name}", []).append(timed(call, calls))
                runner.run(measure_async(paths, keys, calls, kept))
                priced = measure_requests(client, keys, calls)
                if number >= 0:
                    requests.append(priced)
                live.show(number + 2, f"round {number + 1} of {rounds}")
    return samples, prices(requests)


async def measure_async(paths: tuple[str, str], keys: U8Array, calls: int, kept: Samples) -> None:
    loop = asyncio.get_running_loop()
    _transport, echo = await loop.create_unix_connection(AsyncEchoClient, paths[1])
    async with AsyncClient(paths[0], namespace=NAMESPACE) as client:
        called: dict[str, Callable[[], Awaitable[object]]] = {"echo": echo.ping, "ping": client.ping}
        called |= {f"lookup {n}": partial(client.lookup, {0: keys[:n]}) for n in KEY_COUNTS}
        for name, call in called.items():
            kept.setdefault(f"asyncio {name}", []).append(await timed_async(call, calls))
    echo.close()


def measure_requests(client: Client, keys: U8Array, calls: int) -> dict[str, dict[str, float]]:
    """By number of keys: p50 of each kind of request, in seconds."""
    found = {}
    for number in PRICED:
        groups, seconds = {0: keys[:number]}, dict[str, list[float]]()

        def note(what: str, call: Callable[[], Any], seconds: dict[str, list[float]] = seconds) -> Any:
            begun = time.perf_counter()
            answer = call()
            seconds.setdefault(what, []).append(time.perf_counter() - begun)
            return answer

        for _ in range(calls):
            note("ping", client.ping)
            note("lookup", partial(client.lookup, groups))
            note("release", partial(client.release, note("pin", partial(client.pin, groups)).lease))
        found[str(number)] = {what: p50(some) for what, some in seconds.items()}
    return found


def prices(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """By number of keys: each kind of request in pings."""
    return {
        number: {
            what: round(median_ratio([one[number][what] for one in rounds], [one[number]["ping"] for one in rounds]), 2)
            for what in ("lookup", "pin", "release")
        }
        for number in map(str, PRICED)
    }


def measure_beside(paths: tuple[str, str], rounds: int, calls: int, live: Live) -> Samples:
    """`paths`: of this checkout's daemon and of the other one's. Few calls at a time, in turn, so that what else the
    machine does hits both.
    """
    samples: Samples = {}
    keys = np.random.default_rng(1).integers(0, 256, (max(KEY_COUNTS), NAMESPACE.key_bytes), dtype=np.uint8)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(Client(path, namespace=NAMESPACE)) for path in paths]
        for client in clients:
            fill(client, keys)
        for number in range(-1, rounds):
            gc.collect()
            for name in ("ping", *(f"{verb} {n}" for verb in ("lookup", "pin") for n in KEY_COUNTS)):
                seconds: tuple[list[float], list[float]] = ([], [])
                for turn in range(calls // TURN_CALLS):
                    for which in (0, 1) if turn % 2 else (1, 0):
                        seconds[which].extend(timed(call_of(clients[which], name, keys), TURN_CALLS))
                for side, found in zip(("this", "other"), seconds, strict=True):
                    if number >= 0:  # the first round warms up
                        samples.setdefault(f"{side} {name}", []).append(found)
            live.show(number + 2, f"round {number + 1} of {rounds}")
    return samples


def call_of(client: Client, name: str, keys: U8Array) -> Callable[[], object]:
    """A pin is released again."""
    verb, _, count = name.partition(" ")
    if verb == "ping":
        return client.ping
    some = {0: keys[: int(count)]}
    return partial(client.lookup, some) if verb == "lookup" else lambda: client.release(client.pin(some).lease)


def beside_summary(samples: Samples) -> dict[str, Any]:
    """Medians over the rounds of the ratio of this checkout's p50 to the other one's."""
    rows = {}
    for name in [name.removeprefix("this ") for name in samples if name.startswith("this ")]:
        this, other = ([p50(one) for one in samples[f"{side} {name}"]] for side in ("this", "other"))
        rows[name] = {"p50_us": round(p50(this) * 1e6, 1), "ratio": round(median_ratio(this, other), 4)}
    worst = max(row["ratio"] for row in rows.values())
    return {"round_trips": rows, "worst_ratio": worst, "within_budget": worst <= BESIDE_RATIO_MAX}


def show_beside(result: dict[str, Any]) -> None:
    rows = [(name, f"{row['p50_us']:.1f}", f"{row['ratio']:.3f}") for name, row in result["round_trips"].items()]
    print_grid(f"beside {result['beside']}, processes {result['placement']}", ("call", "p50 us", "ratio"), rows)


def placed(placement: str) -> tuple[set[int], set[int]]:
    """CPUs of the client and of the servers."""
    cpus = os.sched_getaffinity(0)
    first, last = min(cpus), max(cpus)
    if placement == "apart" and first == last:
        raise SystemExit("there is one CPU only: use --placement together")
    return {"apart": ({first}, {last}), "together": ({first}, {first}), "free": (cpus, cpus)}[placement]


def summary(samples: Samples, price: Prices) -> dict[str, Any]:
    """Microseconds and ratios."""
    medians = {name: [p50(one) for one in rounds] for name, rounds in samples.items()}
    rows = {
        name: {
            "p50_us": round(p50(medians[name]) * 1e6, 1),
            "p99_us": round(p99([seconds for one in rounds for seconds in one]) * 1e6, 1),
        }
        for name, rounds in samples.items()
    }
    ratios = {
        kind: round(median_ratio(medians[f"{kind} ping"], medians[f"{kind} echo"]), 2)
        for kind in ("blocking", "asyncio")
    }
    return {
        "round_trips": rows,
        "ratio_to_limit": ratios,
        "ratio_max": RATIO_MAX,
        "price": price,
        "price_max": {number: PRICE_MAX if int(number) <= FEW_KEYS else MANY_PRICE_MAX for number in price},
        "within_budget": max(ratios.values()) <= RATIO_MAX and all(map(_is_cheap, price.items())),
    }


def _is_cheap(priced: tuple[str, dict[str, float]]) -> bool:
    number, some = priced
    return max(some.values()) <= (PRICE_MAX if int(number) <= FEW_KEYS else MANY_PRICE_MAX)


def show(result: dict[str, Any]) -> None:
    rows = []
    for name, row in result["round_trips"].items():
        kind, call = name.split(" ", 1)
        unit = " keys" if call.startswith("lookup") else ""
        rows.append((kind, call + unit, f"{row['p50_us']:.1f}", f"{row['p99_us']:.1f}"))
    print_grid(f"round trips, processes {result['placement']}", ("client", "call", "p50 us", "p99 us"), rows, texts=2)
    print_grid(
        "\nprice of a request, in pings",
        ("keys", "lookup", "pin", "release", "budget"),
        (
            (number, *(f"{some[what]:.2f}" for what in ("lookup", "pin", "release")), str(result["price_max"][number]))
            for number, some in result["price"].items()
        ),
    )
    for kind, ratio in result["ratio_to_limit"].items():
        print(f"ratio_to_limit, {kind}: {ratio:.2f} (budget {RATIO_MAX})")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    client_cpus, server_cpus = placed(arguments.placement)
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        os.sched_setaffinity(0, server_cpus)  # children inherit it
        folder = Path(stack.enter_context(private_folder()))
        echo, other = folder / "echo", folder / "other"
        socket_path, beside = arguments.socket, arguments.beside
        if beside is None:
            stack.enter_context(echo_server(echo))
        else:
            other.mkdir()
            tree = {"PYTHONPATH": str(beside.resolve())}
            program = ("-P", "-m", "kvoffloadd")
            rival = stack.enter_context(Daemon(other, arguments.memory, environment=tree, program=program))
        if socket_path is None:
            socket_path = str(stack.enter_context(Daemon(folder, arguments.memory)).socket)
        os.sched_setaffinity(0, client_cpus)
        live = stack.enter_context(Live("bench_rpc", arguments.rounds + 1))
        if beside is not None:
            compared = measure_beside((socket_path, str(rival.socket)), arguments.rounds, arguments.calls, live)
            return {"placement": arguments.placement, "beside": str(beside), **beside_summary(compared)}
        found = measure((socket_path, str(echo)), arguments.rounds, arguments.calls, live)
        return {"placement": arguments.placement, **summary(*found)}


def main() -> int:
    parser = benchmark_line(__doc__)
    parser.add_argument("--socket", help="measure the daemon that listens there, instead of one of its own")
    parser.add_argument("--memory", default="64MiB", help="memory of its own daemon (default: %(default)s)")
    parser.add_argument(
        "--placement", choices=("apart", "together", "free"), default="apart", help="see above (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--calls", type=int, default=200, help="calls of each kind in a round (default: %(default)s)")
    parser.add_argument("--beside", type=Path, metavar="TREE", help="another checkout, whose daemon runs in turn")
    parser.add_argument("--echo-server", metavar="PATH", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo_server is not None:
        asyncio.run(serve_echo(arguments.echo_server))
        return 0
    return show_result(run(arguments), arguments, show if arguments.beside is None else show_beside)


if __name__ == "__main__":
    sys.exit(main())
