"""Offload keys become the daemon's: by group, of one width, and anew after each reset."""

from __future__ import annotations

from kvoffloadd.integrations.vllm.names import KEY_BYTES, by_group, group_of, key_of
from kvoffloadd.integrations.vllm.versions import release


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
    names = {key_of(offload_key(b"h" * 32, 0), generation) for generation in range(3)}
    assert len(names) == 3


def test_keys_keep_their_order_and_are_named_once() -> None:
    keys = [offload_key(name * 32, group) for name, group in ((b"a", 1), (b"b", 0), (b"c", 1), (b"a", 1))]
    assert by_group(keys) == {1: [b"a" * 32, b"c" * 32], 0: [b"b" * 32]}


def test_release_of_a_version() -> None:
    assert release("0.32.0+cpu") == release("0.32.1rc1") == "0.32"
