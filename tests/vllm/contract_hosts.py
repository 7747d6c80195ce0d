"""Engines of two hosts that share a store, with vLLM's own scheduler, real daemons and no model.

Not collected: `test_contract` runs it with each release's Python. Every token that a model would read is looked at.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffloadd.integrations.vllm.caches import announced
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from tests.e2e.sharedstore import SharedStore
from tests.vllm.engine import by_connector
from tests.vllm.modelless import BLOCK, WINDOW, Modelless, is_connected

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

StartDaemon = Callable[..., Daemon]
PREFILL = {"do_remote_decode": True}
DECODE = {"do_remote_prefill": True}
LENGTH = 15 * BLOCK + 21
SLIDING = 1
"""The group with a window of a hybrid."""
WINDOW_KEYS = WINDOW // BLOCK


class ContractHosts:
    """Two hosts, each with a daemon and an engine. `computes` stores in the store, `loads` has nothing stored."""

    def __init__(self, daemons: tuple[Daemon, Daemon], store: SharedStore, tiny: str, kind: str, chunk: int) -> None:
        self.store = store
        self.here, self.there = daemons
        self.computes, self.loads = (
            Modelless(tiny, kind, daemon, by_connector(daemon.socket, chunk)) for daemon in (self.here, self.there)
        )
        for engine in (self.computes, self.loads):
            until(partial(_is_ready, engine), "its lookups reach the daemon, which knows an era")

    def share(self, prompt: list[int], **given: Any) -> None:
        """The first host computes it, and the store gets all of it."""
        self.computes.generate([prompt], **given)
        until(self._is_pushed, "the store has all of it")

    def share_history(self, prompt: list[int], keys: int) -> None:
        """A key of each group at a time, as a conversation grows: else vLLM stores of a window the end alone."""
        for at in range(keys):
            self.share(prompt[: (at + 1) * BLOCK + 1])

    def _is_pushed(self) -> bool:
        status = self.here.status()
        return not status["cache"]["unsealed"] and int(status["remote"]["pushed"]["keys"]) == int(
            status["cache"]["keys"]
        )

    def objects(self, group: int) -> set[Path]:
        """What the store has of a group."""
        return {path for path in self.store.objects() if path.name.split("%2F")[-2] == f"{group}"}

    def fetched(self) -> int:
        """Keys that came to the second host."""
        return int(_remote(self.there)["fetched"]["keys"])

    def close(self) -> None:
        for engine in (self.loads, self.computes):
            engine.close()


def _is_ready(engine: Modelless) -> bool:
    engine.generate([[3]])
    return is_connected(engine) and any(_remote(engine.daemon)["eras"].values())


def _remote(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["remote"]
    return found


@pytest.fixture
def make_hosts(start_daemon: StartDaemon, tmp_path: Path) -> Iterator[Callable[..., ContractHosts]]:
    """`make_hosts(kind, chunk=...)`, once."""
    made: list[ContractHosts] = []

    def make(kind: str, chunk: int = BLOCK) -> ContractHosts:
        store = SharedStore(tmp_path)
        daemons = start_daemon(*store.settings(), memory="64MiB"), start_daemon(*store.settings(), memory="64MiB")
        made.append(ContractHosts(daemons, store, os.environ["KVOFFLOADD_TINY_MODEL"], kind, chunk))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture
def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(LENGTH)]


def test_windows_are_those_that_vllm_looks_up(make_hosts: Callable[[str], ContractHosts]) -> None:
    engine = make_hosts("hybrid").computes
    groups = announced(engine.worker.connector_worker.spec.config).groups
    looked_up = [
        group.sliding_window_size_in_chunks for group in engine.scheduler.connector.scheduler.config.kv_group_configs
    ]
    assert [group.window_keys or None for group in groups] == looked_up == [None, WINDOW_KEYS]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_only_what_is_of_use_is_fetched(
    make_hosts: Callable[[str], ContractHosts], prompt: list[int], kind: str
) -> None:
    """All keys of full attention, and of a window those at its end: one more, for a prompt that might end there."""
    hosts = make_hosts(kind)
    hosts.share_history(prompt, 15)
    assert len(hosts.objects(SLIDING)) == (15 if kind == "hybrid" else 0)
    assert hosts.loads.generate([prompt]) == [15 * BLOCK]
    assert hosts.fetched() == 15 + (WINDOW_KEYS + 1 if kind == "hybrid" else 0)


def test_what_is_not_in_a_window_is_missed_by_nobody(
    make_hosts: Callable[[str], ContractHosts], prompt: list[int]
) -> None:
    """vLLM stores of a window's group the end of the prompt alone, or the store has evicted the rest."""
    hosts = make_hosts("hybrid")
    hosts.share(prompt)
    assert len(hosts.objects(SLIDING)) == WINDOW_KEYS
    assert hosts.loads.generate([prompt]) == [15 * BLOCK]
    assert hosts.fetched() == 15 + WINDOW_KEYS


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("length", [15 * BLOCK - 1, 15 * BLOCK, 15 * BLOCK + 1])
def test_prompts_of_whole_keys(
    make_hosts: Callable[[str], ContractHosts], prompt: list[int], kind: str, length: int
) -> None:
    """What one daemon would serve its own engine, the other one serves, too."""
    hosts = make_hosts(kind)
    hosts.share_history(prompt[:length], 15)
    hosts.computes.forget()
    expected = hosts.computes.generate([prompt[:length]])
    assert expected[0] >= 14 * BLOCK
    assert hosts.loads.generate([prompt[:length]]) == expected


