"""Offload, wipe, restore elsewhere, and go on: a decoder's tokens and logits are those of an undisturbed run."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, GroupKind, NamespaceSpec, Outcome
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    FLASHINFER_HND,
    HOST,
    PACKED_HND,
    TRITON_HND,
    Attention,
    Backend,
    CanonicalCache,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    Plan,
    Reach,
    State,
    canonicalise,
    cross_layers,
    packed_pages,
    packed_rows,
)
from kvoffloadd.model import U8Array
from scripts.harness.daemon import Daemon
from tests.layout.decoder import VOCABULARY, Decoder
from tests.layout.oracle import gather, rows_of, scatter, torch

BLOCK, WINDOW, HEADS, SIZE = 8, 20, 2, 16
FULL_BLOCKS, TAIL, NEW = 5, 3, 24
TOKENS = FULL_BLOCKS * BLOCK + TAIL
TABLE = -(-(TOKENS + NEW) // BLOCK)
NUM_BLOCKS = 64
NOWHERE = 0
"""A block that nobody may read: what tables name where a window has passed."""

NAN, PLAUSIBLE = (0xFF, 0x100), (0x38, 0x40)
"""Ranges of bytes that memory is filled with: each item is not a number, or one as small as those models compute."""

Moves = dict[int, tuple[range, list[int]]]
"""Group -> keys, by their place in the prompt, and the block of each."""

Generated = tuple[list[int], Any]
"""Tokens, and the logits (tokens, vocabulary) of each."""


# --- models, and memory for them ---


@dataclass(frozen=True)
class Memory:
    """An engine's. `flat`: every byte there is."""

    specs: Mapping[str, LayerSpec]
    groups: Sequence[LayerGroup]
    layers: Mapping[str, Any]
    cache: CanonicalCache
    flat: Sequence[Any]

    def wipe(self, garbage: tuple[int, int], rng: np.random.Generator) -> None:
        for one in self.flat:
            one.copy_(torch.from_numpy(rng.integers(*garbage, one.shape, dtype=np.uint8).view(np.int8)))


def attention(backend: Backend | int, dtype: str = "bfloat16", kernel_blocks: int = 1) -> Attention:
    return Attention(BLOCK, HEADS, SIZE, dtype, backend, kernel_blocks=kernel_blocks)


def model(full: Attention, kinds: Sequence[str]) -> tuple[dict[str, LayerSpec], list[LayerGroup]]:
    """Layers of these kinds in turn, fewer of sliding attention: in its group slots stay unused."""
    states = State((3, 16), "bfloat16"), State((16, 8), "float32")
    described: dict[str, LayerSpec] = {
        "full": full,
        "sliding": replace(full, kind=LayerKind.SLIDING, window=WINDOW),
        "mamba": Mamba(BLOCK, states, padded_bytes=full.page_bytes),
    }
    specs = {f"{kind}{at}": described[kind] for at in range(3) for kind in kinds if at < 2 or kind != "sliding"}
    groups = [LayerGroup(at, tuple(name for name in specs if name.startswith(kind))) for at, kind in enumerate(kinds)]
    return specs, groups


def planned(plan: Plan, device: str = HOST) -> Memory:
    made = plan.allocate(device)
    return Memory(plan.specs, plan.groups, made.layers, made.cache, [one.view(-1) for one in made.tensors])


