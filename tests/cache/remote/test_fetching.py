"""Fetches that meet clears, deadlines, cancellations and one another: nothing wrong is served, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np
import pytest

from kvoffloadd.cache.clearing import clear_here
from kvoffloadd.cache.lower.fetches import Fetch, Urgency
from kvoffloadd.cache.memory.audit import check
from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.composition import Composition
from kvoffloadd.cache.memory.namespace import Keyspace
from kvoffloadd.cache.memory.reservation import reserve
from kvoffloadd.cache.remote.remotetier import RemoteTier
from kvoffloadd.cache.remote.request import RemoteKeys
from kvoffloadd.config import RemoteConfig
from kvoffloadd.errors import SchemaError
from kvoffloadd.model import PAGE_BYTES, GroupKind, GroupSchema, KeyState
from kvoffloadd.scheduling.lanes import Flow
from kvoffloadd.storage.hashing import hash_payloads
from kvoffloadd.storage.memory import MemoryTier
from kvoffloadd.storage.remote.questions import QUESTION_KEYS
from kvoffloadd.storage.remote.store import RemoteStore
from kvoffloadd.storage.remote.transfers import Names
from kvoffloadd.testing.wait import HANG_S

from ..clears import clear
from ..fakes import FirstInFirstOut, keys_of
from .fakeremote import Call, FakeRemote, names_of

NAME = b"n" * 16
SIZES = (PAGE_BYTES, PAGE_BYTES + 100)


def payloads_of(keyspace: Keyspace, number: int) -> list[bytes]:
    epoch = keyspace.namespace.epoch
    return [np.random.default_rng([number, part, epoch]).bytes(size) for part, size in enumerate(SIZES)]


def digests_of(payloads: list[bytes]) -> np.ndarray:
    arrays = [np.frombuffer(payload, np.uint8) for payload in payloads]
    addresses = np.array([array.ctypes.data for array in arrays], np.uint64)
    return hash_payloads(addresses, np.array([len(p) for p in payloads], np.int64))


class RemoteScene:
    """A cache with a remote tier over a store that the test steers."""

    def __init__(self, pages: int = 4096, **settings: Any) -> None:
        self.loop = asyncio.get_running_loop()
        memory = MemoryTier(pages * PAGE_BYTES, 64 * PAGE_BYTES)
        self.cache = Cache(memory, lambda capacity_rows, max_rows: FirstInFirstOut(), seed=7)
        self.arena = memory.pool.arena
        self.store = FakeRemote(self.arena, memory.address, digests_of, self.loop)
        chosen = {"push": "never", "min_keys": 1, "miss_ttl_s": 0.0, "era_poll_s": 0.001, "fetch_s": 3600.0}
        config = RemoteConfig(**{**chosen, "inflight_bytes": memory.capacity_bytes // 16, **settings})
        self.remote = RemoteTier(self.cache, cast(RemoteStore, self.store), config, self.loop, self._clear_here)
        self.tasks: list[asyncio.Task[None]] = []
        self.troubles: list[str] = []
        self.loop.set_exception_handler(lambda _, context: self.troubles.append(str(context)))

    async def _clear_here(self, name: bytes, epoch: int | None) -> None:
        await clear_here(self.cache, None, name, epoch)

    async def start(self) -> RemoteScene:
        namespace = self.cache.open_namespace(NAME, 0, "test", 32)
        keyspace = self.cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=len(SIZES)))
        self.cache.set_part_bytes(keyspace, dict(enumerate(SIZES)))
        self.remote.start(self._spawn)
        await self.era_is_known()
        return self

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self.tasks.append(task)
        return task

    async def era_is_known(self) -> None:
        async with asyncio.timeout(HANG_S):
            while self.remote._contents.place(self.keyspace) is None or self.keyspace.namespace.doubt:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert not self.troubles
        self.cache.tier.close()

    @property
    def keyspace(self) -> Keyspace:
        return self.cache.namespaces[NAME].keyspaces[0]

    # --- the store ---

    def offer(self, *numbers: int) -> None:
        """The store has these keys, in the present era."""
        place = self.remote._contents.place(self.keyspace)
        assert place is not None
        for number, name in zip(numbers, names_of(Names(place.space, keys_of(*numbers))), strict=True):
            self.store.objects[name] = payloads_of(self.keyspace, number)

    async def finish_all(self, rounds: int = 50) -> None:
        """Every call ends, and what follows from it."""
        for _ in range(rounds):
            while self.store.calls:
                self.store.finish(self.store.calls[0])
            await asyncio.sleep(0)

    async def turn(self, turns: int = 5) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    def gets(self) -> list[Call]:
        return [call for call in self.store.calls if call.touch.__name__ == "touch"]

    # --- the cache ---

    def request(self, *numbers: int, done: Callable[[], None] = lambda: None, urgent: int = Urgency.PIN) -> Fetch:
        keys = keys_of(*numbers)
        found = self.cache.find(self.keyspace, keys)
        (asked,) = self.remote.to_ask([(self.keyspace, 0, keys, found)])
        wanted = [RemoteKeys(self.keyspace, 0, keys, found.hits, asked)]
        return self.remote.fetching.request(wanted, urgent, done, whole=False)

    def store_here(self, *numbers: int) -> None:
        parts = np.arange(len(SIZES), dtype=np.uint16)
        made = reserve(self.cache, self.keyspace, keys_of(*numbers), parts, 0)
        for record, key, part in zip(made.parts.tolist(), made.keys.tolist(), made.columns.tolist(), strict=True):
            self.slot(record, SIZES[part])[:] = np.frombuffer(payloads_of(self.keyspace, numbers[key])[part], np.uint8)
        kept = self.cache.commit(made.parts)
        digests = hash_payloads(self.cache.entries.payload_addresses(kept), self.cache.entries.payload_bytes(kept))
        self.cache.seal(kept, self.cache.entries.parts.generation[kept], digests)

    def slot(self, record: int, size: int) -> np.ndarray:
        start = int(self.cache.entries.parts.page[record]) * PAGE_BYTES
        return self.arena[start : start + size]

    def served(self, *numbers: int) -> list[int]:
        """Keys that hit; each byte of them is right."""
        found = self.cache.find(self.keyspace, keys_of(*numbers))
        hits = [number for number, hit in zip(numbers, found.hits.tolist(), strict=True) if hit]
        for number, row in zip(hits, found.hit_rows.tolist(), strict=True):
            for part, payload in enumerate(payloads_of(self.keyspace, number)):
                record = int(self.cache.entries.first[row]) + part
                assert self.slot(record, SIZES[part]).tobytes() == payload, f"key {number} is wrong"
        return hits

    def states(self, *numbers: int) -> list[int]:
        found: list[int] = self.cache.find(self.keyspace, keys_of(*numbers)).states.tolist()
        return found

    def audit(self) -> None:
        assert check(self.cache, self.remote.holds, self.remote.reserved) == []
        assert not self.troubles


@pytest.fixture
async def scene() -> AsyncIterator[RemoteScene]:
    made = await RemoteScene().start()
    yield made
    await made.finish_all()
    made.audit()
    assert (made.remote.holds, made.remote.reserved, made.remote.fetching.quarantined_bytes) == (0, 0, 0)
    assert all(not window.used_bytes for window in made.remote.fetching._all_windows())
    await made.close()


async def test_two_requests_for_the_same_keys_are_one_get(scene: RemoteScene) -> None:
    scene.offer(*range(8))
    ended: list[str] = []
    scene.request(*range(8), done=lambda: ended.append("first"))
    await scene.turn()
    scene.store.finish(scene.store.calls[0])
    await scene.turn()
    (get,) = scene.gets()
    scene.request(*range(8), done=lambda: ended.append("second"))
    await scene.turn()
    assert scene.gets() == [get]
    scene.audit()
    await scene.finish_all()
    assert sorted(ended) == ["first", "second"]
    assert scene.served(*range(8)) == list(range(8))


async def test_a_key_of_which_ranks_have_stored_some_parts_is_not_asked_for(scene: RemoteScene) -> None:
    """It could not be fetched: its row is taken."""
    made = reserve(scene.cache, scene.keyspace, keys_of(1), np.zeros(1, np.uint16), 0)
    scene.cache.commit(made.parts)
    keys = keys_of(0, 1, 2)
    found = scene.cache.find(scene.keyspace, keys)
    assert found.states.tolist() == [KeyState.MISS] * 3
    (asked,) = scene.remote.to_ask([(scene.keyspace, 0, keys, found)])
    assert asked is not None
    assert asked.tolist() == [True, False, True]
    assert found.states.tolist() == [KeyState.PENDING, KeyState.MISS, KeyState.PENDING]


async def test_a_keyspace_that_was_cleared_has_no_names_in_the_era_after_it(scene: RemoteScene) -> None:
    old = scene.keyspace
    await clear(scene.cache, None, {NAME}, scene.remote)
    await scene.era_is_known()
    contents = scene.remote._contents
    assert contents.place(scene.keyspace) is not None
    assert contents.place(old) is None


async def test_each_question_is_a_short_turn_of_who_asks(scene: RemoteScene) -> None:
    """Also the one for the marker, behind what came."""
    scene.offer(*range(300))
    flow = Flow(1001, 7)
    keys = keys_of(*range(300))
    found = scene.cache.find(scene.keyspace, keys)
    (asked,) = scene.remote.to_ask([(scene.keyspace, 0, keys, found)])
    wanted = [RemoteKeys(scene.keyspace, 0, keys, found.hits, asked)]
    scene.remote.fetching.request(wanted, Urgency.LOAD, lambda: None, flow, whole=True)
    assert [keys for keys, _, _ in scene.store.asked] == [QUESTION_KEYS, QUESTION_KEYS, 300 - 2 * QUESTION_KEYS]
    await scene.finish_all()
    assert scene.served(*range(300)) == list(range(300))
    checks = [keys for keys, _, _ in scene.store.asked[3:]]
    assert checks
    assert set(checks) == {0}
    assert {(whose, urgent) for _, whose, urgent in scene.store.asked} == {(flow, Urgency.LOAD)}


async def test_who_joins_is_not_hurt_by_the_first_ones_deadline(scene: RemoteScene) -> None:
    scene.offer(*range(8))
    ended: list[str] = []
    first = scene.request(*range(8), done=lambda: ended.append("first"))
    await scene.turn()
    scene.store.finish(scene.store.calls[0])
    await scene.turn()
    scene.gets()[0].begun = True
    scene.request(*range(8), done=lambda: ended.append("second"))
    await scene.turn()
    scene.remote.fetching._expire(cast(Any, first))
    assert ended == ["first"]
    assert scene.remote.fetching.quarantined_bytes == 0
    await scene.finish_all()
    assert ended == ["first", "second"]
    assert scene.served(*range(8)) == list(range(8))


@pytest.mark.parametrize("begun", [False, True])
async def test_a_deadline_frees_what_can_be_freed(scene: RemoteScene, begun: bool) -> None:
    scene.offer(*range(8))
    ended: list[list[int]] = []
    fetch = scene.request(*range(8), done=lambda: ended.append(scene.states(*range(8))))
    await scene.turn()
    scene.store.finish(scene.store.calls[0])
    await scene.turn()
    (get,) = scene.gets()
    get.begun = begun
    scene.remote.fetching._expire(cast(Any, fetch))
    assert ended == [[KeyState.MISS] * 8]
    assert (scene.remote.fetching.quarantined_bytes > 0) == begun
    scene.audit()
    scene.store_here(*range(8))
    get.touch() if begun else None
    assert scene.served(*range(8)) == list(range(8)), "they lie elsewhere"
    await scene.finish_all()
    assert scene.served(*range(8)) == list(range(8))


async def test_a_question_that_is_never_answered_ends_with_its_request(scene: RemoteScene) -> None:
    scene.offer(*range(8))
    ended: list[list[int]] = []
    fetch = scene.request(*range(8), done=lambda: ended.append(scene.states(*range(8))))
    await scene.turn()
    (question,) = scene.store.calls
    scene.remote.fetching._expire(cast(Any, fetch))
    assert ended == [[KeyState.MISS] * 8]
    scene.store.finish(question)  # it comes after all
    await scene.turn()
    assert not scene.store.calls, "nothing is fetched for it"
    assert len(ended) == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_a_session_that_goes_leaves_nothing(scene: RemoteScene, begun: bool) -> None:
    scene.offer(*range(8))
    fetch = scene.request(*range(8), done=lambda: pytest.fail("nobody is there"))
    await scene.turn()
    scene.store.finish(scene.store.calls[0])
    await scene.turn()
    scene.gets()[0].begun = begun
    scene.remote.fetching.cancel(fetch)
    scene.audit()
    await scene.finish_all()
    assert scene.served(*range(8)) == (list(range(8)) if begun else [])


async def test_a_session_that_goes_before_the_answer(scene: RemoteScene) -> None:
    scene.offer(*range(8))
    fetch = scene.request(*range(8), done=lambda: pytest.fail("nobody is there"))
    scene.remote.fetching.cancel(fetch)
    await scene.finish_all()
    assert scene.served(*range(8)) == []


@pytest.mark.parametrize("when", ["asked", "under way", "come"])
async def test_a_clear_wins_at_any_step(scene: RemoteScene, when: str) -> None:
    scene.offer(*range(8))
    ended: list[list[int]] = []
    scene.request(*range(8), done=lambda: ended.append(scene.states(*range(8))))
    await scene.turn()
    if when != "asked":
        scene.store.finish(scene.store.calls[0])
        await scene.turn()
        scene.gets()[0].begun = True
    if when == "come":
        scene.store.finish(scene.gets()[0])
        await scene.turn()
    await clear(scene.cache, None, {NAME}, scene.remote)
    scene.audit()
    await scene.finish_all()
    assert ended == [[KeyState.MISS] * 8]
    assert scene.served(*range(8)) == []


@pytest.mark.parametrize("when", ["not asked", "asked", "under way"])
async def test_nothing_comes_while_a_root_tells_of_a_clear(scene: RemoteScene, when: str) -> None:
    """Memory is walked over before the epoch rises: what came behind the walk would be taken over into the new one."""
    scene.offer(*range(8))
    if when != "not asked":
        scene.request(*range(8))
        await scene.turn()
    if when == "under way":
        scene.store.finish(scene.store.calls[0])
        await scene.turn()
    epochs = scene.cache.epochs
    epochs.rising = epochs.merged(0, epochs.last + 5, {NAME: epochs.last + 5})
    scene.request(*range(8))
    await scene.finish_all()
    assert scene.served(*range(8)) == []
    epochs.rising = None


@pytest.mark.parametrize("when", ["asked", "come"])
async def test_without_the_marker_nothing_counts(scene: RemoteScene, when: str) -> None:
    scene.offer(*range(8))
    (marker,) = [name for name in scene.store.values if "/era/" in name]
    ended: list[list[int]] = []
    scene.request(*range(8), done=lambda: ended.append(scene.states(*range(8))))
    await scene.turn()
    if when == "come":
        scene.store.finish(scene.store.calls[0])
        await scene.turn()
        scene.store.finish(scene.gets()[0])
        await scene.turn()
    scene.store.values.pop(marker)
    await scene.finish_all()
    assert ended == [[KeyState.MISS] * 8]
    assert scene.remote.eras.lost_markers == 1


async def test_what_came_counts_only_in_the_era_in_which_it_was_asked_for(scene: RemoteScene) -> None:
    """The marker was there when the store looked, and here another question has found it gone since."""
    scene.offer(*range(8))
    ended: list[list[int]] = []
    scene.request(*range(8), done=lambda: ended.append(scene.states(*range(8))))
    await scene.turn()
    scene.store.finish(scene.store.calls[0])
    await scene.turn()
    scene.store.finish(scene.gets()[0])
    await scene.turn()
    (question,) = scene.store.calls
    place = scene.remote._contents.place(scene.keyspace)
    assert place is not None
    scene.remote.eras.lost(NAME, place.number)
    scene.store.finish(question)
    assert ended == [[KeyState.MISS] * 8]
    assert scene.remote.fetching.counters.not_fetched["cleared"] == 8
    await scene.era_is_known()


async def test_while_much_is_late_nothing_is_asked_for(scene: RemoteScene) -> None:
    """A store that hangs keeps a bounded part of memory."""
    contents = scene.remote._contents
    for start in range(0, 64, 4):
        numbers = range(start, start + 4)
        scene.offer(*numbers)
        if not scene.remote.fetching.is_worth_asking:
            break
        fetch = scene.request(*numbers)
        await scene.turn()
        for call in [call for call in scene.store.calls if call not in scene.gets()]:
            scene.store.finish(call)
        await scene.turn()
        for call in scene.gets():
            call.begun = True
        scene.remote.fetching._expire(cast(Any, fetch))
        scene.audit()
    assert not scene.remote.fetching.is_worth_asking
    assert scene.remote.fetching.quarantined_bytes <= contents.config.inflight_bytes
    keys = keys_of(*range(100, 108))
    found = scene.cache.find(scene.keyspace, keys)
    assert scene.remote.to_ask([(scene.keyspace, 0, keys, found)]) == [None]
    await scene.finish_all()
    assert scene.remote.fetching.is_worth_asking


async def test_another_composition_has_other_objects(scene: RemoteScene) -> None:
    """Also where nothing was known at first: what the store has then is not asked for any more."""
    scene.offer(1)
    scene.store_here(3)
    contents, rows = scene.remote._contents, scene.cache.find(scene.keyspace, keys_of(3)).hit_rows
    place = contents.place(scene.keyspace)
    assert place is not None
    contents.believe(scene.keyspace, rows, place)
    known = Composition("bfloat16", b"layers 0")
    scene.cache.set_part_bytes(scene.keyspace, dict(enumerate(SIZES)), dict.fromkeys(range(len(SIZES)), known))
    assert not contents.believed(rows, place).any(), "under its new name it is not there yet"
    scene.offer(2)
    scene.request(2, 1)
    await scene.finish_all()
    assert scene.served(2, 1) == [2]
    with pytest.raises(SchemaError):
        scene.cache.set_part_bytes(scene.keyspace, {0: SIZES[0]}, {0: Composition("float16")})


class FetchChaos:
    """Requests, deadlines, cancellations, stores, evictions, clears and lost markers in any order."""

    def __init__(self, scene: RemoteScene, rng: random.Random) -> None:
        self.scene, self.rng = scene, rng
        self.fetches: list[Fetch] = []
        self.begun = 0
        self.ended = 0
        steps = {
            self.ask: 20, self.finish: 30, self.touch: 10, self.expire: 6, self.cancel: 6, self.store_here: 8,
            self.evict: 5, self.clear: 3, self.lose: 2, self.offer: 10,
        }  # fmt: skip
        self.steps = [step for step, weight in steps.items() for _ in range(weight)]

    def some(self) -> range:
        first = self.rng.randrange(40)
        return range(first, first + self.rng.randrange(1, 16))

    def end(self) -> None:
        self.ended += 1

    async def ask(self) -> None:
        self.begun += 1
        urgent = self.rng.choice([Urgency.LOAD, Urgency.PIN, Urgency.PREFETCH])
        self.fetches.append(self.scene.request(*self.some(), done=self.end, urgent=urgent))

    async def finish(self) -> None:
        if self.scene.store.calls:
            self.scene.store.finish(self.rng.choice(self.scene.store.calls))

    async def touch(self) -> None:
        if self.scene.store.calls:
            call = self.rng.choice(self.scene.store.calls)
            call.begun = True
            call.touch()

    async def expire(self) -> None:
        if self.fetches:
            self.scene.remote.fetching._expire(cast(Any, self.rng.choice(self.fetches)))

    async def cancel(self) -> None:
        if self.fetches:
            fetch = self.rng.choice(self.fetches)
            self.begun -= not fetch.ended
            self.scene.remote.fetching.cancel(fetch)

    async def store_here(self) -> None:
        self.scene.store_here(*self.some())

    async def evict(self) -> None:
        cache = self.scene.cache
        rows = cache.find(self.scene.keyspace, keys_of(*self.some())).hit_rows
        cache.eviction.drop(rows[cache.entries.evictable(rows)])

    async def clear(self) -> None:
        await clear(self.scene.cache, None, {NAME}, self.scene.remote)

    async def lose(self) -> None:
        if markers := [name for name in self.scene.store.values if "/era/" in name]:
            self.scene.store.values.pop(self.rng.choice(markers))

    async def offer(self) -> None:
        if self.scene.remote._contents.place(self.scene.keyspace) is not None:
            self.scene.offer(*self.some())


@pytest.mark.parametrize("number", range(40))
async def test_whatever_comes_between(seed: int, number: int) -> None:
    rng = random.Random(seed + number)
    scene = await RemoteScene(rng.choice([512, 4096]), push=rng.choice(["never", "seal"])).start()
    chaos = FetchChaos(scene, rng)
    for _ in range(150):
        await rng.choice(chaos.steps)()
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        scene.audit()
        scene.served(*range(60))
    await scene.finish_all(200)
    assert all(fetch.ended for fetch in chaos.fetches)
    assert chaos.ended == chaos.begun
    scene.audit()
    assert (scene.remote.holds, scene.remote.reserved, scene.remote.fetching.quarantined_bytes) == (0, 0, 0)
    assert all(not window.used_bytes for window in scene.remote.fetching._all_windows())
    scene.served(*range(60))
    await scene.close()
