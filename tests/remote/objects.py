"""Lays out objects of known bytes in an engine's memory: a header page and parts, each at a separate place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvoffloadd.agentwire.frames import HEADER_BYTES
from kvoffloadd.model import U8Array
from scripts.harness.enginehost import EngineHost, Wanted

KIB, MIB = 1 << 10, 1 << 20
GUARD_BYTES = 4096
GUARD = 0xA5


@dataclass(frozen=True, slots=True)
class Object:
    """`part_bytes`: of each part, behind the header page. Its bytes follow from `seed`."""

    name: str
    seed: int
    part_bytes: tuple[int, ...] = (64 * KIB,)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the sizes of all pieces."""
        return (HEADER_BYTES, *self.part_bytes)

    @property
    def size_bytes(self) -> int:
        """Returns the size of the object."""
        return sum(self.sizes)

    def bytes(self) -> U8Array:
        """All of it."""
        return np.random.default_rng([self.seed, self.size_bytes]).integers(0, 256, self.size_bytes, np.uint8)


class Places:
    """Pieces in an engine's memory, one behind the other from `at` on, with guards between them."""

    def __init__(self, engine: EngineHost, objects: list[Object], at: int = 0) -> None:
        self._memory = engine.memory
        self._objects = objects
        self.wanted: list[Wanted] = []
        begin = at
        for each in objects:
            pieces = []
            for size in each.sizes:
                pieces.append((at + GUARD_BYTES, size))
                at += GUARD_BYTES + size
            self.wanted.append((each.name, pieces))
        self.end = at + GUARD_BYTES
        self._begin = begin
        self.wipe()

    def wipe(self) -> None:
        """All of it, guards and pieces."""
        self._memory[self._begin : self.end] = GUARD

    def fill(self) -> None:
        """The objects' bytes."""
        for each, (_, pieces) in zip(self._objects, self.wanted, strict=True):
            content, at = each.bytes(), 0
            for offset, size in pieces:
                self._memory[offset : offset + size] = content[at : at + size]
                at += size

    def holds(self, number: int) -> bool:
        """Whether this object's bytes are there, all of them."""
        return bool(np.array_equal(self._content(number), self._objects[number].bytes()))

    def is_wiped(self, number: int) -> bool:
        """Whether nothing was written there."""
        return bool((self._content(number) == GUARD).all())

    def guards_stand(self) -> bool:
        """Whether nothing was written outside the pieces."""
        outside = np.ones(self.end - self._begin, bool)
        for _, pieces in self.wanted:
            for offset, size in pieces:
                outside[offset - self._begin : offset - self._begin + size] = False
        return bool((self._memory[self._begin : self.end][outside] == GUARD).all())

    def _content(self, number: int) -> U8Array:
        _, pieces = self.wanted[number]
        return np.concatenate([self._memory[offset : offset + size] for offset, size in pieces])


def put(engine: EngineHost, *objects: Object) -> list[int]:
    """Put them, all in one call."""
    places = Places(engine, list(objects))
    places.fill()
    return engine.put(places.wanted)


def get(engine: EngineHost, *objects: Object) -> tuple[list[int], Places]:
    """Get them into wiped memory, all in one call: codes, and where they are."""
    places = Places(engine, list(objects))
    return engine.get(places.wanted), places
