"""A part of a key is the same bytes, whatever the tensor-parallel size of the engine that stores it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffloadd.client import Ref, digest_layers
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.vllm.parts import (
    LayerFacts,
    by_heads,
    check_scheduler,
    head_repeats,
    held_refs,
    share,
    whole_refs,
    why_one_size,
)
from kvoffloadd.layout import Share
from kvoffloadd.model import U8Array
from tests.integrations.vllm.fakes import CacheRef, CopyRun, PageMapping, Parallel, of_size
from tests.integrations.vllm.pages import ORDERS, Pages, torch

PAGES = Pages("HNC", heads=8, tokens=4, content=6)


def refs_of_rank(pages: list[Pages], held: Share, rank: int, ranks: int, **how: Any) -> list[list[Ref]]:
    """Returns the refs of layers l0, l1, ... of each group, each layer in a separate tensor."""
    layers = {f"l{at}": one.tensor(ranks) for at, one in enumerate(pages)}
    mappings = [one.mapping(rank, ranks, **how) for one in pages]
    refs = [CacheRef(at, one.local_page_size_bytes, one) for at, one in enumerate(mappings)]
    return held_refs(list(layers), refs, LayerFacts.of(layers), held)


def gathered(rows: list[U8Array], refs: list[Ref]) -> bytes:
    """What these refs name of a block, in their order."""
    pieces = [rows[ref.tensor][ref.offset + at * ref.stride :][: ref.length] for ref in refs for at in range(ref.count)]
    return np.concatenate(pieces).tobytes()


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(ORDERS.values())),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (6, 3), (8, 2), (8, 8), (12, 4)]),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 1 << 16),
)
def test_a_part_is_the_same_bytes_for_every_size(
    order: str, counts: tuple[int, int], tokens: int, content: int, layers: int, strided: bool, seed: int
) -> None:
    """And a rank's parts are all that it has. With more ranks than heads, one of the replicas stores."""
    heads, parts = counts
    pages = [Pages(order, heads, tokens, content * (1 + at)) for at in range(layers)]
    rng = np.random.default_rng(seed)
    contents = [rng.integers(0, 256, one.whole().size, dtype=np.uint8) for one in pages]
    each = heads // parts
    expected = [
        b"".join(whole[one.range(part * each, each)].tobytes() for one, whole in zip(pages, contents, strict=True))
        for part in range(parts)
    ]
    for ranks in [size for size in range(1, parts + 1) if parts % size == 0] + [2 * heads] * (parts == heads):
        stored: dict[int, int] = {}
        for rank in range(ranks):
            held = share(of_size(ranks, heads, rank=rank, canonical_parts=parts))
            rows = [whole[one.of_rank(rank, ranks)] for one, whole in zip(pages, contents, strict=True)]
            found = refs_of_rank(pages, held, rank, ranks, strided=strided)
            for part, refs in enumerate(found, start=held.part):
                assert gathered(rows, refs) == expected[part]
                stored[part] = stored.get(part, 0) + held.writes
            assert sum(ref.payload_bytes for refs in found for ref in refs) == sum(len(row) for row in rows)
        assert stored == dict.fromkeys(range(parts), 1)


@pytest.mark.parametrize(
    ("order", "first", "second"),
    [
        ("HNC", [Ref(0, 0, 48)], [Ref(0, 48, 48)]),
        ("NHC", [Ref(0, 0, 12, 4, 24)], [Ref(0, 12, 12, 4, 24)]),
        ("KHNC", [Ref(0, 0, 48, 2, 96)], [Ref(0, 48, 48, 2, 96)]),
        ("KNHC", [Ref(0, 0, 12, 8, 24)], [Ref(0, 12, 12, 8, 24)]),
    ],
)
def test_a_part_takes_one_ref_a_layer(order: str, first: list[Ref], second: list[Ref]) -> None:
    """8 heads in 4 parts, on the second of 2 ranks."""
    held = share(of_size(2, 8, rank=1, canonical_parts=4))
    assert held == Share(4, 2, 2, writes=True)
    named = [[replace(ref, dtype="int8", layers=digest_layers(["l0"])) for ref in refs] for refs in (first, second)]
    assert refs_of_rank([replace(PAGES, order=order)], held, 1, 2) == named


