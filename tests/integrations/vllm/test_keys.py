"""Offload keys become the daemon's: by group, of one width, and anew after each reset."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd.integrations.common.keys import KEY_BYTES
from kvoffloadd.integrations.vllm.keys import (
    KeyNames,
    by_group,
    drafting_groups,
    group_of,
    hash_bytes_of,
    key_of,
    offload_key_of,
    pack_by_group,
    salts_of,
)
from kvoffloadd.integrations.vllm.versions import release

GENERATIONS = st.integers(0, (1 << 64) - 1)


def offload_key(name: bytes, group: int) -> bytes:
    return name + group.to_bytes(4, "big")


def test_the_group_goes_and_the_hash_stays() -> None:
    assert group_of(offload_key(b"h" * 32, 7)) == 7
    assert key_of(offload_key(b"h" * 32, 7)) == b"h" * 32


def test_every_key_has_the_same_width() -> None:
    lengths = {len(key_of(offload_key(b"h" * size, 0))) for size in (8, 16, 32, 64)}
    assert lengths == {KEY_BYTES}
    assert key_of(offload_key(b"h" * 64, 0)) != key_of(offload_key(b"h" * 65, 0))


def test_after_a_reset_nothing_has_its_old_name() -> None:
    names = {key_of(offload_key(b"h" * 32, 0), KeyNames(generation)) for generation in range(3)}
    assert len(names) == 3


@given(name=st.binary(min_size=1, max_size=KEY_BYTES), group=st.integers(0, 99), generation=GENERATIONS)
def test_a_name_can_be_turned_back(name: bytes, group: int, generation: int) -> None:
    names = KeyNames(generation)
    key = key_of(offload_key(name, group), names)
    assert len(key) == KEY_BYTES
    assert offload_key_of(key, group, names, len(name)) == offload_key(name, group)
    assert hash_bytes_of(offload_key(name, group)) == len(name)


@given(names=st.lists(st.binary(min_size=16, max_size=16), unique=True), generation=GENERATIONS)
def test_names_differ_where_hashes_do(names: list[bytes], generation: int) -> None:
    assert len({key_of(offload_key(name, 0), KeyNames(generation)) for name in names}) == len(names)


@given(
    hash_bytes=st.sampled_from([8, 16, 31, 32, 33, 64]),
    groups=st.lists(st.integers(0, 300), max_size=20).map(sorted),
    generation=GENERATIONS,
    salts=st.dictionaries(st.integers(0, 3), GENERATIONS),
)
def test_many_at_once_have_the_same_names(
    hash_bytes: int, groups: list[int], generation: int, salts: dict[int, int]
) -> None:
    """Those of each group follow one another."""
    keys = [offload_key(at.to_bytes(hash_bytes, "big"), group) for at, group in enumerate(groups)]
    names = KeyNames(generation, salts)
    packed = pack_by_group(keys, names)
    assert {group: [key.tobytes() for key in rows] for group, (_, rows) in packed.items()} == by_group(keys, names)
    assert {group: first for group, (first, _) in packed.items()} == {group: groups.index(group) for group in groups}


@given(name=st.binary(min_size=16, max_size=16), of=GENERATIONS, read_as=GENERATIONS)
def test_a_padding_tells_another_generations_names(name: bytes, of: int, read_as: int) -> None:
    found = offload_key_of(key_of(offload_key(name, 0), KeyNames(of)), 0, KeyNames(read_as), 16)
    assert found == (offload_key(name, 0) if of == read_as else None)


def test_long_hashes_can_not_be_turned_back() -> None:
    for generation in (0, 7):
        key = key_of(offload_key(b"h" * 64, 0), KeyNames(generation))
        assert len(key) == KEY_BYTES
        assert offload_key_of(key, 0, KeyNames(generation), 64) is None
    assert key_of(offload_key(b"h" * 64, 0)) != key_of(offload_key(b"h" * 64, 0), KeyNames(7))


def test_keys_keep_their_order_and_are_named_once() -> None:
    keys = [offload_key(name * 32, group) for name, group in ((b"a", 1), (b"b", 0), (b"c", 1), (b"a", 1))]
    assert by_group(keys) == {1: [b"a" * 32, b"c" * 32], 0: [b"b" * 32]}


@given(name=st.binary(min_size=16, max_size=KEY_BYTES), generation=GENERATIONS)
def test_groups_of_drafts_are_named_by_them(name: bytes, generation: int) -> None:
    """Other engines have the same names for the target's groups, and other names for the draft's; each can be turned
    back.
    """
    one, other = (KeyNames(generation, salts_of(draft, (1,))) for draft in ("one draft", "another"))
    assert one == KeyNames(generation, salts_of("one draft", [1]))
    for group, differs in ((0, False), (1, True)):
        key = key_of(offload_key(name, group), one)
        assert (key != key_of(offload_key(name, group), other)) is differs
        assert (key != key_of(offload_key(name, group), KeyNames(generation))) is differs
        assert offload_key_of(key, group, one, len(name)) == offload_key(name, group)
    assert by_group([offload_key(name, 1)], one) == {1: [key_of(offload_key(name, 1), one)]}


def test_layers_that_are_not_known_as_the_targets_are_the_drafts() -> None:
    layers = {
        0: ["model.layers.0.self_attn.attn", "model.layers.3.self_attn.attn"],
        1: ["model.layers.4.self_attn.attn"],  # EAGLE, MTP: numbered on
        2: ["draft_model.model.layers.0.self_attn.attn"],
        3: ["language_model.model.layers.1.self_attn.attn"],
        4: ["model.layers.1.self_attn.attn", "mtp.layers.0.self_attn.attn"],
        5: ["odd"],
        6: ["model.layers.x.attn"],
    }
    assert drafting_groups(layers, 4) == [1, 2, 4, 5, 6]
    assert drafting_groups(layers, 0) == list(layers)


def test_release_of_a_version() -> None:
    assert release("0.32.0+cpu") == release("0.32.1rc1") == "0.32"
