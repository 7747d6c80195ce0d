"""Who may come in, and what users who are neither root nor the daemon's own may do."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from kvoffloadd.daemon import USERS_AT_START
from kvoffloadd.linux.memorylimits import memory_bytes
from kvoffloadd.testing.daemon import KVOFFLOADD
from scripts.harness.daemon import Daemon
from scripts.harness.peer import RawPeer
from tests.conftest import OTHER_UID
from tests.e2e.users import Stranger, needs_root
from tests.server.scene import FULL, SIZE, Scene, ids, keys

pytestmark = needs_root


@pytest.fixture
def stranger(daemon: Daemon) -> RawPeer:
    """Connects as an allowed user, without a hello."""
    found: RawPeer = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID)).peer
    return found


def memfd(seals: int) -> int:
    fd = os.memfd_create("users", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_a_user_who_is_not_allowed(daemon: Daemon) -> None:
    before = daemon.state()
    refused = daemon.status()["server"]["sessions_refused"]
    stranger = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID - 1))
    assert f"uid {OTHER_UID - 1} is not in server.allowed_uids" in stranger.peer.turned_away("forbidden")
    assert daemon.state() == before
    assert daemon.status()["server"]["sessions_refused"] == refused + 1


@pytest.mark.slow
def test_a_user_without_a_number_in_the_daemons_namespace(start_daemon: Callable[..., Daemon]) -> None:
    """Such as a daemon's in a container without root, whose socket is mounted from outside."""
    unshare = ("unshare", "--user", "--map-root-user")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("there are no user namespaces here")
    command = f"[*{unshare}, sys.executable, *{tuple(KVOFFLOADD)}, *sys.argv[1:]]"
    program = ("-c", f"import os, sys; command = {command}; os.execvp(command[0], command)")
    daemon = start_daemon("server.socket_mode=0o666", program=program)
    os.chmod(daemon.socket.parent, 0o755)
    stranger = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID))
    assert "stands for every user without a number" in stranger.peer.turned_away("forbidden")
    assert daemon.status()["server"]["sessions_refused"] == 1, "root has a number there"


def test_memory_that_its_owner_could_shrink(daemon: Daemon, stranger: RawPeer) -> None:
    stranger.hello()
    before = daemon.state()
    for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_GROW):
        fd = memfd(seals)
        refusal = stranger.refused("bad_memory", "attach", rights=[fd], kind="shm", fds=1)
        assert "F_SEAL_SHRINK" in refusal
        os.close(fd)
    assert daemon.state() == before
    assert daemon.mapped("users") == 0
    fd = memfd(fcntl.F_SEAL_SHRINK)
    assert stranger.attach([fd])
    os.close(fd)


def test_our_own_unsealed_memory_is_taken(scene: Scene) -> None:
    fd = memfd(0)
    assert scene.session().attach([fd])
    os.close(fd)


@pytest.mark.parametrize(("tag", "fields"), [
    ("clear", {"everything": True}),
    ("clear", {"namespaces": "*", "token": bytes(16)}),
    ("clear", {"uid": OTHER_UID, "token": bytes(16)}),
    ("drain", {"everything": True}),
    ("verify", {}),
    ("verify", {"payloads": True}),
])  # fmt: skip
def test_what_reaches_beyond_the_own_namespace(
    scene: Scene, stranger: RawPeer, tag: str, fields: dict[str, Any]
) -> None:
    stranger.hello(namespace=scene.namespace)
    before = scene.daemon.state()
    assert "only root" in stranger.refused("forbidden", tag, **fields)
    assert scene.daemon.state() == before
    stranger.ok("clear")
    stranger.ok("drain")
    assert scene.peer.ok("lookup", groups=[{"group": 0, "keys": keys(1)}])["states"] == [b"\1"]


def test_the_same_names_of_two_users_never_meet(scene: Scene, stranger: RawPeer) -> None:
    """Namespace fields and keys are the same: neither user hits, clears, hears of or leases the other's."""
    stranger.hello(namespace=scene.namespace)
    fd = memfd(fcntl.F_SEAL_SHRINK)
    (allocation,) = stranger.attach([fd])
    os.close(fd)
    # Not even the schema is shared: here the group has another one.
    tensors, groups = [{**scene.tensor, "allocation": allocation}], [{**FULL, "tokens_per_key": 8}]
    registration = stranger.ok("register", tensors=tensors, groups=groups)["registration"]
    wanted = [{"group": 0, "keys": keys(1, 2), "blocks": ids(0, 1)}]
    load: dict[str, Any] = {"job": 1, "registration": registration, "groups": wanted}
    assert stranger.ok("lookup", groups=[{"group": 0, "keys": keys(1, 2)}])["states"] == [b"\0\0"]
    assert stranger.ok("load", **load)["states"] == [b"\0\0"]
    assert stranger.completed(1)["outcome"] == "partial"
    lease = scene.peer.ok("pin", groups=[{"group": 0, "keys": keys(1)}])["lease"]
    stranger.refused("bad_lease", "release", lease=lease)
    stranger.refused("bad_lease", "load", **{**load, "lease": lease})
    scene.peer.ok("release", lease=lease)


