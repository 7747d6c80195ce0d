"""Offload, wipe, restore elsewhere, and go on: a decoder's tokens and logits are those of an undisturbed run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvoffloadd.client import Client, GroupKind, NamespaceSpec
from kvoffloadd.layout import (
    FLASH_HND,
    FLASH_NHD,
    FLASHINFER_HND,
    PACKED_HND,
    TRITON_HND,
    Attention,
    Backend,
    LayerGroup,
    LayerKind,
    LayerSpec,
    Mamba,
    State,
    cross_layers,
    packed_pages,
    packed_rows,
)
from scripts.harness.daemon import Daemon
from scripts.harness.layers import LayerMemory, allocated, apart
from tests.layout.decoder import Decoder
from tests.layout.oracle import torch
from tests.layout.worker import (
    BLOCK,
    FULL_BLOCKS,
    NAN,
    NEW,
    PLAUSIBLE,
    TABLE,
    WINDOW,
    Generated,
    Moves,
    Worker,
    check_same,
    prompt_of,
    wipe,
)

pytestmark = pytest.mark.slow

HEADS, SIZE = 2, 16
NUM_BLOCKS = 64


# --- models, and memory for them ---


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


def crossed(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> LayerMemory:
    return allocated(cross_layers(specs, groups, NUM_BLOCKS))


def in_torch(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> LayerMemory:
    """Does what `crossed` does, in memory that is moved to shared memory when it is registered."""
    return allocated(cross_layers(specs, groups, NUM_BLOCKS), "cpu")


def in_pages(specs: Mapping[str, LayerSpec], _groups: Sequence[LayerGroup]) -> LayerMemory:
    """Two layers on a page, one on the last; Mamba layers overlay them in two groups."""
    return allocated(packed_pages(specs, 2, NUM_BLOCKS))


def in_rows(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> LayerMemory:
    return allocated(packed_rows(specs, groups, NUM_BLOCKS))


def in_pieces(specs: Mapping[str, LayerSpec], groups: Sequence[LayerGroup]) -> LayerMemory:
    return apart(specs, groups, NUM_BLOCKS)


@dataclass(frozen=True)
class DecodeCase:
    make: Callable[[Mapping[str, LayerSpec], Sequence[LayerGroup]], LayerMemory]
    full: Attention
    kinds: tuple[str, ...]

    def memory(self) -> LayerMemory:
        return self.make(*model(self.full, self.kinds))

    def undisturbed(self, seed: int) -> Generated:
        """What the model generates without a byte moved."""
        return undisturbed(self.full.dtype, self.kinds, seed)


NHD, HND = attention(FLASH_NHD), attention(FLASH_HND)
ALL = ("full", "sliding", "mamba")
CASES = {
    "default, full": DecodeCase(crossed, NHD, ("full",)),
    "default, sliding": DecodeCase(crossed, NHD, ("sliding", "full")),
    "default, mamba": DecodeCase(crossed, NHD, ALL),
    "default, float32": DecodeCase(crossed, attention(FLASH_NHD, "float32"), ALL),
    "default, torch's memory": DecodeCase(in_torch, NHD, ALL),
    "heads first, full": DecodeCase(crossed, HND, ("full",)),
    "heads first, sliding": DecodeCase(crossed, attention(TRITON_HND), ("sliding", "full")),
    "heads first, mamba": DecodeCase(crossed, HND, ALL),
    "K and V side by side": DecodeCase(crossed, attention(PACKED_HND), ALL),
    "kernel blocks": DecodeCase(crossed, attention(FLASH_NHD, kernel_blocks=2), ALL),
    "kernel blocks, triton": DecodeCase(crossed, attention(TRITON_HND, kernel_blocks=4), ALL),
    "isolated": DecodeCase(crossed, attention(replace(FLASH_NHD, layered=None)), ALL),
    "packed pages, full": DecodeCase(in_pages, NHD, ("full",)),
    "packed pages, sliding": DecodeCase(in_pages, HND, ("sliding",)),
    "packed pages, mamba": DecodeCase(in_pages, HND, ("full", "mamba")),
    "packed pages, mamba, kernel blocks": DecodeCase(
        in_pages, attention(FLASHINFER_HND, kernel_blocks=4), ("full", "mamba")
    ),
    "packed rows, full": DecodeCase(in_rows, HND, ("full",)),
    "packed rows, mamba": DecodeCase(in_rows, NHD, ALL),
    "packed rows, mamba, kernel blocks": DecodeCase(in_rows, attention(FLASHINFER_HND, kernel_blocks=2), ALL),
    "K and V apart": DecodeCase(in_pieces, attention(0), ALL),
}


@functools.cache
def undisturbed(dtype: str, kinds: tuple[str, ...], seed: int) -> Generated:
    memory = in_pieces(*model(attention(0, dtype), kinds))
    wipe(memory, NAN, np.random.default_rng(seed))
    tables = {group.group: range(TABLE) for group in memory.groups}
    return Decoder(memory.specs, memory.groups, memory.layers, seed).generate(prompt_of(seed), tables, NEW)


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
    """Drops the first."""
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

    Memory is full of small numbers, so that it is values that matter.
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
