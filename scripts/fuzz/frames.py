"""Frames for fuzzing: right ones of every type, and many ways to spoil them. Pure, but for the random generator."""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

PREFIX = struct.Struct("<I")
FRAME_BYTES_MAX = 4 << 20
KEY_BYTES = 32
BLOCKS = 64
PAGE_BYTES = 4096
MEMORY_BYTES = BLOCKS * PAGE_BYTES

Fields = dict[str, Any]

STRANGE: list[Any] = [
    0, 1, -1, 2, 16, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 48) - 1, (1 << 62) - 1,
    1 << 62, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1, True, False, None, 0.0, 1.0, -1.5, 1e-9, 86_400.0, 1e300,
    float("nan"), float("inf"), "", "x", "full", "worker", "x" * 513, b"", b"\0", b"\xff" * 16, bytes(32), bytes(4096),
    [], [0], [[]] * 9, {}, {"a": {}}, [{}], ["full"], msgpack.Timestamp(1), msgpack.ExtType(5, b"\0" * 9),
]  # fmt: skip
"""Values that some field somewhere may not expect."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What to send. `whole`: it is one frame by its length, so that it must be answered, or the session closed; else
    nothing can be expected but the end. `fds`: how many descriptors go with it.
    """

    data: bytes
    whole: bool
    fds: int = 0


def pack(fields: object) -> bytes:
    body: bytes = msgpack.packb(fields, use_bin_type=True)
    return body


def framed(body: bytes, fds: int = 0) -> Frame:
    """Puts the right length before the body. No bytes at all are no frame, but are answered just the same."""
    return Frame(PREFIX.pack(len(body)) + body, True, fds)


# --- right requests --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Names:
    """What a session has, so that right requests can name it. 0: nothing yet."""

    namespace: str
    allocation: int = 0
    registration: int = 0
    lease: int = 0
    job: int = 0


TOLD: Fields = {"dtype": "bfloat16", "layers": b"layers 0"}
"""All sessions describe a ref like this, or not at all: one that came first with another would shut the others out."""

GROUPS: list[Fields] = [
    {"group": 0, "kind": "full", "tokens_per_key": 16, "refs": [{"tensor": 0, "offset": 0, "length": 1000, **TOLD}]},
    {
        "group": 1,
        "kind": "sliding",
        "tokens_per_key": 32,
        "window_keys": 2,
        "blocks_per_key": 2,
        "refs": [{"tensor": 0, "offset": 1024, "length": 16, "count": 4, "stride": 32}],
    },
    {"group": 2, "kind": "mamba", "tokens_per_key": 64, "parts": 2, "part": 1},
]