@pytest.mark.parametrize("tag", ["lookup", "pin", "prefetch", "touch"])
def test_who_asks_for_no_groups(scene: Scene, stranger: RawPeer, tag: str) -> None:
    stranger.hello(namespace=scene.namespace)
    assert stranger.ok(tag, groups=[])["type"] in ("found", "done")


def test_another_user_s_instance(scene: Scene, stranger: RawPeer) -> None:
    """Knowing the token is not enough."""
    fields: dict[str, Any] = {"version": 1, "role": "worker", "instance": scene.instance, "namespace": scene.namespace}
    assert "another user" in stranger.refused("forbidden", "hello", **fields)
    stranger.hello(namespace=scene.namespace)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """What is in it, by path."""
    if isinstance(value, dict):
        return {k: v for name, one in value.items() for k, v in flat(one, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {f"{path}.len": len(value)} | {
            k: v for n, one in enumerate(value) for k, v in flat(one, f"{path}.{n}").items()
        }
    return {path: value}


def readable(peer: RawPeer, registration: int) -> dict[str, Any]:
    """Returns all that an unprivileged peer can ask about keys that others may have, without what depends on time."""
    named: list[dict[str, Any]] = [{"group": 0, "keys": keys(*range(100))}]
    status = peer.ok("status")["status"]
    del status["uptime_s"], status["loop"]
    answers = {"status": status}
    for tag in ("lookup", "prefetch", "touch", "pin"):
        answers[tag] = peer.ok(tag, groups=named)
    peer.ok("release", lease=answers["pin"]["lease"]) if answers["pin"]["lease"] else None
    answers["reserve"] = peer.ok("reserve", groups=[{"group": 0, "keys": keys(500)}])
    peer.ok("release", lease=answers["reserve"]["lease"])
    load: dict[str, Any] = {
        "job": 1,
        "registration": registration,
        "groups": [{**named[0], "blocks": ids(*[0xFFFFFFFF] * 100)}],
    }
    answers["load"] = peer.ok("load", **load)
    answers["completed"] = {**peer.completed(1), "seconds": 0}
    answers["snapshot"] = peer.ok("snapshot", group=0)
    answers["drain"] = peer.ok("drain")
    for tag, fields in (
        ("release", {"lease": 1}), ("clear", {"everything": True}), ("verify", {}), ("cancel", {"job": 9}),
        ("unregister", {"registration": 99}), ("lookup", {"groups": [{"group": 7, "keys": keys(1)}]}),
    ):  # fmt: skip
        answers[f"{tag} refused"] = peer.ask(tag, **fields)
    answers["pushed"] = len(peer.pushes)
    derived = (".seq", ".ceiling_rate")  # which counts what was asked, and follows from two other figures
    return {path: value for path, value in flat(answers).items() if not path.endswith(derived)}


@pytest.mark.slow
def test_nothing_tells_one_user_of_another(start_daemon: Callable[..., Daemon]) -> None:
    """Whatever a peer can read changes by its own asking alone, the same each time, whatever others do meanwhile: they
    store and pin the very keys that it asks for, are refused, cleared, and evicted.
    """
    daemon = start_daemon(f"server.allowed_uids=[{OTHER_UID}]", "server.socket_mode=0o666")
    os.chmod(daemon.socket.parent, 0o755)
    scene = Scene(daemon, "of root")
    scene.settle()
    stranger = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID)).peer
    stranger.hello(namespace={**scene.namespace, "salt": "of the stranger"})
    fd = memfd(fcntl.F_SEAL_SHRINK)
    (allocation,) = stranger.attach([fd])
    os.close(fd)
    tensors = [{**scene.tensor, "allocation": allocation}]
    registration = stranger.ok("register", tensors=tensors, groups=[FULL])["registration"]
    stranger.ok("subscribe")
    readable(stranger, registration)
    first = readable(stranger, registration)
    second = readable(stranger, registration)

    for number in range(5, 40):
        scene.store(scene.peer, keys(number), ids(number % 16))
    scene.settle()
    others = scene.stranger()
    leases = [others.ok("pin", groups=[{"group": 0, "keys": keys(*range(60))}])["lease"] for _ in range(3)]
    others.ok("release", lease=leases[0])
    others.refused("unknown_name", "lookup", groups=[{"group": 77, "keys": keys(1)}])
    scene.session().ok("register", tensors=[], groups=[{**FULL, "group": 9, "refs": []}])
    scene.session().ok("bye")
    daemon.status()
    during = readable(stranger, registration)
    others.close()
    scene.peer.ok("clear")
    scene.store(scene.peer, keys(1, 2, 3), ids(0, 1, 2))
    scene.settle()
    after = readable(stranger, registration)

    for before, now in ((second, during), (during, after)):
        assert before.keys() == now.keys() == first.keys()
        moved = {path for path, value in now.items() if value != before[path]}
        for path in sorted(moved):
            assert isinstance(now[path], int | float), (path, before[path], now[path])
            assert now[path] - before[path] == pytest.approx(second[path] - first[path]), path


