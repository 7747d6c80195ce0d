"""Lanes: every completion comes once, on the loop, in time; on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import uvloop

from kvoffloadd.errors import UsageError
from kvoffloadd.scheduling import lanes
from kvoffloadd.scheduling.changes import Changes
from kvoffloadd.scheduling.lanes import (
    AGAIN,
    BACKGROUND,
    DAEMON,
    TURN_BYTES,
    Again,
    CancelledWork,
    Flow,
    Lane,
    LaneExecutor,
    Ticket,
)
from kvoffloadd.testing.wait import HANG_S

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """Runs a coroutine function on a loop of each kind; a callback's exception fails the test."""
    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:

        def run_on_loop(main: Callable[[], Awaitable[None]]) -> None:
            async def bounded() -> None:
                async with asyncio.timeout(HANG_S):
                    await main()

            runner.run(bounded())

        yield run_on_loop


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  threads change it, which set no event
        await asyncio.sleep(0.0005)


class GatedWork:
    """Work that begins, sets an event, and ends when it is let through."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.entered.set()
        self.open.wait(HANG_S)
        return "through"

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 20)


class Log:
    """Remembers completions, and on which thread they came."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.threads: set[int] = set()
        self._changes = Changes()

    def __call__(self, value: Any) -> None:
        self.values.append(value)
        self.threads.add(threading.get_ident())
        self._changes.notify_all()

    async def wait(self, count: int) -> None:
        await self._changes.wait_for(lambda: len(self.values) >= count)


def test_done_gets_results_and_exceptions_on_the_loop(run: Any) -> None:
    async def main() -> None:
        lane, log = Lane("test", 1, asyncio.get_running_loop()), Log()

        def fail() -> None:
            raise ZeroDivisionError("planted")

        def exit_thread() -> None:
            raise SystemExit(3)

        lane.submit(lambda: 17, log)
        lane.submit(fail, log)
        lane.submit(exit_thread, log)
        lane.submit(threading.get_ident, log)
        assert log.values == [], "never within submit"
        await log.wait(4)
        assert log.values[0] == 17
        assert isinstance(log.values[1], ZeroDivisionError)
        assert isinstance(log.values[2], SystemExit)
        assert log.values[3] != threading.get_ident(), "work runs in the lane's thread"
        assert log.threads == {threading.get_ident()}
        assert await lane.close(5)

    run(main)


def test_a_lane_runs_on_the_cpus_it_is_given(run: Any) -> None:
    async def main() -> None:
        loop, before = asyncio.get_running_loop(), os.sched_getaffinity(0)
        given = frozenset({max(before)})
        lane, other, gone = (
            Lane("near", 2, loop, given),
            Lane("any", 1, loop),
            Lane("gone", 1, loop, frozenset({1 << 13})),
        )
        assert await lane.perform(lambda: os.sched_getaffinity(0)) == given
        assert await other.perform(lambda: os.sched_getaffinity(0)) == before
        assert await gone.perform(lambda: os.sched_getaffinity(0)) == before, (
            "CPUs that it can't have keep it from nothing"
        )
        assert os.sched_getaffinity(0) == before
        for each in (lane, other, gone):
            assert await each.close(5)

    run(main)