class Requests:
    """Right requests of every type, with random contents, for a session with these names."""

    def __init__(self, rng: random.Random, names: Names) -> None:
        self._rng = rng
        self.names = names
        self._seq = 0
        self._make: dict[str, Callable[[], Fields]] = {
            "hello": self._hello,
            "ping": dict,
            "attach": lambda: {"kind": "shm", "fds": 1},
            "attach_ipc": lambda: {"device": self._device(), "handles": rng.randbytes(64 * rng.randrange(1, 3))},
            "attach_vmm": self._chunks,
            "detach": lambda: {"allocations": [names.allocation]},
            "register": self._register,
            "unregister": lambda: {"registration": names.registration},
            "lookup": self._keys,
            "pin": self._keys,
            "prefetch": self._keys,
            "touch": self._keys,
            "keep": lambda: {**self._keys(), "how": rng.choice(["soon", "drop"])},
            "retain": lambda: {
                **(self._keys() if rng.random() < 0.8 else {"groups": []}),
                **{"seconds": rng.choice([0.01, 5.0]), "priority": rng.choice([None, 0, 100]), "name": self._claim()},
            },
            "forget": lambda: {"name": self._claim() or "a"},
            "prefetch_claims": lambda: {"name": self._claim() or "a", "wait_s": rng.choice([0.01, 0.2]), "cursor": 0},
            "claims": lambda: {"cursor": rng.choice([0, 0, 7])},
            "release": lambda: {"lease": names.lease},
            "reserve": lambda: {**self._keys(), "parts": rng.choice([None, [0]])},
            "store": self._job,
            "load": lambda: {**self._job(), "expedited": rng.random() < 0.5},
            "cancel": lambda: {"job": names.job},
            "clear": lambda: rng.choice([{}, {"token": rng.randbytes(16), "wait_s": rng.choice([0.0, 0.1])}]),
            "delete": lambda: {**self._keys(), "wait_s": rng.choice([0.0, 0.1])},
            "drain": lambda: {"deadline_s": rng.choice([0.001, 0.1, 60.0])},
            "status": dict,
            "verify": lambda: {"payloads": rng.random() < 0.1},
            "subscribe": dict,
            "snapshot": lambda: {"group": rng.randrange(3), "cursor": rng.choice([0, 0, 65_536])},
            "bye": dict,
        }
        self.tags = list(self._make)

    def right(self, tag: str) -> tuple[Fields, int]:
        """A request of this type, and how many descriptors go with it."""
        self._seq += 1
        fields = {"type": tag, "seq": self._seq, **self._make[tag]()}
        return fields, int(fields.get("fds", 0))

    def _hello(self) -> Fields:
        return {
            "version": 1,
            "role": self._rng.choice(["worker", "worker", "scheduler", "observer"]),
            "instance": self._rng.randbytes(16),
            "namespace": {"model": self.names.namespace, "key_bytes": KEY_BYTES},
        }

    def _register(self) -> Fields:
        tensor = {"offset": 0, "num_blocks": BLOCKS, "page_bytes": PAGE_BYTES, "stride_bytes": PAGE_BYTES}
        signals = self._rng.choice([[], [self.names.allocation]])
        tensors = [{"allocation": self.names.allocation, **tensor}]
        return {"tensors": tensors, "groups": copy.deepcopy(GROUPS), "signals": signals}

    def _device(self) -> bytes:
        return self._rng.choice([bytes(16), self._rng.randbytes(16)])

    def _chunks(self) -> Fields:
        total = self._rng.choice([0, 1, 1 << 21, (1 << 48) - 1])
        extends = self._rng.choice([0, self.names.allocation])
        return {
            "device": self._device(),
            "fds": 1,
            "chunks": struct.pack("<Q", self._rng.choice([0, total, 1 << 21])),
            "total_bytes": total,
            "extends": extends,
        }

    def _packed(self, count: int) -> bytes:
        # Few different keys, so that some are there and some are not.
        return b"".join(self._rng.randrange(64).to_bytes(KEY_BYTES, "big") for _ in range(count))

    def _keys(self) -> Fields:
        groups = self._rng.sample([0, 1], self._rng.randrange(1, 3))
        return {"groups": [{"group": g, "keys": self._packed(self._rng.randrange(5))} for g in groups]}

    def _claim(self) -> str:
        """The name of a claim, or none."""
        return self._rng.choice(["", "a", "b", "c" * 128])

    def _job(self) -> Fields:
        self.names.job += 1
        groups = []
        for group in self._rng.sample([0, 1], self._rng.randrange(1, 3)):
            count = self._rng.randrange(1, 5)
            ids = self._rng.sample(range(BLOCKS), count * (1 + group))
            blocks = struct.pack(f"<{len(ids)}I", *ids)
            groups.append({"group": group, "keys": self._packed(count), "blocks": blocks})
        lease = self._rng.choice([0, 0, 0, self.names.lease])
        ready = self._rng.choice([None, None, {"signal": 0, "offset": 0, "value": 1}])
        job = {"job": self.names.job, "registration": self.names.registration, "groups": groups, "lease": lease}
        return {**job, "ready": ready, "deadline_s": self._rng.choice([0.01, 60.0])}


# --- ways to spoil them ------------------------------------------------------------------------------------------


