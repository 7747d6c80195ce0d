"""What is known of a part's bytes: how it is declared, compared and filled in, and what holds over restarts."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.cache.memory.cache import Cache
from kvoffloadd.cache.memory.composition import UNKNOWN, Composition
from kvoffloadd.cache.memory.namespace import Keyspace, shape_of
from kvoffloadd.cache.memory.savedstate import read_saved_state
from kvoffloadd.cache.warm_restart import adopt
from kvoffloadd.errors import SchemaError
from kvoffloadd.model import (
    PAGE_BYTES,
    Dtype,
    GroupKind,
    GroupSchema,
    KeyState,
    Ref,
    common_dtype,
    digest_layers,
    dtype_named,
)
from kvoffloadd.storage.arenafile import ArenaFile

from .conftest import Open
from .disktier import Tier
from .fakes import events_of, keys_of, make_cache, store

NAME = b"n" * 16
A, B = (digest_layers([name]) for name in "ab")
BF16, FP16 = Composition("bfloat16", A), Composition("float16", A)
OTHER_LAYERS = Composition("bfloat16", B)
HIT, MISS, PENDING = KeyState.HIT, KeyState.MISS, KeyState.PENDING

TYPES, LAYERS = st.sampled_from(["", "bfloat16", "float16"]), st.sampled_from([b"", A, B])
ITEMS = st.tuples(TYPES, LAYERS)
PIECES = st.lists(st.tuples(TYPES, LAYERS, st.integers(1, 5)), max_size=5)


def refs_of(pieces: list[tuple[str, bytes, int]]) -> list[Ref]:
    return [Ref(0, 0, size, dtype=dtype_named(dtype), layers=layers) for dtype, layers, size in pieces]


# --- what clients declare ---


def test_the_digest_of_layers_is_what_the_protocol_says() -> None:
    whole = struct.pack("<I", 2) + b"l0" + struct.pack("<I", 3) + "é1".encode()
    assert digest_layers(["l0", "é1"]) == hashlib.sha256(whole).digest()[:8]
    assert digest_layers([]) == b""
    assert len({digest_layers(names) for names in (["ab", "c"], ["a", "bc"], ["abc"], ["c", "ab"])}) == 4


def test_names_of_dtypes() -> None:
    assert [dtype_named(name) for name in ("torch.bfloat16", "float8_e4m3fn", "complex64", "", None)] == [
        "bfloat16", "float8_e4m3fn", "", "", "",
    ]  # fmt: skip
    mixed: list[list[Dtype]] = [["int8", "int8"], ["int8", "uint8"], ["int8", ""], []]
    assert [common_dtype(names) for names in mixed] == ["int8", "", "", ""]


# --- compositions ---


@given(PIECES, st.data())
def test_how_bytes_are_cut_into_refs_makes_no_difference(
    pieces: list[tuple[str, bytes, int]], data: st.DataObject
) -> None:
    finer = []
    for dtype, layers, size in pieces:
        first = data.draw(st.integers(0, size - 1))
        finer += [(dtype, layers, one) for one in (first, size - first) if one]
    assert Composition.of(refs_of(finer)) == Composition.of(refs_of(pieces))
    runs = [replace(ref, length=1, count=ref.length, stride=2) for ref in refs_of(pieces)]
    assert Composition.of(runs) == Composition.of(refs_of(pieces))


@given(st.lists(st.tuples(ITEMS, ITEMS), max_size=5))
def test_only_what_both_know_is_compared(items: list[tuple[tuple[str, bytes], tuple[str, bytes]]]) -> None:
    """A model compares the types, and the layers, of each single byte of two payloads of one size."""
    one, other = ([pair[at] for pair in items] for at in (0, 1))
    left, right = (Composition.of(refs_of([(*item, 1) for item in side])) for side in (one, other))
    columns = [([item[field] for item in one], [item[field] for item in other]) for field in (0, 1)]
    differ = any(all(first) and all(second) and first != second for first, second in columns)
    assert (left.conflict(right) is not None) == (right.conflict(left) is not None) == differ
    if not differ:
        assert left.filled(right).conflict(right) is None
        assert UNKNOWN.filled(left) == left.filled(UNKNOWN) == left


def test_a_composition_is_short_whatever_it_is_of() -> None:
    """A peer that names thousands of layers and types does not fill the daemon's tables."""
    names = ["bfloat16", "float32", "uint8", "int8"]
    many = Composition.of(
        [Ref(0, 0, 1, dtype=dtype_named(names[at % 4]), layers=struct.pack("<Q", at)) for at in range(9999)]
    )
    assert many.dtypes.startswith("bfloat16+float32+int8+uint8#")
    assert (len(many.dtypes), len(many.layers)) == (44, 8)


