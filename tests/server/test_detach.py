"""Memory that was attached and is in no registration: `detach` ends it, and what it has taken of the caps."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvoffloadd.client import Group, GroupKind, KvCache, Ref, SharedTensor
from kvoffloadd.errors import RemoteError
from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.server.session import registry
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import Fields
from tests.client.flavours import MAKERS, NAMESPACE, OnLoop
from tests.server.scene import FULL, SIZE, TENSOR, Scene, ids, keys

OTHER_SCHEMA: Fields = {**FULL, "tokens_per_key": 17}
RUNS = 1 << 16
MANY_RUNS: Fields = {"tensor": 0, "offset": 0, "length": 1, "count": RUNS, "stride": 2}
"""So many that a thread checks the registration."""


def attach(scene: Scene, count: int = 1, size: int = SIZE) -> list[int]:
    fds = [create_memfd("detached", size) for _ in range(count)]
    try:
        return scene.peer.attach(fds)
    finally:
        for fd in fds:
            os.close(fd)


def mapped(scene: Scene) -> int:
    return scene.daemon.mapped("detached")


def test_what_was_not_registered_is_unmapped(unchanged: Scene) -> None:
    numbers = attach(unchanged, 3)
    assert mapped(unchanged) == 3
    unchanged.peer.ok("detach", allocations=numbers[:2])
    assert mapped(unchanged) == 1
    unchanged.peer.refused("unknown_name", "register", tensors=[{"allocation": numbers[0], **TENSOR}], groups=[FULL])
    unchanged.peer.ok("detach", allocations=[numbers[2], numbers[2]])
    unchanged.peer.ok("detach", allocations=[])
    assert mapped(unchanged) == 0


def test_an_unknown_name_ends_none_of_them(scene: Scene) -> None:
    (number,) = attach(scene)
    with scene.stranger() as stranger:
        stranger.refused("unknown_name", "detach", allocations=[number])
    scene.peer.refused("unknown_name", "detach", allocations=[number, 1 << 40])
    assert mapped(scene) == 1
    scene.peer.ok("detach", allocations=[number])
    scene.peer.refused("unknown_name", "detach", allocations=[number])
    assert mapped(scene) == 0


def test_what_a_registration_names_stays_until_its_end(scene: Scene) -> None:
    (number,) = attach(scene)
    tensor = {"allocation": number, **TENSOR}
    one = scene.peer.ok("register", tensors=[tensor], groups=[FULL])["registration"]
    two = scene.peer.ok("register", tensors=[tensor], groups=[FULL])["registration"]
    scene.peer.ok("unregister", registration=two)
    scene.peer.ok("detach", allocations=[number])
    job = scene.job(registration=one)
    scene.peer.ok("store", **job)
    assert scene.peer.completed(job["job"])["outcome"] == "done"
    assert mapped(scene) == 1
    scene.peer.ok("unregister", registration=one)
    scene.peer.refused("unknown_name", "unregister", registration=one)
    assert mapped(scene) == 0


@pytest.mark.parametrize("schema", [{"group": 3}, {"group": 0}], ids=["registered", "refused"])
def test_while_a_registration_is_checked(scene: Scene, schema: Fields) -> None:
    (number,) = attach(scene, size=2 * RUNS)
    tensor = {"allocation": number, "offset": 0, "num_blocks": 1, "page_bytes": 2 * RUNS, "stride_bytes": 2 * RUNS}
    asked = scene.peer.begin("register", tensors=[tensor], groups=[{**FULL, "refs": [MANY_RUNS], **schema}])
    scene.peer.ok("detach", allocations=[number])
    answer = scene.peer.answer(asked)
    if schema["group"]:
        assert mapped(scene) == 1
        groups = [{"group": 3, "keys": keys(1), "blocks": ids(0)}]
        job = scene.job(registration=answer["registration"], groups=groups)
        scene.peer.ok("store", **job)
        assert scene.peer.completed(job["job"])["outcome"] == "done"
        scene.peer.ok("unregister", registration=answer["registration"])
    else:
        assert answer["code"] == "schema_mismatch"
    until(lambda: mapped(scene) == 0, "it goes with whatever held it")


def test_a_refused_detach_changes_nothing(scene: Scene) -> None:
    """A registration that is checked in a thread, and refused, leaves its memory as it was."""
    (number,) = attach(scene, size=2 * RUNS)
    tensor = {"allocation": number, "offset": 0, "num_blocks": 1, "page_bytes": 2 * RUNS, "stride_bytes": 2 * RUNS}
    scene.peer.refused("unknown_name", "detach", allocations=[number, 1 << 40])
    groups = [{**FULL, "refs": [MANY_RUNS]}]
    scene.peer.refused("schema_mismatch", "register", tensors=[tensor], groups=groups)
    assert mapped(scene) == 1
    scene.peer.ok("detach", allocations=[number])


def test_a_refused_registration_changes_nothing_by_itself(scene: Scene) -> None:
    """A client that knows no `detach` may ask again, for other groups of the same memory."""
    (number,) = attach(scene)
    tensor = {"allocation": number, **TENSOR}
    scene.peer.refused("schema_mismatch", "register", tensors=[tensor], groups=[OTHER_SCHEMA])
    assert mapped(scene) == 1
    number = scene.peer.ok("register", tensors=[tensor], groups=[FULL])["registration"]
    scene.peer.ok("unregister", registration=number)
    assert mapped(scene) == 0


@pytest.mark.parametrize("flavour", MAKERS)
def test_the_client_keeps_no_memory_of_what_was_refused(start_daemon: Callable[..., Daemon], flavour: str) -> None:
    """More attempts than the user may have descriptors, in the end one that is right."""
    daemon = start_daemon("limits.fds=4")
    client = MAKERS[flavour](daemon.socket, namespace=NAMESPACE)

    def caches(tokens: int) -> KvCache:
        tensors = [SharedTensor.allocate(8, 4096, name="detached") for _ in range(2)]
        return KvCache(tensors, [Group(0, GroupKind.FULL, tokens, [Ref(0, 0, 4096), Ref(1, 0, 4096)])])

    client.register(caches(16))
    for _ in range(8):
        with pytest.raises(RemoteError, match="schema_mismatch"):
            client.register(caches(17))
        assert daemon.mapped("detached") == 2
    again = client.register(caches(16))
    store = client.store(again, {0: (np.zeros((1, 32), np.uint8), [0])})
    assert client.wait(store, 60.0).outcome == "done"
    client.close()
    if isinstance(client, OnLoop):
        client.end()


async def test_thousands_go_some_at_a_time_whatever_some_of_them_raise() -> None:
    running, most, ended = 0, 0, list[int]()

    async def let_go(number: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        ended.append(number)
        if number % 100 == 7:
            raise OSError(number)

    failed = await registry._in_shares([partial(let_go, number) for number in range(1000)])
    assert ended == list(range(1000))
    assert [error.args for error in failed] == [(number,) for number in range(7, 1000, 100)]
    assert most == registry.AT_ONCE
