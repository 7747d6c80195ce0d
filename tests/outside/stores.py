"""What a remote store and its agent say, and what is made of it. Each function takes one thing that is almost right."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import numpy as np
import xxhash

from kvoffloadd.agent.engines.base import Memory, Region
from kvoffloadd.agent.names import requested_names, transfers
from kvoffloadd.agentwire import frames as af
from kvoffloadd.agentwire.names import Space
from kvoffloadd.cache.remote.era import COUNT_MAX, Era, decode_era, encode_era, new_era
from kvoffloadd.errors import FramingError
from kvoffloadd.model import EPOCH_MAX
from kvoffloadd.storage.remote.calls import Calls, PendingCall
from kvoffloadd.storage.remote.header import HEADER, encode_headers, match_headers
from tests.cache.conftest import Open, open_tier  # noqa: F401  a fixture
from tests.cache.fakes import keys_of
from tests.outside.changes import EXTREMES, changed_bytes, changed_frame, changed_numbers, signed, spots_of

FINGERPRINT = b"n" * 16


def eras(rng: Random) -> None:
    era = Era(rng.choice([0, 1, 10**15, EPOCH_MAX]), rng.choice([0, 1, COUNT_MAX]).to_bytes(4) + rng.randbytes(4))
    raw = encode_era(FINGERPRINT, era)
    raw = changed_bytes(rng, raw) if rng.random() < 0.5 else changed_numbers(rng, raw, [(8, 8), (16, 4), (20, 4)])
    if rng.random() < 0.8:
        raw = raw[:32] + xxhash.xxh3_128_digest(FINGERPRINT + raw[:32])
    if (found := decode_era(FINGERPRINT, raw)) is None:
        return
    assert 0 <= found.generation <= EPOCH_MAX
    for epoch in {found.generation, min(found.generation + 1, EPOCH_MAX)}:
        if epoch > found.generation or not found.is_last:
            after = new_era(found.after(epoch))
            assert decode_era(FINGERPRINT, encode_era(FINGERPRINT, after)) == after > found


SPACE_OF = Space(FINGERPRINT, b"s" * 16, 1, b"e" * 8, 0, 32)


def headers(rng: Random) -> None:
    sizes, digests = np.array([8, 4096], np.uint64), np.ones((1, 2, 2), np.uint64)
    right = encode_headers(SPACE_OF, keys_of(1), sizes, digests, b"b" * 16, 1).tobytes()
    raw = changed_bytes(rng, right) if rng.random() < 0.5 else changed_numbers(rng, right, spots_of(HEADER))
    page = np.frombuffer(signed(raw), np.uint8).reshape(1, -1)
    valid, named = match_headers(page, SPACE_OF, keys_of(1), sizes)
    assert named.shape == (1, 2, 2)
    if valid[0]:
        assert page[0, :120].tobytes() == right[:120], "all that is asked for is as it was asked for"


REPLIES: list[af.FromAgent] = [
    af.Greeting(af.VERSION, 1), af.Started(True, "x"), af.Refused("store", "x"),
    af.Answer(1, struct.pack("<2q", 1, -1)), af.Answer(2, struct.pack("<3q", 0, 1, 2)),
    af.Values(3, [b"x", None, -1]), af.Swept(4, 7, "9"),
]  # fmt: skip


def frames_of_the_agent(rng: Random) -> None:
    """Takes the agent's frames as `AgentProcess` and `Calls` do."""
    frames, loop = af.Frames(by_agent=True), asyncio.new_event_loop()
    calls, ends = Calls(loop, lambda frame: None, lambda why: None, 60.0), list[Any]()
    calls.begin(stops_at_once=True)
    makes: list[tuple[int, Callable[[int], af.Call], Any]] = [
        (2, lambda number: af.Remove(number, ["a", "b"]), af.Answer),
        (3, lambda number: af.Exists(number, SPACE_OF, bytes(64)), af.Answer),
        (3, lambda number: af.Read(number, ["a", "b", "c"]), af.Values),
        (1, lambda number: af.Sweep(number, "p", ""), af.Swept),
    ]
    for items, make, kind in makes:
        until_s = time.monotonic() + 60.0
        call = PendingCall(calls.line(1), make, items, 1 << 40, until_s, ends.append, lambda: None, answered_by=kind)
        calls.submit(call)
    frames.receive(changed_frame(rng, af.encode(rng.choice(REPLIES))[4:], msgpack.packb))
    try:
        while (message := frames.next()) is not None:
            if isinstance(message, af.Answer | af.Values | af.Swept):
                calls.on_answer(message)
    except FramingError:
        pass
    for end in ends:
        codes = end if isinstance(end, np.ndarray) else np.array([getattr(end, "removed", 0)])
        assert ((codes >= af.CODE_MIN) & (codes <= 1 << 40)).all()
        assert not isinstance(end, af.Values) or 0 < len(end.values) <= 3
    assert calls.check() == []
    calls.finish()
    loop.close()


CALLS: list[Any] = [
    af.Start("memory", {"a": 1}, 0, 4096, 4096, 1, 1), af.Exists(1, SPACE_OF, bytes(64)),
    *(kind(1, SPACE_OF, bytes(32), bytes(8), bytes(8), struct.pack("<Q", 4096)) for kind in (af.Get, af.Put)),
    af.Read(1, ["a"]), af.Write(1, "a", b"v", True, 1.0), af.Renew(1, ["a"], 1.0), af.Remove(1, ["a"]),
    af.Sweep(1, "p", ""),
]  # fmt: skip


def frames_of_the_daemon(rng: Random) -> None:
    """Takes the daemon's frames as the agent does: they refer to nothing outside its memory."""
    frames, memory = af.Frames(by_agent=False), Memory(Region(1 << 20, 8192), Region(1 << 40, 8192))
    call = rng.choice(CALLS)
    if isinstance(call, af.Get | af.Put) and rng.random() < 0.7:
        sizes = [rng.choice([*EXTREMES, 4096, 8192]) for _ in range(2)]
        call = type(call)(1, SPACE_OF, bytes(32), *(struct.pack("<Q", size) for size in (0, *sizes)))
        frames.receive(af.encode(call))
    else:
        frames.receive(changed_frame(rng, af.encode(call)[4:], msgpack.packb))
    try:
        while (message := frames.next()) is not None:
            if isinstance(message, af.Exists):
                assert all(isinstance(name, str) for name in requested_names(message))
            if isinstance(message, af.Get | af.Put):
                for transfer in transfers(message, memory):
                    inside = [
                        any(
                            one.address <= at <= at + size <= one.address + one.size_bytes
                            for one in (memory.arena, memory.headers)
                        )
                        for at, size in transfer.pieces
                    ]
                    assert all(inside)
    except FramingError:
        pass