def test_a_lane_as_an_executor(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        lane, gate = Lane("test", 1, loop), GatedWork()
        executor = LaneExecutor(lane, -1)
        assert await loop.run_in_executor(executor, divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(executor, divmod, 7, 0)
        waiting = loop.run_in_executor(executor, gate)
        await gate.wait_entered()
        queued = loop.run_in_executor(executor, gate)
        waiting.cancel()
        gate.open.set()
        assert await queued == "through", "the one before ran to its end, though nobody waited for it"
        assert await lane.close(5)
        with pytest.raises(UsageError):
            await loop.run_in_executor(executor, gate)

    run(main)


def test_who_runs_longest_and_who_began_last(run: Any) -> None:
    async def main() -> None:
        lane, gates, log = Lane("test", 2, asyncio.get_running_loop()), [GatedWork(), GatedWork()], Log()
        assert (lane.oldest_running_s(time.monotonic()), lane.newest_running_s(time.monotonic())) == (0.0, 0.0)
        for gate in gates:
            lane.submit(gate, log)
            await gate.wait_entered()
        later = time.monotonic() + 100.0
        assert 100.0 <= lane.newest_running_s(later) < lane.oldest_running_s(later)
        gates[1].open.set()
        await log.wait(1)
        later = time.monotonic() + 100.0
        assert lane.newest_running_s(later) == lane.oldest_running_s(later)
        gates[0].open.set()
        assert await lane.close(5)

    run(main)


def test_fifo_within_urgency(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log()
        lane.submit(gate, log)
        await gate.wait_entered()
        for number, urgent in enumerate([0, 1, 0, -5, 1, -5]):
            lane.submit(lambda number=number: number, log, urgent=urgent)  # type: ignore[misc]
        assert (lane.queued, lane.running) == (6, 1)
        gate.open.set()
        await log.wait(7)
        assert log.values == ["through", 3, 5, 0, 2, 1, 4]
        assert (lane.queued, lane.running) == (0, 0)
        assert await lane.close(5)

    run(main)


def test_cancel_before_during_after(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log()
        ran: list[int] = []
        running = lane.submit(gate, log)
        await gate.wait_entered()
        waiting = lane.submit(lambda: ran.append(1), log)
        assert waiting.cancel()
        assert not waiting.cancel(), "only once"
        assert not running.cancel()
        assert log.values == [], "never within cancel"
        await log.wait(1)
        assert isinstance(log.values[0], CancelledWork)
        gate.open.set()
        await log.wait(2)
        assert log.values[1] == "through"
        assert not running.cancel()
        assert await lane.close(5)
        assert ran == []
        assert len(log.values) == 2

    run(main)


def test_again_gives_others_their_turn(run: Any) -> None:
    async def main() -> None:
        lane, gate, order = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), list[str]()

        def turns(name: str, count: int) -> Callable[[], Again | str]:
            left = iter(range(count - 1, -1, -1))

            def work() -> Again | str:
                order.append(name)
                return AGAIN if next(left) else name

            return work

        log = Log()
        lane.submit(gate, log)
        await gate.wait_entered()
        lane.submit(turns("a", 4), log)
        lane.submit(turns("b", 2), log)
        lane.submit(turns("u", 2), log, urgent=-1)
        gate.open.set()
        await log.wait(4)
        assert order == ["u", "u", "a", "b", "a", "b", "a", "a"]
        assert log.values == ["through", "u", "b", "a"], "one completion each"
        assert await lane.close(5)

    run(main)


def test_work_that_comes_again_can_be_cancelled_and_closed(run: Any) -> None:
    async def main() -> None:
        lane, log = Lane("test", 1, asyncio.get_running_loop()), Log()
        turned = [threading.Event(), threading.Event()]

        def forever(event: threading.Event) -> Again:
            event.set()
            return AGAIN

        ticket = lane.submit(lambda: forever(turned[0]), log)
        lane.submit(lambda: forever(turned[1]), log)
        await asyncio.to_thread(turned[1].wait, 20)
        assert turned[0].is_set()
        await until(ticket.cancel)  # it may be running just now
        await log.wait(1)
        assert await lane.close(5)
        assert [type(value) for value in log.values] == [CancelledWork, CancelledWork]

    run(main)


def test_close_cancels_the_queued_and_waits_for_the_running(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 2, asyncio.get_running_loop()), GatedWork(), Log()
        lane.submit(gate, log)
        lane.submit(gate, log)
        await gate.wait_entered()
        await until(lambda: lane.running == 2)
        for _ in range(5):
            lane.submit(lambda: "ran", log)
        assert not await lane.close(0.05)
        assert [type(value) for value in log.values] == [CancelledWork] * 5
        with pytest.raises(UsageError, match="closed"):
            lane.submit(lambda: None, log)
        gate.open.set()
        assert await lane.close(5)
        assert log.values[5:] == ["through"] * 2, "all told when close says so"
        assert await lane.close(0), "again, at once"

    run(main)


def test_gauges_of_age(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        lane, gate = Lane("test", 1, loop), GatedWork()
        assert lane.oldest_running_s(loop.time()) == 0
        lane.submit(gate, lambda _: None)
        await gate.wait_entered()
        assert lane.oldest_running_s(time.monotonic() + 100) == pytest.approx(100, abs=5)
        assert lane.oldest_running_s(0) == 0, "a clock that lags is no negative age"
        gate.open.set()
        assert await lane.close(5)
        assert lane.oldest_running_s(time.monotonic() + 100) == 0

    run(main)


def test_a_failing_callback_costs_the_others_nothing(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        lane, gate, log, heard = Lane("test", 1, loop), GatedWork(), Log(), list[dict[str, Any]]()
        loop.set_exception_handler(lambda _, context: heard.append(context))

        def fail(_: object) -> None:
            raise ZeroDivisionError("planted")

        lane.submit(gate, fail)
        lane.submit(lambda: 1, log)
        gate.open.set()
        await log.wait(1)
        assert await lane.close(5)
        assert len(heard) == 1
        assert isinstance(heard[0]["exception"], ZeroDivisionError)

    run(main)


def test_one_wakeup_drains_many(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        wakeups = 0

        class Counting:
            def call_soon_threadsafe(self, callback: Any) -> None:
                nonlocal wakeups
                wakeups += 1
                loop.call_soon_threadsafe(callback)

        lane, log, ended = Lane("test", 1, Counting()), Log(), threading.Event()  # type: ignore[arg-type]
        for number in range(100):
            lane.submit(lambda number=number: number, log)  # type: ignore[misc]
        lane.submit(ended.set, log)
        ended.wait(HANG_S)  # without await: the loop must not get its turn before
        await log.wait(101)
        assert log.values[:100] == list(range(100))
        assert wakeups <= 2
        assert await lane.close(5)

    run(main)


def test_perform_returns_and_raises_what_the_work_does(run: Any) -> None:
    async def main() -> None:
        lane = Lane("test", 2, asyncio.get_running_loop())

        def fail() -> None:
            raise ZeroDivisionError("planted")

        assert await lane.perform(lambda: 17) == 17
        assert await lane.perform(threading.get_ident) != threading.get_ident()
        with pytest.raises(ZeroDivisionError, match="planted"):
            await lane.perform(fail)
        assert await asyncio.gather(*(lane.perform(partial(int, n)) for n in range(50))) == list(range(50))
        assert await lane.close(5)

    run(main)


def test_whoever_gives_up_waiting_leaves_the_work_running(run: Any) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        lane, gate, ended, heard = Lane("test", 1, loop), GatedWork(), list[str](), list[dict[str, Any]]()
        loop.set_exception_handler(lambda _, context: heard.append(context))

        def work() -> None:
            ended.append(gate())
            raise ZeroDivisionError("nobody is left to hear it")

        waiter = asyncio.ensure_future(lane.perform(work))
        await asyncio.sleep(0)
        await gate.wait_entered()
        queued = asyncio.ensure_future(lane.perform(lambda: ended.append("queued")))
        await asyncio.sleep(0)
        for one in (waiter, queued):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await lane.perform(lambda: ended.append("late"))
        assert ended == []
        assert lane.running == 1
        gate.open.set()
        assert await lane.perform(lambda: "next", urgent=1) == "next"
        assert ended == ["through", "queued", "late"], "a waiter's end is not the work's"
        assert heard == []
        assert await lane.close(5)

    run(main)


def test_perform_on_a_lane_that_closes(run: Any) -> None:
    async def main() -> None:
        lane, gate = Lane("test", 1, asyncio.get_running_loop()), GatedWork()
        running = asyncio.ensure_future(lane.perform(gate))
        await asyncio.sleep(0)
        await gate.wait_entered()
        queued = asyncio.ensure_future(lane.perform(lambda: "ran"))
        await asyncio.sleep(0)
        assert not await lane.close(0.01)
        with pytest.raises(CancelledWork):
            await queued
        gate.open.set()
        assert await running == "through"
        assert await lane.close(5)
        with pytest.raises(UsageError, match="closed"):
            await lane.perform(lambda: "ran")

    run(main)


def test_hasten_gives_what_waits_another_chance_and_moves_nothing_else(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log()
        running = lane.submit(gate, log, urgent=3)
        await gate.wait_entered()
        tickets = [lane.submit(partial(int, n), log, urgent=urgent) for n, urgent in enumerate([2, 2, 1, 0, 2, 2])]
        lane.raise_priority(running, DAEMON, 0)
        lane.raise_priority(tickets[4], DAEMON, 1)  # behind the one that is there
        lane.raise_priority(tickets[3], DAEMON, 2)  # it comes before that
        lane.raise_priority(tickets[1], DAEMON, 2)  # nothing new: it keeps its place
        lane.raise_priority(tickets[5], DAEMON, -1)
        assert (lane.queued, lane.running) == (6, 1)
        gate.open.set()
        await log.wait(7)
        assert log.values == ["through", 5, 3, 2, 4, 0, 1]
        lane.raise_priority(tickets[0], DAEMON, -1)
        assert lane.queued == 0, "what has ended does not come again"
        assert await lane.close(5)

    run(main)


def test_what_two_wait_for_goes_with_the_turn_that_comes_first(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log()
        lane.submit(gate, log)
        await gate.wait_entered()
        tickets = [lane.submit(partial(int, n), log, flow=Flow(1001, 1)) for n in range(100)]
        lane.raise_priority(tickets[99], Flow(1002, 2), 0)
        gate.open.set()
        await log.wait(101)
        assert log.values.index(99) <= 3
        assert sorted(log.values[1:]) == list(range(100)), "once"
        assert await lane.close(5)

    run(main)


def test_what_was_hastened_can_be_cancelled(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log()
        lane.submit(gate, log)
        await gate.wait_entered()
        ticket = lane.submit(lambda: "ran", log, urgent=3)
        lane.raise_priority(ticket, Flow(1001, 1), 1)
        assert ticket.cancel()
        lane.raise_priority(ticket, DAEMON, 0)
        assert lane.queued == 0
        gate.open.set()
        await log.wait(2)
        assert isinstance(log.values[0], CancelledWork)
        assert await lane.close(5)

    run(main)


def turns_before(order: list[str], name: str) -> int:
    """Turns of others before the last one of `name`."""
    last = len(order) - order[::-1].index(name)
    return last - order.count(name)


@pytest.mark.parametrize(
    ("flood", "modest", "urgent", "most"),
    [
        (Flow(1001, 1), Flow(1001, 2), (1, 1), 5),
        (Flow(1001, 1), Flow(1001, 2), (0, 1), 5),  # another engine's urgency is no reason to wait
        (Flow(1001, 1), Flow(1002, 2), (0, 3), 5),
        (Flow(1001, 1), Flow(1001, 1), (0, 1), 50),  # its own is, for a while
        (Flow(1001, 1), BACKGROUND, (0, 0), 50),
        (BACKGROUND, Flow(1001, 1), (0, 3), 2),
    ],
)
def test_nobody_waits_for_all_that_another_has_queued(
    run: Any, flood: Flow, modest: Flow, urgent: tuple[int, int], most: int
) -> None:
    async def main() -> None:
        lane, gate, log, order = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log(), list[str]()
        lane.submit(gate, log)
        await gate.wait_entered()
        for _ in range(512):
            lane.submit(partial(order.append, "flood"), log, flow=flood, urgent=urgent[0], cost_bytes=TURN_BYTES)
        for _ in range(4):
            lane.submit(partial(order.append, "modest"), log, flow=modest, urgent=urgent[1], cost_bytes=TURN_BYTES)
        gate.open.set()
        await log.wait(517)
        assert turns_before(order, "modest") <= most
        assert await lane.close(5)

    run(main)


def test_users_share_before_their_engines_do(run: Any) -> None:
    async def main() -> None:
        lane, gate, log, order = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log(), list[str]()
        lane.submit(gate, log)
        await gate.wait_entered()
        for engine in range(256):
            lane.submit(partial(order.append, "many"), log, flow=Flow(1001, engine))
        for _ in range(20):
            lane.submit(partial(order.append, "one"), log, flow=Flow(1002, 256))
        gate.open.set()
        await log.wait(277)
        assert turns_before(order, "one") <= 20
        assert await lane.close(5)

    run(main)


def test_how_long_a_thread_has_been_at_a_ticket(run: Any) -> None:
    async def main() -> None:
        lane, gate, log = Lane("test", 1, asyncio.get_running_loop()), GatedWork(), Log()
        running = lane.submit(gate, log)
        await gate.wait_entered()
        queued = lane.submit(lambda: None, log)
        later = time.monotonic() + 100
        assert running.running_s(later) == pytest.approx(100, abs=20)
        assert running.running_s(0) == 0
        assert queued.running_s(later) == 0, "it is only queued"
        gate.open.set()
        await log.wait(2)
        assert running.running_s(later) == 0
        assert await lane.close(5)

    run(main)


@pytest.mark.parametrize("kind", LOOPS)
def test_threads_outlive_a_closed_loop_quietly(kind: str) -> None:
    loop = LOOPS[kind]()
    gate = GatedWork()
    raised: list[threading.ExceptHookArgs] = []
    hook, threading.excepthook = threading.excepthook, raised.append
    try:
        lane = Lane("closed", 1, loop)
        ticket = lane.submit(gate, lambda _: None)
        queued = lane.submit(lambda: None, lambda _: None)
        gate.entered.wait(HANG_S)
        loop.close()
        assert queued.cancel()
        gate.open.set()
        while not ticket.cancel() and lane.running:
            time.sleep(0.001)
        lane.submit(lambda: None, lambda _: None)
        while lane.queued or lane.running:
            time.sleep(0.001)
    finally:
        threading.excepthook = hook
    assert raised == []


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_a_lane_is_closed_when_all_are_told(run: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The end of its threads is not enough: here they have ended before dropped work is reported as cancelled."""
    monkeypatch.setattr(lanes, "TURN_S", 0.0)  # one in each turn of the loop

    async def main() -> None:
        lane, gate, log = Lane("closing", 1, asyncio.get_running_loop()), GatedWork(), Log()
        (thread,) = [one for one in threading.enumerate() if one.name == "kvo-closing-0" and one.is_alive()]
        lane.submit(gate, log)
        await gate.wait_entered()
        tickets = [lane.submit(partial(int, number), log) for number in range(3)]
        put = lane._deliveries.put

        def put_late(done: Callable[[Any], None], value: object) -> None:
            if isinstance(value, CancelledWork):
                gate.open.set()
                thread.join(0.1)
            put(done, value)

        monkeypatch.setattr(lane._deliveries, "put", put_late)
        if how == "cancel":  # by another thread, while the lane is closed
            canceller = threading.Thread(target=lambda: [ticket.cancel() for ticket in tickets])
            canceller.start()
            await asyncio.to_thread(gate.open.wait, 20)
        assert await lane.close(20)
        assert len(log.values) == 4
        if how == "cancel":
            canceller.join()

    run(main)


def test_threads_are_daemons() -> None:
    loop = asyncio.new_event_loop()
    Lane("daemonic", 2, loop)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvo-daemonic")]
    assert len(threads) == 2
    assert all(thread.daemon for thread in threads)
    loop.close()


def test_a_lane_needs_threads() -> None:
    loop = asyncio.new_event_loop()
    with pytest.raises(UsageError):
        Lane("test", 0, loop)
    loop.close()


class Mess:
    """Work of random urgency and length, some of it cancelled at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.ended: dict[int, list[Any]] = {number: [] for number in range(2000)}
        self.began: set[int] = set()
        self.dropped: set[int] = set()

    async def make(self, lane: Lane) -> None:
        tickets: list[tuple[int, Ticket]] = []
        for number, values in self.ended.items():
            turns = iter(range(self.chance.randrange(3), -1, -1))
            urgent = self.chance.randrange(3)
            tickets.append((number, lane.submit(partial(self._work, number, turns), values.append, urgent=urgent)))
            victim, ticket = self.chance.choice(tickets)
            if self.chance.random() < 0.3 and ticket.cancel():
                assert victim not in self.dropped
                self.dropped.add(victim)
            if self.chance.random() < 0.02:
                await asyncio.sleep(0)

    def _work(self, number: int, turns: Iterator[int]) -> Again | int:
        self.began.add(number)
        return AGAIN if next(turns) else number


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("threads", [1, 4])
def test_each_ticket_ends_once_whatever_happens(run: Any, threads: int, wait: bool) -> None:
    async def main() -> None:
        lane, mess = Lane("test", threads, asyncio.get_running_loop()), Mess(threads)
        await mess.make(lane)
        if wait:
            await until(lambda: all(mess.ended.values()))
        assert await lane.close(10)
        assert {len(values) for values in mess.ended.values()} == {1}
        cancelled = {number for number, (value,) in mess.ended.items() if isinstance(value, CancelledWork)}
        assert cancelled >= mess.dropped
        assert cancelled == mess.dropped or not wait, "only close cancels without being asked"
        kept = {number: value for number, (value,) in mess.ended.items() if number not in cancelled}
        assert all(number == value for number, value in kept.items())
        assert mess.began >= set(kept)

    run(main)