# --- keyspaces ---


def declare(cache: Cache, *compositions: Composition) -> Keyspace:
    """Register all parts of group 0 of a namespace, each a page."""
    namespace = cache.namespaces.get(NAME) or cache.open_namespace(NAME, 0, "test", 32)
    keyspace = cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16, parts=len(compositions)))
    sizes = dict.fromkeys(range(len(compositions)), PAGE_BYTES)
    cache.set_part_bytes(keyspace, sizes, dict(enumerate(compositions)))
    return keyspace


@pytest.mark.parametrize("unlike", [FP16, OTHER_LAYERS])
def test_unlike_ones_are_refused_and_change_nothing(unlike: Composition) -> None:
    cache = make_cache()
    keyspace = declare(cache, BF16)
    with pytest.raises(
        SchemaError, match=r"group 0 part 0 has .* in this namespace, not .*; engines whose KV caches differ"
    ):
        declare(cache, unlike)
    assert keyspace.compositions == [BF16]
    assert declare(cache, BF16) is declare(cache, UNKNOWN) is declare(cache, Composition("bfloat16")) is keyspace
    assert keyspace.compositions == [BF16], "what is not declared takes nothing away"


def test_parts_are_compared_by_their_numbers() -> None:
    """Ranks of a pipeline have other layers in each part."""
    cache = make_cache()
    keyspace = declare(cache, BF16, OTHER_LAYERS)
    assert declare(cache, BF16, UNKNOWN) is keyspace
    with pytest.raises(SchemaError, match="part 0"):
        declare(cache, OTHER_LAYERS, BF16)


def test_what_becomes_known_is_filled_in() -> None:
    cache = make_cache()
    keyspace = declare(cache, UNKNOWN)
    declare(cache, Composition("bfloat16"))
    declare(cache, Composition(layers=A))
    assert keyspace.compositions == [BF16]
    for unlike in (FP16, OTHER_LAYERS):
        with pytest.raises(SchemaError):
            declare(cache, unlike)


def test_a_clear_forgets_no_composition() -> None:
    cache = make_cache()
    namespace = declare(cache, BF16).namespace
    cache.epochs.advance(NAME)
    list(cache.clear(namespace))
    assert namespace.keyspaces[0].compositions == [BF16]
    with pytest.raises(SchemaError):
        declare(cache, FP16)


def test_compositions_are_part_of_a_key_s_name_below_memory() -> None:
    shapes = set()
    for composition in (UNKNOWN, BF16, FP16, OTHER_LAYERS, Composition("bfloat16"), Composition(layers=A)):
        shapes.add(shape_of(declare(make_cache(), composition)))
    shapes |= {shape_of(declare(make_cache(), *two)) for two in ((BF16, FP16), (FP16, BF16), (BF16, BF16))}
    assert len(shapes) == 9


def test_what_nobody_told_has_the_name_that_it_always_had() -> None:
    """Records of earlier daemons are found again by clients that declare nothing."""
    assert shape_of(declare(make_cache(), UNKNOWN)).hex() == "b56c73161f027a694d761aa2b415c02b"


# --- warm restarts ---


def heir(cache: Cache) -> Cache:
    """A successor that has taken over what the cache's process, which was killed, had sealed."""
    pool = ArenaFile(os.dup(cache.tier.pool.fd), 64 * PAGE_BYTES, 16 * PAGE_BYTES, is_old=True)
    successor = make_cache(64, 16, pool)
    saved = read_saved_state(pool.names())
    assert saved is not None
    successor.epochs.merge(saved.base, saved.last, saved.epochs)
    adopt(successor, saved)
    return successor


def hits(cache: Cache, keyspace: Keyspace, *numbers: int) -> list[bool]:
    found: list[bool] = cache.find(keyspace, keys_of(*numbers)).hits.tolist()
    return found


