"""What a store and a load must do to memory: by an engine's own indices on one side, and by refs on the other.

Nothing here uses the package's geometry: layers are written and read through their backend's tensors, canonical tensors
byte by byte.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, NamespaceSpec, Outcome
from kvoffloadd.layout import Attention, Backend, CanonicalCache, LayerGroup, LayerSpec, Mamba
from kvoffloadd.layout.backend import KV
from kvoffloadd.model import Ref, U8Array

torch: Any = pytest.importorskip("torch", reason="torch is not installed: it is the engine's")

Contents = dict[tuple[str, int], np.ndarray[Any, Any]]
"""(layer, number of its tensor) -> the bits of some blocks, in the order of the engine's own indices."""


def engine_views(layer: Any) -> list[Any]:
    return list(layer) if isinstance(layer, list | tuple) else [layer]


def bits(tensor: Any) -> Any:
    """The tensor as integers of its items' size: no float is ever compared."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def blocks_of(tensor: Any, spec: LayerSpec, ids: Sequence[int]) -> tuple[int, Any]:
    """The dimension of blocks, and the indices in it of these blocks."""
    ratio = spec.kernel_blocks
    dim = 0 if isinstance(spec, Mamba) else spec.block_dim
    return dim, torch.tensor([block * ratio + at for block in ids for at in range(ratio)])


def fill(
    layers: Mapping[str, Any], specs: Mapping[str, LayerSpec], names: Sequence[str], ids: Sequence[int], seed: int
) -> Contents:
    """Compute these blocks as the engine would: with bytes that occur nowhere else, as far as bytes can."""
    rng = np.random.default_rng(seed)
    contents: Contents = {}
    for name in names:
        for number, tensor in enumerate(engine_views(layers[name])):
            raw = bits(tensor)
            dim, at = blocks_of(tensor, specs[name], ids)
            shape = list(raw.shape)
            shape[dim] = len(at)
            random = rng.integers(0, 256, int(np.prod(shape)) * raw.element_size(), dtype=np.uint8)
            contents[name, number] = random.view(f"i{raw.element_size()}" if raw.element_size() > 1 else "u1").reshape(
                shape
            )
            raw.index_copy_(dim, at, torch.from_numpy(contents[name, number]))
    return contents


def put(layers: Mapping[str, Any], specs: Mapping[str, LayerSpec], contents: Contents, ids: Sequence[int]) -> None:
    """Write contents to these blocks through the engine's tensors."""
    for (name, number), wanted in contents.items():
        tensor = engine_views(layers[name])[number]
        dim, at = blocks_of(tensor, specs[name], ids)
        bits(tensor).index_copy_(dim, at, torch.from_numpy(wanted))


def put_heads(tensor: Any, spec: Attention, block: int, values: Any) -> None:
    """Write a block of a layer through its tensor. `values`: its bits, (kv, token, head, dim)."""
    if not isinstance(spec.backend, Backend) or KV not in spec.backend.shape:
        values = torch.cat([values[0], values[1]], dim=-1).transpose(0, 1)  # head, token, pair
    for at, piece in enumerate(values.chunk(spec.kernel_blocks, dim=1)):  # by tokens, in either form
        bits(tensor).select(spec.block_dim, block * spec.kernel_blocks + at).copy_(piece)


def heads_of(tensor: Any, spec: Attention, block: int) -> Any:
    """What `put_heads` wrote: bits, (kv, token, head, dim)."""
    pieces = [bits(tensor).select(spec.block_dim, block * spec.kernel_blocks + at) for at in range(spec.kernel_blocks)]
    if not isinstance(spec.backend, Backend) or KV not in spec.backend.shape:
        pieces = [torch.stack(piece.transpose(0, 1).chunk(2, dim=-1)) for piece in pieces]
    return torch.cat(pieces, dim=1)


def wrong(layers: Mapping[str, Any], specs: Mapping[str, LayerSpec], contents: Contents, ids: Sequence[int]) -> int:
    """Items of these blocks that are not those, seen through the engine's tensors."""
    bad = 0
    for (name, number), wanted in contents.items():
        tensor = engine_views(layers[name])[number]
        dim, at = blocks_of(tensor, specs[name], ids)
        bad += int((bits(tensor).index_select(dim, at).numpy() != wanted).sum())
    return bad


