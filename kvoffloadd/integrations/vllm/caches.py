"""Builds an engine's KV cache as its ranks register it with the daemon, and its scheduler, which has no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvoffloadd.client import Group, GroupKind, KvCache, Ref, Timeline
from kvoffloadd.integrations.vllm.config import DRAFTS, REACHES, STATES
from kvoffloadd.integrations.vllm.parts import LayerFacts, by_heads, held_refs, share, whole_refs
from kvoffloadd.integrations.vllm.spans import check_covered
from kvoffloadd.layout import CanonicalCache


def registered(config: Any, kv_caches: Any, facts: LayerFacts, timelines: Sequence[Timeline] = ()) -> KvCache:
    """Returns a rank's cache. `config`: vLLM's OffloadingConfig, `kv_caches`: its CanonicalKVCaches, of this rank;
    `facts`: of its layers.

    CPU memory that is not shared yet is moved to shared memory in place; views that the engine has stay valid. Raises
    UsageError where memory can't be shared, its pages can't be cut into parts, or vLLM's pages leave bytes of a layer
    out.
    """
    held = share(config)
    groups: list[Group] = []
    for index, refs in enumerate(kv_caches.group_data_refs):
        layers = config.groups[index].layer_names
        check_covered(layers, refs, kv_caches.tensors, facts.spans)
        cut = held_refs(layers, refs, facts, held) if by_heads(config) else [whole_refs(layers, refs, facts)]
        groups += [_group(config, index, held.parts, held.part + nth, part_refs) for nth, part_refs in enumerate(cut)]
    tensors = tuple(entry.tensor for entry in kv_caches.tensors)
    return CanonicalCache(tensors, tuple(groups), kv_caches).kv_cache(timelines)


def announced(config: Any) -> KvCache:
    """Returns a scheduler's cache, without memory: a lookup may come before the ranks have registered theirs."""
    parts = share(config).parts
    return KvCache((), [_group(config, index, parts, 0, []) for index in range(len(config.groups))])


def _group(config: Any, index: int, parts: int, part: int, refs: Sequence[Ref]) -> Group:
    group = config.groups[index]
    keeps_state = group.group_id in config.extra_config.get(STATES, ())
    tokens_per_key = group.tokens_per_block * config.cache.blocks_per_chunk
    # vLLM looks up key by key, and decides itself which ones a hit needs. But a store that hosts share sends only
    # useful keys. Without our connector it is unknown which groups have windows.
    reach = config.extra_config.get(REACHES, {}).get(group.group_id)
    if reach is not None and not keeps_state:
        reach += _given_up(config)
    return Group(
        group=group.group_id,
        kind=GroupKind.FULL if reach is None else GroupKind.SLIDING,
        window_keys=0 if reach is None else -(-reach // tokens_per_key),
        tokens_per_key=tokens_per_key,
        refs=refs,
        blocks_per_key=config.cache.blocks_per_chunk,
        parts=parts,
        part=part,
    )


def _given_up(config: Any) -> int:
    """Returns how many tokens of a hit vLLM gives up where there are draft layers: the last chunk of their groups,
    which must be there all the same. The hit ends earlier by as many tokens, and so each window begins earlier.
    """
    drafts = config.extra_config.get(DRAFTS, ())
    blocks = [group.tokens_per_block for group in config.groups if group.group_id in drafts]
    return max(blocks, default=0) * int(config.cache.blocks_per_chunk)