@pytest.mark.parametrize("kind", ["full drafts", "sliding drafts"])
def test_a_prompt_that_goes_on_where_layers_are_a_draft_models(
    make_hosts: Callable[[str], ContractHosts], prompt: list[int], kind: str
) -> None:
    """vLLM gives up the last chunk of a hit, and of a window needs what stands before the rest."""
    hosts = make_hosts(kind)
    hosts.share_history(prompt, 10)
    one, other = (prompt[: 10 * BLOCK] + prompt[at : at + 5 * BLOCK] for at in (0, 1))
    hosts.computes.forget()
    assert hosts.computes.generate([one]) == [9 * BLOCK]
    assert hosts.loads.generate([other]) == [9 * BLOCK]


@pytest.mark.parametrize("kind", ["full drafts", "sliding drafts"])
def test_a_prompt_of_draft_layers_that_was_stored_at_once(
    make_hosts: Callable[[str], ContractHosts], prompt: list[int], kind: str
) -> None:
    """Only the end of a window is there. What one daemon would serve its own engine, the other one serves, too."""
    hosts = make_hosts(kind)
    hosts.share(prompt[: 10 * BLOCK + 1])
    one, other = (prompt[: 10 * BLOCK] + prompt[at : at + 5 * BLOCK] for at in (0, 1))
    hosts.computes.forget()
    expected = hosts.computes.generate([one])
    assert hosts.loads.generate([other]) == expected


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_handed_over_prompt(make_hosts: Callable[[str], ContractHosts], prompt: list[int], kind: str) -> None:
    """Its tail comes with it: the last token alone is computed."""
    hosts = make_hosts(kind)
    hosts.share(prompt, max_tokens=1, params=PREFILL)
    assert hosts.loads.generate([prompt], params=DECODE) == [LENGTH - 1]
    assert hosts.fetched() == 16 + (WINDOW_KEYS + 1 if kind == "hybrid" else 0)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_handed_over_prompt_of_which_the_engine_has_a_part(
    make_hosts: Callable[..., ContractHosts], prompt: list[int], kind: str
) -> None:
    """It ends within a chunk. Of full attention the rest of that is needed, of the window the tail alone."""
    hosts = make_hosts(kind, chunk=4 * BLOCK)
    asked = prompt[: 11 * BLOCK + 5]
    hosts.share(asked, max_tokens=1, params=PREFILL)
    hosts.loads.generate([asked[: 7 * BLOCK + 1]])
    before = hosts.fetched()
    assert hosts.loads.generate([asked], params=DECODE) == [11 * BLOCK + 4]
    assert hosts.fetched() == before + (3 if kind == "hybrid" else 2)
