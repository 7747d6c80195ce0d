"""What a store that hosts share means for a model: its objects, the link that beats computing, and its config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvoffloadd.agentframes import HEADER_BYTES, PARTS_MAX
from kvoffloadd.config import RemoteConfig
from kvoffloadd.errors import ConfigError
from kvoffloadd.planner.planning import CapacityPlan
from kvoffloadd.units import format_bytes

DEFAULTS: Final = RemoteConfig()

LINK_BYTES_PER_S: Final = 3 << 30
"""Of a network of 25 Gbit/s, about."""

PREFILL_TOKENS_PER_S: Final = 10_000
"""Where nobody says: of one engine with all its ranks."""

STORE_TIMES: Final = 4
"""Where nobody says: the store has so many times the memory tier."""

LOOKUP_KEYS_MAX: Final = 4096
"""Of `remote.lookup_keys`."""

INFLIGHT_SHARE, OBJECTS_IN_FLIGHT = 16, 4
"""A fraction (1/n) of memory may be on its way, and an object may be a fraction (1/n) of that."""

USED_SHARE: Final = {"mooncake": 0.9, "valkey": 0.95}
"""Of the store's memory: Mooncake evicts from there on; Valkey counts its own tables, too."""

OBJECT_SHARE: Final = {"mooncake": 0.05, "valkey": 1 / 16}
"""Of a store (Mooncake: of each) that one object may have."""

MARGIN: Final = 1.5
"""A fetch gets so many times what it takes at the link's rate: other fetches share it."""


@dataclass(frozen=True, slots=True)
class RemoteTerms:
    """`engine`: "mooncake" or "valkey". `store_bytes`: of all hosts together; 0: not said. `link_bytes_per_s`: to one
    host.
    """

    engine: str
    store_bytes: int = 0
    link_bytes_per_s: int = LINK_BYTES_PER_S
    prefill_tokens_per_s: int = PREFILL_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class RemotePrompt:
    """A prompt of which this host has nothing. `asked`: keys that the store is asked for; `objects`: that are fetched,
    with `fetch_bytes`, header pages too. `break_even_bytes_per_s`: with a faster link fetching beats computing.
    """

    name: str
    tokens: int
    asked: int
    objects: int
    fetch_bytes: int
    fetch_s: float
    prefill_s: float
    break_even_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class RemotePlan:
    """`object_bytes`: of a key of each group. `tokens`: that the store holds, all groups stored; `held`: how many times
    each prompt; None: it has no whole block. `settings`: keys of `[remote]` whose defaults would not do.
    """

    terms: RemoteTerms
    store_bytes: int
    object_bytes: tuple[int, ...]
    prompts: tuple[RemotePrompt, ...]
    tokens: int
    held: tuple[int | None, ...]
    settings: dict[str, int | float | str]
    warnings: tuple[str, ...]
    assumed: tuple[str, ...]


