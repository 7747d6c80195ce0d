"""What requests want retained is claimed of the pages that SGLang has of them. The daemon is real."""

from __future__ import annotations

import importlib
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.client import ClaimFigures, Client
from kvoffloadd.integrations.common.claims import Directive, RequestPart
from kvoffloadd.integrations.sglang import claims, counters
from kvoffloadd.integrations.sglang.claims import RetainedPages
from kvoffloadd.integrations.sglang.prefixes import Needed
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.integrations.sglang.fakesglang import ADAPTER, Node
from tests.integrations.sglang.test_pagestore import PAGE, PagestoreRank, StartDaemon, names

Json = dict[str, Any]
PAGES = st.integers(0, 12)
TOKENS = st.integers(0, 12 * PAGE)


@dataclass
class Action:
    """Stands in for SGLang's KvHintAction."""

    payload: Json
    action_type: str = "kvoffloadd.retain"
    action_version: str = "1.0"
    action_id: str = "a"


@dataclass
class Envelope:
    """Stands in for SGLang's KvHintsEnvelope."""

    actions: list[Action] = field(default_factory=list)


def claims_of(daemon: Daemon) -> list[ClaimFigures]:
    with Client(daemon.socket, namespace=None, role="observer") as observer:
        return observer.claims()


def named(name: str, **given: Any) -> Envelope:
    return Envelope([Action({"seconds": 600, "name": name, **given})])


# --- which pages -----------------------------------------------------------------------------------


def spans(wanted: RetainedPages, **trailing: int) -> list[dict[str, tuple[int, int]]]:
    return [
        {pool: (span.start, span.stop) for pool, span in pages.items()} for _, pages in wanted.spans(PAGE, trailing)
    ]


def test_of_a_prompt_all_whole_pages_are_claimed_and_of_other_pools_what_it_needs() -> None:
    """A prompt that comes again finds one page less, since SGLang computes its last token."""
    wanted = RetainedPages([Directive(1.0)], names(9), in_prompt=6)
    assert spans(wanted) == [{"kv": (0, 6)}]
    assert spans(wanted, swa=3, mamba=1, indexer=0) == [
        {"kv": (0, 6), "swa": (2, 6), "mamba": (4, 6), "indexer": (0, 6)}
    ]
    assert spans(wanted, swa=300) == [{"kv": (0, 6), "swa": (0, 6)}]


def test_a_conversation_may_go_on_behind_its_prompt_or_behind_the_answer() -> None:
    whole = Directive(1.0, part=RequestPart.WHOLE)
    answer = Directive(1.0, part=RequestPart.OUTPUT)
    assert spans(RetainedPages([whole], names(9), 6), mamba=1) == [{"kv": (0, 9), "mamba": (4, 9)}]
    assert spans(RetainedPages([answer], names(9), 6), mamba=1) == [{"kv": (6, 9), "mamba": (7, 9)}]
    assert spans(RetainedPages([answer, whole], names(6), 6), mamba=1) == [{"kv": (0, 6), "mamba": (4, 6)}]
    assert spans(RetainedPages([whole], [], 0), mamba=1) == []


@given(pages=PAGES, in_prompt=PAGES, start=TOKENS, length=st.none() | TOKENS, part=st.sampled_from(RequestPart))
def test_a_page_is_claimed_if_one_of_its_tokens_is(
    pages: int, in_prompt: int, start: int, length: int | None, part: RequestPart
) -> None:
    end = None if length is None else start + length + 1
    wanted = RetainedPages([Directive(1.0, start=start, end=end, part=part)], names(pages), in_prompt)

    def covers(page: int) -> bool:
        if part is RequestPart.OUTPUT:
            return page >= in_prompt
        tokens = range(page * PAGE, (page + 1) * PAGE)
        touched = any(token >= start and (end is None or token < end) for token in tokens)
        return touched and (part is RequestPart.WHOLE or page < in_prompt)

    expected = [page for page in range(pages) if covers(page)]
    found = [list(range(*span["kv"])) for span in spans(wanted)]
    assert found == ([expected] if expected else [])