def test_status_tells_nobody_about_others(scene: Scene, stranger: RawPeer) -> None:
    stranger.hello(namespace={"model": "of the stranger"})
    theirs = stranger.ok("status")["status"]
    assert {session["uid"] for session in theirs["sessions"]} == {OTHER_UID}
    assert {namespace["uid"] for namespace in theirs["namespaces"]} == {OTHER_UID}
    assert set(theirs["accounts"]) == {str(OTHER_UID)}
    assert {row["uid"] for row in theirs["lookups"]} <= {OTHER_UID}
    ours = scene.daemon.status()
    assert {session["uid"] for session in ours["sessions"]} == {0, OTHER_UID}
    assert set(ours["accounts"]) == {"0", str(OTHER_UID)}


def test_page_tables_are_bounded_for_all_users_together(scene: Scene, stranger: RawPeer) -> None:
    """A sparse file costs its owner nothing, and the daemon 8 bytes for each page that a copy touches."""
    stranger.hello(namespace={"model": "of the stranger"})
    size_bytes = memory_bytes() * 5  # the budget is for 8 times the memory, and the stranger may have half of it
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    refused = stranger.refused("limit", "attach", rights=[fd], kind="shm", fds=1)
    assert f"uid {OTHER_UID} uses 0 page_table_bytes" in refused
    before = scene.daemon.status()["accounts"]
    assert "page_table_bytes" not in before[str(OTHER_UID)]
    scene.peer.attach([fd])
    after = scene.daemon.status()["accounts"]["0"]
    assert after["page_table_bytes"] - before["0"]["page_table_bytes"] == pytest.approx(size_bytes // 512, abs=4096)
    assert after["mappings"] == before["0"]["mappings"] + 1
    os.close(fd)


def test_a_load_holds_no_more_than_its_user_may(scene: Scene, stranger: RawPeer) -> None:
    """It may have a lease or not: a signal that never comes would keep its keys from eviction."""
    page_bytes, count = 1 << 20, 20  # of a memory tier of 32 MiB
    stranger.hello(namespace={"model": "of the stranger"})
    fd = os.memfd_create("large", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, count * page_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    (allocation,) = stranger.attach([fd])
    os.close(fd)
    tensor = {"allocation": allocation, "offset": 0, "num_blocks": count, "page_bytes": page_bytes}
    group = {**FULL, "refs": [{"tensor": 0, "offset": 0, "length": page_bytes}]}
    tensors = [{**tensor, "stride_bytes": page_bytes}]
    registration = stranger.ok("register", tensors=tensors, groups=[group])["registration"]

    def work(tag: str, job: int, *numbers: int) -> Any:
        groups = [{"group": 0, "keys": keys(*numbers), "blocks": ids(*numbers)}]
        return stranger.ask(tag, job=job, registration=registration, groups=groups)

    for number in range(count):
        assert work("store", number + 1, number)["type"] == "accepted"
        assert stranger.completed(number + 1)["outcome"] == "done"
    refused = work("load", 100, *range(count))
    assert (refused["type"], refused["code"]) == ("error", "limit")
    assert "release leases" in refused["message"]
    account = scene.daemon.status()["accounts"][str(OTHER_UID)]
    assert "jobs" not in account
    assert work("load", 101, *range(8))["type"] == "accepted"
    assert stranger.completed(101)["outcome"] == "done"
    assert scene.peer.ok("ping")


@pytest.mark.slow
def test_caps_are_counted_by_user(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(f"server.allowed_uids=[{OTHER_UID}]", "server.socket_mode=0o666", "limits.sessions=3")
    os.chmod(daemon.socket.parent, 0o755)
    peers = [daemon.peer() for _ in range(2)]  # and the observer's own
    for peer in peers:
        peer.hello()
    assert "sessions" in daemon.peer().turned_away("limit")
    stranger = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID))
    stranger.peer.hello()


def test_a_long_list_of_users_costs_no_threads_but_of_those_who_come(start_daemon: Callable[..., Daemon]) -> None:
    """Some of them have theirs from the start, since there may be none to be had later."""
    uids = range(OTHER_UID, OTHER_UID + 300)
    daemon = start_daemon(f"server.allowed_uids=[{', '.join(map(str, uids))}]", "server.socket_mode=0o666")
    daemon.socket.parent.chmod(0o755)

    def served() -> list[int]:
        lanes = daemon.status()["lanes"]
        return [uid for uid in uids if f"host store-{uid}" in lanes]

    assert served() == list(uids)[:USERS_AT_START]
    stranger = daemon.welcome(Stranger.connect(daemon.socket, uids[-1]))
    stranger.peer.hello()
    assert stranger.peer.ok("ping")
    assert served() == [*uids[:USERS_AT_START], uids[-1]]
