"""Converts vLLM's list of GPU blocks to the block ids of each key.

A chunk (our key) is `blocks_per_key` consecutive blocks from a multiple of that.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvoffloadd.model import NO_BLOCK, U32Array

logger = logging.getLogger("vllm.kvoffloadd")

NULL_BLOCK = 0
"""vLLM's block that means no block: never stored, never loaded into."""


class GroupChunks(NamedTuple):
    """The chunks of one group in a transfer."""

    keys: bytes  # packed
    blocks: U32Array  # (keys, blocks_per_key)
    first: int = 0  # position of the first key in its prompt


Chunks = dict[int, GroupChunks]
"""The keys and blocks of a transfer, by group."""

KeysOfGroup = tuple[int, list[bytes]]
"""A group and its keys."""


def warn_of_states(mamba_cache_mode: str, blocks_per_chunk: int) -> None:
    """Warns where vLLM's own connector hands over states: it is unknown which groups have them. `mamba_cache_mode`:
    vLLM's.
    """
    if mamba_cache_mode == "align" and blocks_per_chunk > 1:
        logger.warning(
            "kvoffloadd: this model keeps states, which OffloadingConnector can't store in chunks of several blocks: "
            "nothing will hit. Leave blocks_per_chunk at 1 (it is %d), or block_size at one block, or use "
            "KVOffloaddConnector",
            blocks_per_chunk,
        )


class TransferBlocks(Protocol):
    """vLLM's GPULoadStoreSpec, which names the blocks of a transfer group by group: the number of blocks of each group,
    and the index, in the request, of the first one.
    """

    block_ids: npt.NDArray[Any]
    group_sizes: Sequence[int]
    block_indices: Sequence[int]


def load_chunks(groups: Sequence[KeysOfGroup], blocks: TransferBlocks, blocks_per_key: int) -> Chunks:
    """Converts `groups`, in vLLM's order. Blocks of a chunk that the request does not load are `NO_BLOCK`.

    Raises ValueError where blocks and keys do not fit each other.
    """
    chunks: Chunks = {}
    for (group, keys), ids, first in _split(groups, blocks):
        if not keys and not ids.size:
            continue
        skip = first % blocks_per_key
        if -(-(skip + ids.size) // blocks_per_key) != len(keys):
            raise ValueError(f"group {group}: {ids.size} blocks from block {first} are not {len(keys)} chunks")
        flat = np.full(len(keys) * blocks_per_key, NO_BLOCK, np.uint32)
        flat[skip : skip + ids.size] = np.where(ids == NULL_BLOCK, NO_BLOCK, ids)
        chunks[group] = GroupChunks(b"".join(keys), flat.reshape(len(keys), blocks_per_key), first // blocks_per_key)
    return chunks


def store_chunks(groups: Sequence[KeysOfGroup], blocks: TransferBlocks, blocks_per_key: int) -> Chunks:
    """Does what `load_chunks` does, with whole chunks alone.

    vLLM leaves out blocks that have slid out of a window. If they are the first ones, that chunk is dropped; if it is
    unknown which they are, all of the group: a missing key is a miss later, a wrong one would be a wrong hit.
    """
    chunks: Chunks = {}
    for (group, keys), ids, first in _split(groups, blocks):
        skip = first % blocks_per_key
        if skip + ids.size != len(keys) * blocks_per_key:
            continue
        whole, kept = (keys[1:], ids[blocks_per_key - skip :]) if skip else (keys, ids)
        if whole:
            table = kept.astype(np.uint32).reshape(len(whole), blocks_per_key)
            chunks[group] = GroupChunks(b"".join(whole), table, -(-first // blocks_per_key))
    return chunks


def _split(groups: Sequence[KeysOfGroup], blocks: TransferBlocks) -> list[tuple[KeysOfGroup, npt.NDArray[Any], int]]:
    sizes, starts = blocks.group_sizes, blocks.block_indices
    if not len(groups) == len(sizes) == len(starts):
        raise ValueError(f"{len(groups)} groups of keys, {len(sizes)} of blocks, {len(starts)} starts")
    parts = np.split(blocks.block_ids, np.cumsum(sizes)[:-1])
    return list(zip(groups, parts, starts, strict=True))
