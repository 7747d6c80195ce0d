"""A vandal: writes what no daemon would into the shared store, and removes what daemons need.

It reaches the store as daemons do, through an engine of the agent's, and knows the names and the format of the small
objects that say which era counts. All that it may cause in a namespace are lost hits, clears and doubt.

It does not put back what daemons have removed, such as the marker of an era that is over: who can write to the store
can then give hosts without memory what was cleared, and could as well write keys.
"""

from __future__ import annotations

import logging
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from kvoffloadd.agentwire.frames import HEADER_BYTES
from kvoffloadd.agentwire.names import marker_name, pointer_name, successor_name
from kvoffloadd.cache.memory.epochs import unix_time_us
from kvoffloadd.cache.remote.era import COUNT_MAX, Era, decode_era, encode_era, new_era
from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.testing.process import DaemonError
from scripts.harness.enginehost import EngineHost
from scripts.harness.lab import Host
from scripts.soak.host import lives

GAP_S = 0.7
"""How long between two acts, on average."""
LASTS_S = (3.0, 25.0)
"""What daemons can't mend by themselves is undone after so long: some of it when doubt has begun, some before."""
CALL_S = 10.0
AGAIN_S = 5.0
FAILURES_MAX = 5
"""After this many acts that failed, one after the other, it takes another client."""
LARGE_BYTES = 96 << 10
LINKS = (20, 300)
FOLLOWED_MAX = 400
KEPT_S = 24 * 3600.0
log = logging.getLogger(__name__)

ENDED: Final = "ended by a bug"
"""What is counted when the vandal does nothing any more."""

DAY_US: Final = 24 * 3600 * 10**6
AHEAD_US: Final = 2 * 366 * DAY_US
"""More than any host believes."""


