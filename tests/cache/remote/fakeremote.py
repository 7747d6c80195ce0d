"""A store in this process whose calls end when a test ends them: the part of `RemoteStore` that the cache uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffloadd.agentwire.frames import Presence
from kvoffloadd.agentwire.names import key_names, marker_name
from kvoffloadd.model import U8Array, U64Array
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import DAEMON, Flow
from kvoffloadd.storage.remote.questions import Answered, ExistsResult
from kvoffloadd.storage.remote.store import RemoteState
from kvoffloadd.storage.remote.transfers import GetResult, Names, RemoteStatus
from kvoffloadd.storage.remote.values import NotRead


@dataclass(eq=False)
class Call:
    """Represents a call of any kind."""

    store: FakeRemote
    end: Callable[[], None]
    touch: Callable[[], None] = lambda: None  # what it may do to memory at any time
    begun: bool = False

    def cancel(self) -> bool:
        if self.begun or self not in self.store.calls:
            return False
        self.store.calls.remove(self)
        return True


@dataclass(eq=False)
class FakeRemote:
    """`objects`: payloads of each key's parts, by name. `arena`: the memory, which begins at `address`."""

    arena: np.ndarray
    address: int
    digests: Callable[[list[bytes]], np.ndarray]
    loop: asyncio.AbstractEventLoop
    objects: dict[str, list[bytes]] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    asked: list[tuple[int, Flow, int]] = field(default_factory=list)  # keys, flow and urgency of each question
    changes: Changes = field(default_factory=Changes)
    starts: int = 1
    reason: str = ""
    state: RemoteState = RemoteState.OK
    writable: bool = True
    put_status: RemoteStatus = RemoteStatus.OK

    def start(self) -> None:
        pass

    def can_read(self) -> bool:
        return True

    def can_write(self) -> bool:
        return self.writable

    def put_room_bytes(self) -> int:
        return 1 << 40

    def finish(self, call: Call) -> None:
        """This call ends now."""
        self.calls.remove(call)
        call.end()

    # --- as RemoteStore ---

    def exists(self, names: Names, until_s: float, done: Answered, flow: Flow = DAEMON, urgent: int = 0) -> None:
        self.asked.append((len(names.keys), flow, urgent))

        def end() -> None:
            space = names.space
            marker = marker_name(space.fingerprint, space.generation, space.era) in self.values
            found = [Presence.YES if name in self.objects else Presence.NO for name in names_of(names)]
            done(ExistsResult(Presence.YES if marker else Presence.NO, np.array(found, np.uint8)))

        self.calls.append(Call(self, end))

    def get(
        self,
        names: Names,
        addresses: U64Array,
        part_bytes: Sequence[int],
        until_s: float,
        done: Callable[[GetResult], None],
        flow: Flow = DAEMON,
        urgent: int = 0,
    ) -> Call:
        def places() -> list[np.ndarray]:
            return [
                self.arena[int(address) - self.address :][:size]
                for row in addresses.tolist()
                for address, size in zip(row, part_bytes, strict=True)
            ]

        def touch() -> None:
            for place in places():
                place[:] = 0x5A

        def end() -> None:
            touch()
            status = np.full(len(names.keys), RemoteStatus.MISS, np.uint8)
            digests = np.zeros((*addresses.shape, 2), np.uint64)
            where = iter(places())
            for number, name in enumerate(names_of(names)):
                slots = [next(where) for _ in part_bytes]
                if (payloads := self.objects.get(name)) is None:
                    continue
                for slot, payload in zip(slots, payloads, strict=True):
                    slot[:] = np.frombuffer(payload, np.uint8)
                status[number], digests[number] = RemoteStatus.OK, self.digests(payloads)
            done(GetResult(status, digests))

        call = Call(self, end, touch)
        self.calls.append(call)
        return call

    def put(
        self,
        names: Names,
        addresses: U64Array,
        part_bytes: Sequence[int],
        digests: U64Array,
        until_s: float,
        done: Callable[[U8Array], None],
    ) -> Call:
        def end() -> None:
            for number, name in enumerate(names_of(names)):
                payloads = [
                    self.arena[int(address) - self.address :][:size].tobytes()
                    for address, size in zip(addresses[number].tolist(), part_bytes, strict=True)
                ]
                assert (self.digests(payloads) == digests[number]).all()
                if self.put_status == RemoteStatus.OK:
                    self.objects.setdefault(name, payloads)
            done(np.full(len(names.keys), self.put_status, np.uint8))

        call = Call(self, end)
        self.calls.append(call)
        return call

    async def read_values(self, names: Sequence[str], until_s: float) -> list[bytes | NotRead | None]:
        await asyncio.sleep(0)
        return [self.values.get(name) for name in names]

    async def renew(self, names: Sequence[str], kept_s: float, until_s: float) -> list[bool]:
        await asyncio.sleep(0)
        return [name in self.values for name in names]

    async def write_value(
        self, name: str, value: bytes, until_s: float, *, if_absent: bool = False, kept_s: float | None = None
    ) -> None:
        await asyncio.sleep(0)
        if not (if_absent and name in self.values):
            self.values[name] = value

    async def remove(self, names: Sequence[str], until_s: float) -> None:
        await asyncio.sleep(0)
        for name in names:
            self.values.pop(name, None)

    async def sweep(self, prefix: str, until_s: float, after: str = "") -> tuple[int, str]:
        await asyncio.sleep(0)
        return 0, ""

    async def close(self, deadline_s: float) -> bool:
        return True

    def figures(self) -> dict[str, Any]:
        return {}

    def check(self) -> list[str]:
        return []


def names_of(names: Names) -> list[str]:
    """Returns the names of each key."""
    return key_names(names.space, np.ascontiguousarray(names.keys, "<u8").tobytes())