def test_layers_of_one_cache_are_moved_once() -> None:
    mapping = PAGES.mapping(0, 1)
    alone, facts = Share(1, 0, 1, writes=True), LayerFacts({"a": 1, "b": 1})
    named = [Ref(0, 0, 192, layers=digest_layers(["a", "b"]))]
    assert held_refs(["a", "b"], [CacheRef(0, 192, mapping)] * 2, facts, alone) == [named]
    assert whole_refs(["a", "b"], [CacheRef(0, 192, mapping)] * 2, facts) == named


def test_whole_pages_are_named_with_their_layers() -> None:
    """A single ref is of all layers: vLLM moves rows of all of them as one."""
    facts = LayerFacts({}, {"a": "bfloat16", "b": "bfloat16", "c": "float32"})
    two = [CacheRef(0, 8, None), CacheRef(1, 8, None)]
    a, b = digest_layers(["a"]), digest_layers(["b"])
    assert whole_refs(["a", "b"], two, facts) == [
        Ref(0, 0, 8, dtype="bfloat16", layers=a),
        Ref(1, 0, 8, dtype="bfloat16", layers=b),
    ]
    assert whole_refs(["a", "b"], two[:1], facts) == [Ref(0, 0, 8, dtype="bfloat16", layers=digest_layers(["a", "b"]))]
    assert whole_refs(["a", "c"], two[:1], facts) == [Ref(0, 0, 8, layers=digest_layers(["a", "c"]))]
    assert whole_refs(["a", "b", "c"], two, facts) == [Ref(0, 0, 8), Ref(1, 0, 8)], "whose they are is not told"


def test_what_the_engine_s_tensors_tell_of_layers() -> None:
    attention = torch.empty(3, 8, 4, 6, dtype=torch.bfloat16, device="meta")
    states = [torch.empty(3, 5, dtype=torch.float32), torch.empty(3, 4, dtype=torch.bfloat16)]
    facts = LayerFacts.of(
        {"a": attention, "one": states[:1], "both": states, "odd": torch.empty(3, dtype=torch.cfloat)}
    )
    assert facts.dtypes == {"a": "bfloat16", "one": "float32", "both": "", "odd": ""}
    assert facts.repeats == head_repeats({"a": attention})


def test_the_order_of_heads_is_that_of_the_tensor() -> None:
    repeats = [head_repeats({"l": replace(PAGES, order=order).tensor(2)})["l"] for order in ORDERS.values()]
    assert repeats == [1, 4, 2, 8]
    one_head = [head_repeats({"l": replace(PAGES, order=order).tensor(8)})["l"] for order in ORDERS.values()]
    assert one_head == repeats
    states = [torch.empty(3, 5)]
    assert head_repeats({"states": states, "latent": torch.empty(3, 4, 6)}) == {}


# --- what is refused ---------------------------------------------------------------------------------

WHOLE = Share(8, 0, 8, writes=True)
HALF = Share(8, 0, 4, writes=True)
LATENT = PageMapping(192, 192, (CopyRun(0, 0, 192, 1, 192, 192),))
TURNED = PageMapping(192, 192, (CopyRun(96, 0, 96, 1, 96, 96), CopyRun(0, 96, 96, 1, 96, 96)))


