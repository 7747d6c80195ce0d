"""Prompts that one engine computes and another one answers, with vLLM's own scheduler, a real daemon and no model.

Not collected: `test_contract` runs it with each release's Python. Every token that a model would read is looked at.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request, RequestStatus

from kvoffloadd.integrations.vllm import expectation, handoff
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.vllm.engine import by_connector
from tests.vllm.modelless import BLOCK, BLOCKS, Modelless, is_connected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

StartDaemon = Callable[..., Daemon]
Pair = tuple[Modelless, Modelless]
StartPair = Callable[..., Pair]
Prompts = list[list[int]]

KINDS = ("dense", "hybrid")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
DECODE = {"do_remote_prefill": True}
LENGTHS = (20, 101, 110, 128, 129, 130)
ALL = [length - 1 for length in LENGTHS]
WHOLE = [0, 96, 96, 96, 128, 128]
"""Of prompts of these lengths: all but the last token; what chunks of 32 hold that end before it."""


@pytest.fixture
def pair(start_daemon: StartDaemon) -> Iterator[StartPair]:
    """`pair(kind, chunk)` -> an engine that computes prompts and one that answers them, at one daemon."""
    made: list[Modelless] = []

    def start(kind: str = "dense", chunk: int = BLOCK, **extra: bool) -> Pair:
        daemon = start_daemon(memory="64MiB")
        tiny = os.environ["KVOFFLOADD_TINY_MODEL"]
        for _ in range(2):
            made.append(Modelless(tiny, kind, daemon, by_connector(daemon.socket, chunk, **extra)))
            until(lambda: made[-1].generate([[3]]) and is_connected(made[-1]), "its lookups reach the daemon")
        return made[-2], made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def asked() -> Prompts:
    """Prompts with tails of all sorts: all of it, some tokens, a whole block, the last token alone, two tokens."""
    return prompts(4)


def prompts(seed: int) -> Prompts:
    rng = random.Random(seed)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in LENGTHS]


@pytest.mark.parametrize("chunk", [BLOCK, 4 * BLOCK])
@pytest.mark.parametrize("kind", KINDS)
def test_the_last_token_alone_is_computed(pair: StartPair, asked: Prompts, kind: str, chunk: int) -> None:
    """Whatever the first engine writes behind the prompt, and where the second one has some of it by itself."""
    prefill, decode = pair(kind, chunk)
    prefill.generate(asked, max_tokens=3, params=PREFILL)
    for _ in range(2):
        assert decode.generate(asked, params=DECODE) == ALL
        decode.forget()
        decode.scribble()
    decode.generate([prompt[:96] for prompt in asked])
    assert decode.generate(asked, params=DECODE) == ALL


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_stored_before_others_have_them(pair: StartPair, kind: str) -> None:
    """The first engine frees a prompt's blocks with its only token, and gives them to the next prompt."""
    prefill, decode = pair(kind)
    many = [prompt for seed in range(8) for prompt in prompts(seed)]
    assert sum(len(prompt) for prompt in many) > 2 * BLOCKS * BLOCK
    prefill.generate(many, max_tokens=1, params=PREFILL)
    for seed in range(8):
        assert decode.generate(prompts(seed), params=DECODE) == ALL


@pytest.mark.parametrize("kind", KINDS)
def test_who_does_not_ask_has_none(pair: StartPair, asked: Prompts, kind: str) -> None:
    """Neither engine: one that stores no tail, nor one that looks for none."""
    prefill, decode = pair(kind)
    prefill.generate(asked)
    assert decode.generate(asked, params=DECODE) == (WHOLE if kind == "hybrid" else [*WHOLE[:3], 127, *WHOLE[4:]])
    other = prompts(5)
    prefill.generate(other, params=PREFILL)
    assert decode.generate(other) == (WHOLE if kind == "hybrid" else [*WHOLE[:3], 127, *WHOLE[4:]])


def test_a_chunk_that_began_as_a_tail_is_stored_when_it_is_full(pair: StartPair, asked: Prompts) -> None:
    """Where what is generated is stored, too: another engine finds it."""
    prefill, decode = pair(offload_prompt_only=False)
    prompt = asked[2]
    prefill.generate([prompt], max_tokens=1, params=PREFILL)
    assert decode.generate([prompt], max_tokens=40, params=DECODE) == [109]
    for _ in range(40):
        prompt = [*prompt, (prompt[-1] * 7 + 11) % 500]  # as a Modelless does
    assert prefill.generate([prompt]) == [128]