class Vandal:
    """Acts in its own thread, between `start` and `close`. `counts`: what it did. `names`: fingerprints of the
    namespaces that it does not spare. The thread that has started it calls `look` often.
    """

    def __init__(
        self, host: Host, engine: str, settings: Mapping[str, str], folder: Path, rng: np.random.Generator
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.names: Sequence[bytes] = ()
        self._host, self._engine, self._settings, self._folder = host, engine, dict(settings), folder
        self._rng = rng
        self._client: EngineHost | None = None
        self._again_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vandal", daemon=True)
        self._lasting: list[tuple[float, str]] = []
        self._acts: list[tuple[str, Callable[[bytes], None]]] = [
            ("damaged", self._damage),
            ("oversized", self._oversize),
            ("last numbers", self._last_numbers),
            ("far ahead", self._far_ahead),
            ("a later clear", self._later),
            ("chains", self._chain),
            ("removed", self._remove),
            *([("of another type", self._other_type)] if engine == "valkey" else []),
        ]

    def start(self) -> None:
        """Begin. Raises DaemonError: the store does not answer."""
        self._client = self._connected()
        self._thread.start()

    def look(self) -> None:
        """Give it another client if its own is of no use any more."""
        if self._client is None and time.monotonic() >= self._again_s:
            self._again_s = time.monotonic() + AGAIN_S
            try:
                self._client = self._connected()
            except DaemonError:
                return  # the store is away

    def close(self) -> None:
        """End; what it has left behind stays."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(2 * CALL_S)
        if self._client is not None:
            self._client.__exit__()
            self._client = None

    def _connected(self) -> EngineHost:
        client = EngineHost(self._host, self._engine, self._settings, self._folder)
        try:
            client.start()
        except BaseException:
            client.__exit__()
            raise
        return client

    # --- its thread ---

    def _run(self) -> None:
        try:
            self._go_on()
        except Exception:  # else its end would not be noticed
            log.exception("the vandal has ended")
            self.counts[ENDED] += 1

    def _go_on(self) -> None:
        failures = 0
        while not self._stop.wait(float(self._rng.exponential(GAP_S))):
            client = self._client
            if client is None or not self.names:
                continue
            try:
                self._undo_some()
                self._act()
                failures = 0
            except (DaemonError, OSError):  # the store is away, or its client has ended
                failures += 1
                self.counts["could not"] += 1
                if failures > FAILURES_MAX or not lives(client.pid):
                    failures, self._client = 0, None
                    client.__exit__()

    def _act(self) -> None:
        name = self.names[int(self._rng.integers(0, len(self.names)))]
        what, act = self._acts[int(self._rng.integers(0, len(self._acts)))]
        act(name)
        self.counts[what] += 1

    def _undo_some(self) -> None:
        now = time.monotonic()
        due = [name for at_s, name in self._lasting if at_s <= now]
        if due:
            self._call("remove", due)
            self._lasting = [one for one in self._lasting if one[0] > now]

    # --- acts ---

    def _damage(self, name: bytes) -> None:
        size = int(self._rng.choice([1, 31, 48, 49, 4096]))
        self._write(self._some_object(name), self._rng.bytes(size))

    def _oversize(self, name: bytes) -> None:
        """Larger than any small object, and not to be read as one."""
        place = self._some_object(name)
        self._call("remove", [place])
        self._call("put", [(place, [(0, HEADER_BYTES), (HEADER_BYTES, LARGE_BYTES)])])

    def _last_numbers(self, name: bytes) -> None:
        """Plants a number behind which there is no other."""
        generation, count = self._last(name).generation, b"\xff" * 8
        evil = [
            forged(name, generation, count),
            forged(name, EPOCH_MAX, count),
            forged(name, (1 << 62) - 1, bytes(8)),
            forged(name, (1 << 64) - 1, bytes(8)),
            encode_era(name, Era(generation, COUNT_MAX.to_bytes(4) + b"evil")),
        ]
        self._write(self._pointer_or_successor(name), evil[int(self._rng.integers(0, len(evil)))])

    def _far_ahead(self, name: bytes) -> None:
        place = self._pointer_or_successor(name)
        self._write(place, encode_era(name, new_era(Era(unix_time_us() + AHEAD_US, bytes(8)))))
        self._let_last(place)

    def _later(self, name: bytes) -> None:
        """Acts as if another host had cleared: now, or with a clock that is ahead."""
        ahead_us = int(self._rng.choice([0, 60 * 10**6, 300 * DAY_US], p=[0.8, 0.15, 0.05]))
        self._write(
            self._pointer_or_successor(name), encode_era(name, new_era(Era(unix_time_us() + ahead_us, bytes(8))))
        )

    def _chain(self, name: bytes) -> None:
        """Many eras, one after the other: of the same generation, or each of a later one."""
        era, later = self._last(name), bool(self._rng.integers(0, 2))
        for _ in range(int(self._rng.integers(*LINKS))):
            if self._stop.is_set() or (era.is_last and not later):
                return
            after = new_era(era.after(era.generation + int(later)))
            self._write(successor_name(name, era.generation, era.id), encode_era(name, after))
            era = after

    def _remove(self, name: bytes) -> None:
        """Pointer, markers and successors, some or all of them."""
        path = self._path(name)
        names = [pointer_name(name)]
        names += [marker_name(name, era.generation, era.id) for era in path]
        names += [successor_name(name, era.generation, era.id) for era in path]
        share = float(self._rng.choice([0.3, 1.0]))
        self._call("remove", [one for one in names if self._rng.random() < share] or names[:1])

    def _other_type(self, name: bytes) -> None:
        """A list, which is not to be read as a value. Valkey's alone, and by hand: the engine has no such command."""
        place, url = self._some_object(name), self._settings["url"]
        address, _, port = url.rpartition("/")[2].partition(":")
        words = f"DEL {place}\\r\\nRPUSH {place} x\\r\\n"
        script = f"exec 3<>/dev/tcp/{address}/{port}; printf '{words}' >&3; read -t 2 line <&3; read -t 2 line <&3"
        subprocess.run([*self._host.enter, "bash", "-c", script], capture_output=True, check=False, timeout=CALL_S)
        self._let_last(place)

    # --- small objects ---

    def _call(self, method: str, *arguments: object, **named: object) -> object:
        if self._client is None:
            raise DaemonError("it has no client")
        return self._client.begin(method, *arguments, **named).result(CALL_S)

    def _write(self, name: str, value: bytes) -> None:
        self._call("write", name, value, if_absent=False, kept_s=KEPT_S)

    def _let_last(self, place: str) -> None:
        self._lasting.append((time.monotonic() + float(self._rng.uniform(*LASTS_S)), place))

    def _path(self, name: bytes) -> list[Era]:
        """The eras that the store names, from the pointer on."""
        path: list[Era] = []
        place = pointer_name(name)
        while len(path) < FOLLOWED_MAX and (era := self._read(name, place)) is not None:
            path.append(era)
            place = successor_name(name, era.generation, era.id)
        return path

    def _read(self, name: bytes, place: str) -> Era | None:
        values = self._call("read", [place])
        value = values[0] if isinstance(values, list) else None
        return decode_era(name, value) if isinstance(value, bytes) else None

    def _last(self, name: bytes) -> Era:
        path = self._path(name)
        return path[-1] if path else new_era(Era(0, bytes(8)))

    def _pointer_or_successor(self, name: bytes) -> str:
        last = self._last(name)
        return str(self._rng.choice([pointer_name(name), successor_name(name, last.generation, last.id)]))

    def _some_object(self, name: bytes) -> str:
        last = self._last(name)
        marker = marker_name(name, last.generation, last.id)
        return str(self._rng.choice([self._pointer_or_successor(name), marker]))


def forged(fingerprint: bytes, generation: int, identity: bytes) -> bytes:
    """A small object that no daemon writes, with the right checksum."""
    fields = struct.pack("<8sQ8s", b"KVOERA1\n", generation, identity)
    return fields + xxhash.xxh3_128_digest(fingerprint + fields)
