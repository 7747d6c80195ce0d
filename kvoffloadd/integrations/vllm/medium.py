"""What travels, pickled by vLLM, from the scheduler to the workers: the keys of a transfer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import LoadStoreSpec

from kvoffloadd.integrations.vllm.names import by_group


class KeysLoadStoreSpec(LoadStoreSpec):
    """`groups`: for each of the engine's groups, in vLLM's order, its index and the daemon's keys."""

    def __init__(self, offload_keys: Iterable[bytes], group_ids: Sequence[int], generation: int) -> None:
        named = by_group(offload_keys, generation)
        self.groups: list[tuple[int, list[bytes]]] = [(group, named.get(group, [])) for group in group_ids]
