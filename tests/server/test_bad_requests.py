"""Requests that can't be right: each gets its own error, changes nothing, and leaves the session usable."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.model import KeyState
from kvoffloadd.testing.wait import until
from scripts.harness.peer import Fields
from tests.server.scene import ELSEWHERE, FULL, PAGE, REF, SIZE, SLIDING, STRIDE, Scene, ids, keys

NO_BLOCK = 0xFFFFFFFF


def tensor(**changes: int) -> Callable[[Scene], Fields]:
    """Register one tensor that is right but for this."""
    return lambda scene: {"tensors": [{**scene.tensor, **changes}], "groups": []}


def group(base: Fields, **changes: Any) -> Callable[[Scene], Fields]:
    """Register one group that is right but for this."""
    return lambda scene: {"tensors": [scene.tensor], "groups": [{**base, **changes}]}


def refs(*found: Fields) -> Callable[[Scene], Fields]:
    """Register a new group with these refs."""
    return group({**FULL, "group": 7}, refs=list(found))


REGISTER: dict[str, tuple[str, Callable[[Scene], Fields]]] = {
    "a block past the memory": ("bad_extent", tensor(num_blocks=17)),
    "a byte past the memory": ("bad_extent", tensor(offset=SIZE - (15 * STRIDE + PAGE) + 1)),
    "an offset behind the memory": ("bad_extent", tensor(offset=(1 << 48) - 1)),
    "an extent of more than 64 bits": ("bad_extent", tensor(num_blocks=(1 << 32) - 2, stride_bytes=(1 << 40) - 1)),
    "an extent that wraps to a small one": ("bad_extent", tensor(num_blocks=(1 << 31) + 1, stride_bytes=1 << 33)),
    "a stride below the page": ("bad_extent", tensor(stride_bytes=PAGE - 1)),
    "a stride below the page of a single block": ("bad_extent", tensor(num_blocks=1, stride_bytes=1)),
    "an allocation that nobody attached": ("unknown_name", tensor(allocation=999)),
    "a ref past its page": ("bad_extent", refs({"tensor": 0, "offset": 1, "length": PAGE})),
    "a run past its page": ("bad_extent", refs({"tensor": 0, "offset": 0, "length": 8, "count": 5, "stride": 1024})),
    "runs that overlap": ("bad_extent", refs({"tensor": 0, "offset": 0, "length": 8, "count": 2, "stride": 7})),
    "runs at one place": ("bad_extent", refs({"tensor": 0, "offset": 0, "length": 8, "count": 2, "stride": 0})),
    "refs that share bytes": ("bad_extent", refs(REF, {"tensor": 0, "offset": 4095, "length": 1})),
    "a ref to no tensor": ("bad_extent", refs({"tensor": 1, "offset": 0, "length": 1})),
    "a payload larger than a slab": ("bad_extent", group({**FULL, "group": 7}, blocks_per_key=4096)),
    "a group twice": ("duplicate", lambda s: {"tensors": [s.tensor], "groups": [FULL, FULL]}),
    "another width of window": ("schema_mismatch", group(SLIDING, window_keys=3)),
    "another kind": ("schema_mismatch", group(SLIDING, kind="chunked")),
    "another number of tokens": ("schema_mismatch", group(FULL, tokens_per_key=32)),
    "another number of blocks per key": ("schema_mismatch", group(SLIDING, blocks_per_key=1)),
    "another number of parts": ("schema_mismatch", group(FULL, parts=2)),
    "another payload size": ("schema_mismatch", group(FULL, refs=[{"tensor": 0, "offset": 0, "length": 8}])),
    "a part that does not exist": ("schema_mismatch", group(ELSEWHERE, part=2)),
    "full attention with a window": ("schema_mismatch", group({**FULL, "group": 7}, window_keys=1)),
    "a Mamba group with a window": ("schema_mismatch", group({**ELSEWHERE, "group": 7}, window_keys=1)),
    "chunked attention without a chunk": ("schema_mismatch", group({**FULL, "group": 7}, kind="chunked")),
    "more descriptors per key than can be planned": (
        "limit",
        group(
            {**FULL, "group": 7},
            blocks_per_key=4096,
            refs=[{"tensor": 0, "offset": 0, "length": 1, "count": 1024, "stride": 2}],
        ),
    ),
}  # fmt: skip


def told(**what: Any) -> Callable[[Scene], Fields]:
    """Register a new group with a ref that has these fields."""
    return refs({**REF, **what})


COMPOSITION: dict[str, Callable[[Scene], Fields]] = {
    "a dtype that is not on the list": told(dtype="bf16"),
    "a dtype with torch's prefix": told(dtype="torch.bfloat16"),
    "a dtype of bytes": told(dtype=b"bfloat16"),
    "no dtype": told(dtype=None),
    "a digest that is too short": told(layers=bytes(7)),
    "a digest that is too long": told(layers=bytes(9)),
    "an empty digest": told(layers=b""),
    "a digest of text": told(layers="12345678"),
}


@pytest.mark.parametrize("case", COMPOSITION)
def test_what_can_t_be_said_of_a_ref(unchanged: Scene, case: str) -> None:
    unchanged.peer.refused("bad_message", "register", **COMPOSITION[case](unchanged))


@pytest.mark.parametrize("case", REGISTER)
def test_register(unchanged: Scene, case: str) -> None:
    code, fields = REGISTER[case]
    unchanged.peer.refused(code, "register", **fields(unchanged))


def of(*groups: Fields, **fields: Any) -> Callable[[Scene], Fields]:
    """A job of these groups."""
    return lambda scene: scene.job(groups=list(groups), **fields)


def share(number: int, packed: bytes, blocks: bytes) -> Fields:
    return {"group": number, "keys": packed, "blocks": blocks}


BOTH: dict[str, tuple[str, Callable[[Scene], Fields]]] = {
    "an id one too high": ("bad_block_id", of(share(0, keys(1, 2), ids(0, 16)))),
    "the highest id": ("bad_block_id", of(share(0, keys(1), ids(NO_BLOCK - 1)))),
    "an id too high in a later group": ("bad_block_id", of(share(0, keys(9), ids(9)), share(1, keys(1), ids(1, 16)))),
    "fewer ids than keys": ("bad_block_id", of(share(0, keys(1, 2), ids(0)))),
    "more ids than keys": ("bad_block_id", of(share(0, keys(1), ids(0, 1)))),
    "one id for a key of two blocks": ("bad_block_id", of(share(1, keys(1), ids(0)))),
    "part of an id": ("bad_block_id", of(share(0, keys(1), ids(0)[:3]))),
    "ids without keys": ("bad_block_id", of(share(0, b"", ids(0)))),
    "part of a key": ("bad_key_width", of(share(0, keys(1)[:-1], ids(0)))),
    "a key and a byte": ("bad_key_width", of(share(0, keys(1) + b"\0", ids(0)))),
    "an unknown group": ("unknown_name", of(share(5, keys(1), ids(0)))),
    "a group of which this rank has no part": ("unknown_name", of(share(2, keys(1), ids(0)))),
    "a group twice": ("duplicate", of(share(0, keys(8), ids(8)), share(0, keys(9), ids(9)))),
    "an unknown registration": ("unknown_name", lambda s: s.job(registration=s.registration + 1)),
    "registration 0": ("unknown_name", lambda s: s.job(registration=0)),
    "an unknown lease": ("bad_lease", lambda s: s.job(lease=1 << 40)),
}
STORE = {
    "a block that is not wanted": ("bad_block_id", of(share(0, keys(9), ids(NO_BLOCK)))),
    "half a key that is not wanted": ("bad_block_id", of(share(1, keys(9), ids(4, NO_BLOCK)))),
    "a key twice": ("duplicate", of(share(0, keys(9, 8, 9), ids(9, 8, 7)))),
}
LOAD = {
    "a destination twice": ("duplicate", of(share(0, keys(1, 2), ids(5, 5)))),
    "a key twice, to one block": ("duplicate", of(share(0, keys(1, 1), ids(5, 5)))),
}


@pytest.mark.parametrize("case", [*BOTH, *STORE])
def test_store(unchanged: Scene, case: str) -> None:
    code, fields = (BOTH | STORE)[case]
    unchanged.peer.refused(code, "store", **fields(unchanged))


@pytest.mark.parametrize("case", [*BOTH, *LOAD])
def test_load(unchanged: Scene, case: str) -> None:
    code, fields = (BOTH | LOAD)[case]
    unchanged.peer.refused(code, "load", **fields(unchanged))


def asked(number: int, packed: bytes) -> Fields:
    return {"groups": [{"group": number, "keys": packed}]}


KEYS: dict[str, tuple[str, Fields]] = {
    "an unknown group": ("unknown_name", asked(5, keys(1))),
    "part of a key": ("bad_key_width", asked(0, keys(1)[:31])),
    "a group twice": ("duplicate", {"groups": [asked(0, keys(n))["groups"][0] for n in (1, 2)]}),
}


@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("tag", ["lookup", "pin", "prefetch", "touch", "reserve"])
def test_keys(unchanged: Scene, tag: str, case: str) -> None:
    code, fields = KEYS[case]
    unchanged.peer.refused(code, tag, **fields)


RESERVE: dict[str, tuple[str, Fields]] = {
    "a part that does not exist": ("schema_mismatch", {**asked(0, keys(9)), "parts": [0, 1]}),
    "no part": ("schema_mismatch", {**asked(0, keys(9)), "parts": []}),
    "a part whose size no rank has told": ("schema_mismatch", asked(2, keys(9))),
    "a key twice": ("duplicate", asked(0, keys(9, 9))),
    "a bad group behind a good one": (
        "duplicate",
        {"groups": [asked(0, keys(9))["groups"][0], asked(1, keys(8, 8))["groups"][0]]},
    ),
}


@pytest.mark.parametrize("case", RESERVE)
def test_reserve(unchanged: Scene, case: str) -> None:
    code, fields = RESERVE[case]
    unchanged.peer.refused(code, "reserve", **fields)


def test_names_that_nobody_has(unchanged: Scene) -> None:
    peer = unchanged.peer
    peer.refused("unknown_name", "unregister", registration=unchanged.registration + 1)
    peer.refused("unknown_name", "cancel", job=1)
    peer.refused("bad_lease", "release", lease=1 << 40)
    peer.refused("bad_lease", "release", lease=0)
    peer.refused("unknown_name", "snapshot", group=5)


def test_a_scheduler_that_reserves_before_any_rank_has_registered(unchanged: Scene) -> None:
    scheduler = unchanged.stranger("scheduler")
    for number in (0, 1):
        scheduler.ok("lookup", **asked(number, keys(1)))
    scheduler.refused("unknown_name", "reserve", **asked(3, keys(1)))
    scheduler.refused("schema_mismatch", "reserve", **asked(2, keys(1)), parts=[1])
    scheduler.close()


# --- names of others ---------------------------------------------------------------------------------------


def test_another_session_s_registration_allocation_and_job(unchanged: Scene) -> None:
    other = unchanged.session()
    other.refused("unknown_name", "store", **unchanged.job())
    other.refused("unknown_name", "load", **unchanged.job())
    other.refused("unknown_name", "unregister", registration=unchanged.registration)
    other.refused("unknown_name", "register", tensors=[unchanged.tensor], groups=[])
    other.close()


def test_another_instance_s_leases(scene: Scene) -> None:
    pinned = scene.peer.ok("pin", **asked(0, keys(1, 2)))["lease"]
    reserved = scene.peer.ok("reserve", **asked(0, keys(5)))["lease"]
    before = scene.daemon.state()
    other = scene.stranger()
    for lease in (pinned, reserved):
        other.refused("bad_lease", "release", lease=lease)
    # The stranger needs a registration to get as far as the lease.
    (allocation,) = other.attach(memory := _memory())
    tensors = [{**scene.tensor, "allocation": allocation}]
    registration = other.ok("register", tensors=tensors, groups=[FULL])["registration"]
    load = {"job": 1, "registration": registration, "groups": [share(0, keys(1), ids(0))]}
    other.refused("bad_lease", "load", **load, lease=pinned)
    other.refused("bad_lease", "store", **{**load, "groups": [share(0, keys(5), ids(0))]}, lease=reserved)
    other.close()
    _close(memory)
    _same_again(scene, before)
    scene.peer.ok("release", lease=pinned)
    scene.peer.ok("release", lease=reserved)


def test_leases_of_the_wrong_kind_or_for_other_keys(scene: Scene) -> None:
    pinned = scene.peer.ok("pin", **asked(0, keys(1, 2)))["lease"]
    reserved = scene.peer.ok("reserve", **asked(0, keys(5, 6)))["lease"]
    before = scene.daemon.state()
    peer = scene.peer
    assert "no write lease" in peer.refused("bad_lease", "store", **scene.job(lease=pinned))
    one = [share(0, keys(1), ids(0))]
    assert "no read lease" in peer.refused("bad_lease", "load", **scene.job(lease=reserved, groups=one))
    both = [share(0, keys(1, 3), ids(5, 6))]
    assert "does not cover" in peer.refused("bad_lease", "load", **scene.job(lease=pinned, groups=both))
    _same_again(scene, before)
    peer.ok("release", lease=pinned)
    peer.ok("release", lease=reserved)
    peer.refused("bad_lease", "release", lease=pinned)


def test_a_job_of_no_groups(scene: Scene) -> None:
    """It is the same under a lease, and the lease must be there."""
    lease = scene.peer.ok("reserve", **asked(0, keys(5)))["lease"]
    pinned = scene.peer.ok("pin", **asked(0, keys(1)))["lease"]
    for tag, named in (("store", 0), ("store", lease), ("load", 0), ("load", pinned)):
        job = scene.job(groups=[], lease=named)
        scene.peer.ok(tag, **job)
        assert scene.peer.completed(job["job"])["outcome"] == "done"
    for tag, named in (("store", pinned), ("store", 1 << 40), ("load", lease), ("load", 1 << 40)):
        scene.peer.refused("bad_lease", tag, **scene.job(groups=[], lease=named))
    scene.peer.ok("release", lease=lease)
    scene.peer.ok("release", lease=pinned)


def test_keys_that_no_lease_has_reserved_are_not_stored(scene: Scene) -> None:
    peer = scene.peer
    reserved, another = (peer.ok("reserve", **asked(0, keys(*numbers)))["lease"] for numbers in ((5, 6), (7,)))
    job = scene.job(lease=reserved, groups=[share(0, keys(9, 5, 7), ids(5, 6, 7))])
    assert peer.ok("store", **job)["states"] == [bytes([KeyState.MISS, KeyState.RESERVED, KeyState.PENDING])]
    done = peer.completed(job["job"])
    assert (done["outcome"], done["bytes"]) == ("done", PAGE)
    peer.ok("release", lease=reserved)
    assert peer.ok("lookup", **asked(0, keys(5, 6, 7, 9)))["states"] == [b"\1\0\2\0"]
    peer.ok("release", lease=another)


def test_a_lease_whose_slots_are_filled_has_none_left(scene: Scene) -> None:
    reserved = scene.peer.ok("reserve", **asked(0, keys(5, 6)))["lease"]
    job = scene.job(lease=reserved, groups=[share(0, keys(5), ids(5))])
    scene.peer.ok("store", **job)
    assert scene.peer.completed(job["job"])["outcome"] == "done"
    again = scene.job(lease=reserved, groups=[share(0, keys(5), ids(5))])
    assert scene.peer.ok("store", **again)["states"] == [b"\1"], "it is there: nothing is copied"
    assert scene.peer.completed(again["job"])["bytes"] == 0
    rest = scene.job(lease=reserved, groups=[share(0, keys(6), ids(6))])
    scene.peer.ok("store", **rest)
    assert scene.peer.completed(rest["job"])["outcome"] == "done"
    scene.peer.ok("release", lease=reserved)
    assert scene.peer.ok("lookup", **asked(0, keys(5, 6)))["states"] == [b"\1\1"]


def _same_again(scene: Scene, before: Fields) -> None:
    until(lambda: scene.daemon.state() == before, "nothing has changed")


def _memory() -> tuple[int]:
    return (create_memfd("stranger", SIZE),)


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)
