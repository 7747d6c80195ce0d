"""Roots that come, at the start or later: one that hangs delays nothing else, and clears hold in whatever order its
steps and others' follow one another.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.cache.disk import rootlifecycle as arrivals_module
from kvoffloadd.cache.memory.epochs import unix_time_us
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.errors import NotDurableError
from kvoffloadd.scheduling.steps import in_turns
from kvoffloadd.storage.disk import manifest as manifest_module
from kvoffloadd.storage.disk import probe as probe_module
from kvoffloadd.storage.disk.health import RootState
from kvoffloadd.storage.disk.probe import NO_ANSWER

from .conftest import Open
from .disktier import HIT, MISS, PENDING, DiskGate, Shape, Tier

A, B = (bytes([n]) * 16 for n in (1, 2))
STEPS = ["enter", "manifest", "names"]

Hang = Callable[[Tier, str, Path], DiskGate]


@pytest.fixture
def hang() -> Hang:
    """`hang(tier, step, path)`: this root does not answer when it is taken, its manifest opened or its files listed."""
    return lambda tier, step, path: tier.files.hang(step, path)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "a", tmp_path / "b"]


async def one_on_each(open_tier: Open, paths: list[Path]) -> None:
    """Key 1 of A on the first root, key 2 on the second."""
    for number, path in enumerate(paths, 1):
        tier = await open_tier(paths=[path])
        await tier.store_away(tier.keyspace(A), number)
        await tier.close()


async def take_off(tier: Tier, *paths: Path) -> None:
    """Their directories are gone."""
    for path in paths:
        path.rename(path.with_suffix(".gone"))
    roots = [root for root in tier.roots if root.path in paths]
    await tier.until(lambda: all(root.state == RootState.OFF and not root.accepted for root in roots))


# --- a root that hangs ---


@pytest.mark.parametrize("step", STEPS)
async def test_a_root_that_hangs_as_it_comes_back_keeps_no_other_from_coming(
    open_tier: Open, paths: list[Path], hang: Hang, step: str
) -> None:
    await one_on_each(open_tier, paths)
    tier = await open_tier(paths=paths)
    keyspace = tier.keyspace(A)
    await take_off(tier, *paths)
    assert tier.states(keyspace, 1, 2) == [MISS, MISS]
    gate = hang(tier, step, paths[0])
    paths[0].with_suffix(".gone").rename(paths[0])
    await tier.until(gate.entered.is_set)
    paths[1].with_suffix(".gone").rename(paths[1])
    await tier.until(lambda: tier.roots[1].state == RootState.OK)
    assert await tier.fetch(keyspace, 1, 2) == [2]
    assert tier.roots[0].state == RootState.OFF
    gate.open()
    await tier.until(lambda: tier.roots[0].state == RootState.OK)
    assert await tier.fetch(keyspace, 1, 2) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
async def test_a_start_goes_on_without_a_root_that_hangs(
    open_tier: Open, paths: list[Path], hang: Hang, step: str
) -> None:
    """It comes in when its I/O ends, and clears meanwhile hold for it."""
    await one_on_each(open_tier, paths)
    gates = []
    tier = await open_tier(
        Shape(stuck_s=2.0), paths=paths, before=lambda tier: gates.append(hang(tier, step, paths[0]))
    )
    assert [(root.state, root.health.reason) for root in tier.roots] == [(RootState.OFF, NO_ANSWER), (RootState.OK, "")]
    keyspace, other = tier.keyspace(A), tier.keyspace(B)
    assert await tier.fetch(keyspace, 1, 2) == [2]
    tier.store(other, 3)
    await tier.quiet()
    assert tier.on_disk(other, 3) == [3]
    await take_off(tier, paths[1])
    paths[1].with_suffix(".gone").rename(paths[1])
    await tier.until(lambda: tier.roots[1].state == RootState.OK)
    assert tier.states(keyspace, 1, 2) == [MISS, HIT]
    if step == "enter":  # of the others the manifest may be written already
        with pytest.raises(NotDurableError):
            await tier.clear(keyspace.namespace)
        assert tier.states(tier.keyspace(A), 1, 2) == [MISS, MISS]
    gates[0].open()
    await tier.until(lambda: tier.roots[0].state == RootState.OK)
    assert tier.states(tier.keyspace(A), 1, 2) == ([MISS, MISS] if step == "enter" else [PENDING, HIT])


@pytest.mark.slow
async def test_several_roots_that_hang_cost_one_wait(open_tier: Open, tmp_path: Path, hang: Hang) -> None:
    """Their directories are taken at the same time: each is at its gate before the first is given up."""
    paths = [tmp_path / f"root{n}" for n in range(4)]
    seen: list[list[bool]] = []
    gates: list[DiskGate] = []

    def before(tier: Tier) -> None:
        gates.extend(hang(tier, "enter", path) for path in paths[:3])
        become = tier.roots[0].health.become

        def note(state: str, reason: str = "") -> None:
            seen.append([gate.entered.is_set() for gate in gates])
            become(state, reason)

        tier.roots[0].health.become = note  # type: ignore[method-assign]

    tier = await open_tier(Shape(stuck_s=2.0), paths=paths, before=before)
    assert [root.state for root in tier.roots] == [RootState.OFF, RootState.OFF, RootState.OFF, RootState.OK]
    assert seen[0] == [True, True, True]


async def test_a_manifest_that_hangs_keeps_no_thread_of_the_loop(
    open_tier: Open, paths: list[Path], hang: Hang
) -> None:
    await one_on_each(open_tier, paths)
    tier = await open_tier(paths=paths)
    await take_off(tier, *paths)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    gate = hang(tier, "manifest", paths[0])
    for path in paths:
        path.with_suffix(".gone").rename(path)
    await tier.until(gate.entered.is_set)
    await tier.until(lambda: tier.roots[1].state == RootState.OK)
    assert await tier.fetch(tier.keyspace(A), 2) == [2]
    gate.open()
    await tier.until(lambda: tier.roots[0].state == RootState.OK)


async def test_clears_do_not_pile_up_behind_a_manifest_that_hangs(
    open_tier: Open, paths: list[Path], hang: Hang
) -> None:
    tier = await open_tier(paths=[paths[0]], retry_s=3600.0)  # the tier itself knows of no clear
    directory, gate = tier.root.directory, hang(tier, "manifest", paths[0])
    assert directory.manifest is not None
    notes = []
    for number in range(1, 50):
        notes.append(asyncio.ensure_future(directory.write_epochs(number, number, {})))
        await asyncio.sleep(0)
    await tier.until(gate.entered.is_set)
    assert len(directory._writes) <= 2
    gate.open()
    await asyncio.gather(*notes)
    assert directory.manifest.base_epoch == 49, "and the last one knows all"


async def test_an_orderly_end_lets_a_clear_be_noted(open_tier: Open, paths: list[Path], hang: Hang) -> None:
    tier = await open_tier(paths=[paths[0]], retry_s=3600.0)
    gate = hang(tier, "manifest", paths[0])
    noted = asyncio.ensure_future(tier.root.directory.write_epochs(5, 5, {}))
    await tier.until(gate.entered.is_set)
    closed = asyncio.ensure_future(tier.close())
    await asyncio.sleep(0.01)
    gate.open()
    await closed
    await noted
    found = await manifest_module.read_manifest(paths[0])
    assert found is not None
    assert found.base_epoch == 5


# --- a root that is slow ---


def test_a_root_is_given_up_only_if_none_of_its_calls_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long one of them takes, and however long all together."""
    now = [1000.0]
    monkeypatch.setattr(probe_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def lane(*running: float) -> Any:
        return SimpleNamespace(
            loop=None,
            running=len(running),
            oldest_running_s=lambda at: max((at - began for began in running), default=0.0),
            newest_running_s=lambda at: min((at - began for began in running), default=0.0),
        )

    def probe(last_progress_s: float, *lanes: Any) -> probe_module.Probe:
        directory: Any = SimpleNamespace(lane=lane(), last_progress_s=last_progress_s)
        pool: Any = None
        health: Any = None
        return probe_module.Probe(directory, pool, health, lanes, 5.0, 10.0)

    def stands_still(one: probe_module.Probe) -> list[bool]:
        now[0] = 1000.0
        found = one.stands_still()
        for _ in range(2 * probe_module.LOOKS):
            now[0] += 10.0 / probe_module.LOOKS
            still = one.stands_still()
        return [found, still]

    assert stands_still(probe(0.0, lane(), lane())) == [False, False], "nothing is asked of it"
    assert stands_still(probe(0.0, lane(900.0), lane())) == [False, True]
    assert stands_still(probe(0.0, lane(900.0, 1019.0), lane())) == [False, False], "another thread goes on"
    assert stands_still(probe(0.0, lane(900.0), lane(1019.0))) == [False, False], "another lane goes on"
    assert stands_still(probe(1019.0, lane(900.0), lane())) == [False, False], "it is a call of many"
    assert probe(999.0, lane(900.0), lane()).hangs() is False, "seen once"


async def test_a_long_walk_tells_that_it_goes_on(open_tier: Open, paths: list[Path]) -> None:
    tier = await open_tier(paths=[paths[0]])
    await tier.store_away(tier.keyspace(A), 1)
    await tier.drop()
    threads: list[str] = []

    def before(tier: Tier) -> None:
        tier.root.directory.on_progress = lambda: threads.append(threading.current_thread().name)  # type: ignore[method-assign]

    again = await open_tier(paths=[paths[0]], before=before)
    assert again.on_disk(again.keyspace(A), 1) == [1]
    listed = len(list((paths[0] / "segments").iterdir()))
    assert len([name for name in threads if "read" in name]) > listed, "for each name, and for what was walked"


# --- what happens between the steps ---


async def comes_to_be_known(tier: Tier, number: int) -> None:
    """The segments of a root have been looked at; what they hold is not in the catalog yet."""
    await tier.until(lambda: tier.roots[number].pool.segments)
    assert tier.roots[number].state == RootState.OFF


async def test_a_clear_after_the_segments_were_looked_at(open_tier: Open, paths: list[Path]) -> None:
    await one_on_each(open_tier, paths)
    tier = await open_tier(paths=paths)
    await take_off(tier, paths[0])
    async with tier.disk.arrivals._changing:
        paths[0].with_suffix(".gone").rename(paths[0])
        await tier.until(lambda: tier.roots[0].accepted)
    async with tier.disk.arrivals._changing:
        await comes_to_be_known(tier, 0)
        await tier.clear(tier.keyspace(A).namespace)
        await tier.store_away(tier.keyspace(A), 3)
    await tier.until(lambda: tier.roots[0].state == RootState.OK)
    assert tier.states(tier.keyspace(A), 1, 2, 3) == [MISS, MISS, PENDING]


async def test_a_segment_comes_in_in_steps_and_a_clear_between_two_of_them_holds(
    open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for what came before the clear, and for what comes after it."""
    tier = await open_tier(paths=[paths[0]])
    names = [bytes([number]) * 16 for number in range(1, 11)]  # far less than the root has room for
    for name in names:
        await tier.store_away(tier.keyspace(name), 1, 2)
    first, last = (tier.keyspace(name).namespace for name in (names[0], names[-1]))
    steps, clears = list[int](), list[asyncio.Task[None]]()

    async def look_on(work: Any) -> Any:
        if work.__name__ != "_add_all":
            return await in_turns(work)
        while True:
            try:
                next(work)
            except StopIteration as ended:
                return ended.value
            steps.append(len(steps))
            if steps[-1] == len(names):
                clears.append(asyncio.ensure_future(tier.clear(first, last)))
                await asyncio.sleep(0)

    monkeypatch.setattr(arrivals_module, "in_turns", look_on)
    monkeypatch.setattr(arrivals_module, "STEP_RECORDS", 1)
    await take_off(tier, paths[0])
    paths[0].with_suffix(".gone").rename(paths[0])
    await tier.until(lambda: tier.root.state == RootState.OK)
    await asyncio.gather(*clears)
    assert len(steps) == 2 * len(names)
    assert [tier.on_disk(tier.keyspace(name), 1, 2) for name in (names[0], names[-1])] == [[], []]
    assert tier.disk.catalog.cleared_records == 4, "two that came before the clear, two that came after it"
    assert [tier.on_disk(tier.keyspace(name), 1, 2) for name in names[1:-1]] == [[1, 2]] * (len(names) - 2)


async def test_another_root_tells_of_a_clear_while_one_is_looked_at(
    open_tier: Open, paths: list[Path], hang: Hang
) -> None:
    first = await open_tier(paths=[paths[0]])
    await first.store_away(first.keyspace(A), 1)
    await first.close()
    second = await open_tier(paths=[paths[1]])
    await second.clear(second.keyspace(A).namespace)
    await second.store_away(second.keyspace(A), 2)
    await second.close()
    for path in paths:
        path.chmod(0o755)
    tier = await open_tier(paths=paths)
    gate = hang(tier, "names", paths[0])
    paths[0].chmod(0o700)
    await tier.until(gate.entered.is_set)
    paths[1].chmod(0o700)
    await tier.until(lambda: tier.roots[1].state == RootState.OK)
    gate.open()
    await tier.until(lambda: tier.roots[0].state == RootState.OK and not tier.disk.arrivals.coming)
    assert tier.states(tier.keyspace(A), 1, 2) == [MISS, PENDING]
    await tier.close()
    alone = await open_tier(paths=[paths[0]])
    assert alone.states(alone.keyspace(A), 1) == [MISS], "it has learned of the clear"


class Walks:
    """Steers the walks of `drop_older`: when all is dropped, the n-th walk goes on until it is let go."""

    def __init__(self, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.let_go = 0
        self._drop = tier.cache.drop_older
        monkeypatch.setattr(tier.cache, "drop_older", self)

    def __call__(self, namespace: Namespace, epoch: int) -> Iterator[None]:
        self.begun += 1
        number = self.begun
        yield from self._drop(namespace, epoch)
        while number > self.let_go:
            yield


@pytest.mark.parametrize("heard_before", [False, True])
async def test_nothing_comes_in_while_another_root_s_clears_are_learnt(
    open_tier: Open, paths: list[Path], hang: Hang, monkeypatch: pytest.MonkeyPatch, heard_before: bool
) -> None:
    """Otherwise, its records would be read under the old epoch for a client that opens their namespace then, and their
    keys would be taken over into the new one.
    """
    first = await open_tier(paths=[paths[0]])
    await first.store_away(first.keyspace(A), 1)
    await first.close()
    second = await open_tier(paths=[paths[1]])
    await second.clear()
    await second.close()
    for path in paths:
        path.chmod(0o755)
    tier = await open_tier(paths=paths)
    tier.keyspace(B)
    walks = Walks(tier, monkeypatch)
    gate = hang(tier, "names", paths[0])
    if heard_before:
        paths[0].chmod(0o700)
        await tier.until(gate.entered.is_set)
    paths[1].chmod(0o700)
    await tier.until(lambda: walks.begun)
    paths[0].chmod(0o700)
    gate.open()
    await tier.until(lambda: tier.roots[0].pool.segments if heard_before else tier.roots[0].accepted)
    for _ in range(100):
        await asyncio.sleep(0.001)
        await tier.fetch(tier.keyspace(A), 1)
        assert tier.cache.epochs.is_rising(A), "nor from a shared store"
    walks.let_go = 1
    await tier.until(lambda: all(root.state == RootState.OK for root in tier.roots))
    assert tier.states(tier.keyspace(A), 1) == [MISS]
    assert not tier.cache.epochs.is_rising(A)


async def test_a_clear_amid_a_merge_is_later_than_what_is_merged(
    open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be ahead of the clock. Else what is stored after the clear would be under an epoch that is over."""
    first = await open_tier(paths=[paths[1]])
    await first.close()
    ahead = unix_time_us() + 3600 * 10**6
    manifest = await manifest_module.read_manifest(paths[1])
    assert manifest is not None
    await manifest_module.write_manifest(paths[1], replace(manifest, base_epoch=ahead, last_epoch=ahead))
    paths[1].chmod(0o755)
    tier = await open_tier(paths=paths)
    namespace = tier.keyspace(A).namespace
    walks = Walks(tier, monkeypatch)
    paths[1].chmod(0o700)
    await tier.until(lambda: walks.begun)
    before = tier.cache.epochs.of(A)
    cleared = asyncio.ensure_future(tier.clear(namespace))
    await tier.until(lambda: tier.cache.epochs.of(A) != before)
    assert tier.cache.epochs.of(A) > ahead
    walks.let_go = 1000
    with suppress(NotDurableError):  # the root that comes in may refuse the first try
        await cleared
    await tier.until(lambda: tier.roots[1].state == RootState.OK)
    assert tier.cache.epochs.of(A) > ahead


async def test_clears_of_two_roots_are_learnt_one_after_the_other(
    open_tier: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what the first of them has would be in memory when the second one's walk has passed."""
    paths = [tmp_path / name for name in "abc"]
    second = await open_tier(paths=[paths[1]])
    await second.clear(second.keyspace(A).namespace)
    await second.store_away(second.keyspace(A), 1)
    await second.close()
    third = await open_tier(paths=[paths[2]])
    await third.clear(third.keyspace(A).namespace)
    await third.close()
    for path in paths[1:]:
        path.chmod(0o755)
    tier = await open_tier(paths=paths)
    keyspace, walks = tier.keyspace(A), Walks(tier, monkeypatch)
    paths[1].chmod(0o700)
    await tier.until(lambda: walks.begun)
    paths[2].chmod(0o700)
    await tier.until(lambda: tier.roots[2].accepted)
    await asyncio.sleep(0.01)
    walks.let_go = 1
    for _ in range(300):
        await asyncio.sleep(0.001)
        await tier.fetch(keyspace, 1)
    walks.let_go = 2
    await tier.until(lambda: all(root.state == RootState.OK for root in tier.roots))
    await tier.until(lambda: not tier.disk.arrivals.coming)
    assert tier.states(keyspace, 1) == [MISS]


async def test_a_clear_while_others_are_learnt_is_later_than_all_of_them(
    open_tier: Open, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they are ahead of this host's clock: what it takes away must not come back under the merged number."""
    first = await open_tier(paths=[paths[1]])
    first.cache.epochs.last = first.cache.epochs.clock() + 3600 * 10**6
    await first.clear(first.keyspace(A).namespace)
    await first.close()
    paths[1].chmod(0o755)
    tier = await open_tier(paths=paths)
    keyspace, walks = tier.keyspace(A), Walks(tier, monkeypatch)
    paths[1].chmod(0o700)
    await tier.until(lambda: walks.begun)
    with suppress(NotDurableError):  # the other root may not be there yet
        await tier.clear(keyspace.namespace)
    cleared = tier.cache.epochs.of(A)
    walks.let_go = 1
    await tier.until(lambda: tier.roots[1].state == RootState.OK and not tier.disk.arrivals.coming)
    assert tier.cache.epochs.of(A) == cleared


@pytest.mark.parametrize("hangs", [False, True])
async def test_two_copies_that_come_at_the_same_time(
    open_tier: Open, paths: list[Path], hang: Hang, hangs: bool
) -> None:
    """One is used, and what both know of clears counts; also if the one that is used hangs on its way."""
    first = await open_tier(paths=[paths[0]])
    await first.store_away(first.keyspace(A), 1)
    await first.store_away(first.keyspace(B), 1)
    await first.close()
    shutil.copytree(paths[0], paths[1])
    for path, name in zip(paths, (A, B), strict=True):
        alone = await open_tier(paths=[path])
        await alone.clear(alone.keyspace(name).namespace)
        await alone.close()
    for path in paths:
        path.chmod(0o755)
    tier = await open_tier(paths=paths)
    gates = [hang(tier, "names", path) for path in paths] if hangs else []
    for path in paths:
        path.chmod(0o700)
    await tier.until(lambda: sum(root.health.reason.startswith("it is a copy") for root in tier.roots) == 1)
    assert sum(root.accepted for root in tier.roots) == 1
    for gate in gates:
        gate.open()
    await tier.until(lambda: any(root.state == RootState.OK for root in tier.roots))
    assert tier.states(tier.keyspace(A), 1) == tier.states(tier.keyspace(B), 1) == [MISS]
    assert sorted(root.state for root in tier.roots) == [RootState.OFF, RootState.OK]


async def test_a_root_that_goes_again_while_it_comes(open_tier: Open, paths: list[Path], hang: Hang) -> None:
    await one_on_each(open_tier, paths)
    tier = await open_tier(paths=paths)
    await take_off(tier, paths[0])
    gate = hang(tier, "names", paths[0])
    paths[0].with_suffix(".gone").rename(paths[0])
    await tier.until(gate.entered.is_set)
    paths[0].rename(paths[0].with_suffix(".gone"))
    tier.files.plant("names=EIO")
    gate.open()
    await tier.until(lambda: not tier.roots[0].accepted)
    assert tier.states(tier.keyspace(A), 1, 2) == [MISS, PENDING]
    tier.files.plant("")
    paths[0].with_suffix(".gone").rename(paths[0])
    await tier.until(lambda: tier.roots[0].state == RootState.OK)
    assert await tier.fetch(tier.keyspace(A), 1, 2) == [1, 2]
