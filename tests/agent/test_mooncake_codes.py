"""What Mooncake's answers mean, without Mooncake: codes, and when a failure is sure to be over."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.agent.engines import mooncake
from kvoffloadd.agent.engines.base import EngineError, Memory, ObjectTransfer, Region
from kvoffloadd.agent.engines.mooncake import MooncakeEngine
from kvoffloadd.agentframes import Code, Presence

SIZE = 8192


class Store:
    """Answers `codes` to every call with many names, which takes `seconds` of its clock; `sizes`: what the master says
    of objects.
    """

    def __init__(self, codes: Sequence[int], seconds: float = 0.1, **sizes: int) -> None:
        self.codes, self.seconds, self.sizes = list(codes), seconds, sizes
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def answer(self, *_: Any) -> list[int]:
        self.now_s += self.seconds
        return self.codes

    batch_is_exist = batch_get_into_multi_buffers = batch_put_from_multi_buffers = batch_remove = answer

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Any]]:
        return {name: [_replica(self.sizes[name])] for name in names if name in self.sizes}


def _replica(size: int) -> Any:
    memory = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=size))
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(store: Store) -> MooncakeEngine:
        monkeypatch.setattr(mooncake, "time", store)
        return MooncakeEngine(store)

    return make


def transfers(*names: str) -> list[ObjectTransfer]:
    return [ObjectTransfer(name, [(0, 4096), (4096, 4096)]) for name in names]


CODES = {
    SIZE: SIZE,
    SIZE - 1: Code.SIZE,
    0: Code.SIZE,
    -704: Code.MISS,
    -703: Code.NOT_COMPLETE,
    -707: Code.LEASE_OVER,
    -600: Code.SIZE,
    -801: SIZE,  # Mooncake's own checksum is wrong: ours will be, too
    -800: Code.REFUSED,
    -900: Code.REFUSED,
    -901: Code.REFUSED,
    -1: Code.REFUSED,
    -99999: Code.REFUSED,
}


def test_codes_of_gets(engine: Any) -> None:
    names = [f"k{number}" for number in range(len(CODES))]
    assert engine(Store(list(CODES))).get(transfers(*names)) == list(CODES.values())


def test_a_failure_after_so_long_may_go_on(engine: Any) -> None:
    """Mooncake gives up after a minute, and its threads don't."""
    for seconds, code in ((29.0, Code.REFUSED), (31.0, Code.FAILED), (60.1, Code.FAILED)):
        assert engine(Store([-800, -900, -704], seconds)).get(transfers("a", "b", "c")) == [code, code, Code.MISS]
        assert engine(Store([-800, -900, -200], seconds)).put(transfers("a", "b", "c")) == [code, code, Code.NO_SPACE]


def test_over_rdma_no_failure_is_sure(engine: Any) -> None:
    made = engine(Store([-800]))
    made._tcp = False
    assert made.get(transfers("a")) == made.put(transfers("a")) == [Code.FAILED]


def test_a_smaller_object_is_told_from_a_broken_link(engine: Any) -> None:
    store = Store([-800, -800, -800], b=SIZE - 4096, c=SIZE)
    assert engine(store).get(transfers("a", "b", "c")) == [Code.REFUSED, Code.SIZE, Code.REFUSED]


def test_codes_of_puts(engine: Any) -> None:
    assert engine(Store([0, -705, -200, -900])).put(transfers("a", "b", "c", "d")) == [
        SIZE,
        SIZE,
        Code.NO_SPACE,
        Code.REFUSED,
    ]


def test_presences_and_removals(engine: Any) -> None:
    assert engine(Store([0, 1, -1, -900])).exists("abcd") == [
        Presence.NO,
        Presence.YES,
        Presence.UNKNOWN,
        Presence.UNKNOWN,
    ]
    assert engine(Store([0, -704, -703, -900])).remove("abcd") == [1, 0, Code.NOT_COMPLETE, Code.REFUSED]


def test_a_name_twice_is_a_bug_of_ours(engine: Any) -> None:
    """Mooncake would fill one of the two places, and say that it filled both."""
    with pytest.raises(EngineError, match="twice"):
        engine(Store([SIZE, SIZE])).get(transfers("a", "a"))


@pytest.mark.parametrize("prefix", ["", "kvo1/.*", "kvo1/(a)", "kvo1/ü", "a\nb"])
def test_only_plain_prefixes_are_swept(engine: Any, prefix: str) -> None:
    with pytest.raises(EngineError, match="is not a prefix"):
        engine(Store([])).sweep(prefix, "")


def test_what_is_missing_is_told_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake", None)
    monkeypatch.setattr(mooncake, "_check_master", lambda _: None)
    nowhere = Memory(Region(0, 0), Region(0, 0))
    with pytest.raises(EngineError, match=r"checkout.*\[remote-mooncake\].*libibverbs") as caught:
        MooncakeEngine().start({"host": "127.0.0.1", "master": "127.0.0.1:1"}, nowhere)
    assert caught.value.fault == "operator"
