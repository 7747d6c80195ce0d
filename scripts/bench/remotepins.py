"""What the remote tier costs a pin when the store is gone: through the socket, against a daemon without the tier.

`open`: three daemons on one CPU, in turn: one without `[remote]`, twice, and one whose breaker is open, since its store
is dead. A pin of keys that no tier has would be a question to the store; one of keys that memory has would not. The
second daemon without `[remote]` shows how much two equal daemons differ here and now.

`death`: the store dies, or the link to it, while a worker pins keys that no tier has, one pin after the other, and
waits for each to be through. Seconds until the first pin that the store has no part in any more, and what those before
took.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ref, SharedTensor
from kvoffloadd.model import U8Array
from kvoffloadd.testing.figures import p50, print_grid
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from scripts.harness.lab import Host, Lab
from scripts.harness.stores import StoreProcess

PAGE_BYTES = 4096
MEMORY = "64MiB"
NAMESPACE = NamespaceSpec(model="bench_remote")
KEY_COUNTS = (64, 512)
TURN_CALLS = 10
PINS_BEFORE = 20
OPEN_MAX_US = 20.0
SURE_PINS = 20
"""This many undisturbed pins in a row are needed, and the first of them counts."""
KILLED, STOPPED, CUT = ENDS = ("killed", "stopped", "link cut")
STORES = ("first", "second", "open")


class PinningWorker:
    """A worker of one daemon, which has some keys in memory."""

    def __init__(self, daemon: Daemon, rng: np.random.Generator) -> None:
        self._rng = rng
        self.client = Client(daemon.socket, namespace=NAMESPACE)
        self.client.connect()
        self._tensor = SharedTensor.allocate(max(KEY_COUNTS), PAGE_BYTES)
        self._registration = self.client.register(
            KvCache([self._tensor], [Group(0, GroupKind.FULL, 16, refs=[Ref(0, 0, PAGE_BYTES)])])
        )
        self._kept = self.fresh(max(KEY_COUNTS))
        job = self.client.store(self._registration, {0: (self._kept, np.arange(len(self._kept)))})
        self.client.wait(job, HANG_S)
        self.client.drain(HANG_S)

    def fresh(self, count: int) -> U8Array:
        """Returns keys that no tier has."""
        return self._rng.integers(0, 256, (count, NAMESPACE.key_bytes), dtype=np.uint8)

    def pin_s(self, kind: str, count: int) -> float:
        """Returns the seconds of a pin of `count` keys that "hit" or "miss"; it is released."""
        keys = {0: self._kept[:count] if kind == "hit" else self.fresh(count)}
        began = time.perf_counter()
        found = self.client.pin(keys)
        seconds = time.perf_counter() - began
        if found.promoting:
            raise SystemExit("the store is asked, though its breaker is open")
        if found.lease:
            self.client.release(found.lease)
        return seconds

    def whole_pin(self, count: int) -> tuple[float, bool]:
        """Returns the seconds until a pin of absent keys is through, and whether the store had a part in it."""
        keys = {0: self.fresh(count)}
        began = time.perf_counter()
        found = self.client.pin(keys)
        took_part = bool(found.promoting)
        if took_part:
            found = self.client.wait_ready(found, HANG_S)
        seconds = time.perf_counter() - began
        if found.lease:
            self.client.release(found.lease)
        return seconds, took_part


@contextlib.contextmanager
def daemon_of(folder: Path, settings: dict[str, str]) -> Iterator[Daemon]:
    """Starts a daemon; without settings, it has no remote tier."""
    folder.mkdir()
    with Daemon(folder, MEMORY, settings) as daemon:
        yield daemon


def await_sharing(daemon: Daemon) -> None:
    """Waits until the store is asked for the keys of all namespaces that are open."""
    until(lambda: all((eras := daemon.status()["remote"]["eras"]).values()) and eras, "an era is known", every_s=0.02)


def settings_of(engine: str, engine_settings: dict[str, Any], host: Host, folder: Path) -> dict[str, str]:
    """Returns the settings of a daemon whose agent is on this host. Its deadlines are the defaults."""
    named = {f"{engine}.{name}": str(value) for name, value in engine_settings.items()}
    return {"log.level": "error", "remote.engine": engine, "remote.python": str(host.python(folder)), **named}


# --- an open breaker ---


def measure_open(
    settings: dict[str, str], store: StoreProcess, folder: Path, rounds: int, tell: Callable[[float, str], None]
) -> dict[str, Any]:
    """Kills the store, which the caller may start again."""
    rng = np.random.default_rng(1)
    with contextlib.ExitStack() as stack:
        cpus = os.sched_getaffinity(0)
        stack.callback(os.sched_setaffinity, 0, cpus)
        os.sched_setaffinity(0, {max(cpus)})  # children inherit it
        chosen: dict[str, dict[str, str]] = {name: {} for name in STORES} | {"open": settings}
        daemons = {name: stack.enter_context(daemon_of(folder / name, given)) for name, given in chosen.items()}
        os.sched_setaffinity(0, {min(cpus)})
        workers = {name: PinningWorker(daemon, rng) for name, daemon in daemons.items()}
        for worker in workers.values():
            stack.callback(worker.client.close, 1.0, force=True)
        await_sharing(daemons["open"])
        store.kill()
        until(partial(_has_opened, workers["open"], daemons["open"]), "the breaker opens", every_s=0.02)
        samples: dict[tuple[str, str, int], list[float]] = {}
        for number in range(-1, rounds):
            for kind in ("hit", "miss"):
                for count in KEY_COUNTS:
                    for turn in range(3):
                        for name in np.roll(STORES, turn).tolist():
                            # A breaker that is tried closes only if the store answers: it is dead.
                            found = [workers[name].pin_s(kind, count) for _ in range(TURN_CALLS)]
                            if number >= 0:
                                samples.setdefault((name, kind, count), []).append(p50(found))
            tell(number + 1, f"open breaker, round {number + 1} of {rounds}")
        store.start()
    rows = {}
    for kind in ("hit", "miss"):
        for count in KEY_COUNTS:
            first, second, opened = (np.array(samples[name, kind, count]) for name in STORES)
            rows[f"{kind} {count}"] = {
                "p50_us": round(p50(first.tolist()) * 1e6, 1),
                "added_us": round(float(np.median(opened - first)) * 1e6, 1),
                "noise_us": round(float(np.median(second - first)) * 1e6, 1),
                "ratio": round(float(np.median(opened / first)), 3),
            }
    worst = max(row["added_us"] - abs(row["noise_us"]) for row in rows.values())
    return {"pins": rows, "added_max_us": OPEN_MAX_US, "within_budget": worst <= OPEN_MAX_US}


def _has_opened(worker: PinningWorker, daemon: Daemon) -> bool:
    worker.whole_pin(KEY_COUNTS[0])
    return bool(daemon.status()["remote"]["lookups"]["breaker"] == "open")


# --- a death ---


def measure_death(settings: dict[str, str], strike: Callable[[], None], folder: Path) -> dict[str, Any]:
    """`strike()` makes the store's end, or the link's."""
    with daemon_of(folder, settings) as daemon:
        worker = PinningWorker(daemon, np.random.default_rng(2))
        try:
            await_sharing(daemon)
            before = [worker.whole_pin(KEY_COUNTS[0])[0] for _ in range(PINS_BEFORE)]
            strike()
            return _pins_after(worker) | {"before_p50_ms": round(p50(before) * 1e3, 2)}
        finally:
            worker.client.close(1.0, force=True)


def _pins_after(worker: PinningWorker) -> dict[str, Any]:
    began = time.perf_counter()
    disturbed: list[float] = []
    calm, calm_since_s = 0, 0.0
    while calm < SURE_PINS:
        at_s = time.perf_counter() - began
        seconds, took_part = worker.whole_pin(KEY_COUNTS[0])
        if took_part:
            disturbed.append(seconds)
            calm = 0
        else:
            calm_since_s = calm_since_s if calm else at_s
            calm += 1
        if at_s > HANG_S:
            raise SystemExit(f"pins are still disturbed after {at_s:.0f} s")
    return {
        "until_undisturbed_ms": round(calm_since_s * 1e3, 1),
        "disturbed_pins": len(disturbed),
        "disturbed_p50_ms": round(p50(disturbed) * 1e3, 2) if disturbed else 0.0,
        "disturbed_max_ms": round(max(disturbed, default=0.0) * 1e3, 2),
    }


def strike(what: str, first: StoreProcess, lab: Lab) -> None:
    """One of ENDS. `first`: what is asked which keys there are."""
    if what == KILLED:
        first.kill()
    elif what == STOPPED:
        first.pause()
    else:
        lab.cut(lab.hosts[0], first.host)


def show(engine: str, result: dict[str, Any]) -> None:
    """Two tables."""
    rows = [
        (name, *(f"{row[key]:,.1f}" for key in ("p50_us", "added_us", "noise_us")), f"{row['ratio']:.3f}")
        for name, row in result["open"]["pins"].items()
    ]
    headings = ("pin of keys", "p50 us", "added us", "two equal ones", "ratio")
    print_grid(f"{engine}: what an open breaker adds to a pin", headings, rows)
    named = ("until_undisturbed_ms", "disturbed_pins", "disturbed_p50_ms", "disturbed_max_ms")
    deaths = [(name, *(f"{row[key]:,}" for key in named)) for name, row in result["death"].items()]
    print_grid(f"{engine}: from its end on", ("", "ms until undisturbed", "pins before", "p50 ms", "max ms"), deaths)