def make_remote_plan(plan: CapacityPlan, terms: RemoteTerms) -> RemotePlan:
    """Raises ConfigError for a model whose keys can't be objects."""
    if max(plan.parts) > PARTS_MAX:
        raise ConfigError(f"a key has {max(plan.parts)} parts; an object has at most {PARTS_MAX}")
    layout = plan.layout
    objects = tuple(HEADER_BYTES + parts * payload for parts, payload in zip(plan.parts, layout.payloads, strict=True))
    store_bytes = terms.store_bytes or STORE_TIMES * plan.terms.memory_bytes
    prompts = tuple(_prompt(plan, terms, objects, prompt.name, prompt.tokens) for prompt in plan.prompts)
    usable = int(store_bytes * USED_SHARE[terms.engine])
    a_block = _bytes(objects, layout.stored_blocks(layout.block_tokens))
    stored = [_bytes(objects, layout.stored_blocks(prompt.tokens)) for prompt in plan.prompts]
    settings = _settings(plan, objects, prompts[0])
    return RemotePlan(
        terms, store_bytes, objects, prompts,
        tokens=usable // a_block * layout.block_tokens,
        held=tuple(usable // size if size else None for size in stored),
        settings=settings,
        warnings=tuple(_warnings(plan, terms, store_bytes, objects, prompts[0])),
        assumed=tuple(_assumed(plan, terms)),
    )  # fmt: skip


def _bytes(objects: Sequence[int], counts: Sequence[int]) -> int:
    return sum(size * count for size, count in zip(objects, counts, strict=True))


def _prompt(plan: CapacityPlan, terms: RemoteTerms, objects: Sequence[int], name: str, tokens: int) -> RemotePrompt:
    layout = plan.layout
    needed = layout.needed_blocks(tokens)
    restored = tokens // layout.block_tokens * layout.block_tokens
    fetch_bytes, prefill_s = _bytes(objects, needed), restored / terms.prefill_tokens_per_s
    return RemotePrompt(
        name, tokens,
        asked=sum(layout.stored_blocks(tokens)),
        objects=sum(needed),
        fetch_bytes=fetch_bytes,
        fetch_s=fetch_bytes / terms.link_bytes_per_s,
        prefill_s=prefill_s,
        break_even_bytes_per_s=fetch_bytes / prefill_s if prefill_s else 0.0,
    )  # fmt: skip


def _inflight_bytes(plan: CapacityPlan) -> int:
    return min(DEFAULTS.inflight_bytes, plan.terms.memory_bytes // INFLIGHT_SHARE)


def _settings(plan: CapacityPlan, objects: Sequence[int], prompt: RemotePrompt) -> dict[str, int | float | str]:
    """What the first prompt needs, where the defaults would not do."""
    found: dict[str, int | float | str] = {}
    if prompt.asked > DEFAULTS.lookup_keys:
        found["lookup_keys"] = min(prompt.asked, LOOKUP_KEYS_MAX)
    patience_s = MARGIN * prompt.fetch_s
    if prompt.fetch_s < prompt.prefill_s:  # else nobody is to wait for it
        if patience_s > DEFAULTS.fetch_s:
            found["fetch_s"] = float(math.ceil(patience_s))
        if 2 * patience_s > DEFAULTS.prefetch_s:
            found["prefetch_s"] = float(math.ceil(2 * patience_s))
    needed, most = OBJECTS_IN_FLIGHT * max(objects), plan.terms.memory_bytes // INFLIGHT_SHARE
    if _inflight_bytes(plan) < needed <= most:
        found["inflight_bytes"] = format_bytes(-(-needed // (1 << 20)) << 20)
    return found


def _warnings(
    plan: CapacityPlan, terms: RemoteTerms, store_bytes: int, objects: Sequence[int], prompt: RemotePrompt
) -> list[str]:
    said, largest = [], max(objects)
    if OBJECTS_IN_FLIGHT * largest * INFLIGHT_SHARE > plan.terms.memory_bytes:
        least = OBJECTS_IN_FLIGHT * INFLIGHT_SHARE * largest
        said.append(
            f"keys of {format_bytes(largest)} are never shared: memory.capacity_bytes must be {format_bytes(least)} "
            "or more, because an object may take at most a fourth of the bytes in flight"
        )
    if largest > OBJECT_SHARE[terms.engine] * store_bytes:
        each = "of one store, with Mooncake's steps of eviction" if terms.engine == "mooncake" else "of maxmemory"
        said.append(
            f"keys of {format_bytes(largest)} may find no room: an object may take {OBJECT_SHARE[terms.engine]:.1%} "
            f"{each}, so {format_bytes(math.ceil(largest / OBJECT_SHARE[terms.engine]))} are needed"
        )
    if prompt.asked > LOOKUP_KEYS_MAX:
        said.append(
            f"a prompt has {prompt.asked:,} keys, and the store is asked for {LOOKUP_KEYS_MAX:,} at most: longer "
            "blocks (--block-size) make fewer of them"
        )
    if prompt.prefill_s and prompt.fetch_s >= prompt.prefill_s:
        said.append(
            f"over this link, computing is faster: {prompt.fetch_s:.2f} s to fetch, {prompt.prefill_s:.2f} s to "
            'compute; remote.push = "never", or a faster network'
        )
    return said


def _assumed(plan: CapacityPlan, terms: RemoteTerms) -> list[str]:
    tcp = "0.4 to 0.8 of what a plain socket moves was measured over TCP (docs/benchmarks/remote.md)"
    return [
        f"the link moves {format_bytes(terms.link_bytes_per_s)} a second to this host, and has no other traffic; {tcp}",
        f"the engine computes {terms.prefill_tokens_per_s:,} tokens a second of such a prompt (--prefill-rate)",
        "this host has nothing of the prompt, and the store all of it, in one copy",
        "each key is one object, with the parts of all ranks and a header page",
    ]  # fmt: skip


def config_lines(plan: RemotePlan) -> list[str]:
    """What to write into the daemon's config."""
    lines = ["[remote]", f'engine = "{plan.terms.engine}"']
    lines += [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}"
              for key, value in plan.settings.items()]  # fmt: skip
    if plan.terms.engine == "mooncake":
        return [*lines, "[mooncake]", 'master = "MASTER:50051"', 'host = "THIS-HOST"']
    return [*lines, "[valkey]", 'url = "rediss://kvoffloadd@SERVER:6379"', 'password_file = "/etc/kvoffloadd/valkey"']