@pytest.mark.parametrize("declared", [(BF16,), (BF16, BF16), (BF16, OTHER_LAYERS), (UNKNOWN, BF16)])
def test_a_successor_knows_what_it_took_over(declared: tuple[Composition, ...]) -> None:
    cache = make_cache()
    store(cache, declare(cache, *declared), keys_of(1, 2))
    after = heir(cache)
    keyspace = after.namespaces[NAME].keyspaces[0]
    assert keyspace.compositions == list(declared)
    with pytest.raises(SchemaError):
        declare(after, *[FP16] * len(declared))
    assert hits(after, declare(after, *declared), 1, 2) == [True, True]
    assert hits(after, declare(after, *[UNKNOWN] * len(declared)), 1) == [True]


def test_what_was_filled_in_is_saved_before_anything_is_stored_under_it() -> None:
    cache = make_cache()
    keyspace = declare(cache, UNKNOWN)
    store(cache, keyspace, keys_of(1))
    declare(cache, BF16)
    store(cache, keyspace, keys_of(2))
    after = heir(cache)
    with pytest.raises(SchemaError):
        declare(after, FP16)
    assert hits(after, declare(after, BF16), 1, 2) == [True, True]


def test_what_a_predecessor_did_not_know_is_anybody_s() -> None:
    cache = make_cache()
    store(cache, declare(cache, UNKNOWN), keys_of(1))
    after = heir(cache)
    assert hits(after, declare(after, FP16), 1) == [True]


def test_an_earlier_daemon_takes_over_what_it_can_compare() -> None:
    """It reads the last field of a keyspace as the sizes of its parts, and passes over one with a size of 0."""
    cache = make_cache()
    declare(cache, BF16)
    namespace = cache.open_namespace(b"o" * 16, 0, "old", 32)
    cache.set_part_bytes(cache.declare(namespace, GroupSchema(0, GroupKind.FULL, 16)), {0: PAGE_BYTES})
    cache.save_state()
    keyspaces = msgpack.unpackb(cache.tier.pool.names(), strict_map_key=False)[3]
    earlier = {fields[1]: bool(all(fields[-1])) for fields in keyspaces}
    assert earlier == {NAME: False, b"o" * 16: True}
    assert [len(fields) for fields in keyspaces if fields[1] != NAME] == [13]


# --- disks ---


def on_tier(tier: Tier, composition: Composition) -> Keyspace:
    return declare(tier.cache, composition)


async def test_another_composition_finds_nothing_on_disk(open_tier: Open) -> None:
    tier = await open_tier()
    await tier.store_away(on_tier(tier, BF16), 1, 2)
    await tier.close()
    for unlike in (FP16, OTHER_LAYERS, UNKNOWN):
        again = await open_tier()
        assert again.states(on_tier(again, unlike), 1, 2) == [MISS, MISS]
        await again.close()
    last = await open_tier()
    assert last.states(on_tier(last, BF16), 1, 2) == [PENDING, PENDING]
    assert await last.fetch(on_tier(last, BF16), 1, 2) == [1, 2]


async def test_what_was_stored_under_a_composition_is_never_anybody_s(open_tier: Open) -> None:
    """Also where nothing was known at first: what is stored from then on goes under its own name."""
    tier = await open_tier()
    keyspace = on_tier(tier, UNKNOWN)
    await tier.store_away(keyspace, 1)
    keyspace.namespace.listeners = 1
    assert on_tier(tier, BF16) is keyspace
    assert tier.states(keyspace, 1) == [MISS]
    assert tier.cache.entries.events.waiting.take_loss(keyspace.namespace), "who listens lists the keys anew"
    assert events_of(tier.cache) == []
    await tier.store_away(keyspace, 2)
    await tier.close()
    again = await open_tier()
    unknown = on_tier(again, UNKNOWN)
    assert again.states(unknown, 1, 2) == [PENDING, MISS]
    assert on_tier(again, FP16) is unknown
    assert again.states(unknown, 1, 2) == [MISS, MISS]
    await again.close()
    last = await open_tier()
    assert last.states(on_tier(last, BF16), 1, 2) == [MISS, PENDING]


async def test_keys_in_memory_are_written_anew_once_more_is_known(open_tier: Open) -> None:
    tier = await open_tier()
    keyspace = on_tier(tier, UNKNOWN)
    await tier.store_away(keyspace, 1, 2)
    await tier.fetch(keyspace, 1)
    assert tier.states(on_tier(tier, BF16), 1, 2) == [HIT, MISS]
    await tier.until(lambda: tier.on_disk(keyspace, 1) == [1])
    await tier.close()
    last = await open_tier()
    assert last.states(on_tier(last, BF16), 1, 2) == [PENDING, MISS]