# --- from a request's end to the daemon --------------------------------------------------------------


class EndingEngine:
    """A rank, and the part of SGLang that ends requests: the real `engine` module hands the hints over."""

    def __init__(self, sglang: SimpleNamespace, daemon: Daemon, *, states: bool = False, **options: Any) -> None:
        self.rank = PagestoreRank(daemon, states=states, **options)
        self.store = self.rank.store
        self.daemon = daemon
        self.tree = sglang.tree()
        self._sglang = sglang
        importlib.import_module(f"{ADAPTER}.engine").tell_hints(self.store)
        until(lambda: self.store.available, "it is connected")

    def end(self, kept: Node | None, hints: Any, tokens: int | None = None, **changed: Any) -> None:
        """Ends a request of which the tree has `kept`, and whose prompt has so many tokens."""
        request = self._sglang.request("r")
        request.last_node, request.kv_hints = kept, hints
        request.origin_input_ids = [0] * ((kept.pages * PAGE if kept else 0) if tokens is None else tokens)
        for name, value in changed.items():
            setattr(request, name, value)
        self.tree.on_release(request, checkpointed=True)

    def claims(self) -> list[ClaimFigures]:
        return claims_of(self.daemon)

    def made(self, *expected: tuple[str, int]) -> None:
        """Waits until the claims have these names, and so many keys."""
        until(lambda: [(claim.name, claim.keys) for claim in self.claims()] == list(expected), "it is claimed", HANG_S)


Start = Callable[..., EndingEngine]


@pytest.fixture
def start(sglang: SimpleNamespace) -> Iterator[Start]:
    """`start(daemon, ...)`, closed at the end."""
    with ExitStack() as stack:

        def begin(daemon: Daemon, **options: Any) -> EndingEngine:
            engine = EndingEngine(sglang, daemon, **options)
            stack.callback(engine.store.close)
            return engine

        yield begin


@pytest.fixture
def counted() -> Callable[[], tuple[int, int]]:
    """Returns how many hints were ignored, and how many claims were lost, since the last time."""

    def now() -> tuple[int, int]:
        found = (counters.IGNORED_HINTS, counters.LOST_CLAIMS)
        ignored, lost = (int(next(iter(one.collect())).samples[0].value) for one in found)
        return ignored, lost

    before = [now()]

    def since() -> tuple[int, int]:
        (ignored, lost), before[0] = before[0], now()
        return before[0][0] - ignored, before[0][1] - lost

    return since


pages = pytest.mark.slow


@pages
def test_what_a_request_names_is_claimed_and_outlives_all_else(start_daemon: StartDaemon, start: Start) -> None:
    """64 pages fit, of which claims may keep 16."""
    engine = start(start_daemon("memory.slab_bytes=64KiB", 'memory.policy="lru"', memory="512KiB"))
    root = Node(names(4))
    prompt = Node(names(3, "behind"), root)
    asked, other = [*root.keys, *prompt.keys], names(7, "another")
    for keys in (asked, other):
        assert engine.store.store([engine.rank.fill(keys)])["kv"].all()
    engine.end(prompt, named("agent 7", priority=80))
    engine.made(("agent 7", 7))
    (claim,) = engine.claims()
    assert (claim.priority, claim.tokens, claim.memory_keys) == (80, 7 * PAGE, 7)
    for turn in range(10):
        engine.store.store([engine.rank.fill(names(40, f"turn {turn}"), 20)])
    assert engine.store.restorable(asked).pages == 7
    assert engine.store.restorable(other).pages == 0
    assert engine.store.load([engine.rank.pages(asked)])["kv"].all()
    assert all(engine.rank.holds(asked))


