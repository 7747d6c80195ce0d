"""Who may say what when: the hello, the roles, and the time after bye."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from kvoffloadd.protocol.messages import REQUESTS
from kvoffloadd.protocol.state import ROLE_MAY
from kvoffloadd.testing.wait import until
from scripts.harness.daemon import Daemon
from scripts.harness.peer import NAMESPACE, RawPeer, frame, said
from tests.e2e.daemons import Hold
from tests.server.scene import Scene, ids, keys

HELLO: dict[str, Any] = {"version": 1, "role": "worker", "instance": bytes(range(16)), "namespace": NAMESPACE}

RIGHT: dict[str, dict[str, Any]] = {
    "ping": {},
    "attach": {"kind": "shm", "fds": 1},
    "attach_ipc": {"device": bytes(16), "handles": bytes(64)},
    "attach_vmm": {"device": bytes(16), "fds": 1, "chunks": bytes(8), "total_bytes": 1},
    "detach": {"allocations": []},
    "register": {"tensors": [], "groups": []},
    "unregister": {"registration": 1},
    "lookup": {"groups": []},
    "pin": {"groups": []},
    "prefetch": {"groups": []},
    "touch": {"groups": []},
    "keep": {"groups": [], "how": "soon"},
    "retain": {"groups": [], "seconds": 1.0, "name": "a"},
    "forget": {"name": "a"},
    "prefetch_claims": {"name": "a"},
    "claims": {},
    "release": {"lease": 1},
    "reserve": {"groups": []},
    "store": {"job": 1, "registration": 1, "groups": [{"group": 0, "keys": keys(1), "blocks": ids(0)}]},
    "load": {"job": 1, "registration": 1, "groups": [{"group": 0, "keys": keys(1), "blocks": ids(0)}]},
    "cancel": {"job": 1},
    "clear": {},
    "delete": {"groups": []},
    "drain": {},
    "status": {},
    "verify": {},
    "subscribe": {},
    "snapshot": {"group": 0},
    "bye": {},
}
"""A well-formed request of every type but hello."""
WITH_FDS = {"attach", "attach_vmm"}


def test_these_are_all_requests() -> None:
    assert set(RIGHT) | {"hello"} == set(REQUESTS)


# --- the hello -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", [tag for tag in RIGHT if tag not in WITH_FDS])
def test_nothing_comes_before_the_hello(daemon: Daemon, tag: str) -> None:
    with RawPeer(daemon.socket) as peer:
        assert "in state hello" in peer.refused("bad_state", tag, **RIGHT[tag])
        peer.hello()


@pytest.mark.parametrize("version", [0, 2, 1000, (1 << 31) - 1])
def test_a_wrong_version_is_told_the_right_ones(daemon: Daemon, version: int) -> None:
    with RawPeer(daemon.socket) as peer:
        assert "serves [1]" in peer.refused("bad_version", "hello", **{**HELLO, "version": version})
        assert peer.end() == []


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("bad_message", {"instance": bytes(15)}),
        ("bad_message", {"instance": "sixteen letters!"}),
        ("bad_message", {"role": "admin"}),
        ("bad_message", {"namespace": {**NAMESPACE, "key_bytes": 7}}),
        ("bad_message", {"namespace": {**NAMESPACE, "key_bytes": 33}}),
        ("bad_message", {"namespace": {"model": "m" * 513}}),
        ("bad_message", {"namespace": {}}),
        ("bad_message", {"version": True}),
        ("bad_state", {"namespace": None}),
        ("bad_state", {"namespace": None, "role": "scheduler"}),
    ],
)
def test_a_bad_hello_can_be_said_again(daemon: Daemon, code: str, changes: dict[str, Any]) -> None:
    before = daemon.state()["instances"], daemon.state()["namespaces"]
    with RawPeer(daemon.socket) as peer:
        peer.refused(code, "hello", **{**HELLO, **changes})
        assert (daemon.state()["instances"], daemon.state()["namespaces"]) == before
        peer.hello()


def test_a_second_hello(unchanged: Scene) -> None:
    unchanged.peer.refused("bad_state", "hello", **HELLO)
    unchanged.peer.refused("bad_state", "hello", **{**HELLO, "role": "observer"})


def test_requests_sent_together_with_the_hello(daemon: Daemon) -> None:
    with RawPeer(daemon.socket) as peer:
        peer.send(b"".join(frame({"type": tag, "seq": seq}) for seq, tag in enumerate(["ping", "ping"], 1)))
        peer.send(frame({"type": "hello", "seq": 3, **HELLO}) + frame({"type": "ping", "seq": 4}))
        assert [peer.answer(seq)["type"] for seq in (1, 2, 3, 4)] == ["error", "error", "welcome", "done"]


def test_one_instance_has_one_namespace(scene: Scene) -> None:
    with RawPeer(scene.daemon.socket) as peer:
        other = {**scene.namespace, "salt": "another"}
        words = peer.refused("forbidden", "hello", **{**HELLO, "instance": scene.instance, "namespace": other})
        assert "same namespace" in words
        observer = {**HELLO, "instance": scene.instance, "namespace": None, "role": "observer"}
        assert peer.ok("hello", **observer)["namespace"] == b""


# --- roles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "tag"),
    [
        (role, tag)
        for role in ("observer", "scheduler")
        for tag in sorted(set(RIGHT) - ROLE_MAY[role])
        if tag not in WITH_FDS
    ],
)
def test_a_role_keeps_to_its_requests(unchanged: Scene, role: str, tag: str) -> None:
    peer = unchanged.session(role)
    assert f"role {role}" in peer.refused("forbidden", tag, **RIGHT[tag])
    peer.close()


@pytest.mark.parametrize("role", ["observer", "scheduler"])
def test_only_workers_attach(unchanged: Scene, role: str) -> None:
    fd = os.memfd_create("roles")
    os.truncate(fd, 4096)
    peer = unchanged.session(role)
    peer.refused("forbidden", "attach", rights=[fd], kind="shm", fds=1)
    peer.ok("ping")
    peer.close()
    os.close(fd)


@pytest.mark.parametrize("tag", ["lookup", "snapshot", "subscribe", "clear", "drain"])
def test_an_observer_without_a_namespace_has_no_keys(unchanged: Scene, tag: str) -> None:
    with RawPeer(unchanged.daemon.socket) as peer:
        peer.ok("hello", **{**HELLO, "instance": os.urandom(16), "role": "observer", "namespace": None})
        peer.refused("bad_state", tag, **RIGHT[tag])
        peer.ok("ping")


def test_an_observer_may_look_at_its_namespace(unchanged: Scene) -> None:
    observer = unchanged.session("observer", instance=os.urandom(16))
    wanted: dict[str, Any] = {"groups": [{"group": 0, "keys": keys(1, 2, 3, 4, 5)}]}
    assert observer.ok("lookup", **wanted)["states"] == [b"\1\1\1\1\0"]
    assert len(observer.ok("snapshot", group=0)["keys"]) == 4 * 32
    observer.close()


# --- the time after bye ----------------------------------------------------------------------------------------


def test_bye_is_the_last_word(unchanged: Scene) -> None:
    with unchanged.session() as peer:
        peer.send(b"".join(frame({"type": tag, "seq": seq}) for seq, tag in ((80, "ping"), (81, "bye"), (82, "ping"))))
        found = {message["seq"]: message["type"] for message in peer.end()}
        assert found == {80: "done", 81: "done", 82: "error"}


def test_what_was_asked_before_bye_is_answered(scene: Scene) -> None:
    """Each request gets exactly one reply, also those that take their time."""
    asked = {91: "drain", 92: "verify", 93: "clear", 94: "unregister", 95: "bye"}
    extra = {"unregister": {"registration": scene.registration}}
    scene.peer.send(b"".join(frame({"type": t, "seq": s, **extra.get(t, {})}) for s, t in asked.items()))
    answers = {message["seq"]: message["type"] for message in scene.peer.end()}
    assert answers == {91: "drained", 92: "verified", 93: "cleared", 94: "done", 95: "done"}


PATIENT = """
import sys
from kvoffloadd import cli
from kvoffloadd.server import connection
connection.FLUSH_S = 60.0
sys.exit(cli.main(sys.argv[1:]))
"""
"""The daemon, whose `bye` waits longer than this test may take."""


def test_a_drain_that_waits_is_answered_before_bye(start_daemon: Callable[..., Daemon], hold: Hold) -> None:
    """It waits for another session's job; bye itself would not."""
    scene = Scene(start_daemon(faults=hold.fault, program=("-c", PATIENT)), "bye")
    leaver = scene.session()
    load = scene.job(groups=[{"group": 0, "keys": keys(1), "blocks": ids(5)}])
    with hold:
        scene.peer.ok("load", **load)
        leaver.send(frame({"type": "drain", "seq": 91}) + frame({"type": "bye", "seq": 92}))
        until(lambda: scene.daemon.status()["namespaces"][0]["sessions"] == 1, "it has said bye")
        assert scene.daemon.status()["running"]["jobs"] == 1
    assert [(message["type"], message["seq"]) for message in leaver.end()] == [("drained", 91), ("done", 92)]


def test_a_drain_that_waits_for_too_long_is_told_so(standing: Callable[..., Daemon], hold: Hold) -> None:
    scene = Scene(standing(faults=hold.fault), "bye")
    leaver = scene.session()
    load = scene.job(groups=[{"group": 0, "keys": keys(1), "blocks": ids(5)}])
    with hold:
        scene.peer.ok("load", **load)
        leaver.send(frame({"type": "drain", "seq": 91}) + frame({"type": "bye", "seq": 92}))
        drained, done = leaver.end()
    assert (said(drained, "bad_state"), drained["seq"]) == ("the session sent bye before this request was done", 91)
    assert (done["type"], done["seq"]) == ("done", 92)