class Spoiler:
    """Makes frames, most of them wrong in some way."""

    def __init__(self, rng: random.Random, requests: Requests) -> None:
        self._rng = rng
        self._requests = requests
        self._ways: list[tuple[int, Callable[[], Frame]]] = [
            # What ends the session is rarer, so that most sessions get somewhere.
            (36, self._right),
            (38, self._changed_fields),
            (9, self._flipped_bits),
            (4, self._truncated),
            (5, self._spliced),
            (2, self._noise),
            (4, self._descriptors),
            (2, self._broken_stream),
        ]

    def frame(self) -> Frame:
        """The next one."""
        weights = [weight for weight, _ in self._ways]
        ((_, way),) = self._rng.choices(self._ways, weights)
        return way()

    def _request(self) -> tuple[Fields, int]:
        # Bye and hello end what can be tried in a session: rarely.
        tags = self._requests.tags
        tag = self._rng.choice(tags)
        if tag in ("bye", "hello") and self._rng.random() < 0.8:
            tag = self._rng.choice(tags)
        return self._requests.right(tag)

    def _right(self) -> Frame:
        fields, fds = self._request()
        return framed(pack(fields), fds)

    def _changed_fields(self) -> Frame:
        fields, fds = self._request()
        for _ in range(self._rng.choice([1, 1, 1, 2, 5])):
            if fields:
                self._change(fields)
        try:
            body = pack(fields)
        except (OverflowError, ValueError):  # msgpack has no such integers, and no such depth
            return self._changed_fields()
        return framed(body, fds if self._rng.random() < 0.9 else 0)

    def _change(self, fields: Fields) -> None:
        place, name = self._rng.choice(list(_places(fields)))
        what = self._rng.randrange(10)
        if what == 0 and isinstance(place, dict):
            del place[name]
        elif what == 1 and isinstance(place, dict):
            place[self._rng.choice(["extra", "fds", "type", "x" * 200])] = self._rng.choice(STRANGE)
        elif what == 2 and isinstance(place[name], (bytes, str, list)):
            place[name] = place[name] * self._rng.choice([0, 2, 3, 1000])
        elif what == 3 and isinstance(place[name], (bytes, str, list)) and len(place[name]):
            place[name] = place[name][: self._rng.randrange(len(place[name]))]
        elif what == 4 and type(place[name]) is int:
            place[name] += self._rng.choice([-1, 1, 1 << 8, 1 << 31, -(1 << 31)])
        else:
            place[name] = copy.deepcopy(self._rng.choice(STRANGE))

    def _flipped_bits(self) -> Frame:
        fields, fds = self._request()
        body = bytearray(pack(fields))
        for _ in range(self._rng.choice([1, 1, 2, 8])):
            body[self._rng.randrange(len(body))] ^= 1 << self._rng.randrange(8)
        return framed(bytes(body), fds)

    def _truncated(self) -> Frame:
        fields, fds = self._request()
        body = pack(fields)
        return framed(body[: self._rng.randrange(len(body))], fds)

    def _spliced(self) -> Frame:
        (first, fds), (second, _) = self._request(), self._request()
        head, tail = pack(first), pack(second)
        return framed(head[: self._rng.randrange(len(head))] + tail[self._rng.randrange(len(tail)) :], fds)

    def _noise(self) -> Frame:
        return framed(self._rng.randbytes(self._rng.choice([1, 2, 10, 100, 5000])))

    def _descriptors(self) -> Frame:
        fields, _ = self._request()
        sent = self._rng.randrange(4)
        if self._rng.random() < 0.7:
            fields["fds"] = self._rng.choice([0, 1, 2, 3, 64, 65, sent])
        return framed(pack(fields), sent)

    def _broken_stream(self) -> Frame:
        """Lengths that are lies; nothing can be expected after them."""
        fields, fds = self._request()
        body = pack(fields)
        size = self._rng.choice([len(body) + 1, len(body) + 1000, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, (1 << 32) - 1])
        if self._rng.random() < 0.3:
            return Frame((PREFIX.pack(len(body)) + body)[: self._rng.randrange(len(body) + 4)], False, fds)
        return Frame(PREFIX.pack(size) + body, False, fds)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) in nested maps and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in list(items):
        yield value, name
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def truncations(requests: Requests) -> Iterator[Frame]:
    """Every beginning of a right frame of every type: as a frame of that length, and as a stream that ends there."""
    for tag in requests.tags:
        fields, fds = requests.right(tag)
        body = pack(fields)
        for size in range(len(body)):
            yield framed(body[:size], fds)
        data = PREFIX.pack(len(body)) + body
        for size in range(1, len(data)):
            yield Frame(data[:size], False, fds)