@pages
def test_parts_of_a_request(start_daemon: StartDaemon, start: Start) -> None:
    """The last page of the prompt has tokens of the answer."""
    engine, kept = start(start_daemon(memory="64MiB")), Node(names(8))
    ours = [Action({"seconds": 60, "end": 2 * PAGE, "name": "agent"}), Action({"seconds": 60, "name": "agent"})]
    directives = [{"end": 1, "priority": 90}, {"start": 5 * PAGE, "priority": 70, "duration": 60}]
    engines = Action({"scope": None, "directives": [*directives, {"covers_output": True, "priority": 60}]}, "kv.retain")
    engine.end(kept, Envelope([*ours, engines]), tokens=4 * PAGE + 9)
    until(lambda: len(engine.claims()) == 5, "all are claimed", HANG_S)
    assert {(claim.name, claim.priority): (claim.keys, claim.tokens) for claim in engine.claims()} == {
        ("agent #1", 50): (2, 2 * PAGE),
        ("agent #2", 50): (4, 4 * PAGE),
        ("", 90): (1, PAGE),
        ("", 70): (3, 8 * PAGE),
        ("", 60): (4, 8 * PAGE),
    }


@pages
def test_of_other_pools_what_a_prefix_needs_is_claimed(start_daemon: StartDaemon, start: Start) -> None:
    engine, kept = start(start_daemon(memory="64MiB"), states=True, windows=True), Node(names(6))
    engine.end(kept, named("before any lookup"))
    engine.made(("before any lookup", 18))
    engine.store.restorable(kept.keys, [Needed("mamba", 1), Needed("swa", 2)])
    engine.end(kept, named("later"))
    engine.made(("before any lookup", 18), ("later", 6 + 2 + 3))


@pages
def test_what_claims_nothing(start_daemon: StartDaemon, start: Start, counted: Callable[[], tuple[int, int]]) -> None:
    """A request that is retracted runs again; one that never ran has nothing in the tree."""
    engine, kept = start(start_daemon(memory="64MiB")), Node(names(4))
    engine.end(kept, named("retracted"), is_finished=False)
    engine.end(None, named("never ran"))
    engine.end(Node([]), named("of no page"))
    engine.end(kept, None)
    engine.end(kept, Envelope())
    engine.end(kept, Envelope([Action({}, "kv.fetch"), Action({"seconds": 0}), Action({}, "kv.retain", "2.0")]))
    engine.end(kept, named("last"))
    engine.made(("last", 4))
    assert counted() == (3, 0)
    assert [rid for rid, _ in engine.tree.released] == ["r"] * 7, "SGLang goes on"


@pages
def test_an_older_sglang_has_no_hints(start_daemon: StartDaemon, start: Start, sglang: SimpleNamespace) -> None:
    engine, request = start(start_daemon(memory="64MiB")), sglang.request("r")
    del request.kv_hints
    engine.tree.on_release(request, checkpointed=False)
    assert engine.tree.released == [("r", False)]


@pages
def test_a_prompt_of_more_pages_than_fit_is_several_claims(start_daemon: StartDaemon, start: Start) -> None:
    """The beginning of the prompt is claimed last: of one priority, the daemon gives up the oldest claims first."""
    engine = start(start_daemon("limits.keys_per_request=5", memory="64MiB"))
    engine.end(Node(names(12)), named("agent"))
    engine.made(("agent #3", 2), ("agent #2", 5), ("agent #1", 5))
    assert [claim.tokens for claim in engine.claims()] == [12 * PAGE, 10 * PAGE, 5 * PAGE]


