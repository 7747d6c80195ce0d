"""The namespace of an engine's pages: everything that decides their bytes and is not in SGLang's names of pages.

Pure: everything is in the arguments. Each rank computes it separately, so it may contain nothing that ranks do not all
know alike.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvoffloadd.client import NamespaceSpec
from kvoffloadd.integrations.common.keys import KEY_BYTES
from kvoffloadd.integrations.common.naming import digest_of, fitting
from kvoffloadd.integrations.sglang.pools import STATES, Pools


@dataclass(frozen=True, slots=True)
class Computed:
    """Describes what an engine computes with. `arguments`: all of SGLang's, as resolved. `identity`: those that count,
    with files by their contents. `amx`: whether it computes on a processor with AMX: states lie otherwise there
    (mem_cache/memory_pool.py). `release`: of SGLang.
    """

    arguments: Mapping[str, Any]
    identity: object
    release: str
    amx: bool = False


def namespace_of(computed: Computed, pools: Pools, tp_size: int) -> NamespaceSpec:
    """Returns the namespace. cache_salt, adapters and the like are in the names of pages, and so in the keys."""
    given = computed.arguments
    # A prefix needs the last of its states, and the daemon's groups have that kind: groups of two kinds can't share a
    # namespace.
    shapes = tuple((*shape, "the last") if shape[0] == STATES else shape for shape in pools.shapes)
    device = f"{given['device']} with AMX" if computed.amx else given["device"]
    return NamespaceSpec(
        model=fitting(os.path.basename(str(given["model_path"]).rstrip("/"))),  # for humans: contents are named below
        dtype=fitting(f"{given['dtype']} {given['kv_cache_dtype']}"),
        layout=fitting(f"sglang {computed.release} {device} {digest_of(shapes)}"),
        parallel=f"tp{tp_size}",
        salt=digest_of(computed.identity),
        key_bytes=KEY_BYTES,
    )