def places(group: Group) -> tuple[Ref, ...]:
    """The refs of a group, without what their bytes are."""
    return tuple(replace(ref, dtype="", layers=b"") for ref in group.refs)


def gather(rows: Sequence[U8Array], refs: Sequence[Ref], block: int) -> bytes:
    """The payload of a block."""
    return b"".join(piece.tobytes() for piece in _pieces(rows, refs, block))


def scatter(rows: Sequence[U8Array], refs: Sequence[Ref], block: int, payload: bytes) -> None:
    """Undo `gather`."""
    at = 0
    for piece in _pieces(rows, refs, block):
        piece[:] = np.frombuffer(payload[at : at + len(piece)], np.uint8)
        at += len(piece)
    assert at == len(payload)


def _pieces(rows: Sequence[U8Array], refs: Sequence[Ref], block: int) -> Iterator[U8Array]:
    for ref in refs:
        for run in range(ref.count):
            start = ref.offset + run * ref.stride
            yield rows[ref.tensor][block, start : start + ref.length]


def rows_of(cache: CanonicalCache) -> list[U8Array]:
    """The canonical tensors as they are now: registering may have moved them."""
    return [tensor.numpy().view(np.uint8) for tensor in cache.tensors]


class ByHand:
    """Stores and loads as the refs say, without a daemon."""

    def __init__(self, cache: CanonicalCache) -> None:
        self._cache = cache
        self._payloads: list[bytes] = []

    def store(self, at: int, ids: Sequence[int]) -> int:
        """Blocks of the group at this index; returns the bytes of one."""
        refs = self._cache.groups[at].refs
        self._payloads = [gather(rows_of(self._cache), refs, block) for block in ids]
        return len(self._payloads[0])

    def load(self, at: int, ids: Sequence[int]) -> None:
        """What was stored last, in other blocks."""
        for block, payload in zip(ids, self._payloads, strict=True):
            scatter(rows_of(self._cache), self._cache.groups[at].refs, block, payload)

    def close(self) -> None:
        """Nothing is open."""


class ByDaemon:
    """Moves bytes through a real daemon."""

    def __init__(self, socket: Path, cache: CanonicalCache) -> None:
        self._client = Client(socket, namespace=NamespaceSpec(model="layouts", layout=os.urandom(8).hex()))
        self._client.connect()
        self._registration = self._client.register(cache.kv_cache())
        self._numbers = [group.group for group in cache.groups]
        self._keys = np.zeros((0, 32), np.uint8)

    def store(self, at: int, ids: Sequence[int]) -> int:
        """Does what `ByHand` does."""
        self._keys = np.frombuffer(os.urandom(32 * len(ids)), np.uint8).reshape(-1, 32)
        result = self._client.wait(self._client.store(self._registration, self._wanted(at, ids)), 15)
        assert result.outcome == Outcome.DONE
        return result.bytes // len(ids)

    def load(self, at: int, ids: Sequence[int]) -> None:
        """Does what `ByHand` does."""
        result = self._client.wait(self._client.load(self._registration, self._wanted(at, ids)), 15)
        assert result.outcome == Outcome.DONE

    def _wanted(self, at: int, ids: Sequence[int]) -> dict[int, tuple[U8Array, Any]]:
        return {self._numbers[at]: (self._keys, np.array(ids))}

    def close(self) -> None:
        """Forget it all."""
        self._client.clear()
        self._client.close()


Mover = ByHand | ByDaemon
MOVERS: list[Callable[[CanonicalCache], Mover]] = [ByHand]
"""What every check uses, one after the other: by hand, and, while there is one (see conftest), through a daemon."""


