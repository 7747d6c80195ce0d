"""What Mooncake's answers mean, without Mooncake: codes, and when a failure is sure to be over."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.agent.engines import mooncake
from kvoffloadd.agent.engines.base import EngineError, Memory, ObjectTransfer, Region
from kvoffloadd.agent.engines.mooncake import MooncakeEngine
from kvoffloadd.agentwire.frames import Code, Presence
from kvoffloadd.testing.wait import until

SIZE = 8192
FOREVER_S = 60.0


class CodedStore:
    """Answers `codes` to every call with many names, which takes `seconds` of its clock; `sizes`: the master's
    answers about objects.
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


def _replica(size: int, place: str = "") -> Any:
    memory = SimpleNamespace(buffer_descriptor=SimpleNamespace(size=size, transport_endpoint=place))
    return SimpleNamespace(is_memory_replica=lambda: True, get_memory_descriptor=lambda: memory)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(store: CodedStore) -> MooncakeEngine:
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
    assert engine(CodedStore(list(CODES))).get(transfers(*names)) == list(CODES.values())


def test_a_failure_after_so_long_may_go_on(engine: Any) -> None:
    """Mooncake gives up after a minute, and its threads don't."""
    for seconds, code in ((29.0, Code.REFUSED), (31.0, Code.FAILED), (60.1, Code.FAILED)):
        assert engine(CodedStore([-800, -900, -704], seconds)).get(transfers("a", "b", "c")) == [code, code, Code.MISS]
        assert engine(CodedStore([-800, -900, -200], seconds)).put(transfers("a", "b", "c")) == [
            code,
            code,
            Code.NO_SPACE,
        ]


def test_over_rdma_no_failure_is_sure(engine: Any) -> None:
    made = engine(CodedStore([-800]))
    made._tcp = False
    assert made.get(transfers("a")) == made.put(transfers("a")) == [Code.FAILED]


def test_a_smaller_object_is_told_from_a_broken_link(engine: Any) -> None:
    store = CodedStore([-800, -800, -800], b=SIZE - 4096, c=SIZE)
    assert engine(store).get(transfers("a", "b", "c")) == [Code.REFUSED, Code.SIZE, Code.REFUSED]


def test_codes_of_puts(engine: Any) -> None:
    assert engine(CodedStore([0, -705, -200, -900])).put(transfers("a", "b", "c", "d")) == [
        SIZE,
        SIZE,
        Code.NO_SPACE,
        Code.REFUSED,
    ]


def test_presences_and_removals(engine: Any) -> None:
    assert engine(CodedStore([0, 1, -1, -900])).exists("abcd") == [
        Presence.NO,
        Presence.YES,
        Presence.UNKNOWN,
        Presence.UNKNOWN,
    ]
    assert engine(CodedStore([0, -704, -703, -900])).remove("abcd") == [1, 0, Code.NOT_COMPLETE, Code.REFUSED]


def test_a_name_twice_is_a_bug_of_ours(engine: Any) -> None:
    """Mooncake would fill one of the two places, and say that it filled both."""
    with pytest.raises(EngineError, match="twice"):
        engine(CodedStore([SIZE, SIZE])).get(transfers("a", "a"))


@pytest.mark.parametrize("prefix", ["", "kvo1/.*", "kvo1/(a)", "kvo1/ü", "a\nb"])
def test_only_plain_prefixes_are_swept(engine: Any, prefix: str) -> None:
    with pytest.raises(EngineError, match="is not a prefix"):
        engine(CodedStore([])).sweep(prefix, "")


# --- small objects ---


class SmallStore:
    """`values`: bytes, or a code, of each name, and the place that has it. Those in `hanging` places hang."""

    def __init__(self, **values: tuple[bytes | int, str]) -> None:
        self.values = values
        self.hanging: set[str] = set()
        self.go_on = threading.Event()
        self.asked: list[list[str]] = []
        self.away = False

    def batch_get_replica_desc(self, names: Sequence[str]) -> dict[str, list[Any]]:
        if self.away:
            return {}
        on_disk = SimpleNamespace(is_memory_replica=lambda: False)
        return {
            name: [on_disk, _replica(48, place)] if (place := self.values[name][1]) else [on_disk]
            for name in names
            if name in self.values
        }

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        return [-900 if self.away else int(name in self.values) for name in names]

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.asked.append(names)
        if self.hanging.intersection(self.values[name][1] for name in names):
            self.go_on.wait(FOREVER_S)
        codes = []
        for name, address, size in zip(names, addresses, sizes, strict=True):
            value = self.values[name][0]
            if isinstance(value, bytes):
                assert len(value) <= size
                ctypes.memmove(address, value, len(value))
            codes.append(value if isinstance(value, int) else len(value))
        return codes


def test_small_objects_are_asked_for_where_they_are() -> None:
    store = SmallStore(a=(b"1", "x"), b=(b"22", "y"), c=(b"3", "x"), d=(b"4", ""))
    assert MooncakeEngine(store).read(["a", "b", "none", "c", "d", "a"]) == [b"1", b"22", None, b"3", b"4", b"1"]
    assert sorted(map(sorted, store.asked)) == [["a", "c"], ["b"], ["d"]]
    many = SmallStore(**{f"k{number}": (b"%d" % number, "x") for number in range(200)})
    assert MooncakeEngine(many).read(list(many.values)) == [value for value, _ in many.values.values()]
    assert max(map(len, many.asked)) <= 64


def test_codes_of_small_objects_are_nothing_to_the_others() -> None:
    store = SmallStore(a=(b"1", "x"), gone=(-704, "x"), large=(-600, "x"), half=(-703, "x"), cut=(-800, "x"))
    found = MooncakeEngine(store).read(["large", "a", "gone", "half", "cut"])
    assert found == [Code.SIZE, b"1", None, Code.NOT_COMPLETE, Code.REFUSED]