def test_a_tail_of_vllms_own_that_ends_before(pair: StartPair, asked: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM finds one by itself for models with states, with `--prefix-match-unit`, where it asks a second time."""
    prefill, decode = pair()
    prefill.generate(asked, params=PREFILL)
    scheduler = decode.scheduler.connector.scheduler
    look_up = scheduler._lookup
    found = []

    def with_tail(status: Any, most_tokens: int | None = None) -> int | None:
        hit: int | None = look_up(status, most_tokens)
        if hit and hit + 2 < status.req.num_tokens:
            found.append(status.req.request_id)
            hit += 1
            status.partial_tail_boundary = status.num_locally_computed_tokens + hit
        return hit

    monkeypatch.setattr(scheduler, "_lookup", with_tail)
    assert decode.generate(asked, params=DECODE) == ALL
    assert found


def test_the_prompt_of_who_asked_stays_whole(pair: StartPair, asked: Prompts) -> None:
    """Where states are kept, the engine computes all but its last token."""
    prefill, _ = pair()
    (name,) = prefill.add(asked[2:3], params=PREFILL)
    request = prefill.scheduler.requests[name]
    given = request.prompt_token_ids = [*asked[2]]
    prefill.scheduler.connector._handoff._keeps_states = True
    prefill.scheduler.connector._handoff.begin(request)
    assert (given, request.prompt_token_ids, request.num_tokens) == (asked[2], asked[2][:-1], 109)


@pytest.mark.parametrize("what", ["embeddings", "images"])
def test_prompts_that_are_not_tokens_alone(
    pair: StartPair, asked: Prompts, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Where states are kept, nothing is taken off them, and no tail is looked for: both engines compute it."""
    warnings: list[str] = []
    monkeypatch.setattr(handoff.logger, "warning", lambda form, *given: warnings.append(form % given))
    prefill, decode = pair()
    for one, word in ((prefill, PREFILL), (decode, DECODE)):
        one.scheduler.connector._handoff._keeps_states = True
        given: dict[str, Any] = {}
        if what == "embeddings":
            given = {"prompt_embeds": torch.ones(110, 8), "prompt_is_token_ids": [False] * 50 + [True] * 60}
        else:
            image = MultiModalFeatureSpec(None, "image", "a", PlaceholderRange(100, 10))
            given = {"mm_features": [image]}
        for prompt in asked[2:3] * 2:
            (name,) = one.add([prompt], params=word, **given)
            request = one.scheduler.requests[name]
            assert (len(request.prompt_token_ids), request.num_tokens, request.num_prompt_tokens) == (110, 110, 110)
            assert one.scheduler.connector._handoff.matched(request, 0, 96) == 96
            assert not one.scheduler.connector._handoff._prompts
    assert len(warnings) == 2
    assert "embeddings or images" in warnings[0]


def test_no_other_prompt_finds_a_tail(pair: StartPair, asked: Prompts) -> None:
    """One that goes on, one that ends before, one that ends otherwise, and the same one with another salt."""
    prefill, decode = pair()
    prompt = asked[2]
    prefill.generate([prompt], params=PREFILL)
    assert decode.generate([[*prompt, 7], prompt[:-1], [*prompt[:-1], 501]], params=DECODE) == [96] * 3
    decode.forget()
    assert decode.generate([prompt], salt="a", params=DECODE) == [0]
    assert decode.generate([prompt], params=DECODE) == [109]


def test_a_salt_is_in_the_name_of_a_tail_without_whole_blocks(pair: StartPair, asked: Prompts) -> None:
    prefill, decode = pair()
    prefill.generate(asked[:1], salt="a", params=PREFILL)
    assert [decode.generate(asked[:1], salt=salt, params=DECODE)[0] for salt in ("b", None, "a")] == [0, 0, 19]


def test_what_the_answer_says_goes_with_the_next_request(pair: StartPair, asked: Prompts) -> None:
    """Routers do this: what the first engine returns is given to the second one as it is."""
    prefill, decode = pair()
    plain, handed = prefill.add(asked[1:2]), prefill.add(asked[2:3], params=PREFILL)
    prefill.generate([])
    assert prefill.params[plain[0]] is None
    assert decode.generate(asked[2:3], params=prefill.params[handed[0]]) == [109]


def answer_of(engine: Modelless, prompt: list[int]) -> dict[str, Any]:
    """What the answer to a prompt carries, once it is out; the engine then stops, before the stores of its end."""
    (name,) = engine.add([prompt], max_tokens=1, params=PREFILL)
    while name not in engine.params:
        engine.step()
    params: dict[str, Any] = engine.params[name]
    return params


def ask_again(engine: Modelless, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, until a request that waits has asked the daemon three times."""
    thread, asked = engine.scheduler.connector.scheduler.manager._lookup_thread, []
    ask = thread.ask

    def note(pin: Any) -> None:
        asked.append(pin)
        ask(pin)

    with monkeypatch.context() as patched:
        patched.setattr(thread, "ask", note)
        until(lambda: engine.step() == 0 and len(asked) >= 3, "it has asked again")


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_comes_before_the_stores_waits_for_them(
    pair: StartPair, asked: Prompts, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives the answer out with the step that computes it, and stores begin with the next one."""
    monkeypatch.setattr(expectation, "EXPECTED_S", 3600.0)
    prefill, decode = pair(kind)
    for prompt, loaded in zip(asked, ALL, strict=True):
        params = answer_of(prefill, prompt)
        (waiting,) = decode.add([prompt], params=params)
        ask_again(decode, monkeypatch)
        assert waiting not in decode.began
        prefill.generate([])
        decode.generate([])
        assert decode.began[waiting] == loaded


def test_nobody_waits_for_stores_without_daemon(
    pair: StartPair, asked: Prompts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where it has died before the request, nor while that waits."""
    monkeypatch.setattr(expectation, "EXPECTED_S", 3600.0)
    prefill, decode = pair()
    params = answer_of(prefill, asked[0])
    decode.add(asked[:1], params=params)
    ask_again(decode, monkeypatch)
    prefill.daemon.signal(signal.SIGKILL)
    prefill.daemon.wait()
    assert decode.generate(asked, params=params) == [0] * len(asked)


@pytest.mark.parametrize("kind", KINDS)
def test_vllms_caps_hold_for_tails(pair: StartPair, asked: Prompts, kind: str) -> None:
    """`max_offload_tokens` and `max_load_tokens`."""
    prefill, decode = pair(kind)
    (name,) = prefill.add(asked[2:3], params={**PREFILL, "max_offload_tokens": 108})
    prefill.generate([])
    assert expectation.COMPUTED_AT not in prefill.params[name], "nobody is to wait for what is not stored"
    assert decode.generate(asked[2:3], params=DECODE) == [96]
    prefill.forget()
    prefill.generate(asked[2:3], params={**PREFILL, "max_offload_tokens": 109})
    decode.forget()
    assert decode.generate(asked[2:3], params={**DECODE, "max_load_tokens": 108}) == [96]
    decode.forget()
    assert decode.generate(asked[2:3], params={**DECODE, "max_load_tokens": 109}) == [109]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["before the lookup", "before the load"])
def test_a_daemon_that_dies_between(pair: StartPair, asked: Prompts, kind: str, when: str) -> None:
    """Everything is computed then, and nothing is kept waiting."""
    prefill, decode = pair(kind)
    prefill.generate(asked, params=PREFILL)
    daemon = prefill.daemon

    def die() -> None:
        if daemon.alive:
            daemon.signal(signal.SIGKILL)
            daemon.wait()

    if when == "before the lookup":
        die()
    else:
        begin = decode.worker.start_load_kv

        def begin_without(context: None) -> None:
            if decode.worker._connector_metadata.load_jobs:
                die()
            begin(context)

        decode.worker.start_load_kv = begin_without
    decode.generate(asked, params=DECODE)
    assert not daemon.alive
    assert bool(decode.failed) == (when == "before the load")
    decode.forget()
    assert decode.generate(asked, params=DECODE) == [0] * len(asked)
    assert prefill.generate(asked, params=PREFILL) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_old_tails_are_not_found(pair: StartPair, asked: Prompts, kind: str) -> None:
    """They are of the weights before it."""
    prefill, _ = pair(kind)
    prefill.generate(asked, params=PREFILL)
    assert prefill.scheduler.reset_prefix_cache(reset_connector=True)
    assert prefill.generate(asked, params=DECODE) == [0] * len(asked)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_anew_after_a_reset_is_stored_anew(pair: StartPair, asked: Prompts, kind: str) -> None:
    """The reset finds the requests running, their tails stored, and preempts them. It leaves the engine names of its
    own, so that it takes over from itself.
    """
    prefill, _ = pair(kind)
    prefill.add(asked, max_tokens=60, params=PREFILL)
    computed = prefill.scheduler.connector._handoff._computed
    while len(computed) < len(asked):
        prefill.step()
    assert len(prefill.scheduler.running) == len(asked)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    prefill.scribble()
    prefill.generate([])
    prefill.forget()
    prefill.scribble()
    assert prefill.generate(asked, params=DECODE) == ALL


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_aborted(pair: StartPair, asked: Prompts, kind: str) -> None:
    """They are aborted at any step of either engine. Nothing stays behind."""
    prefill, decode = pair(kind)
    for steps in range(6):
        for one, params in ((prefill, PREFILL), (decode, DECODE)):
            names = one.add(prompts(steps), params=params)
            for _ in range(steps):
                one.step()
            one.scheduler.finish_requests(names[::2], RequestStatus.FINISHED_ABORTED)
            one.generate([])
            kept = one.scheduler.connector._handoff
            assert not (kept._prompts or kept._computing or kept._computed or kept._stored or kept._loading)
    prefill.generate(asked, params=PREFILL)
    assert decode.generate(asked, params=DECODE) == ALL
    until(lambda: prefill.daemon.status()["leases"]["keys"] == 0, "nothing is pinned")


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_are_preempted(pair: StartPair, kind: str) -> None:
    """There is room for their prompts, and not for what they are answered."""
    prefill, decode = pair(kind)
    asked = prompts(1) + prompts(2)
    for one, params in ((prefill, PREFILL), (decode, DECODE)):
        preempted: list[Request] = []
        preempt = one.scheduler._preempt_request

        def note(
            request: Request, *rest: Any, preempt: Any = preempt, preempted: Any = preempted, **named: Any
        ) -> None:
            preempted.append(request)
            preempt(request, *rest, **named)

        one.scheduler._preempt_request = note
        one.generate(asked, max_tokens=150, params=params)
        assert preempted
        one.forget()
    decode.scribble()
    assert decode.generate(asked, params=DECODE) == ALL * 2
