"""Store and load on a real daemon, byte for byte, on both event loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, Outcome
from kvoffloadd.model import NO_BLOCK
from scripts.harness.daemon import Daemon
from tests.e2e.rank import HYBRID, NAMESPACE, Rank, new_keys

GROUPS = (0, 1, 2)


@pytest.fixture(params=["true", "false"], ids=["uvloop", "asyncio"])
def on_loop(request: pytest.FixtureRequest, standing: Callable[..., Daemon]) -> Daemon:
    """A daemon on each event loop."""
    return standing(f"server.use_uvloop={request.param}")


@pytest.fixture
def rank(on_loop: Daemon) -> Rank:
    found: Rank = on_loop.welcome(Rank(on_loop.socket, HYBRID))
    return found


def test_every_byte_of_hybrid_groups_comes_back_and_no_other_is_touched(rank: Rank, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = {group: new_keys(rng, 6) for group in GROUPS}
    stored = {group: (keys[group], rank.blocks_of(group, 0, 6)) for group in GROUPS}
    result = rank.store(stored)
    assert result.outcome is Outcome.DONE
    assert all((states == KeyState.RESERVED).all() for states in result.states)

    rank.wipe()
    loaded = {group: (keys[group][::-1], blocks + 30) for group, (_, blocks) in stored.items()}
    assert rank.load(loaded).outcome is Outcome.DONE
    assert [rank.wrong(group, *loaded[group]) for group in GROUPS] == [0, 0, 0]
    for group in GROUPS:
        rank.wipe_loaded(group, loaded[group][1])
    assert rank.clean()


def test_blocks_that_are_not_wanted_are_not_touched(rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 6)
    rank.store_keys(keys, 1)
    rank.wipe()
    blocks = rank.blocks_of(1, 20, 6)
    blocks[0] = NO_BLOCK
    blocks[2, 0] = NO_BLOCK
    blocks[5, 1] = NO_BLOCK
    result = rank.load({1: (keys, blocks)})
    assert result.outcome is Outcome.DONE
    assert rank.wrong(1, keys, blocks) == 0
    rank.wipe_loaded(1, blocks)
    assert rank.clean()


def test_a_store_of_present_keys_says_hit_and_copies_nothing(on_loop: Daemon, rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 8)
    rank.store_keys(keys[:5])
    before = on_loop.status()["transfers"]["store"]
    result = rank.store_keys(keys)
    assert result.outcome is Outcome.DONE
    assert result.states[0].tolist() == [KeyState.HIT] * 5 + [KeyState.RESERVED] * 3
    assert result.bytes == 3 * (3000 + 8 * 32)
    assert rank.store_keys(keys).bytes == 0
    after = on_loop.status()["transfers"]["store"]
    assert after["keys"] - before["keys"] == 3
    assert rank.loads_right(keys)


def test_a_load_names_exactly_what_it_could_not_give(rank: Rank, seed: int) -> None:
    keys = new_keys(np.random.default_rng(seed), 8)
    held = np.array([0, 2, 3, 6])
    rank.store_keys(keys[held])
    rank.wipe()
    blocks = rank.blocks_of(0, 10, 8)
    result = rank.load({0: (keys, blocks)})
    assert result.outcome is Outcome.PARTIAL
    assert result.failed[0].tolist() == [1, 4, 5, 7]
    assert rank.wrong(0, keys[held], blocks[held]) == 0
    rank.wipe_loaded(0, blocks[held])
    assert rank.clean()


def test_any_key_width(on_loop: Daemon, seed: int) -> None:
    """Narrow keys that agree in all but the last byte are different keys."""
    for width in (8, 9, 20, 31):
        namespace = type(NAMESPACE)(model="widths", key_bytes=width)
        keys = np.zeros((200, width), np.uint8)
        keys[:, -1] = np.arange(200)
        with Rank(on_loop.socket, namespace=namespace, num_blocks=200) as rank:
            assert rank.store_keys(keys).outcome is Outcome.DONE
            assert rank.loads_right(keys)
            other = keys.copy()
            other[:, 0] = 1
            assert rank.states(other) == [KeyState.MISS] * 200


def test_many_jobs_at_once_and_out_of_order(rank: Rank, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = [new_keys(rng, 2) for _ in range(30)]
    blocks = [rank.blocks_of(0, 2 * at, 2) for at in range(30)]
    jobs = [rank.begin_store({0: (k, b)}) for k, b in zip(keys, blocks, strict=True)]
    assert {rank.wait(job).outcome for job in reversed(jobs)} == {Outcome.DONE}
    rank.wipe()
    order = rng.permutation(30)
    loads = [rank.client.load(rank.registration, {0: (keys[at], blocks[at])}, expedited=bool(at % 2)) for at in order]
    assert {rank.wait(job).outcome for job in loads} == {Outcome.DONE}
    assert sum(rank.wrong(0, k, b) for k, b in zip(keys, blocks, strict=True)) == 0


def test_an_empty_job_ends_too(rank: Rank) -> None:
    nothing = np.zeros((0, 32), np.uint8), np.zeros(0, np.int64)
    assert rank.store({0: nothing}).outcome is Outcome.DONE
    assert rank.load({0: nothing}).outcome is Outcome.DONE
    assert rank.load({}).outcome is Outcome.DONE


def test_a_client_that_never_registers(on_loop: Daemon) -> None:
    with Client(on_loop.socket, namespace=NAMESPACE) as client:
        client.ping()
        assert client.status()["pid"] == on_loop.pid