def test_a_master_that_is_away_knows_nothing() -> None:
    """That it describes no object does not say that there is none."""
    store = SmallStore(a=(b"1", "x"))
    store.away = True
    assert MooncakeEngine(store).read(["a", "none"]) == [Code.FAILED, Code.FAILED]


def test_a_master_that_takes_long_is_not_asked_twice(engine: Any) -> None:
    """Each question would take as long, and together too long for the agent to live."""
    store = CodedStore([], 4.2)

    def describe(names: Sequence[str]) -> dict[str, list[Any]]:
        assert names == ["a", "b"]
        store.answer()
        return {}

    store.batch_get_replica_desc = describe  # type: ignore[method-assign]
    assert engine(store).read(["a", "b"]) == [Code.FAILED, Code.FAILED]
    assert store.now_s == 4.2


def test_a_store_that_hangs_holds_up_its_own_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_READ_S", 0.1)
    store = SmallStore(a=(b"1", "x"), bad=(b"2", "y"), worse=(b"3", "y"))
    store.hanging = {"y"}
    engine = MooncakeEngine(store)
    until(lambda: engine.read(["bad"]) == [Code.FAILED] and ["bad"] in store.asked, "it has begun to hang")
    monkeypatch.setattr(mooncake, "_READ_S", FOREVER_S)
    for _ in range(5):
        assert engine.read(["bad", "a", "worse"]) == [Code.FAILED, b"1", Code.FAILED]
    assert len(store.asked) == 6
    store.go_on.set()
    until(lambda: engine.read(["worse", "bad"]) == [b"3", b"2"], "it is asked again")


def test_memory_of_a_read_that_may_go_on_is_never_used_again(engine: Any) -> None:
    """Bytes that come late would be another object's."""
    for seconds, kept in ((0.1, True), (31.0, False)):
        store = CodedStore([-800], seconds)
        made = engine(store)
        places = []

        def get(names: Sequence[str], addresses: list[int], _: Any, store: CodedStore = store) -> list[int]:
            places.extend(addresses)  # noqa: B023
            return store.answer()

        store.batch_get_into = get  # type: ignore[attr-defined]
        made._read_batch(["a"])
        made._read_batch(["a"])
        assert (len(set(places)) == 1) is kept


class PinningStore:
    """A master that allows pins of up to `pin_ms_max` milliseconds, and Mooncake's module."""

    SoftPinAction = SimpleNamespace(ENABLE="enable")
    ReplicateConfig = SimpleNamespace

    def __init__(self, pin_ms_max: int) -> None:
        self.pin_ms_max = pin_ms_max
        self.written: list[tuple[str, dict[str, Any]]] = []

    def put_from(self, name: str, _: int, __: int, config: SimpleNamespace) -> int:
        if getattr(config, "soft_pin_ttl_ms", 0) > self.pin_ms_max:
            return -600
        self.written.append((name, vars(config)))
        return 0


def test_what_is_kept_is_pinned_for_that_long() -> None:
    store = PinningStore(31 * 86_400_000)
    engine = MooncakeEngine(store)
    engine._pins.begin(store, 3)
    assert engine.write("a", b"v", if_absent=True, kept_s=31 * 86400.0) == 1
    assert store.written == [("a", {"replica_num": 3, "soft_pin_action": "enable", "soft_pin_ttl_ms": 31 * 86_400_000})]


def test_what_a_master_does_not_pin_for_that_long_is_pinned_for_good() -> None:
    store = PinningStore(86_400_000)
    engine = MooncakeEngine(store)
    engine._pins.begin(store, 3)
    for name in "ab":
        assert engine.write(name, b"v", if_absent=True, kept_s=31 * 86400.0) == 1
    assert store.written == [(name, {"replica_num": 3, "with_hard_pin": True}) for name in "ab"]


def test_a_client_without_such_pins_pins_for_good() -> None:
    store = PinningStore(0)
    engine = MooncakeEngine(store)
    engine._pins.begin(SimpleNamespace(ReplicateConfig=SimpleNamespace), 2)
    assert engine.write("a", b"v", if_absent=True, kept_s=1.0) == 1
    assert store.written == [("a", {"replica_num": 2, "with_hard_pin": True})]


def test_a_write_that_is_invalid_otherwise_is_tried_no_more_than_twice() -> None:
    store = PinningStore(-1)
    engine = MooncakeEngine(store)
    engine._pins.begin(store, 3)
    engine._ordinary = SimpleNamespace()
    store.put_from = lambda *_: -600  # type: ignore[method-assign]
    assert engine.write("a", b"v", if_absent=True, kept_s=1.0) == Code.SIZE
    assert engine.write("a", b"v", if_absent=True, kept_s=None) == Code.SIZE


@pytest.mark.parametrize(("found", "code"), [(0, 0), (1, 1), (-900, Code.FAILED)])
def test_codes_of_renewals(engine: Any, found: int, code: int) -> None:
    assert engine(CodedStore([found])).renew(["a"], 60.0) == [code]


def test_what_is_missing_is_told_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake", None)
    monkeypatch.setattr(mooncake, "_check_master", lambda _: None)
    nowhere = Memory(Region(0, 0), Region(0, 0))
    with pytest.raises(EngineError, match=r"checkout.*\[remote-mooncake\].*libibverbs") as caught:
        MooncakeEngine().start({"host": "127.0.0.1", "master": "127.0.0.1:1"}, nowhere)
    assert caught.value.fault == "operator"
