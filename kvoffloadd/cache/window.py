"""How many bytes of slots may be reserved at once for what one root is to read. Event loop only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Window(Generic[T]):
    """`used_bytes` are reserved; `waiting`: who found no room, in order."""

    limit_bytes: int
    used_bytes: int = 0
    waiting: deque[T] = field(default_factory=deque)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much may be reserved now. What is larger than the whole window goes alone."""
        return not self.used_bytes or self.used_bytes + num_bytes <= self.limit_bytes