def check_moves(
    memory: Sequence[Any],
    layers: Mapping[str, Any],
    specs: Mapping[str, LayerSpec],
    groups: Sequence[LayerGroup],
    cache: CanonicalCache,
    num_blocks: int,
    seed: int = 0,
) -> None:
    """Fill some blocks of each group, store them, wipe all memory, load them into other blocks, look at every byte.

    `memory`: flat torch.uint8 tensors that hold every byte there is, padding and unused slots included.
    """
    check_apart(memory, layers, specs, groups, num_blocks)
    rng = np.random.default_rng(seed)
    for make in MOVERS:
        mover = make(cache)
        for at, group in enumerate(groups):
            count = int(rng.integers(1, num_blocks + 1))
            source, target = (rng.permutation(num_blocks)[:count].tolist() for _ in range(2))
            wipe(memory, rng)
            contents = fill(layers, specs, group.layers, source, int(rng.integers(1 << 30)))
            assert wrong(layers, specs, contents, source) == 0, "the engine's own tensors overlap"
            assert mover.store(at, source) == sum(specs[layer].payload_bytes for layer in group.layers)
            before = wipe(memory, rng)
            mover.load(at, target)
            assert wrong(layers, specs, contents, target) == 0
            after = [one.clone() for one in memory]
            # The same blocks written by the engine itself: no other byte may differ.
            for one, old in zip(memory, before, strict=True):
                one.copy_(old)
            put(layers, specs, contents, target)
            for one, loaded in zip(memory, after, strict=True):
                assert torch.equal(one, loaded), "a load touched bytes that are not its blocks'"
        mover.close()


def check_apart(
    memory: Sequence[Any],
    layers: Mapping[str, Any],
    specs: Mapping[str, LayerSpec],
    groups: Sequence[LayerGroup],
    num_blocks: int,
) -> None:
    """That no two layers of a group have a byte in common, and no two block ids, of whichever groups.

    Through the engine's own tensors, each block's bytes are filled with its number: at most 126 blocks.
    """
    owners = [np.zeros(one.shape[0], np.uint8) for one in memory]
    for group in groups:
        for one in memory:
            one.zero_()
        for name in group.layers:
            for tensor in engine_views(layers[name]):
                for block in range(num_blocks):
                    dim, at = blocks_of(tensor, specs[name], [block])
                    bits(tensor).index_fill_(dim, at, int.from_bytes(tensor.element_size() * bytes([block + 1]), "big"))
        arrays = [one.numpy() for one in memory]
        used = sum(int(np.count_nonzero(one)) for one in arrays)
        assert used == num_blocks * sum(specs[layer].payload_bytes for layer in group.layers), "bytes are shared"
        for old, new in zip(owners, arrays, strict=True):
            both = (old != 0) & (new != 0)
            assert (old[both] == new[both]).all(), "two blocks have bytes in common"
            old[new != 0] = new[new != 0]


def check_refs_of_layers(plan: Any, made: Any, memory: Sequence[Any]) -> None:
    """That the refs of each layer alone name exactly its bytes, here those of block 0."""
    for name, refs in plan.canonical.layers.items():
        for one in memory:
            one.zero_()
        for tensor in engine_views(made.layers[name]):
            dim, at = blocks_of(tensor, plan.specs[name], [0])
            bits(tensor).index_fill_(dim, at, -1 if tensor.element_size() > 1 else 255)
        rows = rows_of(made.cache)
        length = plan.specs[name].payload_bytes
        assert gather(rows, refs, 0) == length * b"\xff"
        scatter(rows, refs, 0, bytes(length))
        assert not any(bool(one.any()) for one in memory), "a layer has bytes that its refs do not name"


def wipe(memory: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    """Noise in flat torch.uint8 tensors; returns what it is."""
    for one in memory:
        one.copy_(torch.from_numpy(rng.integers(0, 256, one.shape, dtype=np.uint8)))
    return [one.clone() for one in memory]


def check_plan(plan: Any, device: str = "cpu", seed: int = 0) -> Any:
    """`check_moves` for a plan; returns what was allocated."""
    made = plan.allocate(device)
    memory = [tensor.view(-1).view(torch.uint8) for tensor in made.tensors]
    check_moves(memory, made.layers, plan.specs, plan.groups, made.cache, plan.num_blocks, seed)
    check_refs_of_layers(plan, made, memory)
    geometry = plan.canonical
    assert made.cache.groups == geometry.groups
    assert [tuple(tensor.shape) for tensor in made.cache.tensors] == [
        (rows.num_blocks, rows.page_bytes) for rows in geometry.rows
    ]
    return made