@pytest.mark.parametrize(
    ("mapping", "repeats", "held", "why"),
    [
        (None, 1, WHOLE, "which heads its bytes belong to"),
        (replace(PAGES.mapping(0, 1), parallelism_agnostic=False), 1, WHOLE, "which heads its bytes belong to"),
        (PAGES.mapping(0, 1), 0, WHOLE, "a page of 192 bytes is not 8 equal parts"),
        (PAGES.mapping(0, 1), 5, WHOLE, "a page of 192 bytes is not 8 equal parts"),
        (LATENT, 1, HALF, "a rank with 4 of 8 parts has 192 of the 192 bytes of a page"),
        (PAGES.mapping(1, 2), 1, HALF, "byte 0 of its canonical page is not on this rank"),
        (PAGES.mapping(0, 2), 4, HALF, "byte 96 of its canonical page is not on this rank"),
        (TURNED, 1, Share(1, 0, 1, writes=True), "its bytes of part 0 are not in canonical order"),
    ],
)
def test_what_cannot_be_cut(mapping: PageMapping | None, repeats: int, held: Share, why: str) -> None:
    """No guess: a layer is refused by its name."""
    refs = [CacheRef(0, 192, mapping)]
    with pytest.raises(UsageError, match=f"layer model.0 can't be cut by heads: .*{why}.* remove canonical_layout"):
        held_refs(["model.0"], refs, LayerFacts({"model.0": repeats}), held)


def test_rows_of_all_layers_cannot_be_cut() -> None:
    with pytest.raises(UsageError, match="layer a, b can't be cut by heads: vLLM moves the pages of all layers as one"):
        held_refs(["a", "b"], [CacheRef(0, 4096, None)], LayerFacts({"a": 1, "b": 1}), WHOLE)


# --- shares ------------------------------------------------------------------------------------------


def test_parts_are_heads_unless_it_is_said() -> None:
    assert share(of_size(1, 8)) == Share(8, 0, 8, writes=True)
    assert share(of_size(4, 8, rank=1)) == Share(8, 2, 2, writes=True)
    assert share(of_size(4, 8, rank=1, canonical_parts=4)) == Share(4, 1, 1, writes=True)


def test_one_of_the_replicas_stores() -> None:
    """2 heads on 4 ranks; one latent on 2."""
    assert [share(of_size(4, 2, rank=rank)).writes for rank in range(4)] == [True, False, True, False]
    latent = [Share(1, 0, 1, writes=rank == 0) for rank in (0, 1)]
    assert [share(of_size(2, 1, rank=rank)) for rank in (0, 1)] == latent
    # Sizes do not share rows of all layers, and vLLM asks all ranks to store.
    rows = [share(of_size(2, 1, rank=rank, kv_cache_layout="BLHNC", replicated_layout=True)) for rank in (0, 1)]
    assert rows == latent


def test_a_page_is_a_part_where_parts_are_no_heads() -> None:
    config = of_size(2, 8, rank=1, agnostic=False)
    assert share(config) == share(replace(config, canonical_layout=False)) == Share(2, 1, 1, writes=True)
    assert share(replace(config, canonical_layout=False, replicated_layout=True)) == Share(1, 0, 1, writes=True)


def test_why_sizes_do_not_share() -> None:
    config = of_size(2, 8)
    assert by_heads(config)
    assert not why_one_size(config)
    assert "canonical_layout is not set" in why_one_size(replace(config, canonical_layout=False))
    assert "keeps states" in why_one_size(of_size(2, 8, agnostic=False))
    assert "layout BLHNC" in why_one_size(replace(config, kv_cache_layout="BLHNC"))
    assert "over 3 ranks" in why_one_size(of_size(3, 8, agnostic=False))
    for changed in ({"world_size": 4, "pp_size": 2}, {"dcp_size": 2}):
        parallel = replace(Parallel(is_parallelism_agnostic=True), **changed)  # type: ignore[arg-type]
        assert "pipeline or context parallelism" in why_one_size(replace(config, parallel=parallel))


def test_a_rank_and_its_scheduler_agree() -> None:
    """Else the engine does not start: nothing would hit."""
    alike, unlike = of_size(2, 8), of_size(2, 8, agnostic=False)
    rows = replace(unlike, kv_cache_layout="BLHNC")  # not by heads, for either
    for one, other in ((alike, unlike), (unlike, alike), (rows, replace(rows, replicated_layout=True))):
        check_scheduler(one, one)
        with pytest.raises(UsageError, match="share block tables differ"):
            check_scheduler(one, other)
        plain = [replace(config, canonical_layout=False) for config in (one, other)]
        check_scheduler(*plain)  # without the option each engine starts
