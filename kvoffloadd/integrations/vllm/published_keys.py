"""What was told of the daemon's keys to those who route requests, so that nothing is told twice, or wrongly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

TOLD_MAX = 1 << 20
"""Keys that are remembered, at some 120 bytes each. What comes beyond them is not told: a hit that nobody hopes for."""

EXPECTED_MAX = 1 << 16


class PublishedKeys:
    """By group. All that is told as stored is told as removed once, when it goes or can't be known any more.

    In generation 0 keys are told whoever stored them. Later ones are an engine's own: what else comes has been named by
    others, or before the engine's reset, and its name says nothing about what the engine could load.
    """

    def __init__(self, groups: Sequence[int]) -> None:
        self.generation = 0
        self._told: dict[int, set[bytes]] = {group: set() for group in groups}
        self._expected: dict[tuple[int, bytes], None] = {}
        self._room = TOLD_MAX

    @property
    def groups(self) -> Sequence[int]:
        """All that there are."""
        return tuple(self._told)

    def renew(self, generation: int) -> Iterator[tuple[int, list[bytes]]]:
        """The engine was reset. Everything that was told, to be told as removed."""
        yield from self.forget()
        self._expected.clear()
        self.generation = generation

    def expect(self, group: int, keys: Iterable[bytes]) -> None:
        """The engine stores these. A store that is dropped leaves them behind, so the oldest make room."""
        if self.generation:
            self._expected.update(dict.fromkeys((group, key) for key in keys))
            while len(self._expected) > EXPECTED_MAX:
                del self._expected[next(iter(self._expected))]

    def came(self, group: int, keys: Iterable[bytes]) -> list[bytes]:
        """Those to be told as stored."""
        told = self._told.get(group)
        if told is None:
            return []
        found = [key for key in keys if key not in told and self._is_ours(group, key)][: self._room]
        told.update(found)
        self._room -= len(found)
        return found

    def went(self, group: int, keys: Iterable[bytes]) -> list[bytes]:
        """Those to be told as removed."""
        told = self._told.get(group, set())
        found = [key for key in keys if key in told]
        told.difference_update(found)
        self._room += len(found)
        return found

    def told(self, group: int, keys: Iterable[bytes]) -> set[bytes]:
        """Those that were told as stored."""
        return self._told.get(group, set()).intersection(keys)

    def amiss(self, group: int, there: set[bytes]) -> list[bytes]:
        """As `went`, of all that is not `there`."""
        return self.went(group, self._told.get(group, set()) - there)

    def forget(self) -> Iterator[tuple[int, list[bytes]]]:
        """Everything that was told, to be told as removed, and as stored again where it turns out to be there."""
        for group, told in self._told.items():
            keys = self.went(group, list(told))
            self.expect(group, keys)
            yield group, keys

    def _is_ours(self, group: int, key: bytes) -> bool:
        return not self.generation or self._expected.pop((group, key), 0) is None