def crossed(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> Memory:
    return planned(cross_layers(specs, groups, NUM_BLOCKS))


def in_torch(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> Memory:
    """As `crossed`, in memory that is moved to shared memory when it is registered."""
    return planned(cross_layers(specs, groups, NUM_BLOCKS), "cpu")


def in_pages(specs: Mapping[str, LayerSpec], _groups: Sequence[LayerGroup]) -> Memory:
    """Two layers on a page, one on the last; Mamba layers overlay them in two groups."""
    return planned(packed_pages(specs, 2, NUM_BLOCKS))


def in_rows(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> Memory:
    return planned(packed_rows(specs, groups, NUM_BLOCKS))


def apart(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> Memory:
    """K, V and each state in a tensor of its own: no layout at all."""
    layers: dict[str, list[Any]] = {}
    for name, spec in specs.items():
        halves = 2 * (State((BLOCK, HEADS, SIZE), spec.dtype),) if isinstance(spec, Attention) else ()
        states = spec.states if isinstance(spec, Mamba) else halves
        layers[name] = [torch.zeros(NUM_BLOCKS, *one.shape, dtype=getattr(torch, one.dtype)) for one in states]
    flat = [one.view(-1).view(torch.int8) for layer in layers.values() for one in layer]
    return Memory(specs, groups, layers, canonicalise(layers, specs, groups), flat)


@dataclass(frozen=True)
class Case:
    make: Callable[[Mapping[str, LayerSpec], Sequence[LayerGroup]], Memory]
    full: Attention
    kinds: tuple[str, ...]

    def memory(self) -> Memory:
        return self.make(*model(self.full, self.kinds))

    def undisturbed(self, seed: int) -> Generated:
        """What the model says, not a byte of it moved."""
        return undisturbed(self.full.dtype, self.kinds, seed)


NHD, HND = attention(FLASH_NHD), attention(FLASH_HND)
ALL = ("full", "sliding", "mamba")
CASES = {
    "default, full": Case(crossed, NHD, ("full",)),
    "default, sliding": Case(crossed, NHD, ("sliding", "full")),
    "default, mamba": Case(crossed, NHD, ALL),
    "default, float32": Case(crossed, attention(FLASH_NHD, "float32"), ALL),
    "default, torch's memory": Case(in_torch, NHD, ALL),
    "heads first, full": Case(crossed, HND, ("full",)),
    "heads first, sliding": Case(crossed, attention(TRITON_HND), ("sliding", "full")),
    "heads first, mamba": Case(crossed, HND, ALL),
    "K and V side by side": Case(crossed, attention(PACKED_HND), ALL),
    "kernel blocks": Case(crossed, attention(FLASH_NHD, kernel_blocks=2), ALL),
    "kernel blocks, triton": Case(crossed, attention(TRITON_HND, kernel_blocks=4), ALL),
    "isolated": Case(crossed, attention(replace(FLASH_NHD, layered=None)), ALL),
    "packed pages, full": Case(in_pages, NHD, ("full",)),
    "packed pages, sliding": Case(in_pages, HND, ("sliding",)),
    "packed pages, mamba": Case(in_pages, HND, ("full", "mamba")),
    "packed pages, mamba, kernel blocks": Case(in_pages, attention(FLASHINFER_HND, kernel_blocks=4), ("full", "mamba")),
    "packed rows, full": Case(in_rows, HND, ("full",)),
    "packed rows, mamba": Case(in_rows, NHD, ALL),
    "packed rows, mamba, kernel blocks": Case(in_rows, attention(FLASHINFER_HND, kernel_blocks=2), ALL),
    "K and V apart": Case(apart, attention(0), ALL),
}


def prompt_of(seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, TOKENS).tolist()
    return tokens


@functools.cache
def undisturbed(dtype: str, kinds: tuple[str, ...], seed: int) -> Generated:
    memory = apart(*model(attention(0, dtype), kinds))
    memory.wipe(NAN, np.random.default_rng(seed))
    tables = {group.group: range(TABLE) for group in memory.groups}
    return Decoder(memory.specs, memory.groups, memory.layers, seed).generate(prompt_of(seed), tables, NEW)


# --- an engine's worker ---


class Worker:
    """A prompt, a model over memory, and a session with the daemon.

    Block tables in which the prompt is computed and those to which it is restored have no block in common.
    """

    def __init__(self, client: Client, memory: Memory, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._client, self._memory = client, memory
        self._model = Decoder(memory.specs, memory.groups, memory.layers, seed)
        self._registration = client.register(memory.cache.kv_cache())
        self._prompt = prompt_of(seed)
        self._keys = {group.group: self._rolling_hash(group.group) for group in memory.groups}
        firsts = {group.group: memory.specs[group.layers[0]] for group in memory.groups}
        self.reaches = {
            group: Reach(spec.group_kind, spec.block_size, getattr(spec, "window", 0)) for group, spec in firsts.items()
        }
        blocks = 1 + self._rng.permutation(NUM_BLOCKS - 1)[: 2 * len(firsts) * TABLE]
        source, target = blocks.reshape(2, len(firsts), TABLE).tolist()
        self._source, self._target = dict(zip(firsts, source, strict=True)), dict(zip(firsts, target, strict=True))
        self._tables: dict[int, list[int]] = {}

    def _rolling_hash(self, group: int) -> U8Array:
        """u8 (keys, 32): of each full block, what it and all before it hold."""
        digest = hashlib.blake2b(bytes([group]), digest_size=32)
        found = []
        for block in range(FULL_BLOCKS):
            digest.update(bytes(self._prompt[block * BLOCK : (block + 1) * BLOCK]))
            found.append(np.frombuffer(digest.digest(), np.uint8))
        return np.stack(found)

    def wipe(self, garbage: tuple[int, int]) -> None:
        self._memory.wipe(garbage, self._rng)

    def offload(self, kind: GroupKind | None = None, missing: int = FULL_BLOCKS) -> None:
        """Compute the prompt and store its full blocks; of groups of `kind` all but the `missing` one."""
        self.wipe(NAN)
        self._model.prefill(self._prompt, self._source)
        for group, reach in self.reaches.items():
            gap = missing if reach.kind == kind else FULL_BLOCKS
            for keys in (range(gap), range(gap + 1, FULL_BLOCKS)):
                self._move(self._client.store, {group: (keys, self._source[group][keys.start : keys.stop])})

    def restorable(self) -> int:
        """Blocks of the longest prefix that the daemon has for all groups."""
        boundaries: list[int] = self._client.lookup(self._keys).boundaries.tolist()
        return max(boundaries, default=0) // BLOCK

    def admit(self, remote: int, local: int = 0) -> Moves:
        """Block tables for the request, of which the first `local` blocks are computed here, and what to load for
        `remote` ones. Blocks that a group does not need are nowhere.
        """
        moves: Moves = {}
        for group, reach in self.reaches.items():
            keys, ids = reach.wanted(remote, local), self._target[group]
            self._tables[group] = [*ids[:local], *[NOWHERE] * (keys.start - local), *ids[keys.start :]]
            moves[group] = keys, ids[keys.start : keys.stop]
        self._model.prefill(self._prompt[: local * BLOCK], self._tables)
        return moves

    def load(self, moves: Moves) -> None:
        self._move(self._client.load, moves)

    def _move(self, submit: Callable[..., Any], moves: Moves) -> None:
        groups = {group: (self._keys[group][keys.start : keys.stop], ids) for group, (keys, ids) in moves.items()}
        first = {group: keys.start for group, (keys, _) in moves.items()}
        job = submit(self._registration, groups, first=first)
        assert self._client.wait(job, 15).outcome == Outcome.DONE

    def resume(self, blocks: int, count: int = NEW) -> Generated:
        """The rest of the prompt behind so many blocks, and what follows."""
        return self._model.generate(self._prompt, self._tables, count, blocks * BLOCK)

    def turn_a_sign(self, group: int, block: int) -> None:
        """Of one item of the block's payload."""
        rows = rows_of(self._memory.cache)
        refs = next(known.refs for known in self._memory.cache.groups if known.group == group)
        payload = bytearray(gather(rows, refs, block))
        payload[int(self._rng.integers(len(payload))) | 3] ^= 0x80  # the last byte of an item, whatever its size
        scatter(rows, refs, block, bytes(payload))


@contextmanager
def working(daemon: Daemon, name: str, seed: int) -> Iterator[Worker]:
    with Client(daemon.socket, namespace=NamespaceSpec(model="decoder", layout=name)) as client:
        yield Worker(client, CASES[name].memory(), seed)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The same order of additions every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_same(one: Generated, other: Generated) -> None:
    assert one[0] == other[0]
    assert bool(one[1].isfinite().all())
    assert torch.equal(one[1], other[1])


# --- tests ---


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_an_undisturbed_run(daemon: Daemon, name: str, seed: int) -> None:
    """All that is not loaded is not a number, windows' earlier blocks included: nothing of it is looked at."""
    with working(daemon, name, seed) as worker:
        worker.offload()
        assert worker.restorable() == FULL_BLOCKS
        for local in (0, 2):
            worker.wipe(NAN)
            worker.load(worker.admit(FULL_BLOCKS, local))
            check_same(worker.resume(FULL_BLOCKS), CASES[name].undisturbed(seed))


@pytest.mark.parametrize(
    ("kind", "missing", "blocks"),
    [(GroupKind.FULL, 2, 2), (GroupKind.SLIDING, 3, 3), (GroupKind.SLIDING, 1, 5), (GroupKind.MAMBA, 4, 4)],
)
def test_the_longest_prefix_that_all_groups_have(
    daemon: Daemon, kind: GroupKind, missing: int, blocks: int, seed: int
) -> None:
    """One key was not stored. Before a boundary, the window needs 3 blocks."""
    name = "heads first, mamba"
    with working(daemon, name, seed) as worker:
        worker.offload(kind, missing)
        assert worker.restorable() == blocks
        worker.wipe(NAN)
        worker.load(worker.admit(blocks))
        check_same(worker.resume(blocks), CASES[name].undisturbed(seed))


def swapped(keys: range, ids: list[int]) -> tuple[range, list[int]]:
    """The first and the last change places."""
    return keys, [ids[-1], *ids[1:-1], ids[0]]


def short(keys: range, ids: list[int]) -> tuple[range, list[int]]:
    """Without the first."""
    return keys[1:], ids[1:]


def earlier(keys: range, ids: list[int]) -> tuple[range, list[int]]:
    """The keys before."""
    return range(keys.start - 1, keys.stop - 1), ids


CONTROLS = (
    (GroupKind.FULL, swapped),
    (GroupKind.FULL, short),
    (GroupKind.SLIDING, swapped),
    (GroupKind.SLIDING, short),
    (GroupKind.SLIDING, earlier),
    (GroupKind.MAMBA, short),
    (GroupKind.MAMBA, earlier),
)


@pytest.mark.parametrize(
    "name", ["default, mamba", "heads first, mamba", "packed pages, mamba", "packed rows, mamba", "K and V apart"]
)
def test_what_is_restored_wrongly_is_seen(daemon: Daemon, name: str, seed: int) -> None:
    """Negative controls: the first token's logits differ, and they do where a single sign in a block is wrong.

    Memory is full of small numbers, so that it is values that tell.
    """
    tokens, (right, *_) = CASES[name].undisturbed(seed)
    with working(daemon, name, seed) as worker:
        worker.offload()
        moves = worker.admit(FULL_BLOCKS)

        def is_right(changed: Moves, spoilt: int | None = None) -> bool:
            worker.wipe(PLAUSIBLE)
            worker.load(changed)
            if spoilt is not None:
                worker.turn_a_sign(spoilt, moves[spoilt][1][-1])
            logits = worker.resume(FULL_BLOCKS, 1)[1][0]
            assert bool(logits.isfinite().all())
            return bool(torch.equal(logits, right))

        worker.wipe(PLAUSIBLE)
        assert worker.resume(FULL_BLOCKS)[0] != tokens, "nothing was loaded"
        assert is_right(moves)
        for kind, change in CONTROLS:
            for group in (group for group, reach in worker.reaches.items() if reach.kind == kind):
                assert not is_right(moves | {group: change(*moves[group])}), f"{change.__name__}, {kind}"
        for group in moves:
            assert not is_right(moves, group), f"a sign of group {group}"