@pages
def test_what_can_not_be_claimed_is_counted(
    start_daemon: StartDaemon, start: Start, counted: Callable[[], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon(memory="64MiB")
    engine, kept = start(daemon, timeout_s=0.5), Node(names(4))
    counted()
    daemon.kill()
    until(lambda: not engine.store.available, "it knows")
    engine.end(kept, named("without a daemon"))
    assert counted() == (0, 1)
    daemon.start()
    until(lambda: engine.store.available, "it is connected again")
    daemon.signal(signal.SIGSTOP)
    try:
        engine.end(kept, named("to a daemon that hangs"))
        until(lambda: counted() == (0, 1), "it is lost", HANG_S)
    finally:
        daemon.signal(signal.SIGCONT)
    until(lambda: engine.store.available, "it is connected again")
    monkeypatch.setattr(claims, "_WAITING_MAX", 2)
    monkeypatch.setattr(engine.store._claims, "send", lambda *_: None)
    for number in range(5):
        engine.end(kept, named(f"{number}"))
    assert counted() == (0, 3)
    monkeypatch.undo()
    until(lambda: {"3", "4"} <= {claim.name for claim in engine.claims()}, "the last ones are claimed", HANG_S)
    # A daemon that hung may carry out what counts as lost.
    assert {"0", "1", "2", "without a daemon"}.isdisjoint(claim.name for claim in engine.claims())
    engine.store.suspend()
    engine.end(kept, named("while weights change"))
    assert counted() == (0, 1)


@pages
def test_what_waits_ends_with_the_weights(
    start_daemon: StartDaemon, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These pages have other names now."""
    engine = start(start_daemon(memory="64MiB"))
    with monkeypatch.context() as context:
        context.setattr(engine.store._claims, "send", lambda *_: None)
        engine.end(Node(names(4)), named("before"))
        engine.store.suspend()
        engine.store.renew(17)
    engine.end(Node(names(4)), named("after"))
    engine.made(("after", 4))


@pages
def test_a_daemon_that_knows_no_claims_gets_none(
    start_daemon: StartDaemon,
    start: Start,
    counted: Callable[[], tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("sglang.kvoffloadd"), "propagate", True)
    engine, kept = start(start_daemon(memory="64MiB")), Node(names(4))
    connector = engine.store._lookups._link.client._core._connector
    connector.features -= {"retain"}
    counted()
    for _ in range(2):
        engine.end(kept, named("agent"))
        until(lambda: not engine.store._claims._waiting, "it was looked at", HANG_S)
    until(lambda: caplog.text.count("the daemon is older and knows no claims") == 1, "it is logged once", HANG_S)
    engine.store.close()
    assert counted() == (0, 2)
    assert not engine.claims()


@pages
def test_sglang_lives_with_a_bug_of_ours(start_daemon: StartDaemon, start: Start, caplog: Any) -> None:
    engine = start(start_daemon(memory="64MiB"))
    with caplog.at_level(logging.ERROR):
        engine.end(Node(names(2)), "no envelope")
    assert "a bug in _tell_hints" in caplog.text
    assert engine.tree.released == [("r", True)]


@pages
@pytest.mark.parametrize("seat", ["storage", "linker"])
def test_either_seat_claims(start_daemon: StartDaemon, sglang: SimpleNamespace, seat: str) -> None:
    """Started as SGLang starts it."""
    daemon = start_daemon(memory="64MiB")
    tests = importlib.import_module(f"tests.integrations.sglang.test_{seat}")
    rank: Any = tests.StorageRank(daemon).start() if seat == "storage" else tests.LinkerRank(daemon.socket)
    begun: Any = getattr(rank, seat)
    until(lambda: begun._pages.available, "it is connected")
    request, tree = sglang.request("r"), sglang.tree()
    request.last_node, request.kv_hints, request.origin_input_ids = Node(names(4)), named("agent"), [0] * 300
    tree.on_release(request, checkpointed=True)
    until(lambda: [claim.name for claim in claims_of(daemon)] == ["agent"], "it is claimed", HANG_S)
    begun.close()


@pages
def test_one_rank_is_enough(start_daemon: StartDaemon, sglang: SimpleNamespace) -> None:
    daemon, engine = start_daemon(memory="64MiB"), importlib.import_module(f"{ADAPTER}.engine")
    storages = importlib.import_module("tests.integrations.sglang.test_storage")
    told = []
    for number in (1, 0):
        sglang.parallel.attn_tp_rank = number
        rank = storages.StorageRank(daemon).start()
        told.append(rank.storage._pages in engine._TOLD_OF_HINTS)
        rank.storage.close()
    assert told == [False, True]
