"""Tests odd arguments: client or daemon refuses them with a message, and nothing else happens."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, Group, GroupKind, KvCache, NamespaceSpec, Ready, Ref, SharedTensor, Timeline
from kvoffloadd.errors import DaemonUnreachableError, KvOffloadError, UsageError
from kvoffloadd.model import U8Array
from tests.client.everycall import Stage, public_calls
from tests.client.fake_daemon import FakeDaemon
from tests.client.flavours import MAKERS, NAMESPACE

NAN = float("nan")
ODD_REF: Any = Ref
WITHOUT_ARGUMENTS = {"connect", "ping", "status", "open_jobs", "claims"}


@pytest.fixture
def stage(client: Any, caches: KvCache, keys: U8Array) -> Stage:
    """Makes a stage with a store that has ended."""
    registration = client.register(caches)
    job = client.store(registration, {0: (keys, np.arange(4))})
    client.wait(job, 60.0)
    return Stage(client, caches, registration, keys, job)


def right(on: Stage) -> dict[str, dict[str, Any]]:
    """Every argument of every call that has some."""
    found = {"groups": on.groups, "first": 0}
    job = {"registration": on.registration, "groups": on.transfers, "lease": 0, "first": 0, "deadline_s": 60.0,
           "ready": None}  # fmt: skip
    return {
        "register": {"caches": on.caches},
        "unregister": {"registration": on.registration},
        **dict.fromkeys(("pin", "touch"), found),
        "lookup": {**found, "local": False},
        "prefetch": {**found, "local": False},
        "wait_ready": {"found": on.client.lookup(on.groups), "deadline_s": 60.0},
        "keep": {**found, "how": "soon"},
        "retain": {**found, "seconds": 60.0, "priority": 9, "name": "a", "number": 0},
        "forget": {"name": "a", "number": 0},
        "prefetch_claims": {"name": "a", "number": 0, "deadline_s": 60.0},
        "prefetch_claims_page": {"name": "a", "number": 0, "cursor": 0},
        "release": {"lease": 1},
        "reserve": {**found, "parts": [0]},
        "clear": {"everything": False, "namespaces": None, "uid": None, "wait_s": 0.0, "token": bytes(16)},
        "delete": {"groups": on.groups, "wait_s": 0.0},
        "subscribe": {"tiers": False},
        "snapshot": {"group": 0, "tier": None},
        "snapshot_page": {"group": 0, "cursor": 0, "tier": None},
        "store": job,
        "load": {**job, "expedited": False, "local": False},
        "wait": {"job": on.job, "deadline_s": 60.0},
        "wait_any": {"jobs": [on.job], "deadline_s": 60.0},
        "cancel": {"job": on.job},
        "drain": {"deadline_s": 1.0, "everything": False},
        "verify": {"payloads": False, "disk": False, "repair": False, "deadline_s": 60.0},
        "events": {"deadline_s": 0.0},
        "close": {"deadline_s": 60.0, "force": False},
    }


ODD: list[Any] = [None, NAN, "a", "", b"", -1, 1 << 70, 2.5, object(), [], {}, [None], {0: None}, {"a": b""}, {-1: b""},
                  {0: (b"",)}, {0: ("a", "b")}, {0: (b"", object())}, {0: [bytes(32), [[1], [2, 3]]]}, np.int64(3),
                  np.float32(2.0), np.array([1.5]), int, True]  # fmt: skip


def test_the_table_has_every_call_and_argument(stage: Stage) -> None:
    table = right(stage)
    assert set(table) | WITHOUT_ARGUMENTS == public_calls(Client)
    for name, arguments in table.items():
        assert set(arguments) == set(inspect.signature(getattr(Client, name)).parameters) - {"self"}, name


def test_any_value_for_any_argument(stage: Stage, fake: FakeDaemon) -> None:
    """A value that can pass for a right one is taken; for any other, an error names what is wrong."""
    for name, arguments in right(stage).items():
        for argument in arguments:
            for value in ODD:
                if (name, argument) == ("close", "force") or (argument == "deadline_s" and value == 1 << 70):
                    continue  # what has no wrong value; what would wait for ever
                if name == "close" and (value is None or isinstance(value, (int, float, np.number))) and value == value:
                    continue  # a right one: it closes
                try:
                    getattr(stage.client, name)(**{**arguments, argument: value})
                except KvOffloadError as error:
                    assert len(str(error)) > 20, (name, argument, value)
                except Exception as error:
                    raise AssertionError(f"{name}({argument}={value!r}): {error!r}") from error
    assert stage.client.open_jobs() == []
    assert fake.tags().count("hello") == 1


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("lookup", {"first": None}, "first must be an integer from 0 to 2147483647, not None"),
    ("lookup", {"first": {0: "a"}}, "first must be an integer"),
    ("lookup", {"first": -1}, "first must be an integer from 0 to 2147483647, not -1"),
    ("pin", {"groups": {"a": bytes(32)}}, "a group must be an integer from 0 to 2147483647, not 'a'"),
    ("prefetch", {"groups": [bytes(32)]}, "keys must be a mapping from group to keys"),
    ("touch", {"groups": {True: bytes(32)}}, "a group must be an integer"),
    ("keep", {"how": "never"}, "how must be one of soon, drop, not 'never'"),
    ("release", {"lease": "a"}, "lease must be an integer"),
    ("reserve", {"parts": 1}, "parts must be a sequence, not 1"),
    ("reserve", {"parts": ["a"]}, "a part must be an integer"),
    ("clear", {"wait_s": None}, "wait_s must be a number of seconds, not None"),
    ("clear", {"token": "sixteen letters!"}, "token must be a bytes"),
    ("snapshot", {"group": "a"}, "group must be an integer"),
    ("snapshot_page", {"cursor": 1 << 48}, "cursor must be an integer from 0"),
    ("store", {"deadline_s": None}, "a job's deadline_s must be a number of seconds, not None"),
    ("load", {"deadline_s": NAN}, "a job's deadline_s must be a number of seconds, not nan"),
    ("load", {"deadline_s": 1e9}, "a job's deadline_s must be above 0 and at most 86400 seconds, not 1000000000.0"),
    ("store", {"registration": 1}, "registration must be a Registration, not 1"),
    ("load", {"groups": [1, 2, 3]}, "keys and block ids must be a mapping from group to keys and block ids"),
    ("store", {"groups": np.arange(3)}, "keys and block ids must be a mapping from group to keys and block ids"),
    ("store", {"groups": {0: [1, 2, 3]}}, "group 0 needs a pair of keys and block ids, not 3 values"),
    ("store", {"groups": {0: (bytes(32),)}}, "group 0 needs a pair of keys and block ids, not 1 values"),
    ("store", {"groups": {0: (bytes(64), [[1], [2, 3]])}}, "block ids must be an array of integers"),
    ("load", {"ready": 1}, "ready must be a Ready, not 1"),
    ("wait", {"job": None}, "job must be a Job, not None"),
    ("wait", {"deadline_s": None}, "deadline_s must be a number of seconds, not None"),
    ("wait_any", {"jobs": [1]}, "job must be a Job, not 1"),
    ("cancel", {"job": 1}, "job must be a Job, not 1"),
    ("wait_ready", {"found": None}, "found must be a Found, not None"),
    ("drain", {"deadline_s": NAN}, "a drain's deadline_s must be a number of seconds, not nan"),
    ("events", {"deadline_s": NAN}, "deadline_s must be a number of seconds, not nan"),
    ("verify", {"deadline_s": "1"}, "deadline_s must be a number of seconds, not '1'"),
    ("register", {"caches": []}, "caches must be a KvCache"),
    ("unregister", {"registration": None}, "registration must be a Registration, not None"),
]


@pytest.mark.parametrize(("name", "change", "words"), WRONG)
def test_what_is_wrong_is_said(stage: Stage, fake: FakeDaemon, name: str, change: dict[str, Any], words: str) -> None:
    arguments = {**right(stage)[name], **change}
    asked = len(fake.seen)
    with pytest.raises(UsageError) as caught:
        getattr(stage.client, name)(**arguments)
    assert words in str(caught.value)
    assert len(fake.seen) == asked


def test_numbers_may_be_numpys(stage: Stage, fake: FakeDaemon) -> None:
    three = np.int64(3)
    stage.client.lookup({np.uint8(0): stage.keys}, first=three)
    assert fake.last("lookup").groups[0].first == 3
    stage.client.lookup(stage.groups, first={0: np.uint32(5)})
    assert fake.last("lookup").groups[0].first == 5
    job = stage.client.store(stage.registration, stage.transfers, first=three, deadline_s=np.float32(2.5))
    assert fake.last("store").deadline_s == 2.5
    stage.client.wait(job, np.float64(60.0))
    stage.client.snapshot(np.int16(0))
    stage.client.reserve(stage.groups, parts=np.arange(1))
    stage.client.release(np.int64(7))
    assert fake.last("release").lease == 7


@pytest.mark.parametrize("flavour", MAKERS)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deadline_s": None}, "deadline_s must be a number"),
        ({"deadline_s": NAN}, "deadline_s must be a number"),
        ({"connect_deadline_s": "1"}, "connect_deadline_s must be a number"),
        ({"instance": "sixteen letters!"}, "instance must be a bytes"),
        ({"namespace": "m"}, "namespace must be a NamespaceSpec"),
        ({"namespace": NamespaceSpec(model=3)}, "namespace: Expected `str`, got `int` - at `$.model`"),  # type: ignore[arg-type]
        ({"namespace": NamespaceSpec(model="m", key_bytes=7)}, "namespace: Expected `int` >= 8"),
        ({"role": None}, "role must be"),
    ],
)
def test_odd_settings(flavour: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        MAKERS[flavour]("/nowhere", **{"namespace": NAMESPACE, **options})
    assert words in str(caught.value)


@pytest.mark.parametrize("path", ["", 3, "/a\0b", "/" + "x" * 108])
def test_odd_paths(path: Any) -> None:
    with pytest.raises(UsageError, match=r"path"):
        Client(path, namespace=NAMESPACE)


@pytest.mark.parametrize(
    "change",
    [
        {"group": "a"}, {"group": -1}, {"kind": "odd"}, {"kind": None}, {"tokens_per_key": "a"}, {"tokens_per_key": 0},
        {"window_keys": None}, {"blocks_per_key": 0}, {"parts": 0}, {"part": -1}, {"refs": [1]}, {"refs": None},
        {"refs": [ODD_REF("a", 0, 8)]}, {"refs": [ODD_REF(0, 0.5, 8)]},
    ],
)  # fmt: skip
def test_odd_groups(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"group": 0, "kind": GroupKind.FULL, "tokens_per_key": 16, "refs": [Ref(0, 0, 8)]}
    with pytest.raises(UsageError, match="group"):
        KvCache([SharedTensor.allocate(1, 4096)], [Group(**{**fields, **change})])


def test_a_ready_of_something_else(stage: Stage) -> None:
    with pytest.raises(UsageError, match="timeline that was not registered"):
        stage.client.store(stage.registration, stage.transfers, ready=Ready(Timeline(), 1))


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["a directory", "a file"])
def test_what_is_no_socket(make_client: Callable[..., Any], socket_dir: Path, make: Callable[[Path], None]) -> None:
    path = socket_dir / "odd"
    make(path)
    with pytest.raises(DaemonUnreachableError, match="not a socket: check that the path"):
        make_client(str(path), connect_deadline_s=60.0).ping()
