"""Tests what scripts check bytes with: it must distinguish whatever a bug could confuse, and see every byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.client import SharedTensor
from kvoffloadd.demo.chat import TURNS_EACH, chat
from kvoffloadd.model import NO_BLOCK
from kvoffloadd.testing.oracle import Oracle
from scripts.harness.counters import Counters
from scripts.harness.geometry import Geometry, random_geometry
from scripts.harness.kvmemory import KvMemory


def oracle(seed: int = 0, namespace: int = 0, key_bytes: int = 16) -> Oracle:
    return Oracle(seed, namespace, key_bytes, roots=2, root_tokens=64)


def test_keys_are_the_same_in_every_process_and_nowhere_else() -> None:
    keys = oracle().keys(3, 16, 20)
    assert keys.shape == (20, 16)
    assert np.array_equal(keys, oracle().keys(3, 16, 20))
    assert np.array_equal(keys[:7], oracle().keys(3, 16, 7))
    others = [oracle().keys(4, 16, 20), oracle(seed=1).keys(3, 16, 20), oracle(namespace=1).keys(3, 16, 20)]
    everything = np.concatenate([keys, *others, oracle().keys(3, 32, 10)])
    assert len(np.unique(everything, axis=0)) == len(everything)
    assert oracle(key_bytes=12).keys(3, 16, 5).shape == (5, 12)


def test_conversations_share_their_root() -> None:
    one, same, other = (oracle().keys(conversation, 16, 6) for conversation in (2, 4, 5))
    assert np.array_equal(one[:4], same[:4])
    assert not (one[4:] == same[4:]).all(axis=1).any()
    assert not (one == other).all(axis=1).any()


def test_contents_differ_by_key_group_part_and_place() -> None:
    made = oracle()
    keys = made.keys(0, 16, 8)
    contents = made.contents(0, 0, keys, 1001)
    assert contents.shape == (8, 1001)
    assert np.array_equal(contents[3:4], made.contents(0, 0, keys[3:4], 1001))
    words = np.ascontiguousarray(contents[:, :1000]).view(np.uint64)
    assert len(np.unique(words)) == words.size
    for other in (made.contents(1, 0, keys, 1001), made.contents(0, 1, keys, 1001)):
        assert (other != contents).mean() > 0.99


def shared_memory(geometry: Geometry) -> KvMemory:
    rng = np.random.default_rng(0)
    return KvMemory(geometry, geometry.arrange(0, 0, rng), rng, "kvo-test")


@pytest.mark.parametrize("number", range(4))
def test_every_changed_byte_is_seen_once(number: int) -> None:
    geometry = random_geometry(5, number)
    memory = shared_memory(geometry)
    shared = memory.caches.tensors[0]
    assert isinstance(shared, SharedTensor)
    tensor = shared.array
    assert memory.compare_all() is None
    tensor[3, 0] ^= 1
    wrong = memory.compare(np.array([9]))
    assert wrong is None
    wrong = memory.compare(np.array([4]))
    assert wrong is not None
    assert (wrong.wrong_bytes, wrong.stray_bytes) == (1, 1)
    assert memory.compare_all() is None


@pytest.mark.parametrize("number", range(4))
def test_filled_blocks_are_expected_and_lent_ones_are_let_alone(number: int) -> None:
    geometry = random_geometry(6, number)
    memory = shared_memory(geometry)
    group = next(group for group in geometry.groups if group.part_of_rank[0] is not None)
    part = group.part_of_rank[0] or 0
    keys = oracle().keys(0, 16, 2)
    blocks = memory.free.take(2 * group.blocks_per_key).reshape(2, -1)
    memory.fill(group.number, blocks, oracle().contents(group.number, part, keys, group.payload_bytes(part)))
    assert memory.compare_all() is None
    # What a load would have to bring, but no load brought it.
    other = oracle().contents(group.number, part, oracle().keys(1, 16, 2), group.payload_bytes(part))
    memory.lend(blocks.reshape(-1))
    memory.expect(group.number, blocks, other)
    assert memory.compare_all() is None
    memory.lend(blocks.reshape(-1), lent=False)
    wrong = memory.compare(blocks.reshape(-1))
    assert wrong is not None
    assert wrong.stray_bytes == 0
    assert wrong.wrong_bytes > 0.9 * other.size
    memory.expect(group.number, blocks, other)
    memory.forgive(group.number, np.append(blocks.reshape(-1), NO_BLOCK))
    assert memory.compare_all() is None


def test_a_killed_worker_takes_no_count_with_it(tmp_path: Path) -> None:
    everyone = Counters(tmp_path / "counters", 2)
    for _process in range(2):
        counters = Counters(tmp_path / "counters", 2, 1)
        counters.add("loads", 3)
        for _ in range(50):
            counters.took("load", 0.01)
        counters.took("load", 5.0)
    assert everyone.total("loads") == everyone.get(1, "loads") == 6
    assert everyone.percentile_s("load", 50) == pytest.approx(0.01, rel=0.05)
    assert everyone.percentile_s("load", 99) == pytest.approx(5.0, rel=0.05)
    assert everyone.percentile_s("store", 50) is None
    assert not counters.stopping
    everyone.stop()
    assert counters.stopping


def test_conversations_change_workers_with_every_turn() -> None:
    turns = chat(1, 300, 2)
    assert turns == chat(1, 300, 2)
    tokens: dict[int, int] = {}
    last: dict[int, int] = {}
    for turn in turns:
        assert turn.known_tokens <= turn.prompt_tokens < turn.total_tokens
        if turn.conversation in tokens:
            assert turn.known_tokens == tokens[turn.conversation]
            assert turn.worker != last[turn.conversation]
        tokens[turn.conversation], last[turn.conversation] = turn.total_tokens, turn.worker
    assert len(tokens) > 300 / (2 * TURNS_EACH)
