"""Pools of pages as a rank registers them, wherever they lie. Storage and linker describe them alike, and share
keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.client import Group, GroupKind, KvCache, Ref
from kvoffloadd.model import U32Array

KV = "kv"
STATES = "mamba"
NAMES = (KV, "swa", STATES, "indexer")
"""SGLang's names of the pools that are known. A pool's group is its index in here."""

USUAL_ORDER = "nhd"
"""The order of keys and values in a pool: token, head. Pages of a pool in another order have other shapes."""

Shape = tuple[Any, ...]
"""The meaning of the bytes of a pool's pages, and their order: equal for pools that may share keys."""


@dataclass(frozen=True, slots=True)
class PagePool:
    """One pool. `group`: its number; `tokens`: tokens of one of its pages, as its slots are counted."""

    group: int
    tokens: int
    pages: int

    def blocks(self, slots: npt.NDArray[np.int64], keys: int) -> U32Array | None:
        """Returns block ids (keys,) of pages that are named by all their slots; None unless these are `keys` whole
        pages.
        """
        if slots.size != keys * self.tokens:
            return None
        first = slots[:: self.tokens]
        blocks = first // self.tokens
        if (first % self.tokens).any() or not ((blocks >= 0) & (blocks < self.pages)).all():
            return None
        if (slots.reshape(keys, self.tokens) != first[:, None] + np.arange(self.tokens)).any():
            return None
        return blocks.astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Pools:
    """All that a rank registers, and each pool by its name. `shapes`: the meaning of its pages' bytes."""

    caches: KvCache
    pools: Mapping[str, PagePool]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class TpRank:
    """This rank's number among the ranks that hold parts of the same keys, and their count."""

    rank: int
    size: int

    def group(self, name: str, refs: Sequence[Ref], tokens_per_key: int, *, replicated: bool) -> Group:
        """Returns the group that this rank registers for a pool. `replicated`: all ranks hold the same."""
        return Group(
            group=NAMES.index(name),
            # Windows, too: SGLang decides how many of their keys each prompt needs. Of states a prompt needs the last
            # one, and the daemon must know that: from a store that hosts share it brings only the keys that are needed.
            kind=GroupKind.MAMBA if name == STATES else GroupKind.FULL,
            tokens_per_key=tokens_per_key,
            refs=refs,
            parts=1 if replicated else self.size,
            part=0 if replicated else self.rank,
        )


def attention_layers(name: str, layers: int) -> list[str]:
    """Returns the daemon's names for a pool's keys and values, in the order of a page's bytes. All refs name all of
    them: a host pool has a ref for all layers' keys, a device pool one for each layer.
    """
    return [f"{name}.{half}.{layer}" for half in ("k", "v") for layer in range(layers)]


def other_layers(name: str, layers: int) -> list[str]:
    """Does what `attention_layers` does, for a pool that has one thing of each layer."""
    return [f"{name}.{layer}" for layer in range(layers)]


def shape_of_attention(name: str, pool: Any, tokens: int, page_bytes: int) -> Shape:
    """Returns the shape of keys and values, each by layer, token, head: in a host pool as in a device's pool.

    `pool`: SGLang's, of either kind; `tokens` and `page_bytes`: of a page.
    """
    heads = (pool.head_num, pool.head_dim, pool.v_head_dim)
    return (name, "keys, values", pool.layer_num, heads, tokens, page_bytes)


def shape_of_latents(name: str, pool: Any, tokens: int, page_bytes: int) -> Shape:
    """Does what `shape_of_attention` does, for MLA's latents, by layer and token."""
    widths = (pool.kv_lora_rank, pool.qk_rope_head_dim, pool.kv_cache_dim)
    return (name, "latents", pool.layer_num, widths, tokens, page_bytes)
